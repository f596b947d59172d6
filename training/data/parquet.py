# SPDX-License-Identifier: Apache-2.0
"""Read the texts of columns of a .parquet file with pyarrow, if it is installed."""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from training.data.text_files import need_package

ROWS = 256  # read at a time
# Arrow's names of the types; a column with nulls alone is of type null
TEXT = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")


def rows(
    path: str, file: BinaryIO, columns: Sequence[str]
) -> Iterator[tuple[int, tuple[bytes | None, ...]]]:
    """Yield (row, from 1, and for each column the bytes of its text, None for null).

    Raises ValueError if a column is missing or does not hold text.
    """
    need_package(path)
    pyarrow: Any = importlib.import_module("pyarrow")
    table = importlib.import_module("pyarrow.parquet").ParquetFile(file)
    for column in columns:
        _check(path, pyarrow, table.schema_arrow, column)
    number = 0
    for batch in table.iter_batches(ROWS, columns=list(dict.fromkeys(columns)), use_threads=False):
        names = batch.schema.names  # in the order of the file
        texts = [_texts(pyarrow, batch.column(names.index(column))) for column in columns]
        for values in zip(*texts, strict=True):
            number += 1
            yield number, tuple(value.as_py() for value in values)


def _check(path: str, pyarrow: Any, schema: Any, column: str) -> None:
    """Raise ValueError if a column is missing or does not hold text."""
    if schema.names.count(column) != 1:
        found = "several columns" if column in schema.names else "no column"
        raise ValueError(
            f"{path}: {found} {column!r}; it has "
            f"{', '.join(schema.names[:20])}; --json-keys names the column "
            "(of make train: JSON_KEYS)"
        )
    stored = schema.field(column).type
    text = stored.value_type if pyarrow.types.is_dictionary(stored) else stored
    text = text.storage_type if isinstance(text, pyarrow.BaseExtensionType) else text
    if str(text) not in TEXT:
        raise ValueError(f"{path}: the column {column!r} holds {stored}, which is not text")


def _texts(pyarrow: Any, values: Any) -> Any:
    """Return a column of a batch as bytes."""
    if pyarrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if isinstance(values, pyarrow.ExtensionArray):
        values = values.storage
    return values.cast(pyarrow.large_binary())
