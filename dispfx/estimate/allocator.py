"""Which library hands out the memory of this process, and whether it keeps what is freed inside a step.

The address of `posix_memalign`, which torch calls for its tensors on a CPU, is asked for the file that it
lies in.  That tells an allocator wherever it came from: `LD_PRELOAD`, `/etc/ld.so.preload`, or a Python that
was linked with one; and it is not misled by a library in `LD_PRELOAD` that is no allocator, such as libgomp.
"""

import ctypes
import os
import platform
import re
from collections.abc import Iterator

_GLIBC_FILE = re.compile(r"libc(\.so\.6|-2\.\d+\.so)")
# Blocks above glibc's threshold are mapped one by one and given back whole.  It starts here and grows with
# what is freed, unless it is set; with it set to this the estimate was measured.
_MAPPED_FROM = 128 * 1024
_THRESHOLD, _TUNABLES = "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"
_TUNABLE = "glibc.malloc.mmap_threshold"


class _Place(ctypes.Structure):
    """`Dl_info` of dlfcn.h."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def keeps_freed_blocks() -> bool:
    """Whether memory comes from glibc, and blocks of a step's size are cut from what it keeps."""
    if platform.libc_ver()[0] != "glibc" or not _GLIBC_FILE.fullmatch(os.path.basename(provider() or "")):
        return False
    return all(threshold > _MAPPED_FROM for threshold in _thresholds())


def provider() -> str | None:
    """Return the file of the library that hands out aligned blocks, or None where the system does not say."""
    place = _Place()
    try:
        process = ctypes.CDLL(None)
        found = process.dladdr(ctypes.cast(process.posix_memalign, ctypes.c_void_p), ctypes.byref(place))
    except (OSError, AttributeError, TypeError):  # a system without these functions
        return None
    return os.fsdecode(place.file) if found and place.file else None


def _thresholds() -> Iterator[int]:
    """Yield the thresholds that were set; glibc passes over what is no number."""
    settings = [pair.partition("=") for pair in os.environ.get(_TUNABLES, "").split(":")]
    named = [value for name, _, value in settings if name == _TUNABLE]
    for value in (os.environ.get(_THRESHOLD, ""), *named):
        try:
            yield int(value, 0)
        except ValueError:
            continue
