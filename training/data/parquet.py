# SPDX-License-Identifier: Apache-2.0
"""Read the texts of a column of a .parquet file with pyarrow, where it is installed."""

import importlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from training.data.text_files import need_package

ROWS = 256  # read at a time
# Arrow's names of the types; a column that has nulls alone is of type null
TEXT = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")


def rows(path: str, file: BinaryIO, column: str) -> Iterator[tuple[int, bytes | None]]:
    """Yield (row, from 1, and the bytes of its text, or None where it has none).

    Raises ValueError where the column is not there or holds no text.
    """
    need_package(path)
    pyarrow: Any = importlib.import_module("pyarrow")
    table = importlib.import_module("pyarrow.parquet").ParquetFile(file)
    schema = table.schema_arrow
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
    number = 0
    for batch in table.iter_batches(ROWS, columns=[column], use_threads=False):
        values = batch.column(0)
        if pyarrow.types.is_dictionary(values.type):
            values = values.dictionary_decode()
        if isinstance(values, pyarrow.ExtensionArray):
            values = values.storage
        for value in values.cast(pyarrow.large_binary()):
            number += 1
            yield number, value.as_py()
