"""Check the contents of a `.pt2` file before torch reads it.

`torch.export.load` trusts its file (torch 2.11 to 2.14): it unpickles sample inputs and tensor
subclasses with `weights_only=False`, unpickles script and opaque objects, evaluates symbolic sizes and
guards as Python, looks any attribute of `torch` up as an operator, and loads compiled libraries.  The
programs that dispfx writes need none of it, so `check_archive` lets through what they do need:

1. Plain weights and constants, one graph, no sample inputs; no other entry, and none twice.
2. Operators of the `aten` library, and arithmetic and comparison of Python numbers.
3. Sizes and guards that are arithmetic over symbols.
4. Inputs and outputs in tuples, lists and dictionaries.
"""

import ast
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from dispfx.analysis.links import registered_operators
from dispfx.errors import DataError
from dispfx.files.json_text import parse_json

WEIGHTS_CONFIG = "data/weights/model_weights_config.json"
_CONSTANTS_CONFIG = "data/constants/model_constants_config.json"
_GRAPH = "models/model.json"
_SAMPLE_INPUTS = "data/sample_inputs/model.pt"

_ENTRY = re.compile(
    r"data/weights/(weight_\d+|model_weights_config\.json)"
    r"|data/constants/(tensor_\d+|model_constants_config\.json)"
    r"|data/sample_inputs/model\.pt|models/model\.json"
    r"|archive_format|archive_version|byteorder|version|\.data/\w+"
)
_OPERATOR = re.compile(
    r"torch\.ops\.aten\.(_?[a-z]\w*|__i?(and|or|xor|lshift|rshift)__)\.[A-Za-z0-9]\w*"
    r"|_operator\.[a-z]\w*|math\.[a-z]\w*|torch\.sym_\w+"
)
# These read a file, or call what they are given.
_NEVER = re.compile(r"torch\.ops\.aten\.from_file\..*|_operator\.(attrgetter|methodcaller|itemgetter|call)")
# Registered by somebody's code.
_OWN_OPERATOR = re.compile(r"torch\.ops\.(?!aten\.)[A-Za-z_]\w*\.\w+\.\w+")
_SYMBOL = re.compile(r"[a-z_]+\d+")
_NAMES = frozenset({
    "Symbol", "Integer", "Float", "Rational", "Add", "Mul", "Pow", "Max", "Min", "Not", "And", "Or",
    "Eq", "Ne", "Gt", "Ge", "Lt", "Le", "Equality", "Unequality", "StrictGreaterThan", "GreaterThan",
    "StrictLessThan", "LessThan", "true", "false", "FloorDiv", "ModularIndexing", "Where", "PythonMod",
    "Mod", "CleanDiv", "CeilToInt", "FloorToInt", "CeilDiv", "LShift", "RShift", "PowByNatural", "FloatPow",
    "FloatTrueDiv", "IntTrueDiv", "TruncToFloat", "TruncToInt", "RoundToInt", "ToFloat", "Identity",
})  # fmt: skip
# torch 2.11 writes `min(…)` where later ones write `Min(…)`, `torch.sym_min(…)`, or nothing.
_GUARD_NAMES = frozenset({"L", "args", "kwargs", "min", "max", "torch"})
_GUARD_ATTRIBUTES = frozenset({"size", "shape", "stride", "storage_offset", "sym_min", "sym_max"})
_EXPRESSION = (
    ast.Expression, ast.Call, ast.Name, ast.Constant, ast.keyword, ast.Load, ast.Subscript, ast.Tuple,
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_CONTAINERS = (None, "builtins.tuple", "builtins.list", "builtins.dict")
# Arguments that are code or objects, and entries that name classes to build.
_REFUSED_KEYS = frozenset({"as_operator", "as_custom_obj", "as_graph"})


def check_archive(path: Path) -> None:
    """Raise unless torch can read the file without running code from it.

    Raises:
        DataError: with the first entry, operator or expression that is not allowed.
    """
    entries = _entries(path)
    for config in (WEIGHTS_CONFIG, _CONSTANTS_CONFIG):
        _check_payload(path, read_json(path, config))
    if _SAMPLE_INPUTS in entries and _reader(path).get_record(_SAMPLE_INPUTS):
        raise _refused(path, "sample inputs, which are a pickle")
    graph = read_json(path, _GRAPH)
    for key, value in _walk(graph):
        if key == "target" and isinstance(value, str) and _OWN_OPERATOR.fullmatch(value):
            require_rule(value, str(path))
        if problem := _problem(key, value):
            raise _refused(path, problem)


def require_rule(operator: str, where: str | None = None) -> None:
    """Pass if an operator that is not torch's, such as `torch.ops.mylib.op.default`, has a link rule.

    Raises:
        DataError: otherwise.
    """
    if operator not in registered_operators():
        packet = operator.rpartition(".")[0]
        raise DataError(
            f"no link rule is registered for the operator {packet}, which a program needs",
            where=where,
            hint="register one in the module that defines it; to open a folder, import that module in Python "
            "and call dispfx.load, verify or evaluate",
        )


def require_rules(graph: fx.Graph) -> None:
    """Pass if every operator of a graph that is not torch's has a registered link rule.

    Raises:
        DataError: as `require_rule`.
    """
    for node in graph.nodes:
        operator = f"torch.ops.{node.target}"
        if isinstance(node.target, torch._ops.OpOverload) and _OWN_OPERATOR.fullmatch(operator):
            require_rule(operator)


def read_json(path: Path, entry: str) -> Any:
    """Return a JSON entry of the archive.

    Raises:
        DataError: if it is missing or damaged.
    """
    try:
        return parse_json(_reader(path).get_record(entry))
    except (RuntimeError, ValueError) as error:
        raise DataError(f"the exported program cannot be read: {error}", where=f"{path}: {entry}") from error


def _entries(path: Path) -> set[str]:
    """Return the names of the entries, as torch sees them and as a zip file has them."""
    try:
        seen = _reader(path).get_all_records()
        with zipfile.ZipFile(path) as opened:
            names = opened.namelist()
    except (RuntimeError, OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"the exported program cannot be read: {error}", where=str(path)) from error
    # torch drops the common folder of all entries.
    inner = [name.partition("/")[2] for name in names]
    if len({name.partition("/")[0] for name in names}) != 1 or sorted(inner) != sorted(set(seen)):
        raise _refused(path, "entries that two readers see differently")
    for name in inner:
        if not _ENTRY.fullmatch(name):
            raise _refused(path, f"the entry {name!r}")
    return set(seen)


def _reader(path: Path) -> Any:
    # The reader of torch.export.load: another one might see other bytes under the same name.
    return torch._C.PyTorchFileReader(str(path))


def _check_payload(path: Path, payload: Any) -> None:
    entries = payload.get("config") if isinstance(payload, dict) else None
    if not isinstance(entries, dict):
        raise _refused(path, "a list of tensors that is damaged")
    for name, meta in entries.items():
        plain = isinstance(meta, dict) and meta.get("use_pickle") is False
        if not plain or not re.fullmatch(r"(weight|tensor)_\d+", str(meta.get("path_name"))):
            raise _refused(path, f"{name}, which is no plain tensor")


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every (key, value) of nested JSON, with an explicit stack: the file controls the depth."""
    stack = [value]
    while stack:
        at = stack.pop()
        if isinstance(at, dict):
            yield from at.items()
            stack.extend(at.values())
        elif isinstance(at, list):
            stack.extend(at)


def _problem(key: str, value: Any) -> str | None:
    """Return the problem of one entry of the graph, or None."""
    if key in _REFUSED_KEYS and value is not None:
        return f"an argument of kind {key}"
    if key == "target" and isinstance(value, str) and not _is_operator(value):
        return f"the operator {value!r}"
    if key == "expr_str" and not _is_arithmetic(value, guard=False):
        return f"the size {value!r}"
    if key == "guards_code" and not (isinstance(value, list) and all(_is_guard(text) for text in value)):
        return "a guard that is no arithmetic"
    if key in ("in_spec", "out_spec") and not _is_plain_container(value):
        return "inputs or outputs in a container of another kind"
    if key == "treespec_namedtuple_fields" and value:
        return "named tuples"
    return None


def _is_operator(target: str) -> bool:
    """Whether an operator belongs to torch, or has a link rule registered by the user's code."""
    if target in registered_operators():
        return True
    return bool(_OPERATOR.fullmatch(target)) and not _NEVER.fullmatch(target)


def _is_guard(text: Any) -> bool:
    return _is_arithmetic(text, guard=True)


def _is_arithmetic(text: Any, *, guard: bool) -> bool:
    """Whether an expression consists only of numbers, symbols and known functions."""
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
        return False
    return all(_is_known(node, guard) for node in ast.walk(tree))


def _is_known(node: ast.AST, guard: bool) -> bool:
    if isinstance(node, ast.Name):
        return node.id in _NAMES or (guard and node.id in _GUARD_NAMES)
    if isinstance(node, ast.Attribute):
        return guard and node.attr in _GUARD_ATTRIBUTES
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return guard or bool(_SYMBOL.fullmatch(node.value))
    return isinstance(node, _EXPRESSION)


def _is_plain_container(text: Any) -> bool:
    try:
        spec = parse_json(text)
    except (TypeError, ValueError, AttributeError):
        return False
    return all(value in _CONTAINERS for key, value in _walk(spec) if key == "type")


def _refused(path: Path, what: str) -> DataError:
    return DataError(
        f"the exported program contains {what}; a program written by dispfx never does",
        where=str(path),
        hint="load only programs that dispfx wrote",
    )
