"""The figures of metrics.jsonl for TensorBoard, if installed.

TensorBoard's files are derived from metrics.jsonl: a resumed run writes them again from the lines that it
keeps, so no step is duplicated or missing.  If they cannot be written, the run continues without them.
"""

import shutil
import time
import warnings
from collections.abc import Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

FOLDER = "tensorboard"
_FILE = "events.out.tfevents.{seconds}.dispfx"
_FORMAT = "brain.Event:2"
_GROUP = "learning"
_POSITION = {"step", "steps"}
_FLUSH_SECONDS = 10.0


class TensorBoardLog:
    """Writes records as scalars to FOLDER in the state's folder; does nothing without TensorBoard.

    TensorBoard's own writer has a thread that would print a traceback on a full disk.

    Args:
        folder: of the state.
        earlier: records that are already in metrics.jsonl.
    """

    def __init__(self, folder: Path, earlier: Iterable[Mapping[str, Any]] = ()):
        self._file: BinaryIO | None = None
        self._flushed = time.monotonic()
        target = folder / FOLDER
        shutil.rmtree(target, ignore_errors=True)
        if find_spec("tensorboard") is None:
            return
        with warnings.catch_warnings():
            # Warnings of its imports do not concern the user.
            warnings.simplefilter("ignore")
            try:
                self._event = import_module("tensorboard.compat.proto.event_pb2")
                self._summary = import_module("tensorboard.compat.proto.summary_pb2").Summary
                writer = import_module("tensorboard.summary.writer.record_writer").RecordWriter
            except ImportError:
                return
        try:
            target.mkdir()
            self._file = (target / _FILE.format(seconds=int(time.time()))).open("wb")
        except OSError:
            return
        self._writer = writer(self._file)
        self._write(file_version=_FORMAT)
        # A running TensorBoard drops the old values of steps that are written again.
        self._write(step=0, session_log=self._event.SessionLog(status=self._event.SessionLog.START))
        for values in earlier:
            self.append(values)

    def append(self, values: Mapping[str, Any]) -> None:
        """Write one record; null values are left out."""
        if self._file is None:
            return
        points = [
            self._summary.Value(tag=f"{_GROUP}/{name}", simple_value=value)
            for name, value in values.items()
            if name not in _POSITION and isinstance(value, int | float)
        ]
        self._write(step=values["step"], summary=self._summary(value=points))

    def close(self) -> None:
        """Write buffered records."""
        if self._file is not None:
            self._end()

    def _write(self, **content: Any) -> None:
        if self._file is None:
            return
        try:
            event = self._event.Event(wall_time=time.time(), **content)
            self._writer.write(event.SerializeToString())
            if time.monotonic() - self._flushed > _FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()
        except OSError:
            self._end()

    def _end(self) -> None:
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError:
            return
