"""package.module:function → the module that the function returns."""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from torch import nn

from dispfx.errors import SourceError
from dispfx.source.quiet import installation
from dispfx.source.transformers_classes import known_config
from dispfx.words.python_code import current_folder, suggestion_for


def build_module(spec: str) -> tuple[nn.Module, None, Any | None]:
    """Import and call the function that `spec` names, with the current directory importable.

    Returns:
        The module, no tokenizer, and the config that transformers would build it from, or None.

    Raises:
        SourceError: if the function cannot be found, raises, or returns something else.
    """
    # Its output must not mix with the machine-readable output of a command.
    with _current_directory_importable(), redirect_stdout(sys.stderr):
        function = _find(spec)
        try:
            module = function()
        except MemoryError as error:
            raise _out_of_memory("MODEL's function ran", error) from error
        except (Exception, SystemExit) as error:
            raise SourceError(
                f"MODEL's function raised {type(error).__name__}: {error}",
                where=_line_of(error) or spec,
                hint="it is called without arguments and must return an nn.Module",
            ) from error
    if not isinstance(module, nn.Module):
        raise SourceError(
            f"MODEL's function must return an nn.Module, but returned {_returned(module)}",
            where=spec,
            hint="end the function in `return model`, with the decoder alone",
        )
    return module, None, known_config(module)


def _returned(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {', '.join(type(part).__name__ for part in value)}"
    return type(value).__name__


def _find(spec: str) -> Callable[[], Any]:
    module_name, _, path = spec.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except MemoryError as error:
        raise _out_of_memory(f"the module {module_name} was imported", error) from error
    except (Exception, SystemExit) as error:
        absent = isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}.")
        here = current_folder() or "the current folder, which was removed,"
        looked = f"it is searched in {here} and among the installed packages"
        hint = (suggestion_for(spec) or looked) if absent else installation(error)
        raise SourceError(
            f"the module {module_name} cannot be imported: {type(error).__name__}: {error}",
            where=spec if absent else _line_of(error) or spec,
            hint=hint,
        ) from error
    for name in path.split("."):
        if not hasattr(found, name):
            raise SourceError(f"{module_name} has no {path}", where=spec, hint=suggestion_for(spec))
        found = getattr(found, name)
    if not callable(found):
        raise SourceError(f"{path} must be a function, but is a {type(found).__name__}", where=spec)
    return found


@contextmanager
def _current_directory_importable() -> Iterator[None]:
    here = current_folder()
    if here is None:  # nothing can be imported from there
        yield
        return
    sys.path.insert(0, str(here))
    # A new file may be missing from the finder's cached listing of the folder.
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(here))


def _out_of_memory(when: str, error: MemoryError) -> SourceError:
    detail = f": {error}" if str(error) else ""
    return SourceError(
        f"memory ran out while {when}{detail}",
        where=_line_of(error),
        hint="build a smaller decoder, or use a smaller dtype; very deeply nested code also causes this",
    )


def _line_of(error: BaseException) -> str | None:
    """Return the last line of the user's code that ran before `error`, or None."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames if frame.filename != __file__ and not frame.filename.startswith("<frozen")
    ]
    return f"{own[-1].filename}:{own[-1].lineno}" if own else None
