"""What users do with a transformers model works with a pruned one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from dispfx.errors import DispfxError
from dispfx.huggingface.layout import READ, WRITE
from dispfx.huggingface.modules import GatherInput
from dispfx.verification.graphs import zeroed_tensors
from tests.huggingface.conftest import Folder
from tests.programs import relative_error, token_ids
from tests.pruned_modules import writers
from tests.tiny_transformers import VOCABULARY, tiny_transformer

IDS = token_ids(2, 7, vocabulary=VOCABULARY)


@pytest.fixture
def pruned(llama: Folder) -> Any:
    return AutoModelForCausalLM.from_pretrained(llama.path)


@pytest.fixture
def masked(llama: Folder) -> Any:
    """The dense decoder with its removed weights set to zero."""
    model = tiny_transformer("llama")
    model.load_state_dict(zeroed_tensors(llama.program, llama.plan), strict=False)
    return model


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "top_k": 20},
        {"cache_implementation": "static"},
        {"use_cache": False},
        {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    ],
    ids=["greedy", "beams", "sampling", "static cache", "no cache", "sampled beams"],
)
def test_generated_tokens_are_those_of_the_masked_dense_decoder(pruned: Any, masked: Any, how: Any) -> None:
    found = []
    for model in (pruned, masked):
        torch.manual_seed(5)
        found.append(model.generate(IDS, max_new_tokens=12, pad_token_id=0, **how))

    assert torch.equal(*found)
    assert found[0].shape[1] == IDS.shape[1] + 12


def test_a_left_padded_batch_continues_as_in_the_masked_dense_decoder(pruned: Any, masked: Any) -> None:
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    how = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}

    found = [model.generate(IDS * mask, **how) for model in (pruned, masked)]

    assert torch.equal(*found)
    unpadded = pruned.generate(IDS, **{**how, "attention_mask": torch.ones_like(IDS)})
    assert not torch.equal(found[0][0, 7:], unpadded[0, 7:]) and torch.equal(found[0][1], unpadded[1])


def test_torch_compile_needs_no_graph_break(pruned: Any) -> None:
    compiled = torch.compile(pruned, fullgraph=True, backend="aot_eager")

    with torch.no_grad():
        assert relative_error(compiled(IDS).logits, pruned(IDS).logits) < 1e-6


def test_torch_export_gives_the_same_logits(pruned: Any) -> None:
    dynamic = {"input_ids": {1: torch.export.Dim.AUTO}, "use_cache": None}
    exported = torch.export.export(  # noqa: TID251 - a user's own export is what is tested
        pruned, (), {"input_ids": IDS, "use_cache": False}, dynamic_shapes=dynamic, strict=False
    )

    with torch.no_grad():
        for ids in (IDS, token_ids(2, 12, vocabulary=VOCABULARY)):
            found = exported.module()(input_ids=ids, use_cache=False).logits
            assert relative_error(found, pruned(ids).logits) < 1e-6


def step(model: Any) -> dict[str, torch.Tensor]:
    model(IDS, labels=IDS).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
def test_gradients_are_the_same_with_checkpointing(llama: Folder, pruned: Any) -> None:
    other = AutoModelForCausalLM.from_pretrained(llama.path).train()
    other.gradient_checkpointing_enable({"use_reentrant": False})

    expected, found = step(pruned.train()), step(other)

    assert expected and expected.keys() == found.keys()
    assert all(gradient is not None for gradient in found.values())
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def outputs_of_writers(model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what each writing module gave in one pass, and which of its features are pruned."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    handles = []
    for module, pruned in writers(model):

        def keep(module: Any, args: Any, output: Any, pruned: torch.Tensor = pruned) -> None:
            found.append((output, pruned))

        handles.append(module.register_forward_hook(keep))
    with torch.no_grad():
        model(IDS)
    for handle in handles:
        handle.remove()
    return found


def assert_pruned_places_are_zero(model: nn.Module) -> None:
    outputs = outputs_of_writers(model)
    assert len(outputs) == 4
    for output, pruned in outputs:
        assert bool(pruned.any()) and not bool(output[..., pruned].any())
        assert bool(output[..., ~pruned].any())


class _Examples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = token_ids(1, 12, vocabulary=VOCABULARY, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def test_the_trainer_trains_and_what_it_saves_loads(pruned: Any, tmp_path: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-2,
        report_to=[], save_steps=4, disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    before = pruned(IDS, labels=IDS).loss.item()

    Trainer(pruned, arguments, train_dataset=_Examples()).train()

    assert_pruned_places_are_zero(pruned)
    assert pruned(IDS, labels=IDS).loss.item() != before
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4")
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, pruned.eval()(IDS).logits)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_on_all_linear_layers_trains_saves_reloads_and_merges(llama: Folder, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(llama.path)
    config = peft.LoraConfig(target_modules="all-linear", r=4, lora_alpha=32, task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, config).train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for _ in range(6):
        loss = model(IDS, labels=IDS).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        trained = model(IDS).logits
    wrapped = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert len(wrapped) == 14 and losses[-1] < losses[0]
    assert_pruned_places_are_zero(model)

    model.save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(llama.path)
    again = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, trained)
    merged = again.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        assert relative_error(reloaded(IDS).logits, trained) < 1e-5
    assert_pruned_places_are_zero(reloaded)


def test_a_replacement_that_copies_hooks_without_their_indices_is_named(pruned: Any) -> None:
    """torch.ao.quantization does so."""
    path, old = next((path, module) for path, module in pruned.named_modules() if WRITE in module._buffers)
    new = nn.Linear(old.in_features, old.out_features, bias=False)
    for hook in old._forward_hooks.values():
        new.register_forward_hook(hook)
    parent, _, name = path.rpartition(".")
    pruned.get_submodule(parent)._modules[name] = new
    with pytest.raises(DispfxError, match=f"a Linear took the place of .* not its index {WRITE}") as error:
        pruned(IDS)
    assert error.value.exit_code == 2 and "torchao" in str(error.value.hint)


def test_a_copied_hook_of_an_input_is_named_too() -> None:
    new = nn.Linear(4, 4)
    new.register_forward_pre_hook(GatherInput(padded=False))  # type: ignore[arg-type]
    with pytest.raises(DispfxError, match=f"not its index {READ}"):
        new(torch.zeros(1, 4))
