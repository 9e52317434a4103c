"""The resumable state of a run: one safetensors file with a JSON header, replaced atomically.

The header holds the position and the `identity` of the run (decoder, sites, budget, settings, text).  Only a
run with the same identity can resume a state.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dispfx.errors import DataError, PlanMismatchError
from dispfx.files.disk import replacing
from dispfx.files.json_text import parse_json
from dispfx.settings.field import section_fields
from dispfx.settings.learning_settings import LearnSettings
from dispfx.words.option_names import option
from dispfx.words.own_function import identity_of

STATE_FILE = "learning.safetensors"
STATE_VERSION = 1

Identity = Mapping[str, Any]


@dataclass(frozen=True)
class Position:
    """The position in a run.

    Args:
        step: steps done; the position in the text follows from it.
        bad_steps: steps so far that changed nothing.
        bad_in_a_row: bad steps since the last good one.
    """

    step: int = 0
    bad_steps: int = 0
    bad_in_a_row: int = 0


def settings_identity(settings: LearnSettings) -> dict[str, Any]:
    """Return the settings that a resumed run must share; for a custom function, its name and digest.

    The number of steps is not included if no step depends on it, so that a run can be extended.
    """
    return {
        one.name: identity_of(getattr(settings, one.name))
        for one in section_fields(LearnSettings)
        if not one.facts.per_run and (one.name != "steps" or settings.depends_on_steps)
    }


def saved_step(folder: Path) -> int | None:
    """Return the step at which the state in `folder` resumes, or None if there is no state.

    Raises:
        DataError: if the file is damaged.
    """
    header = _read_header(folder / STATE_FILE)
    return None if header is None else int(header["position"]["step"])


def save_state(folder: Path, identity: Identity, position: Position, tensors: Mapping[str, Tensor]) -> None:
    """Write the state atomically."""
    header = {"version": STATE_VERSION, "identity": identity, "position": asdict(position)}
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(folder / STATE_FILE) as partial:
        save_file(contiguous, partial, metadata={"dispfx": json.dumps(header)})


def load_state(folder: Path, identity: Identity) -> tuple[Position, dict[str, Tensor]] | None:
    """Return the state in `folder`, or None if there is no state.

    Raises:
        PlanMismatchError: if it was made for another decoder.
        DataError: if it was made with other settings, another budget or text, or is damaged.
    """
    path = folder / STATE_FILE
    header = _read_header(path)
    if header is None:
        return None
    _check_identity(header["identity"], json.loads(json.dumps(identity)), path)
    try:
        return Position(**header["position"]), load_file(path)
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise _damaged(path, error) from error


def run_tensors(
    hypernetwork: nn.Module, optimizer: torch.optim.Optimizer, generator_state: Tensor
) -> dict[str, Tensor]:
    """Return all tensors of a run under flat names."""
    tensors = {f"hypernetwork.{name}": tensor for name, tensor in hypernetwork.state_dict().items()}
    for name, parameter in hypernetwork.named_parameters():
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return {**tensors, "generator": generator_state}


def restore_run(
    hypernetwork: nn.Module,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    position: Position,
    tensors: Mapping[str, Tensor],
) -> None:
    """Restore tensors from `run_tensors`.

    Args:
        position: of the run at that time.

    Raises:
        ValueError: if they do not belong to such a run; nothing is changed then.
    """
    check_forms(_expected(hypernetwork, generator, position, tensors), tensors)
    check_finite(tensors)
    for name, _ in hypernetwork.named_parameters():
        if f"optimizer.{name}.step" in tensors:
            check_moments(_entries(tensors, name), name, position.step - position.bad_steps)
    prefix = "hypernetwork."
    hypernetwork.load_state_dict(
        {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    )
    state = {}
    for index, (name, _) in enumerate(hypernetwork.named_parameters()):
        entries = _entries(tensors, name)
        if entries:
            state[index] = entries
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    generator.set_state(tensors["generator"])


def _entries(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return what AdamW keeps of a parameter."""
    own = f"optimizer.{name}."
    return {key.removeprefix(own): tensor for key, tensor in tensors.items() if key.startswith(own)}


def _expected(
    hypernetwork: nn.Module, generator: torch.Generator, position: Position, found: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a template for every tensor of this run's state, by the names of `run_tensors`."""
    expected = {f"hypernetwork.{name}": tensor for name, tensor in hypernetwork.state_dict().items()}
    expected["generator"] = generator.get_state()
    # Before the first good step the optimizer may have no state yet.
    if position.step > position.bad_steps or any(name.startswith("optimizer.") for name in found):
        for name, parameter in hypernetwork.named_parameters():
            state = {"step": parameter.new_zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}
            expected |= {f"optimizer.{name}.{key}": like for key, like in state.items()}
    return expected


def check_forms(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> None:
    """Check names, shapes and dtypes of a state before it is used: AdamW would read out of bounds.

    Args:
        expected: a tensor of the same shape and dtype for each, by name.
        found: those of the state.

    Raises:
        ValueError: if one is missing, unknown, or of another shape or dtype.
    """
    for name in sorted({*expected, *found}):
        here, right = (_form(tensors.get(name)) for tensors in (found, expected))
        if name not in expected:
            raise ValueError(f"{name} is {here}, but this run has no such tensor")
        if here != right:
            raise ValueError(f"{name} is {here}, but this run has {right}")


def check_finite(found: Mapping[str, Tensor]) -> None:
    """Raise ValueError with the first tensor that holds NaN or infinity."""
    for name, tensor in found.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"{name} has values that are not finite")


def check_moments(entries: Mapping[str, Tensor], name: str, steps: int) -> None:
    """Check what AdamW keeps of a parameter, as far as the values tell.

    Args:
        entries: `step` and `exp_avg_sq` at least, after `check_forms`.
        name: of the parameter.
        steps: of the run so far that changed parameters.

    Raises:
        ValueError: if it took more steps than the run, or none, or a mean of squares is negative.
    """
    step = float(entries["step"])
    if not step.is_integer() or not 1 <= step <= steps:
        raise ValueError(f"the optimizer did {step:g} steps of {name}, but the run {steps}")
    if bool((entries["exp_avg_sq"] < 0).any()):
        raise ValueError(f"the mean of squared gradients of {name} is negative")


def _form(tensor: Tensor | None) -> str:
    return "not there" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {[*tensor.shape]}"


def _read_header(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            header = parse_json((file.metadata() or {})["dispfx"])
        if header["version"] != STATE_VERSION:
            raise ValueError(f"its format is version {header['version']}, this program reads {STATE_VERSION}")
        header["position"] = _checked_position(header["position"])
        _check_tables(header["identity"])
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error
    return header


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"the state of an earlier run cannot be read: {error}",
        where=str(path),
        hint="remove it to start again",
    )


def _checked_position(entries: Any) -> dict[str, int]:
    position = asdict(Position(**entries))
    if any(type(count) is not int or not 0 <= count < 2**63 for count in position.values()):
        raise ValueError(f"it stands at {position}")
    if not position["bad_in_a_row"] <= position["bad_steps"] <= position["step"]:
        raise ValueError(f"it counts more bad steps than steps: {position}")
    return position


def _check_tables(identity: Any) -> None:
    for part in ("settings", "budget"):
        if not isinstance(identity[part], dict):
            raise ValueError(f"its {part} are not a JSON object")


def _check_identity(saved: dict[str, Any], asked: dict[str, Any], path: Path) -> None:
    for key, what in (("decoder", "fingerprint"), ("sites", "sites")):
        if saved.get(key) != asked[key]:
            raise PlanMismatchError(
                f"the state to resume from was made for another decoder: its {what} differ from this one's",
                where=str(path),
                hint=f"resume with the run's own decoder, or start again without {option('resume')}",
            )
    differing = [entry for entry in _compared(saved, asked) if entry[1] != entry[2]]
    if differing:
        described = "; ".join(f"{name} was {before!r} and is {now!r}" for name, before, now in differing)
        raise DataError(
            f"the state to resume from was made with other settings: {described}",
            where=str(path),
            hint=f"resume with the run's own settings, or start again without {option('resume')}",
        )


def _compared(saved: dict[str, Any], asked: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs = []
    for part in ("settings", "budget"):
        before, now = saved.get(part, {}), asked[part]
        pairs += [(name, before.get(name), now.get(name)) for name in sorted({*before, *now})]
    pairs += [(name, saved.get(name), asked[name]) for name in ("text", "device")]
    # States of earlier versions do not say what type the decoder had.
    before, now = saved.get("dtype"), asked.get("dtype")
    return pairs if None in (before, now) else [*pairs, ("dtype", before, now)]
