"""The one line that a message has of another error."""

import pytest

from dispfx.errors import CaptureError, DataError, first_line, memory_shortage


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError(), "RuntimeError"),
        (ValueError("\n  three are needed \ntwo were given"), "ValueError: three are needed"),
        (DataError("the file is empty", where="text.txt"), "the file is empty"),
        (KeyError(), "KeyError"),
        (RuntimeError("the backend raised:\nno room\nand more"), "RuntimeError: the backend raised: no room"),
        (RuntimeError("the backend raised:"), "RuntimeError: the backend raised:"),
    ],
)
def test_the_first_line_names_a_foreign_error_and_takes_one_that_says_nothing(error: Exception, line: str):
    assert first_line(error) == line


def test_a_line_without_end_is_cut():
    assert len(first_line(OSError("x" * 10_000))) < 400


def test_memory_that_ran_out_is_found_behind_other_errors():
    try:
        try:
            bytearray(10**15)
        except MemoryError as error:
            raise CaptureError("the decoder cannot be captured") from error
    except CaptureError as found:
        assert isinstance(memory_shortage(found), MemoryError)
    try:
        try:
            raise MemoryError
        except MemoryError:
            raise CaptureError("the decoder cannot be captured") from None
    except CaptureError as found:
        assert isinstance(memory_shortage(found), MemoryError)
    assert memory_shortage(CaptureError("not enough memory for this")) is None
    assert memory_shortage(RuntimeError("shape mismatch")) is None


@pytest.mark.parametrize("library", ["CUBLAS", "CUDNN", "CUSOLVER", "CUSPARSE", "CUFFT"])
def test_an_allocation_that_fails_in_a_library_of_cuda_is_a_memory_shortage(library: str):
    error = RuntimeError(f"{library} error: {library}_STATUS_ALLOC_FAILED when calling its create function")
    assert memory_shortage(error) is error
    assert memory_shortage(RuntimeError(f"{library}_STATUS_EXECUTION_FAILED")) is None
