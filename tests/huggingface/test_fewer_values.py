"""Folders of decoders with fewer features of values: the cache of an ONNX model is smaller."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import dispfx
from dispfx.api.compilation import apply
from dispfx.api.recovery import recover
from dispfx.compiler.cached_programs import capture_cached
from dispfx.compiler.programs import lower_program
from dispfx.ir.cached_inputs import CachedDecoder, cache_tensors
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from dispfx.report import load_report
from dispfx.verification.graphs import zeroed_tensors
from tests.huggingface.conftest import Folder, one_at_a_time, quantized_session
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import VOCABULARY, tiny_transformer

IDS = token_ids(2, 7, vocabulary=VOCABULARY)
FAMILIES = ("llama", "qwen3", "gpt2", "neox", "phi", "gemma2", "mixtral", "roberta")
KINDS: dict[str, tuple[Any, ...]] = {
    "values": ("attention-values",),
    "heads and values": ("heads", "attention-values"),
}


def fewer_values(program: Program) -> Plan:
    """Return a plan of six of eight features per head, one head less at first, and half of the rest."""
    generator = torch.Generator().manual_seed(0)
    first = next((site.name for site in program.sites if site.kind == "heads"), None)
    kept = {}
    for site in program.sites:
        share = 0.75 if site.kind == "values" else 0.5
        if site.kind == "heads":
            kept[site.name] = torch.arange(int(site.name == first), site.size)
            continue
        each = torch.rand(site.experts, site.per_expert, generator=generator).argsort(1)
        each = each[:, : int(share * site.per_expert)] + torch.arange(site.experts)[:, None] * site.per_expert
        kept[site.name] = each.flatten()
    return Plan.from_masks(program, kept)


def written(path: Path, name: str, kind: str, export: str = "none") -> Folder:
    dense = tiny_transformer(name)
    program = dispfx.capture(dense, sites=KINDS[kind])
    plan = fewer_values(program)
    apply(dense, plan, out=path, export=export)  # type: ignore[arg-type]
    return Folder(path, dense, program, plan)


@pytest.fixture(scope="module", params=KINDS)
def fewer(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """A llama with fewer features of values, and its ONNX model."""
    return written(tmp_path_factory.mktemp("values") / "pruned", "llama", request.param, "onnx")


@pytest.fixture
def pruned(fewer: Folder) -> Any:
    return AutoModelForCausalLM.from_pretrained(fewer.path)


@pytest.fixture
def masked(fewer: Folder) -> Any:
    """The dense decoder with its removed weights set to zero."""
    model = tiny_transformer("llama")
    model.load_state_dict(zeroed_tensors(fewer.program, fewer.plan), strict=False)
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_a_class_of_transformers_keeps_its_cache_and_its_texts(name: str, tmp_path: Path) -> None:
    folder = written(tmp_path / "out", name, "values")
    sites = [site for site in folder.program.sites if site.kind == "values"]
    assert sites and all(site.experts > 1 for site in sites)
    report = load_report(folder.path / "report.json")
    assert report.cache is not None and report.cache.pruned == report.cache.dense
    model: Any = AutoModelForCausalLM.from_pretrained(folder.path)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), model.generate(IDS, use_cache=False, **options))


@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3}, {"cache_implementation": "static"}, {"use_cache": False}],
    ids=["greedy", "beams", "static cache", "no cache"],
)
def test_generated_tokens_are_those_of_the_masked_dense_decoder(pruned: Any, masked: Any, how: Any) -> None:
    found = [
        model.generate(IDS, max_new_tokens=12, do_sample=False, pad_token_id=0, **how)
        for model in (pruned, masked)
    ]
    assert torch.equal(*found)
    with torch.no_grad():
        assert relative_error(pruned(IDS).logits, masked(IDS).logits) < 1e-5


def test_weights_are_smaller_and_gradients_reach_them(fewer: Folder, pruned: Any) -> None:
    """Rows of the value projection and columns of the output projection; the rest is as without values."""
    heads = 1 if "heads" in fewer.plan.sites else 2
    attention = pruned.model.layers[0].self_attn
    assert attention.v_proj.weight.shape[0] == heads * 6 and attention.k_proj.weight.shape[0] == heads * 8
    assert attention.o_proj.weight.shape[1] == heads * 2 * 6
    pruned.train()(IDS, labels=IDS).loss.backward()
    assert bool((attention.v_proj.weight.grad.abs().sum(1) > 0).all())
    with torch.no_grad():
        cache = pruned.eval()(IDS, use_cache=True).past_key_values.layers[0]
    assert (cache.keys.shape[1], cache.values.shape[1:]) == (heads, (heads, 7, 8))


def test_the_onnx_model_caches_smaller_values(fewer: Folder) -> None:
    from dispfx.deploy.onnx.session import CachedSession

    heads = 1 if "heads" in fewer.plan.sites else 2
    caches = CachedSession(fewer.path / "onnx" / "model.onnx").caches
    assert [(cache.heads, cache.size) for cache in caches] == [(heads, 8), (heads, 6), (2, 8), (2, 6)]
    assert not (fewer.path / "onnx" / "genai_config.json").exists(), "genai has one size of heads"
    report = load_report(fewer.path / "report.json")
    assert all(line.holds for line in report.verify)
    assert any(line.name == "onnx with cache = checkpoint" for line in report.verify)
    assert report.cache is not None and report.cache.onnx is not None
    assert report.cache.onnx == sum(4 * cache.heads * cache.size for cache in caches)
    assert report.cache.onnx < report.cache.pruned <= report.cache.dense


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_onnx_model_caches_smaller_values(fewer: Folder, kind: Any, tmp_path: Path) -> None:
    """One token at a time gives what the whole text at once gives; rounding is the quantizer's."""
    folder = Path(shutil.copytree(fewer.path, tmp_path / "out"))
    session = quantized_session(folder, kind)
    assert [cache.size for cache in session.caches] == [8, 6, 8, 6]
    decoder, steps = one_at_a_time(session, IDS)
    assert relative_error(steps, decoder(IDS)) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_fewer_values_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """The differences are those of rounding."""
    dense: Any = tiny_transformer("llama").to(dtype)
    program = dispfx.capture(dense, sites=KINDS["heads and values"])
    plan = fewer_values(program)
    report = apply(dense, plan, out=tmp_path / "out", export="onnx")
    assert all(line.holds for line in report.verify)
    assert report.cache is not None and report.cache.onnx is not None
    assert report.cache.onnx < report.cache.pruned < report.cache.dense
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    dense.load_state_dict(zeroed_tensors(program, plan), strict=False)
    assert model.dtype == dtype
    with torch.no_grad():
        assert relative_error(model(IDS).logits, dense(IDS).logits) < 0.03


def test_weights_are_recovered_where_values_are_fewer(fewer: Folder, tmp_path: Path) -> None:
    """The lowered graph is trained, and its weights go back into the folder's modules."""
    data, out = torch.arange(VOCABULARY).repeat(8), tmp_path / "again"
    recover(
        fewer.path, dense=tiny_transformer("llama"), data=data, steps=4, seq_len=16, batch_size=2, out=out
    )
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (fewer.path, out))
    shapes = [{name: one.shape for name, one in model.named_parameters()} for model in (before, after)]
    assert shapes[0] == shapes[1]
    values = [model.model.layers[0].self_attn.v_proj.weight for model in (before, after)]
    assert not torch.equal(*values)
    assert all(line.holds for line in load_report(out / "report.json").verify)


@pytest.mark.slow
def test_the_report_has_the_cache_of_the_onnx_model_after_recovery(tmp_path: Path) -> None:
    given: dict[str, Any] = {"method": "random", "sites": ("attention-values",), "align": 1, "seq_len": 16}
    given |= {"recover": "weights", "recover_steps": 2, "export": "onnx", "batch_size": 2}
    data = torch.arange(VOCABULARY).repeat(8)
    report = dispfx.compile(tiny_transformer("llama"), 0.5, data, tmp_path / "out", **given)
    assert report.cache is not None and report.cache.onnx is not None
    assert report.cache.onnx < report.cache.pruned == report.cache.dense


def test_a_graph_with_a_cache_computes_what_the_whole_text_gives(fewer: Folder, masked: Any) -> None:
    program = capture_cached(fewer.dense, sites=fewer.plan.sites)
    lowered = lower_program(program, fewer.plan)
    sizes = {(cache.name.partition(".")[2], cache.size) for cache in cache_tensors(lowered.graph)}
    assert sizes == {("key", 8), ("value", 6)}
    decoder = CachedDecoder(lowered.graph_module)
    steps = torch.cat([decoder(IDS[:, :4]), *(decoder(IDS[:, at : at + 1]) for at in range(4, 7))], 1)
    with torch.no_grad():
        assert relative_error(steps, masked(IDS).logits) < 1e-5
