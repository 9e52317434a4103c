"""Decoders around which somebody put something: hooks, parametrizations, compilers, adapters, checkpoints."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import dispfx
from dispfx.errors import CaptureError
from dispfx.plan.plan import Plan
from dispfx.verification.graphs import identity_lines, lowered_lines
from tests.plain_decoders import FORMS, Decoder, build

Around = Callable[[nn.Module], nn.Module]


def doubled(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return output * 2


def of_up(change: Callable[[nn.Module], object]) -> Around:
    """Return what changes the first projection of an MLP."""

    def around(model: nn.Module) -> nn.Module:
        change(model.get_submodule("layers.0.mlp.up"))
        return model

    return around


class InAutocast(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(ids).float()


class Checkpointed(InAutocast):
    def forward(self, ids: Tensor) -> Tensor:
        return checkpoint(self.model, ids, use_reentrant=False)  # type: ignore[return-value]


class Dropping(InAutocast):
    """Drops features in training, by the function and by the module."""

    def __init__(self, model: nn.Module):
        super().__init__(model)
        self.dropout = nn.Dropout(0.5)
        self.train()

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.dropout(self.dropout(self.model(ids)), 0.5, self.training)


def with_adapter(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["up", "down"], r=2, init_lora_weights=False)
    return get_peft_model(model, config)  # type: ignore[arg-type]


def compiled_part(model: nn.Module) -> nn.Module:
    part: nn.Module = torch.compile(model.get_submodule("layers.0.mlp"), backend="eager")  # type: ignore[assignment]
    model.get_submodule("layers.0").mlp = part
    return model


AROUND: dict[str, Around] = {
    "weight norm": of_up(parametrizations.weight_norm),
    "spectral norm": of_up(parametrizations.spectral_norm),
    "orthogonal weight": of_up(parametrizations.orthogonal),
    "pruned by torch": of_up(lambda up: torch.nn.utils.prune.l1_unstructured(up, "weight", 0.5)),
    "a hook that changes": of_up(lambda up: up.register_forward_hook(doubled)),
    "a hook with keywords": of_up(
        lambda up: up.register_forward_pre_hook(lambda m, given, named: (given, named), with_kwargs=True)
    ),
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "compiled in part": compiled_part,
    "LoRA": with_adapter,
    "autocast": InAutocast,
    "checkpoint": Checkpointed,
    "dropout in training": Dropping,
}


@pytest.mark.parametrize("name", sorted(AROUND))
def test_it_is_pruned_and_every_form_agrees(name: str):
    torch.manual_seed(0)
    model = AROUND[name](build(FORMS["plain-mlp"], layers=1))
    program = dispfx.capture(model)
    assert program.sites and program.size == sum(tensor.numel() for tensor in model.parameters())
    plan = Plan.random(program, 0.3, seed=0)
    lowered = dispfx.lower(program, plan)
    model.eval()
    for line in [*identity_lines(program), *lowered_lines(program, plan, lowered, model)]:
        assert line.holds, line


def lazy() -> nn.Module:
    model = build(FORMS["plain-mlp"], layers=1)
    model.head = nn.LazyLinear(61)
    return model


class Noisy(InAutocast):
    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.dropout(self.model(ids), 0.5)


def made_in_inference_mode() -> nn.Module:
    with torch.inference_mode():
        return Decoder(FORMS["plain-mlp"], layers=1)


def plain() -> nn.Module:
    return build(FORMS["plain-mlp"], layers=1)


def scripted() -> nn.Module:
    return torch.jit.trace(plain().eval(), torch.zeros(2, 5, dtype=torch.int64))  # type: ignore[return-value]


def quantized() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to remove it
        return torch.ao.quantization.quantize_dynamic(plain(), {nn.Linear}, torch.qint8)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "without shapes": (
        lazy,
        "has no shape before the module has run",
        "run the module on some token ids first",
    ),
    "TorchScript": (
        scripted,
        "a module in TopLevelTracedModule cannot be captured",
        "give the module that it was made from",
    ),
    "DataParallel": (lambda: nn.DataParallel(plain()), "a module in DataParallel", "that it was made from"),
    "quantized": (
        quantized,
        "the weights of LinearPackedParams are packed by torch",
        "before it was quantized",
    ),
    "noise": (lambda: Noisy(plain()), "draws other numbers each time", "nothing may be random"),
    "inference mode": (made_in_inference_mode, "inference tensor", "outside torch.inference_mode"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_it_is_refused_with_what_helps(name: str):
    make, problem, hint = REFUSED[name]
    with pytest.raises(CaptureError, match=problem) as error:
        dispfx.capture(make())
    assert error.value.hint is not None and hint in error.value.hint
