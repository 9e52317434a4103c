"""Records of a table or of JSON lines → one text: texts of a field, joined by line breaks.

A text that ends in a line break gets no second one, so that a data set of lines gives the original text.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from dispfx.errors import DataError
from dispfx.words.option_names import option
from dispfx.words.text_origin import LINE_BREAK


def joined(documents: Iterable[str], between: str = LINE_BREAK) -> Iterator[str]:
    """Yield all documents in order, on separate lines or separated by `between`."""
    separator = ""
    for document in documents:
        yield separator + document
        separator = "" if between == LINE_BREAK and document.endswith(between) else between


def until_full(documents: Iterable[str], most_bytes: int) -> Iterator[str]:
    """Yield documents until they reach `most_bytes`, including the one that reaches it."""
    taken = 0
    for document in documents:
        yield document
        taken += len(document.encode())
        if taken >= most_bytes:
            return


def text_of(record: Any, field: str, *, where: str, record_name: str) -> str:
    """Return the text in a field of a record.

    Args:
        field: its name, or a dotted path to a nested field, such as `message.content`.
        where: the file or data set, for the message.
        record_name: name of the record in messages, such as "line 3".

    Raises:
        DataError: if the record has no such field, or the field does not hold valid text.
    """
    if not isinstance(record, dict):
        raise DataError(f"{record_name} is a {type(record).__name__} without fields", where=where)
    values = _values(record, field)
    if not values:
        raise missing_field(field, list(record), where=where, record_name=record_name)
    text = values[0]
    if not isinstance(text, str):
        found = "nothing" if text is None else f"a value of type {type(text).__name__}"
        raise DataError(
            f"{field!r} must hold text, but in {record_name} it holds {found}",
            where=where,
            hint=f"name another field with {option('data_field')}",
        )
    if not _is_unicode(text):
        raise DataError(f"{field!r} in {record_name} holds half a character (a lone surrogate)", where=where)
    return text


def _values(record: dict[str, Any], field: str) -> list[Any]:
    """Return the value of a field; a name that contains a dot takes precedence over a path."""
    if field in record:
        return [record[field]]
    places = [place for place, letter in enumerate(field) if letter == "."]
    inner = [(record.get(field[:place]), field[place + 1 :]) for place in places]
    return [value for inside, rest in inner if isinstance(inside, dict) for value in _values(inside, rest)]


def missing_field(field: str, fields: list[str], *, where: str, record_name: str) -> DataError:
    """Return the error for a missing field, with the existing ones."""
    shown = ", ".join(map(repr, fields[:8])) + (", …" if len(fields) > 8 else "")
    return DataError(
        f"{record_name} has no field {field!r}; it has {shown or 'none'}",
        where=where,
        hint=f"name the field that holds the text with {option('data_field')}",
    )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
