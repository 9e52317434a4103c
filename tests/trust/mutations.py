"""Hypothesis strategies for hostile input: valid files with a few changes, and words of a command line."""

import json
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Edit = Callable[[bytes], bytes]

# Lengths and counts that a header may claim.
_NUMBERS = (0, 1, 2**31 - 1, 2**32 - 1, 10**12, 2**60, 2**63 - 1, 2**63, 2**64 - 1)
_PIECES = (
    b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\r", b"\n", b"{", b"}", b"[" * 3_000, b'"', b"NaN", b"1e999",
    b"-1", b"..", b"/", b"\\ud800", b"9" * 5_000, b"%", b"PK\x03\x04", b"null",
)  # fmt: skip

ODD_TEXT = (
    "", " ", ".", "..", "../outside", "../../outside.safetensors", "/outside", "/dev/zero", "a/../../b",
    "C:\\x", "nul\x00", "\ud800", "é" * 50, "x" * 10_000, "%s{0}", "-1", "__proto__", "[red]", "[/]", "\n",
    "\x1b[2J", "eval('1')", "model.embed.weight:0",
)  # fmt: skip
ODD_NUMBERS = (
    None, True, False, 0, -1, 1, 2, 7, 10**6, 10**12, 2**31, 2**63, 2**64, 10**30, 10**400,
    0.5, -0.0, 1.5, 1e-320, 1e300, float("nan"), float("inf"), -float("inf"),
)  # fmt: skip
_LEAVES = st.sampled_from(ODD_NUMBERS) | st.sampled_from(ODD_TEXT)
ODD_VALUES = _LEAVES | st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ODD_TEXT), inner, max_size=3),
    max_leaves=5,
)


def _put(at: float, cut: int, piece: bytes) -> Edit:
    def edit(data: bytes) -> bytes:
        start = int(at * len(data))
        return data[:start] + piece + data[start + cut :]

    return edit


def _end(at: float) -> Edit:
    return lambda data: data[: int(at * len(data))]


def _twice(at: float, length: int) -> Edit:
    return lambda data: data[: int(at * len(data)) + length] + data[int(at * len(data)) :]


# Half of all changes are made in the first bytes, where formats keep their lengths.
_PLACES = st.floats(0, 1, exclude_max=True) | st.floats(0, 0.02)
_BINARY_NUMBERS = st.sampled_from(_NUMBERS).map(lambda number: number.to_bytes(8, "little"))
_EDITS = st.one_of(
    st.builds(_put, _PLACES, st.just(1), st.binary(min_size=1, max_size=1)),
    st.builds(_put, _PLACES, st.just(8), _BINARY_NUMBERS),
    st.builds(_put, _PLACES, st.just(4), _BINARY_NUMBERS.map(lambda raw: raw[:4])),
    st.builds(_put, _PLACES, st.integers(0, 16), st.sampled_from(_PIECES) | st.binary(max_size=16)),
    st.builds(_end, _PLACES),
    st.builds(_twice, _PLACES, st.integers(1, 64)),
)


def changed_bytes(valid: bytes) -> SearchStrategy[bytes]:
    """Return strings of bytes that are `valid` with up to four changes, or unlike it."""

    def change(edits: list[Edit]) -> bytes:
        data = valid
        for edit in edits:
            data = edit(data)
        return data

    few = st.lists(_EDITS, min_size=1, max_size=4).map(change)
    return st.one_of(few, few, few, few, few, few, few, st.binary(max_size=64))


def changed_json(valid: Any) -> SearchStrategy[Any]:
    """Return JSON values that are `valid` with up to three entries replaced, removed, renamed or doubled."""
    places = list(_places(valid, ()))

    def change(edits: Sequence[tuple[tuple[Any, ...], str, Any]]) -> Any:
        value = deepcopy(valid)
        for place, how, odd in edits:
            value = _edited(value, place, how, odd)
        return value

    edits = st.tuples(
        st.sampled_from(places),
        st.sampled_from(("replace", "replace", "remove", "rename", "add")),
        ODD_VALUES,
    )
    return st.lists(edits, min_size=1, max_size=3).map(change)


def json_text(value: Any) -> bytes:
    """Return the value as JSON text, with the words for infinity and NaN that Python reads."""
    # A lone surrogate is written as its escape, so that any text can be spelled.
    return json.dumps(value).encode()


def changed_json_text(valid: Any) -> SearchStrategy[bytes]:
    """Return JSON texts like `valid`, and texts that are none."""
    text = json_text(valid)
    entries = changed_json(valid).map(json_text)
    return st.one_of(entries, entries, entries, changed_bytes(text), st.just(b"[" * 200_000))


def _places(value: Any, at: tuple[Any, ...]) -> Any:
    yield at
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, entry in entries:
        # Lists are alike from their second entry on.
        if not isinstance(key, int) or key < 2:
            yield from _places(entry, (*at, key))


def _edited(value: Any, place: tuple[Any, ...], how: str, odd: Any) -> Any:
    if not place:
        return odd if how == "replace" else value
    owner = value
    try:
        for key in place[:-1]:
            owner = owner[key]
        owner[place[-1]]
    except (KeyError, IndexError, TypeError):
        return value  # an earlier change took the place away
    if not isinstance(owner, dict | list):
        return value
    _edit_entry(owner, place[-1], how, odd)
    return value


def _edit_entry(owner: Any, key: Any, how: str, odd: Any) -> None:
    if how == "replace":
        owner[key] = odd
    elif how == "remove":
        del owner[key]
    elif isinstance(owner, list):
        owner.append(owner[key] if how == "rename" else odd)
    elif how == "rename":
        owner[str(odd)[:50]] = owner.pop(key)
    else:
        owner[str(odd)[:50]] = odd
