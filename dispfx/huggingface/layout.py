"""How the modules of a pruned decoder differ from those of the dense one.

A layout is what config.json holds: shapes, widths and where an index stands.  The indices themselves
lie with the weights, as int32 buffers of the modules that use them:

    dispfx_select   a norm's output is gathered by it: the kept positions
    dispfx_read     a module's input is gathered by it: the kept positions
    dispfx_write    a module's output is gathered by it: for every feature its place among the kept
                    ones, or one past the last where it is pruned
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import PlanMismatchError
from dispfx.files.json_text import parse_json

SELECT, READ, WRITE = "dispfx_select", "dispfx_read", "dispfx_write"
INDEX_NAMES = (SELECT, READ, WRITE)
# A tensor of a decoder without indices, so that what lists unknown tensors names dispfx for it, too.
MARK = "dispfx_pruned"

ONE_COMPILATION = "config.json and the weights must come from one compilation"


@dataclass(frozen=True)
class ModuleLayout:
    """What differs in one module.

    Args:
        shapes: shape of each parameter that is cut, by name.
        sizes: whole numbers that the module remembers of its shape, by attribute.
        select: (features of its output, kept ones) where the output is gathered for all its readers.
        readers: paths of the modules that take the gathered output.  Engines that fuse a norm with other
            operations gather in the readers.
        read: (features of its input, kept ones) where the input is gathered.
        padded: whether `read` may point one past the last feature, at a zero.
        write: (features of its output, kept ones) where the output is put among zeros.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    select: tuple[int, int] | None = None
    readers: tuple[str, ...] = ()
    read: tuple[int, int] | None = None
    padded: bool = False
    write: tuple[int, int] | None = None

    @cached_property
    def indices(self) -> dict[str, tuple[int, int]]:
        """(features, kept ones) by the name of the index buffer."""
        named = {SELECT: self.select, READ: self.read, WRITE: self.write}
        return {name: sizes for name, sizes in named.items() if sizes is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the entries that are not empty."""
        entries: dict[str, Any] = {
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "sizes": dict(self.sizes),
            "padded": self.padded,
            "readers": list(self.readers),
        }
        entries |= {key: list(getattr(self, key) or ()) for key in ("select", "read", "write")}
        return {key: value for key, value in entries.items() if value}

    @staticmethod
    def from_json(entries: Mapping[str, Any]) -> "ModuleLayout":
        """Read what `to_json` gave; TypeError, ValueError or AttributeError where it is something else."""
        pairs = {key: _pair(entries[key]) for key in ("select", "read", "write") if key in entries}
        shapes = {
            str(name): tuple(int(size) for size in shape) for name, shape in entries.get("shapes", {}).items()
        }
        sizes = {str(name): int(size) for name, size in entries.get("sizes", {}).items()}
        readers = tuple(str(path) for path in entries.get("readers", ()))
        padded = bool(entries.get("padded", False))
        return ModuleLayout(shapes, sizes, readers=readers, padded=padded, **pairs)


def _entries_of(modules: Any) -> dict[str, Any]:
    """Return the entries of each module; the first folders have a text for each, later ones one for all."""
    if isinstance(modules, str):
        return parse_json(modules)
    return {path: parse_json(text) for path, text in modules.items()}


def _dtype_name(name: Any) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return name


def _pair(value: Any) -> tuple[int, int]:
    features, kept = (int(number) for number in value)
    if not 0 < kept <= features:
        raise ValueError(f"{kept} of {features} features")
    return features, kept


@dataclass(frozen=True)
class Layout:
    """The layout of a decoder.

    Args:
        modules: what differs, by the module's path in the dense decoder.
        indices: digest of the index buffers that belong to it.
        buffers: paths of those that are stored although the decoder does not save them by itself.
        dtypes: of the tensors that are stored in another dtype than the decoder has, by path.
    """

    modules: Mapping[str, ModuleLayout]
    indices: str
    buffers: tuple[str, ...] = ()
    dtypes: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the layout as the config holds it.

        All modules are one text: transformers copies a config some twenty times while it loads a model, and
        thousands of nested entries took longer to copy than the weights to read.
        """
        modules = {path: module.to_json() for path, module in self.modules.items()}
        entries = {"modules": json.dumps(modules), "indices": self.indices}
        return {**entries, "buffers": list(self.buffers), "dtypes": dict(self.dtypes)}

    @staticmethod
    def from_json(entries: Any) -> "Layout":
        """Read what `to_json` gave.

        Raises:
            PlanMismatchError: if it is something else.
        """
        try:
            modules = {
                str(path): ModuleLayout.from_json(module)
                for path, module in _entries_of(entries["modules"]).items()
            }
            buffers = tuple(str(path) for path in entries["buffers"])
            dtypes = {str(path): _dtype_name(dtype) for path, dtype in entries["dtypes"].items()}
            return Layout(modules, str(entries["indices"]), buffers, dtypes)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanMismatchError(
                f"the config's dispfx section holds no usable layout: {error!r}", hint=ONE_COMPILATION
            ) from error

    @property
    def marked(self) -> bool:
        """Whether the decoder holds the mark, for want of indices."""
        return not any(module.indices for module in self.modules.values())

    def check_indices(self, buffers: Mapping[str, Tensor]) -> None:
        """Pass if the index buffers are in range and are those that this layout was made with.

        Args:
            buffers: by "module path.buffer name".

        Raises:
            PlanMismatchError: naming the first one that is not.
        """
        for path, module in self.modules.items():
            for name, (features, kept) in module.indices.items():
                index = buffers.get(f"{path}.{name}")
                problem = "the index is missing"
                if index is not None:
                    problem = _problem(index, name, features, kept, module.padded)
                if problem:
                    raise PlanMismatchError(problem, where=f"{path}.{name}", hint=ONE_COMPILATION)
        if digest(buffers) != self.indices:
            raise PlanMismatchError(
                "the stored indices are not those that the config was written with", hint=ONE_COMPILATION
            )


def digest(buffers: Mapping[str, Tensor]) -> str:
    """Return a digest of index buffers: their names, shapes and values."""
    found = hashlib.sha256()
    for name in sorted(buffers):
        index = buffers[name].detach().to("cpu", torch.int32).contiguous()
        found.update(f"{name}:{tuple(index.shape)};".encode())
        found.update(index.numpy().tobytes())
    return found.hexdigest()


def _problem(index: Tensor, name: str, features: int, kept: int, padded: bool) -> str | None:
    """Return what is wrong with an index buffer, or None."""
    if index.is_meta:
        return "the index has no values"
    length = features if name == WRITE else kept
    if index.dtype != torch.int32 or tuple(index.shape) != (length,):
        return f"{length} int32 indices were expected, {tuple(index.shape)} {index.dtype} is stored"
    # Of numpy, whose operations begin sooner: there may be hundreds of indices.
    values = index.cpu().numpy()
    limit = kept if name == WRITE else features - (not padded)
    if int(values.min()) < 0 or int(values.max()) > limit:
        return f"the indices must lie between 0 and {limit}"
    inside = values[values < (kept if name == WRITE else features)]
    if not bool((inside[1:] > inside[:-1]).all()):
        return "the indices must rise strictly"
    return None
