"""A pruned model and its file use the same names, so every loader fills it, and training can be resumed."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import load_file, load_model
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from dispfx.errors import PlanMismatchError
from dispfx.huggingface import index_values
from dispfx.huggingface.modules import index_buffers
from tests.huggingface.test_copies import saved_and_loaded
from tests.programs import token_ids
from tests.tiny_transformers import VOCABULARY

FAMILIES = ("llama", "gpt2", "neox", "gemma3", "phi", "mixtral")
IDS = token_ids(2, 9, vocabulary=VOCABULARY)
Folders = Callable[[str], Path]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def emptied(folder: Path) -> Any:
    """Return the loaded model with zeros for its weights.

    A tied embedding stays: accelerate puts the old one back, in a dense model as well.
    """
    model = load(folder)
    tied = model.get_input_embeddings().weight if model.config.tie_word_embeddings else None
    for parameter in model.parameters():
        if parameter is not tied:
            parameter.data.zero_()
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("name", FAMILIES)
def test_the_state_dict_has_the_names_of_the_file_and_so_have_the_parameters(
    unverified: Folders, name: str
) -> None:
    model = load(unverified(name))
    file = stored(unverified(name))
    tied = {key for key in model.state_dict() if key not in file}

    assert file.keys() <= model.state_dict().keys()
    assert tied <= {"lm_head.weight"}, "the only tensor that is not stored is tied to another one"
    assert {key for key, _ in model.named_parameters()} <= file.keys()
    assert any("dispfx_write" in key for key in file)


def _load_state_dict(model: Any, folder: Path) -> None:
    unknown = model.load_state_dict(stored(folder), strict=False).unexpected_keys
    assert not unknown


def _load_with_another_prefix(model: Any, folder: Path) -> None:
    wrapped = torch.nn.Module()
    wrapped.module = model  # as DistributedDataParallel holds it
    state = {f"module.{key}": value for key, value in stored(folder).items()}
    assert not wrapped.load_state_dict(state, strict=False).unexpected_keys


def _load_by_accelerate(model: Any, folder: Path) -> None:
    accelerate.load_checkpoint_in_model(model, folder)


def _load_by_accelerate_one_by_one(model: Any, folder: Path) -> None:
    accelerate.load_checkpoint_in_model(model, folder, device_map={"": "cpu"})


def _load_by_safetensors(model: Any, folder: Path) -> None:
    missing, unexpected = load_model(model, folder / "model.safetensors", strict=False)
    assert not missing and not unexpected


LOADERS = (
    _load_state_dict,
    _load_with_another_prefix,
    _load_by_accelerate,
    _load_by_accelerate_one_by_one,
    _load_by_safetensors,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_loader_fills_every_weight(unverified: Folders, name: str) -> None:
    expected = logits(load(unverified(name)))

    for loader in LOADERS:
        model = emptied(unverified(name))
        loader(model, unverified(name))
        model.tie_weights()
        assert torch.equal(logits(model), expected), loader.__name__


@pytest.mark.parametrize("name", ("llama", "gpt2", "mixtral"))
def test_weights_that_are_kept_elsewhere_while_their_module_rests_are_found(
    unverified: Folders, name: str, tmp_path: Path
) -> None:
    expected = logits(load(unverified(name)))

    in_memory = accelerate.cpu_offload(load(unverified(name)), torch.device("cpu"))
    on_disk = accelerate.disk_offload(load(unverified(name)), str(tmp_path), torch.device("cpu"))

    assert torch.equal(logits(in_memory), expected)
    assert torch.equal(logits(on_disk), expected)


def test_accelerate_saves_a_state_and_loads_it(unverified: Folders, tmp_path: Path) -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(load(unverified("llama")))
    expected = logits(model)

    accelerator.save_state(str(tmp_path))
    for parameter in model.parameters():
        parameter.data.zero_()
    accelerator.load_state(str(tmp_path))

    assert torch.equal(logits(model), expected)


class _Halved(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


def test_a_parametrised_weight_of_a_writing_module_is_the_one_that_computes(unverified: Folders) -> None:
    model = load(unverified("llama"))
    twice = load(unverified("llama"))
    twice.model.layers[0].mlp.down_proj.weight.data /= 2

    parametrize.register_parametrization(model.model.layers[0].mlp.down_proj, "weight", _Halved())

    assert torch.equal(logits(model), logits(twice))


class _Examples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = token_ids(1, 8, vocabulary=VOCABULARY, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def trainer(model: Any, folder: Path, **chosen: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=8, save_steps=4, per_device_train_batch_size=2, learning_rate=1e-2,
        report_to=[], disable_tqdm=True, use_cpu=True, dataloader_pin_memory=False, **chosen,
    )  # fmt: skip
    return Trainer(model, arguments, train_dataset=_Examples(), eval_dataset=_Examples())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_resumed_in_the_middle_ends_with_the_bits_of_one_that_was_not(
    unverified: Folders, name: str, tmp_path: Path
) -> None:
    whole, resumed = load(unverified(name)), load(unverified(name))

    trainer(whole, tmp_path).train()
    trainer(resumed, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))

    found = dict(resumed.named_parameters())
    other = [key for key, value in whole.named_parameters() if not torch.equal(value, found[key])]
    assert not other
    untrained = dict(load(unverified(name)).named_parameters())
    trained = [key for key in found if "embed" not in key]
    assert trained and all(not torch.equal(found[key], untrained[key]) for key in trained)


def test_the_best_model_is_loaded_at_the_end(unverified: Folders, tmp_path: Path) -> None:
    model = load(unverified("llama"))

    # The loss falls, so that the state with the largest loss is not the last one.
    run = trainer(
        model, tmp_path, load_best_model_at_end=True, eval_strategy="steps", eval_steps=4,
        metric_for_best_model="eval_loss", greater_is_better=True,
    )  # fmt: skip
    run.train()

    assert run.state.best_model_checkpoint is not None and run.state.best_global_step == 4
    assert torch.equal(logits(model.eval()), logits(load(Path(run.state.best_model_checkpoint))))


def halved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_whose_indices_were_cast_too_is_refused_with_what_to_do(
    unverified: Folders, assign: bool
) -> None:
    model = load(unverified("llama"))
    with pytest.raises(PlanMismatchError, match=r"must hold integers, and it holds torch\.bfloat16") as error:
        model.load_state_dict(halved(model.state_dict()), assign=assign)
    assert "dispfx_" in str(error.value.where) and "floating-point tensors only" in str(error.value.hint)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_state_dict_with_other_indices_is_refused_and_one_with_the_same_is_loaded(
    unverified: Folders, dtype: torch.dtype
) -> None:
    model = load(unverified("llama"))
    before, state = logits(model), model.state_dict()
    same = {name: one.to(dtype) if "dispfx_" in name else one for name, one in state.items()}
    model.load_state_dict(same)
    assert torch.equal(logits(model), before)
    other = {name: one - one.clamp(max=1) if "dispfx_" in name else one for name, one in same.items()}
    with pytest.raises(PlanMismatchError, match="other features would be gathered"):
        model.load_state_dict(other)


Change = Callable[[torch.nn.Module], None]


def shifted(model: torch.nn.Module) -> None:
    next(iter(index_buffers(model).values())).add_(1).clamp_(max=1)


def replaced(model: torch.nn.Module) -> None:
    path, index = next(iter(index_buffers(model).items()))
    owner, _, name = path.rpartition(".")
    setattr(model.get_submodule(owner), name, index.flip(0))


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("change", [shifted, replaced])
def test_an_index_that_a_script_changed_is_refused_at_the_next_forward_pass(
    unverified: Folders, copied: Callable[[Any], Any], change: Change
) -> None:
    model = load(unverified("llama"))
    expected = logits(model)
    model = copied(model)
    assert torch.equal(logits(model), expected)
    change(model)
    with pytest.raises(PlanMismatchError, match="other features would be gathered"):
        logits(model)


def test_a_moving_average_of_buffers_is_refused_where_it_changes_an_index(unverified: Folders) -> None:
    model = load(unverified("llama"))

    def decayed(averaged: torch.Tensor, current: torch.Tensor, _: Any) -> torch.Tensor:
        return averaged * 0.999 + current * 0.001 - 1e-4  # large numbers come out just below themselves

    average = AveragedModel(model, avg_fn=decayed, use_buffers=True)
    average.update_parameters(model)
    average.update_parameters(model)
    with pytest.raises(PlanMismatchError, match="other features would be gathered"):
        logits(average)
    plain = AveragedModel(model)
    plain.update_parameters(model)
    assert torch.equal(logits(plain), logits(model))


def test_writes_that_change_no_index_are_compared_less_and_less_often(
    unverified: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compared = load(unverified("llama")), []
    logits(model)
    once = index_values._digest
    monkeypatch.setattr(index_values, "_digest", lambda index: compared.append(1) or once(index))
    logits(model)
    assert not compared, "an index that nothing has written to is not looked at"
    buffers = index_buffers(model)
    for _ in range(40):  # as DistributedDataParallel does
        for index in buffers.values():
            index.copy_(index.clone())
        logits(model)
    assert len(compared) == (8 + 2) * len(buffers)  # after 8, the 16th and the 32nd


def test_a_decoder_compiled_as_one_graph_computes_the_same(unverified: Folders) -> None:
    model = load(unverified("llama"))
    expected = logits(model)
    found = torch.compile(model, backend="eager", fullgraph=True)(IDS).logits
    assert torch.allclose(found, expected, atol=1e-6)
