"""`program.pt2`: a lowered decoder as a torch.export archive, for modules that transformers does not know."""

import io
import math
import operator
import os
import secrets
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from dispfx.capturing.graph_export import traced
from dispfx.capturing.unlifting import user_inputs
from dispfx.deploy.archive import WEIGHTS_CONFIG, check_archive, read_json, require_rules
from dispfx.deploy.weights import INDEX_BUFFERS
from dispfx.errors import DataError, OutputError, first_line
from dispfx.ir.lengths import held_to

PROGRAM_FILE = "program.pt2"


def export_program(module: fx.GraphModule, ids: Tensor) -> ExportedProgram:
    """Return a graph module as an `ExportedProgram` with dynamic batch and length.

    Args:
        module: forward(ids) -> logits.
        ids: (B, T) sample token ids with B, T >= 2.

    Where the module is held to a range of lengths, the exported program raises beyond its end, too.
    """
    held = held_to(module)
    tokens = Dim.AUTO(min=max(held.least, 2), max=held.most)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return traced(module, (ids,), ({0: Dim.AUTO, 1: tokens},))


def save_graph(module: fx.GraphModule, folder: Path) -> None:
    """Write a graph module, forward(ids (B, T) int64) -> logits, as `program.pt2`.

    Every loader rejects the lengths that `module` rejects.

    Raises:
        OutputError, DataError: as `save_program`.
    """
    held = held_to(module)
    # Not a power of two: it could equal a size of the decoder, such as that of a chunk.
    ids = torch.zeros(2, held.within(9), dtype=torch.int64, device=next(module.parameters()).device)
    exported = export_program(module, ids)
    if held.least > 1:
        _require_tokens(exported, held.least)
    save_program(exported, folder)


def _require_tokens(exported: ExportedProgram, least: int) -> None:
    """Let the program raise for shorter sequences: torch does not check a range that begins at two."""
    graph = exported.graph
    name = user_inputs(exported)[0]
    ids = next(node for node in graph.nodes if node.name == name)
    tokens = ids.meta["val"].shape[1]
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        size = graph.call_function(torch.ops.aten.sym_size.int, (ids, 1))
        enough = graph.call_function(operator.ge, (size, least))
        message = f"this graph holds for sequences of {least} tokens or more"
        check = graph.call_function(torch.ops.aten._assert_scalar.default, (enough, message))
    size.meta["val"], enough.meta["val"], check.meta["val"] = tokens, tokens >= least, None
    exported.graph_module.recompile()


def save_program(exported: ExportedProgram, folder: Path) -> None:
    """Write `program.pt2` into `folder` atomically; the program is not changed.

    Sample inputs, which torch would pickle, and stack traces, which contain paths of this machine, are left
    out.

    Raises:
        OutputError: if it cannot be written.
        DataError: if the program needs something that `load_program` does not allow.
    """
    require_rules(exported.graph)
    # torch refuses names that do not end in .pt2.
    partial = folder / f".program-{secrets.token_hex(4)}.pt2"
    try:
        with _bare(exported), _Writer(partial, "w") as writer:
            torch.export.save(exported, writer)  # type: ignore[arg-type]
            if writer.error is not None:
                raise writer.error
        check_archive(partial)
        os.replace(partial, folder / PROGRAM_FILE)
    except OSError as error:
        raise OutputError(
            f"the program cannot be written: {error.strerror or first_line(error)}", where=str(folder)
        ) from error
    except RuntimeError as error:
        raise OutputError(
            f"the program cannot be written: {first_line(error)}",
            where=str(folder),
            hint="rewrite the operation named above, which torch.export cannot store",
        ) from error
    finally:
        partial.unlink(missing_ok=True)


class _Writer(io.FileIO):
    """A file for torch, whose archive aborts the process (its destructor throws) if a write fails.

    The first failure is kept in `error`, and later writes are dropped.
    """

    error: OSError | None = None

    def write(self, data: bytes) -> int:  # type: ignore[override]
        rest = memoryview(data)
        while len(rest) and self.error is None:
            try:
                rest = rest[super().write(rest) :]
            except OSError as error:
                self.error = error
        return len(data)


@contextmanager
def _bare(exported: ExportedProgram) -> Iterator[None]:
    """Remove sample inputs and stack traces from the program inside the block."""
    inputs, exported._example_inputs = exported._example_inputs, None
    traced = [node for node in exported.graph.nodes if "stack_trace" in node.meta]
    traces = [node.meta.pop("stack_trace") for node in traced]
    try:
        yield
    finally:
        exported._example_inputs = inputs
        for node, trace in zip(traced, traces, strict=True):
            node.meta["stack_trace"] = trace


def load_program(folder: Path) -> nn.Module:
    """Return the module in `program.pt2`: forward(input_ids (B, T) int64) -> logits (B, T, V).

    The archive is checked first, because torch would run code that it contains.

    Raises:
        DataError: if the file is missing or damaged, or holds more than tensors and a graph.
    """
    path = folder / PROGRAM_FILE
    if not path.is_file():
        raise DataError(f"there is no {PROGRAM_FILE}", where=str(folder))
    check_archive(path)
    try:
        with warnings.catch_warnings():
            # torch 2.11 maps the weights read-only and warns that they can be written to.
            warnings.simplefilter("ignore")
            # Guards of a trace are mostly about strides; the range of lengths is checked separately.
            return torch.export.load(path).module(check_guards=False)
    except Exception as error:
        # The archive passed the check, but torch may still raise anything; report it as an error of the file.
        raise DataError(f"torch cannot read the exported program: {error}", where=str(path)) from error


def count_parameters(folder: Path) -> int:
    """Count the parameters of `program.pt2` from its list of tensors, tied ones once, indices left out.

    Raises:
        DataError: if the file or that list is damaged.
    """
    listed = read_json(folder / PROGRAM_FILE, WEIGHTS_CONFIG)
    sizes = {}
    try:
        for name, entry in listed["config"].items():
            if entry["is_param"] and not name.startswith(INDEX_BUFFERS):
                shape = [int(size["as_int"]) for size in entry["tensor_meta"]["sizes"]]
                sizes[entry["path_name"], str(entry["tensor_meta"]["storage_offset"])] = math.prod(shape)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(
            f"the list of tensors is damaged: {error!r}", where=str(folder / PROGRAM_FILE)
        ) from error
    return sum(sizes.values())
