"""Speed tables as Markdown and JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dispfx.benchmark.speed_row import Side, SpeedRow
from dispfx.files.disk import replacing, writing

_HEADER = (
    "", "step", "batch × tokens (past)", "mode", "dense", "pruned", "×", "bound", "of bound", "tokens/s",
    "peak memory", "start", "not pruned",
)  # fmt: skip
_PARTS = {
    "head_operations": "head", "attention_operations": "attention", "head_bytes": "head",
    "embedding_bytes": "embedding", "cache_bytes": "KV cache",
}  # fmt: skip
_LEAST_SHARE = 0.005
_MARKS = {"generated": " ᵍ", "layers": " ˡ"}


def speed_markdown(rows: Sequence[SpeedRow], facts: Mapping[str, str]) -> str:
    """Return a Markdown page: facts, then one line per row, with slowdowns flagged.

    Args:
        facts: needed to repeat the measurement, such as device, versions and widths.
    """
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", _line(_HEADER), _line(["---"] * len(_HEADER)), *(_line(_cells(row)) for row in rows), ""]
    slower = [row for row in rows if row.is_slower]
    if slower:
        lines += [f"**{len(slower)} of {len(rows)} rows are slower than the dense decoder** (marked ⚠).", ""]
    return "\n".join(lines)


def speed_plain(rows: Sequence[SpeedRow], facts: Mapping[str, str]) -> dict[str, Any]:
    """Return the same as plain data for JSON."""
    return {"facts": dict(facts), "rows": [_plain(row) for row in rows]}


def speed_json(rows: Sequence[SpeedRow], facts: Mapping[str, str], decoder: str | None) -> str:
    """Return the same as a JSON document, with the identity of the measured decoder."""
    plain = {"decoder": decoder, **speed_plain(rows, facts)}
    return json.dumps(plain, indent=1, ensure_ascii=False) + "\n"


def write_speed(
    folder: Path,
    rows: Sequence[SpeedRow],
    facts: Mapping[str, str],
    pages: Sequence[str] = (),
    *,
    decoder: str | None = None,
) -> None:
    """Write speed.md and speed.json.

    Args:
        pages: appended to speed.md.
        decoder: identity of the measured decoder, as `dispfx.deploy.digests.identity`.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "speed.md") as partial:
        partial.write_text("\n".join([speed_markdown(rows, facts), *pages]), encoding="utf-8")
    with replacing(folder / "speed.json") as partial:
        partial.write_text(speed_json(rows, facts, decoder), encoding="utf-8")


def speed_line(row: SpeedRow) -> str:
    """Return a row as one line of a log."""
    what = f"{row.name}, {row.kind} {tuple(row.shape)} {row.mode}"
    if row.speedup is None or row.share_of_bound is None or row.dense is None or row.pruned is None:
        return f"{what}: {row.note}"
    kernels = f"{row.dense.kernels} → {row.pruned.kernels}"
    slower = ", SLOWER than dense" if row.is_slower else ""
    return (
        f"{what}: dense {_time(row.dense)}, pruned {_time(row.pruned)}, {row.speedup:.3f} × as fast "
        f"({row.share_of_bound:.0%} of the bound of {row.bound:.3f}; kernels {kernels}){slower}"
    )


def _plain(row: SpeedRow) -> dict[str, Any]:
    found = asdict(row)
    found["shape"] = row.shape._asdict()
    derived = {"kind": row.kind, "speedup": row.speedup, "share_of_bound": row.share_of_bound}
    rates = {
        f"{name}_tokens_per_second": row.tokens_per_second(side)
        for name, side in (("dense", row.dense), ("pruned", row.pruned))
        if side is not None
    }
    return {**found, **derived, **rates, "slower": row.is_slower}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(row: SpeedRow) -> list[str]:
    batch, tokens, past = row.shape
    shape = f"{batch} × {tokens}" + (f" ({past})" if row.kind == "decode" else "")
    first = [row.name, row.kind, shape, row.mode]
    unpruned = ", ".join(
        f"{_PARTS[part]} {share:.0%}" for part, share in row.unpruned.items() if share >= _LEAST_SHARE
    )
    if row.dense is None or row.pruned is None or row.speedup is None or row.share_of_bound is None:
        return [*first, "", "", row.note, f"{row.bound:.2f}", "", "", "", "", unpruned]
    return [
        *first,
        _time(row.dense),
        _time(row.pruned),
        f"{row.speedup:.2f}{' ⚠' if row.is_slower else ''}",
        f"{row.bound:.2f}",
        f"{row.share_of_bound:.0%}",
        f"{row.tokens_per_second(row.dense):,.0f} → {row.tokens_per_second(row.pruned):,.0f}",
        f"{_memory(row.dense)} → {_memory(row.pruned)}" if row.dense.peak_bytes is not None else "",
        f"{row.dense.start_seconds:.0f} → {row.pruned.start_seconds:.0f} s",
        unpruned,
    ]


def _time(side: Side) -> str:
    milliseconds = side.seconds * 1e3
    shown = f"{milliseconds:.3f} ms" if milliseconds < 10 else f"{milliseconds:.1f} ms"
    return shown + _MARKS.get(side.kernels, "")


def _memory(side: Side) -> str:
    return f"{(side.peak_bytes or 0) / 1e9:.2f} GB"
