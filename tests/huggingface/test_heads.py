"""A pruned folder gives the body to classes with another head, as the dense folder does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from dispfx.errors import OutputError, PlanMismatchError
from tests.huggingface.conftest import Folder
from tests.programs import token_ids
from tests.tiny_transformers import VOCABULARY, tiny_transformer

IDS = token_ids(2, 9, vocabulary=VOCABULARY)
LABELS: dict[Any, dict[str, torch.Tensor]] = {
    AutoModelForSequenceClassification: {"labels": torch.tensor([0, 2])},
    AutoModelForTokenClassification: {"labels": IDS % 3},
    AutoModelForQuestionAnswering: {
        "start_positions": torch.tensor([1, 2]),
        "end_positions": torch.tensor([3, 4]),
    },
}
FAMILIES = ("llama", "gpt2", "neox", "gemma3", "phi", "mixtral")
# transformers has no class for the others, or one that finds none of a checkpoint's weights.
CASES = [
    *((AutoModelForSequenceClassification, name) for name in FAMILIES),
    *((AutoModelForTokenClassification, name) for name in FAMILIES if name != "gemma3"),
    *((AutoModelForQuestionAnswering, name) for name in ("gpt2", "neox", "mixtral")),
]


def with_head(kind: Any, folder: Path) -> tuple[Any, dict[str, Any]]:
    labels = {} if kind is AutoModelForQuestionAnswering else {"num_labels": 3}
    return kind.from_pretrained(folder, output_loading_info=True, pad_token_id=0, **labels)


def hidden(body: Any) -> torch.Tensor:
    with torch.no_grad():
        return body.eval()(IDS).last_hidden_state


def step(model: Any, labels: dict[str, torch.Tensor]) -> float:
    """Do one step of gradient descent, and return the loss before it."""
    loss = model(IDS, **labels).loss
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter -= 0.01 * parameter.grad
            parameter.grad = None
    return loss.item()


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_a_new_head_on_the_pruned_body_trains_is_saved_and_read_again(
    unverified: Callable[[str], Path], kind: Any, name: str, tmp_path: Path
) -> None:
    dense: Any = tiny_transformer(name)
    dense.save_pretrained(tmp_path / "dense")

    model, report = with_head(kind, unverified(name))

    # The same weights are new, and as many are left over, as from the dense folder.
    expected = with_head(kind, tmp_path / "dense")[1]
    assert report["missing_keys"] == expected["missing_keys"] != set()
    assert len(report["unexpected_keys"]) == len(expected["unexpected_keys"])
    assert not report["mismatched_keys"]
    body = AutoModelForCausalLM.from_pretrained(unverified(name)).base_model
    assert torch.equal(hidden(model.base_model), hidden(body))
    losses = [step(model, LABELS[kind]) for _ in range(4)]
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path / "trained")
    again, report = with_head(kind, tmp_path / "trained")
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_one_label_is_a_reward_or_a_regression(unverified: Callable[[str], Path]) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(
        unverified("llama"), num_labels=1, pad_token_id=0
    )

    losses = [step(model, {"labels": torch.tensor([0.5, -1.0])}) for _ in range(3)]

    assert model(IDS).logits.shape == (2, 1) and losses[-1] < losses[0]


def test_a_head_on_a_narrower_stream_has_its_width(narrow_llama: Folder) -> None:
    model, report = with_head(AutoModelForSequenceClassification, narrow_llama.path)

    assert report["missing_keys"] == {"score.weight"} and not report["mismatched_keys"]
    assert model.score.in_features == len(narrow_llama.plan.kept["stream"]) < 32
    assert bool(model.score.weight.std() > 0), "the head is initialised"
    body = AutoModelForCausalLM.from_pretrained(narrow_llama.path).base_model
    assert torch.equal(hidden(model.base_model), hidden(body))
    losses = [step(model, {"labels": torch.tensor([0, 2])}) for _ in range(3)]
    assert losses[-1] < losses[0]


def test_a_class_that_finds_no_weight_of_the_folder_is_refused(unverified: Callable[[str], Path]) -> None:
    """The body of this class has another name; transformers makes up all weights of a dense folder too."""
    with pytest.raises(PlanMismatchError, match="has none of the pruned modules"):
        AutoModelForQuestionAnswering.from_pretrained(unverified("llama"))


def test_the_config_of_a_loaded_model_does_not_build_the_dense_one(
    unverified: Callable[[str], Path], tmp_path: Path
) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(unverified("llama"))
    model.save_pretrained(tmp_path)

    for config in (model.config, model.base_model.config, AutoConfig.from_pretrained(tmp_path)):
        with pytest.raises(OutputError, match="kept indices are stored with its weights"):
            AutoModel.from_config(config)
