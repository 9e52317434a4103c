"""The figures of metrics.jsonl for TensorBoard, where that is installed.

metrics.jsonl is the truth and TensorBoard's files are a view of it: a resumed run writes them anew from
the lines that it keeps, so no step is there twice or missing, whatever the killed run had not yet written.
"""

import shutil
import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
_GROUP = "learning"
_POSITION = {"step", "steps"}
_FLUSH_SECONDS = 10


class TensorBoardLog:
    """Writes records as scalars to FOLDER in the state's folder; does nothing without TensorBoard.

    Args:
        folder: of the state.
        earlier: records that are already in metrics.jsonl.
    """

    def __init__(self, folder: Path, earlier: Iterable[Mapping[str, Any]] = ()):
        self._writer: Any | None = None
        target = folder / FOLDER
        shutil.rmtree(target, ignore_errors=True)
        if find_spec("tensorboard") is None:
            return
        with warnings.catch_warnings():
            # Those of its own imports are no concern of the user.
            warnings.simplefilter("ignore")
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
        # A TensorBoard that watches the folder drops what it saw of the steps that are written again.
        self._writer = SummaryWriter(str(target), purge_step=0, flush_secs=_FLUSH_SECONDS)
        for values in earlier:
            self.append(values)

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one record; what is null in metrics.jsonl gets no point."""
        if self._writer is None:
            return
        for name in values.keys() - _POSITION:
            value = values[name]
            if isinstance(value, int | float):
                self._writer.add_scalar(f"{_GROUP}/{name}", value, values["step"])

    def close(self) -> None:
        """Write what is still held."""
        if self._writer is not None:
            self._writer.close()
