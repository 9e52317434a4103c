"""For which lengths a captured graph holds, by each way in which a decoder may depend on the length."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
)

from dispfx.capturing.module_capture import capture, compare_at
from dispfx.errors import CaptureError, DataError
from dispfx.ir.lengths import Lengths
from tests import lengths_decoders
from tests.lengths_decoders import growing, long_texts, scaled
from tests.plain_decoders import FORMS, build
from tests.programs import relative_error, token_ids

WHOLE = 64  # tokens, which is what the plain decoders have positions for


def raises_beyond_thirty(tokens: int, x: Tensor) -> Tensor:
    if tokens > 30:
        raise ValueError("too long")
    return x


def below_six(tokens: int, x: Tensor) -> Tensor:
    return x * 2 if tokens < 6 else x


def single(tokens: int, x: Tensor) -> Tensor:
    return x * 2 if tokens == 1 else x


def in_chunks(tokens: int, x: Tensor) -> Tensor:
    """Sum within each chunk of 20 tokens, one chunk after another in Python."""
    starts = range(0, -(-tokens // 20))
    return torch.cat([x[:, 20 * i : 20 * (i + 1)].cumsum(1) for i in starts], 1)


def warns_beyond_thirty(tokens: int, x: Tensor) -> Tensor:
    if tokens > 30:
        x = x + 0
    return x


def warns_and_scales_beyond_forty(tokens: int, x: Tensor) -> Tensor:
    if tokens > 30:
        x = x + 0
    return x * 2 if tokens > 40 else x


def padded_to_eight(tokens: int, x: Tensor) -> Tensor:
    missing = -tokens % 8
    return nn.functional.pad(x, (0, 0, 0, missing))[:, :tokens] if missing > 0 else x


def with_the_length(tokens: int, x: Tensor) -> Tensor:
    """Scale by the length inside tensors, which a graph does too."""
    length = torch.arange(x.shape[1]).max() + 1
    return x * torch.where(length > 24, (length / 24).log() + 1, torch.ones(()))


def test_a_branch_on_the_length_ends_the_range_at_its_module_and_line():
    program = capture(long_texts())
    line = inspect.getsourcelines(growing)[1] + 2
    assert program.lengths == Lengths(1, 24, "changes", f"layers.1.mlp, {lengths_decoders.__file__}:{line}")


@pytest.mark.parametrize(
    ("scale", "least", "most", "limit"),
    [
        (raises_beyond_thirty, 1, 30, True),
        (below_six, 6, WHOLE, True),
        (single, 2, WHOLE, True),
        (in_chunks, 1, 20, False),
        (warns_beyond_thirty, 1, WHOLE, True),
        (warns_and_scales_beyond_forty, 1, 40, False),
        (padded_to_eight, 1, WHOLE, True),
        (with_the_length, 1, WHOLE, True),
    ],
)
def test_the_range_of_each_way_to_depend_on_the_length(
    scale: Callable[[int, Tensor], Tensor], least: int, most: int, limit: bool
):
    model = scaled(scale)
    program = capture(model)
    found = program.lengths
    assert (found.least, found.most, found.limit) == (least, most, limit)
    for tokens in (least, 8, 17, 24, 25, 31, 32, 40, WHOLE):
        ids = token_ids(1, tokens)
        if tokens in found:
            assert relative_error(program.graph_module(ids), model(ids)) <= 1e-6, tokens
        else:
            with pytest.raises((CaptureError, DataError)):
                program.graph_module(ids)


WITHOUT_A_FILE = """
class Doubled(nn.Module):
    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(x * 2 if x.shape[1] % 32 == 0 else x)
"""


@pytest.mark.parametrize("file", ["<string>", "<ipython-input-1-2>"])
def test_a_condition_in_code_without_a_file_counts(file: str):
    """Such is what `python -c` and `exec` run."""
    names: dict[str, Any] = {"nn": nn}
    exec(compile(WITHOUT_A_FILE, file, "exec"), names)
    model: Any = scaled(lambda tokens, x: x)
    model.layers[1].mlp = names["Doubled"](model.layers[1].mlp.mlp)
    program = capture(model)
    assert (program.lengths.most, program.lengths.end) == (31, "changes")


def test_a_table_that_ends_is_a_limit_of_the_decoder_in_plain_words():
    program = capture(build(FORMS["pre-norm"], layers=1))
    assert (program.lengths.most, program.lengths.limit) == (WHOLE, True)
    with pytest.raises(
        DataError, match="this decoder reads at most 64 tokens, and a sequence has 65"
    ) as error:
        program.graph_module(token_ids(1, 65))
    assert "plain_decoders.py:" in str(error.value.where)


@pytest.mark.parametrize("limit", [True, False])
def test_a_far_end_is_found_without_running_the_decoder_there(limit: bool):
    def far(tokens: int, x: Tensor) -> Tensor:
        if tokens > 5_000 and limit:
            raise ValueError("too long")
        return x * 2 if tokens > 5_000 else x

    decoder = scaled(far)
    decoder.positions = nn.Parameter(torch.randn(6_000, 32))
    decoder.register_forward_pre_hook(require_short)
    found = capture(decoder).lengths
    assert (found.most, found.limit) == (5_000, limit)


@pytest.mark.parametrize(
    ("scale", "most"),
    [
        (lambda tokens, x: x * 2 if tokens == 1_500 else x, 1_499),
        (lambda tokens, x: x * 2 if tokens // 64 == 30 else x, 1_919),
        (lambda tokens, x: x * 2 if math.ceil(tokens / 4) == 450 else x, 1_796),
        (lambda tokens, x: x + 0 if tokens == 1_500 else x, 2_000),
    ],
)
def test_single_lengths_far_from_the_traced_one_are_found(scale: Callable[[int, Tensor], Tensor], most: int):
    decoder = scaled(scale)
    decoder.positions = nn.Parameter(torch.randn(2_000, 32))
    assert capture(decoder).lengths.most == most


def require_short(module: nn.Module, inputs: tuple[Tensor]) -> None:
    """Raise where a decoder is run, and not traced, on a long text."""
    assert isinstance(inputs[0], FakeTensor) or inputs[0].shape[1] < 5_000


def odd(tokens: int, x: Tensor) -> Tensor:
    return x * 2 if tokens % 2 == 0 else x


def beyond_fifteen(tokens: int, x: Tensor) -> Tensor:
    return x * 2 if tokens > 15 else x


@pytest.mark.parametrize(
    ("scale", "said"), [(odd, "below 13 tokens"), (beyond_fifteen, "changes at 16 tokens")]
)
def test_a_range_that_is_too_short_to_be_verified_is_refused_with_the_line(
    scale: Callable[[int, Tensor], Tensor], said: str
):
    with pytest.raises(CaptureError, match=said) as error:
        capture(scaled(scale))
    assert "layers.1.mlp, " in str(error.value.where)


def test_copies_and_rewritten_graphs_of_a_program_hold_to_its_range():
    program = capture(long_texts())
    twin = program.clone()
    twin.rebuild(dict(twin.tensors()))
    for module in (program.graph_module, twin.graph_module):
        assert module(token_ids(1, 24)).shape[1] == 24
        with pytest.raises(CaptureError, match="arithmetic changes at 25 tokens, and a sequence has 64"):
            module(token_ids(1, 64))


def test_a_graph_that_is_wrong_at_a_length_of_the_run_is_refused():
    model = long_texts()
    program = capture(model)
    compare_at(model, program, 20)
    assert program.identity[1, 20].absolute == 0.0
    program.hold_to(Lengths())  # as if no condition had been noted
    with pytest.raises(CaptureError, match="at \\(1, 40\\) tokens it differs"):
        compare_at(model, program, 40)


SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 0,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ORIGINAL = {"rope_theta": 1e4, "original_max_position_embeddings": 32}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
FACTORS = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
# With a switch of some kind at 32 tokens, or a window or chunk of 16.
SWITCHED = {
    "yarn": lambda: LlamaConfig(**SIZES, rope_parameters={"rope_type": "yarn", "factor": 2.0, **ORIGINAL}),
    "llama3": lambda: LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "llama3", "factor": 2.0, **ORIGINAL, **BANDS}
    ),
    "longrope": lambda: Phi3Config(
        **SIZES,
        original_max_position_embeddings=32,
        rope_parameters={"rope_type": "longrope", **ORIGINAL, **FACTORS},
    ),
    "mistral": lambda: MistralConfig(**SIZES, sliding_window=16),
    "qwen2": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=0),
    "phi3": lambda: Phi3Config(**SIZES, sliding_window=16),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
    ),
    "llama4": lambda: Llama4TextConfig(
        **SIZES, head_dim=8, attention_chunk_size=16, intermediate_size_mlp=48, num_local_experts=2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCHED)
def test_switches_inside_tensors_hold_at_every_length(name: str):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(SWITCHED[name]()).eval()
    program = capture(model)
    assert program.lengths == Lengths()
    for tokens in (16, 32, 33, 40, 64):
        compare_at(model, program, tokens)
    assert max(found.relative for found in program.identity.values()) <= 1e-6


def test_rotary_positions_that_branch_on_values_are_refused_with_the_line():
    rope = {"rope_type": "dynamic", "factor": 2.0, **ORIGINAL}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, rope_parameters=rope)).eval()
    with pytest.raises(CaptureError, match="a branch or a size depends on the values of a tensor") as error:
        capture(model)
    assert "modeling_rope_utils.py:" in str(error.value.where)


class Switching(nn.Module):
    """A decoder whose logits are multiplied by a number that Python computes from the token ids' shape."""

    def __init__(self, factor: Callable[[Tensor], Any]):
        super().__init__()
        self.decoder, self.factor = build(FORMS["pre-norm"], layers=1), factor

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(ids) * self.factor(ids)


def by_len(ids: Tensor) -> float:
    return 2.0 if len(ids[0]) > 24 else 1.0


def by_float(ids: Tensor) -> float:
    return 2.0 if float(ids.shape[1]) > 24 else 1.0


def by_logarithm(ids: Tensor) -> float:
    return max(1.0, math.log(float(ids.shape[1])) / math.log(24))


def by_max(ids: Tensor) -> float:
    return 1.0 / max(1.0, ids.shape[1] / 24)


def by_min(ids: Tensor) -> float:
    return min(1.0, 24 / ids.shape[1])


def by_order(ids: Tensor) -> float:
    return sorted([24.0, ids.shape[1]])[1] / 24


def near_the_limit(ids: Tensor) -> float:
    return 2.0 if len(ids[0]) > 55 else 1.0


@pytest.mark.parametrize(
    ("factor", "most"),
    [
        (by_len, 24),
        (by_float, 24),
        (by_logarithm, 24),
        (by_max, 24),
        (by_min, 24),
        (by_order, 23),
        (near_the_limit, 55),
    ],
)
def test_a_length_that_python_turns_into_a_number_ends_the_range_at_its_line(
    factor: Callable[[Tensor], float], most: int
):
    line = inspect.getsourcelines(factor)[1] + 1
    lengths = capture(Switching(factor)).lengths
    assert (lengths.least, lengths.most, lengths.end) == (1, most, "changes")
    assert str(lengths.where) == f"{__file__}:{line}"


def test_a_plain_number_that_changes_nothing_does_not_end_the_range():
    lengths = capture(Switching(lambda ids: 1.0 if len(ids[0]) > 24 else 1)).lengths
    assert (lengths.least, lengths.most, lengths.limit) == (1, WHOLE, True)


def test_steps_of_the_logarithm_of_the_length_are_refused_with_length_and_line():
    with pytest.raises(CaptureError, match="arithmetic changes at 16 tokens, and a sequence has 17") as error:
        capture(Switching(lambda ids: 1 + math.floor(math.log2(ids.shape[1])) / 8))
    assert Path(__file__).name in str(error.value.where)


def in_three_parts(tokens: int, x: Tensor) -> Tensor:
    return torch.cat([part.cumsum(1) for part in x.chunk(3, 1)], 1)


def test_a_text_with_fewer_tokens_than_parts_is_outside_of_the_range():
    program = capture(scaled(in_three_parts))
    assert program.lengths.least == 5  # two parts of 2 tokens are made of 4
    model = scaled(in_three_parts)
    for tokens in (5, 6, 7, 40):
        ids = token_ids(1, tokens)
        assert relative_error(program.graph_module(ids), model(ids)) <= 1e-6


@pytest.mark.parametrize("mode", [torch.compiler.is_compiling, torch.compiler.is_exporting])
def test_arithmetic_that_only_a_trace_has_is_refused(mode: Callable[[], bool]):
    with pytest.raises(CaptureError, match="the graph must give the module's logits"):
        capture(Switching(lambda ids: 1.0 if mode() else 2.0))


def test_an_error_of_a_lookup_by_the_length_names_the_line_that_looks_up():
    with pytest.raises(CaptureError) as error:
        capture(Switching(lambda ids: {True: 2.0, False: 1.0}[ids.shape[1] > 24]))
    assert Path(__file__).name in str(error.value.where)
