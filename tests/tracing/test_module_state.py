"""A module, and every random state, is after a capture what it was before, whether that succeeds or fails."""

import random
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dispfx
from dispfx.capturing.module_capture import capture
from dispfx.capturing.module_state import ModuleState, called_with, module_kept, random_state_kept
from dispfx.errors import CaptureError
from dispfx.plan.plan import Plan
from dispfx.verification.graphs import zeroed_decoder
from tests.one_branch import VOCABULARY, WIDTH
from tests.plain_decoders import FORMS, build
from tests.programs import relative_error, token_ids

IDS = token_ids(2, 9, vocabulary=VOCABULARY)


class Cache:
    """Something with attributes that is no module."""

    def __init__(self) -> None:
        self.length = 0
        self.tables: dict[str, Tensor] = {}


class Decoder(nn.Module):
    """Keeps things of every kind, and writes to them where a test says so."""

    def __init__(self, write: Callable[["Decoder", Tensor], Any]):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("absent", None)
        self.plain = torch.zeros(3)
        self.number = 0
        self.things: list[Any] = [torch.zeros(2), {"inner": [1, 2]}]
        self.named: OrderedDict[str, Any] = OrderedDict(a=1, b=2)
        self.recent = deque([1, 2], maxlen=2)
        self.seen = {1, 2}
        self.cache = Cache()
        self.write = write

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.down(self.up(x).relu())
        if not torch.compiler.is_exporting():
            self.write(self, ids)
        return self.head(x)


def add_buffer(m: Decoder, ids: Tensor) -> None:
    m.register_buffer("new", torch.ones(ids.shape[1]), persistent=False)


def hook(m: Decoder, ids: Tensor) -> None:
    m.up.register_forward_hook(lambda *given: None)


def tables(m: Decoder, ids: Tensor) -> None:
    m.cache.length = ids.shape[1]
    m.cache.tables["long"] = torch.ones(3)


WRITES: dict[str, Callable[[Decoder, Tensor], Any]] = {
    "a number": lambda m, ids: setattr(m, "number", ids.shape[1]),
    "a new attribute": lambda m, ids: setattr(m, "mask", torch.ones(ids.shape[1])),
    "an attribute goes": lambda m, ids: vars(m).pop("plain", None),
    "a tensor in place": lambda m, ids: m.plain.add_(1),
    "a buffer in place": lambda m, ids: m.table.add_(1),  # type: ignore[operator]
    "a buffer replaced": lambda m, ids: setattr(m, "table", torch.ones(ids.shape[1])),
    "a buffer on first use": lambda m, ids: setattr(m, "absent", torch.ones(ids.shape[1])),
    "a new buffer": add_buffer,
    "a buffer goes": lambda m, ids: m._buffers.pop("table", None),
    "a tensor in a list": lambda m, ids: m.things[0].add_(1),
    "a list in a list": lambda m, ids: m.things[1]["inner"].append(3),
    "an ordered dict": lambda m, ids: m.named.update(a=3, c=4),
    "a deque": lambda m, ids: m.recent.append(3),
    "a set": lambda m, ids: m.seen.add(3),
    "an object": tables,
    "a hook": hook,
    "modes": lambda m, ids: m.up.train(),
    "a parameter replaced": lambda m, ids: setattr(m.up, "bias", nn.Parameter(m.up.bias.detach().clone())),
}


def decoder(write: Callable[[Decoder, Tensor], Any]) -> Decoder:
    torch.manual_seed(0)
    return Decoder(write)


def everything(value: Any, path: str = "", seen: frozenset[int] = frozenset()) -> dict[str, Any]:
    """Return every value that an object holds, by where it is held, with the identity of what holds them."""
    if id(value) in seen:
        return {}
    found: dict[str, Any] = {f"{path}/": id(value)}
    seen = seen | {id(value)}
    if isinstance(value, Tensor):
        return found | {path: value.tolist()}
    pairs: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        pairs += value.items()
    elif isinstance(value, list | deque | set):
        pairs += enumerate(value)
    if isinstance(value, nn.Module | Cache):
        pairs += vars(value).items()
    for name, inner in pairs:
        found |= everything(inner, f"{path}.{name}", seen)
    return found


@pytest.mark.parametrize("name", sorted(WRITES))
@pytest.mark.parametrize("fails", [False, True])
def test_what_a_forward_pass_writes_is_as_before(name: str, fails: bool):
    model = decoder(WRITES[name]).train()
    model.up.eval()
    before = everything(model)
    if fails:
        model.head.register_forward_hook(lambda module, given, output: output.mean(1))
        before = everything(model)
        with pytest.raises(CaptureError):
            capture(model)
    else:
        capture(model)
    assert everything(model) == before


def test_a_module_that_fails_at_once_is_as_before():
    def broken(m: Decoder, ids: Tensor) -> None:
        m.number = 5
        raise ValueError("no")

    model = decoder(broken)
    with pytest.raises(CaptureError, match="no"):
        capture(model)
    assert model.number == 0 and model.training


def test_no_random_number_is_drawn():
    def draw(m: Decoder, ids: Tensor) -> None:
        _ = random.random(), np.random.rand(), torch.rand(2)

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model = Decoder(draw)
    expected = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    capture(model)
    found = (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    assert found == expected


def test_random_states_come_back_after_an_error():
    state = torch.get_rng_state()
    with pytest.raises(ValueError), random_state_kept():
        torch.rand(3)
        raise ValueError
    assert torch.equal(torch.get_rng_state(), state)


def test_only_another_object_counts_as_another_structure():
    model = decoder(lambda m, ids: None)
    state = ModuleState(model)
    assert not state.restructured()
    model.plain.add_(1)
    assert not state.restructured()
    model.things[1]["inner"][0] = 7
    assert state.restructured()
    state.restore()
    assert not state.restructured() and model.things[1]["inner"] == [1, 2] and not model.plain.any()


def test_values_of_parameters_are_not_copied_and_other_values_only_where_asked():
    model = decoder(lambda m, ids: None)
    with module_kept(model, values=False):
        model.plain.add_(1)
        with torch.no_grad():
            model.up.bias.add_(1)
    assert model.plain.all()


def test_objects_that_hold_each_other_are_kept():
    model = decoder(lambda m, ids: None)
    model.things.append(model.things)
    model.cache.owner = model.__dict__  # type: ignore[attr-defined]
    with module_kept(model):
        model.things.append(1)
    assert len(model.things) == 3


def test_a_call_with_other_values_changes_nothing_in_a_module_that_stands_at_two_places():
    """`torch.func.functional_call` leaves the other values there: a second compile took zeros for weights."""
    model = build(FORMS["pre-norm"])
    model.layers[1] = model.layers[0]
    before = {path: one.detach().clone() for path, one in model.named_parameters(remove_duplicate=False)}
    owned = [id(one) for one in model.parameters()]
    program = dispfx.capture(model)
    plan = Plan.random(program, 0.4, 0)
    zeroed = zeroed_decoder(program, plan, model)
    with torch.no_grad():
        dense, expected = model(IDS), dispfx.gated(program, plan)(IDS)
        for _ in range(2):
            assert relative_error(zeroed(IDS), expected) < 1e-5 < relative_error(expected, dense)
            assert torch.equal(model(IDS), dense)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(torch.equal(before[path], after[path]) for path in before)
    assert owned == [id(one) for one in model.parameters()]


def test_a_tensor_with_two_names_has_one_value_at_both():
    model = build(FORMS["tied-embeddings"])
    value = torch.randn_like(model.head.weight)
    twin = build(FORMS["pre-norm"])
    twin.load_state_dict(model.state_dict() | {"embedding.weight": value, "head.weight": value})
    for path in ("embedding.weight", "head.weight"):
        assert torch.equal(called_with(model, {path: value}, (IDS,), {}), twin(IDS))


@dataclass(frozen=True, slots=True)
class Frozen:
    """An object without `__dict__` that does not let its attributes be set."""

    count: np.ndarray


class Slotted:
    """An object without `__dict__`, which keeps a table per length."""

    __slots__ = ("__private", "length", "table")

    def __init__(self) -> None:
        self.length, self.__private = 0, {"x": 1}

    def fill(self, tokens: int) -> None:
        self.length, self.table, self.__private = tokens, torch.ones(tokens), {}

    def held(self) -> tuple[Any, ...]:
        return self.length, getattr(self, "table", None), self.__private


@pytest.mark.parametrize("fails", [False, True])
def test_objects_with_slots_and_arrays_are_as_before_after_a_capture(fails: bool):
    def write(m: Any, ids: Tensor) -> None:
        m.slotted.fill(ids.shape[1])
        object.__setattr__(m.frozen, "count", m.frozen.count + 1)
        m.counts += 1
        m.counts[0] = np.nan
        m.things[0][0] += 1
        m.text[:] = b"longer than before"
        m.whole.append(1)

    model: Any = decoder(write)
    model.slotted, model.frozen = Slotted(), Frozen(np.zeros(2))
    counts = model.counts = np.arange(3.0)
    model.things.append(np.zeros((), dtype=np.int64))
    model.text, model.whole = bytearray(b"abc"), array("l", [1, 2])
    slots, frozen = model.slotted.held(), model.frozen.count
    if fails:
        model.head = nn.Identity()
        with pytest.raises(CaptureError):
            capture(model)
    else:
        capture(model)
    assert all(one is other for one, other in zip(model.slotted.held(), slots, strict=True))
    assert model.frozen.count is frozen and not frozen.any()
    assert model.counts is counts and counts.tolist() == [0.0, 1.0, 2.0]
    assert model.text == b"abc" and model.whole.tolist() == [1, 2]


def test_a_refused_trace_leaves_no_fake_tensors_in_slots():
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder, self.tables = build(FORMS["pre-norm"], layers=1), Slotted()

        def forward(self, ids: Tensor) -> Tensor:
            if self.tables.length != ids.shape[1]:
                self.tables.fill(ids.shape[1])
            logits = self.decoder(ids)
            return logits * (2.0 if logits.sum() > 0 else 1.0)

    model = Remembering().eval()
    expected = model(IDS)
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        capture(model)
    assert type(model.tables.table) is Tensor and model.tables.length == IDS.shape[1]
    assert torch.equal(model(IDS), expected)
