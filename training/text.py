# SPDX-License-Identifier: Apache-2.0
"""Read the texts of .txt and .jsonl files, each as it is or with .gz behind."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path


def documents(file: Path, key: str = "text") -> Iterator[str]:
    """Yield the documents of a file: all of a .txt, or a .jsonl's `key`, line by line.

    Raises ValueError with file and line for what is no such text.
    """
    kind = file.with_suffix("").suffix if file.suffix == ".gz" else file.suffix
    if kind not in (".txt", ".jsonl"):
        raise ValueError(f"{file}: neither .txt nor .jsonl, nor one of them with .gz")
    opener = gzip.open if file.suffix == ".gz" else open
    try:
        with opener(file, "rt", encoding="utf-8", newline="") as stream:
            if kind == ".txt":
                yield stream.read()
                return
            for number, line in enumerate(stream, 1):
                try:
                    text = json.loads(line)[key]
                except (ValueError, KeyError, TypeError):
                    text = None
                if not isinstance(text, str):
                    raise ValueError(f"{file}, line {number}: no JSON object with a text {key!r}")
                yield text
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: is not UTF-8 ({error.reason})") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror or error})") from None
