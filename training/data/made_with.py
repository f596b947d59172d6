# SPDX-License-Identifier: Apache-2.0
"""Record beside a .bin/.idx pair which tokenizer made it, and refuse a pair of another one.

PREFIX.json has the tokenizer's type, its digest (`Tokenizer.digest`), the size of its vocabulary
and the id that ends each document, and the numbers of documents and tokens and a digest of the
lengths of its pair. tools/preprocess_data.py writes it. A pair may lack it, as Megatron's does. If
only a part of the tokens counts in the loss, it also has the digest of the mask, and which texts
count.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from training.data.tokenizer import Tokenizer
from training.data.tokenizer_files import digests_of, same_tokenizer
from training.files.owned import json_with
from training.files.untrusted import read_json

FORMAT = "weft-tokens"
FIELDS: Mapping[str, tuple[type, ...]] = {
    "tokenizer_type": (str,),
    "tokenizer_digest": (str,),
    "vocab_size": (int,),
    "eod": (int, type(None)),
    "documents": (int,),
    "tokens": (int,),
    "lengths": (str,),
}
MASK: Mapping[str, tuple[type, ...]] = {"loss_mask": (str,), "loss_on": (list,)}  # or neither
Record = dict[str, Any]
is_record = json_with("format", *FIELDS)


def record_of(tokenizer: Tokenizer, eod: int | None) -> Record:
    """Return the record of a tokenizer. eod: the id that was put after each document."""
    return {
        "format": FORMAT,
        "tokenizer_type": tokenizer.name,
        "tokenizer_digest": tokenizer.digest(),
        "vocab_size": tokenizer.vocab_size,
        "eod": eod,
    }


def facts_of(lengths: np.ndarray) -> Record:
    """Return the record of a pair. lengths: int32, those of its documents."""
    digest = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(lengths, "<i4").data)
    tokens = int(lengths.sum(dtype=np.int64))
    return {"documents": len(lengths), "tokens": tokens, "lengths": digest}


class MadeWith:
    """Compare a run's pairs with its tokenizer.

    named: the tokenizer by its flags, for messages. ends: whether the run uses ends of documents.
    """

    def __init__(self, tokenizer: Tokenizer, named: str, *, ends: bool) -> None:
        self._tokenizer, self._named, self._ends = tokenizer, named, ends
        self._records: dict[str, Record] = {}
        self._without: list[str] = []  # why pairs could not be compared

    def check(self, prefix: str, lengths: np.ndarray) -> Record | None:
        """Return the record of a pair in PREFIX.json, None if it has none for these tokens.

        lengths: those of its documents. NullTokenizer, which handles no text, takes the ids of any
        one tokenizer. Raises ValueError, naming file and values, if the pair was made by another
        tokenizer.
        """
        path = f"{prefix}.json"
        found, why = _read(path)
        if found and not facts_of(lengths).items() <= found.items():
            found, why = None, f"{path} describes other tokens than its .bin has"
        if not found:
            self._without.append(why)
            return None
        self._records[path] = found
        tokenizer, digest = self._tokenizer, found["tokenizer_digest"]
        if tokenizer.name != "NullTokenizer" or found["tokenizer_type"] == tokenizer.name:
            if not same_tokenizer(digest, digests_of(tokenizer), {}):
                raise ValueError(
                    f"{path}: tokenizer_digest: the pair was made with {_words(found)}, and "
                    f"{self._named} is {_words(record_of(tokenizer, None))}: give the tokenizer "
                    "that made it, or tokenize the text again (without this file nothing is "
                    "compared)"
                )
            return found
        first, known = next(iter(self._records.items()))
        if digest != known["tokenizer_digest"]:
            raise ValueError(
                f"{path}: tokenizer_digest: the pair was made with {_words(found)}, and that of "
                f"{first} with {_words(known)}: the pairs of a run must be made with one tokenizer"
            )
        if found["vocab_size"] > tokenizer.vocab_size:
            raise ValueError(
                f"{path}: vocab_size {found['vocab_size']} is more than --vocab-size "
                f"{tokenizer.vocab_size} of --tokenizer-type NullTokenizer"
            )
        if self._ends and found["eod"] not in (None, tokenizer.eod):
            raise ValueError(
                f"{path}: eod {found['eod']} ends each document, and NullTokenizer expects "
                f"{tokenizer.eod}: --reset-position-ids, --reset-attention-mask and "
                f"--eod-mask-loss need --vocab-size {found['eod'] + 1}, or the pair's tokenizer"
            )
        return found

    def tell(self, report: Callable[[str], None]) -> None:
        """Report in one line the pairs that could not be compared."""
        if self._without:
            more = len(self._without) - 1
            report(
                f"data: {self._without[0]}{f' (and {more} more)' if more else ''}: taken as tokens "
                f"of {self._named}"
            )


def _read(path: str) -> tuple[Record | None, str]:
    """Return a pair's record, or None and why there is none. Raises ValueError for a bad one."""
    try:
        found = read_json(Path(path), foreign=True)
        other = not isinstance(found, dict) or found.get("format") != FORMAT
    except FileNotFoundError:
        return None, f"no {path} says which tokenizer made the pair"
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError:
        other = True
    if other:
        return None, f"{path} was not written by tools/preprocess_data.py and names no tokenizer"
    fields = FIELDS if found.keys().isdisjoint(MASK) else {**FIELDS, **MASK}
    for field, kinds in fields.items():
        if type(found.get(field)) not in kinds:
            raise ValueError(
                f"{path}: {field}: {found.get(field)!r} is not {kinds[0].__name__}; without the "
                "file the tokenizer is not compared"
            )
    return found, ""


def _words(record: Record) -> str:
    digest = str(record["tokenizer_digest"])
    return f"{record['tokenizer_type']} of {record['vocab_size']:,} tokens ({digest[:16]})"
