# SPDX-License-Identifier: Apache-2.0
"""Read which tokens of a pair count in the loss: PREFIX.loss_mask.bin and .idx beside PREFIX.bin.

The mask is a pair of Megatron's format, too: documents of the same lengths, and for each token 1
if its prediction counts and 0 if it does not, as uint8. PREFIX.json has the digest of the mask, so
that a mask of other tokens, or a missing one, is detected (training/data/made_with.py).
"""

import os
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from training.data.blend import parse_blend
from training.data.cache import IndexCache
from training.data.dataset import DataError
from training.data.indexed import IndexedTokens
from training.data.made_with import Record

if TYPE_CHECKING:
    from training.settings.config import Config

SUFFIX = ".loss_mask"  # of a mask's prefix, after its pair's
ENDS = (f"{SUFFIX}.bin", f"{SUFFIX}.idx")
AGAIN = "make the pair again by tools/preprocess_data.py --loss-on"


class LossMask:
    """The mask of a pair of tokens; threads may share it. cache: keeps `digest`.

    Raises ValueError naming the file if it is damaged, or not a mask of these tokens.
    """

    def __init__(self, tokens: IndexedTokens, cache: IndexCache | None = None) -> None:
        self._file = IndexedTokens(tokens.prefix + SUFFIX, cache)
        self.prefix, kind = self._file.prefix, self._file.dtype
        if kind != np.uint8:
            self._refuse(".idx", f"token type: {kind} is not uint8")
        lengths, wanted = self._file.lengths, tokens.lengths
        if len(lengths) != len(wanted):
            self._refuse(
                ".idx", f"it has {len(lengths)} documents, and {tokens.prefix}.idx {len(wanted)}"
            )
        if not np.array_equal(lengths, wanted):
            bad = int(np.argmax(lengths != wanted))
            self._refuse(
                ".idx",
                f"document {bad} has {lengths[bad]} tokens, and in {tokens.prefix}.idx "
                f"{wanted[bad]}",
            )
        least, greatest = self._file.range_of_ids
        if not 0 <= least <= greatest <= 1:
            self._refuse(".bin", f"values from {least} to {greatest} are not 0 and 1")

    @property
    def digest(self) -> str:
        """Return an XXH3-128 of every length and every value, as for a pair of tokens."""
        return self._file.digest

    @property
    def sketch(self) -> str:
        """Return a SHA-256 of every length and of 64 blocks of values."""
        return self._file.sketch

    def read(self, document: int, offset: int, count: int) -> np.ndarray:
        """Return whether `count` tokens of a document, from `offset` on, count: bool [count].

        Raises DataError if the file does not hold them any more, or other values than 0 and 1.
        """
        values = self._file.read(document, offset, count)
        if count and values.max() > 1:
            raise DataError(
                f"{self.prefix}.bin: document {document} has the value {values.max()}, which is "
                "not 0 or 1"
            )
        return values.astype(bool)

    def counts_none(self, documents: range) -> bool:
        """Return whether no token of consecutive documents counts."""
        return self._file.holds_only(0, documents)

    def check(self) -> None:
        """Raise DataError if the mask was written to, or truncated, since it was opened."""
        self._file.check()

    def under_way(self) -> str:
        """Return the file and the byte of the longest read in progress, or ""."""
        return self._file.under_way()

    def _refuse(self, end: str, why: str) -> NoReturn:
        raise ValueError(f"{self.prefix}{end}: {why}; {AGAIN}")


def is_masked(config: "Config") -> bool:
    """Return whether a run leaves training tokens out of the loss: by --eod-mask-loss, or by a mask
    beside a pair, which is detected by its file name alone.
    """
    data, stages = config.data, [stage.train_data_path for stage in config.stages]
    blends = [paths for paths in (data.data_path, data.train_data_path, *stages) if paths]
    prefixes = [prefix for paths in blends for prefix in parse_blend(paths)[0]]
    return data.eod_mask_loss or any(os.path.lexists(prefix + ENDS[1]) for prefix in prefixes)


def find_loss_mask(
    prefix: str, tokens: IndexedTokens, record: Record | None, cache: IndexCache | None = None
) -> LossMask | None:
    """Return the mask beside a pair, None if there is none.

    prefix: the pair's, of which `tokens` may be a copy. record: the pair's record in PREFIX.json,
    None without one. Raises ValueError, naming the file, for a mask that is not the pair's.
    """
    named = record and record.get("loss_mask")
    if not any(os.path.lexists(tokens.prefix + end) for end in ENDS):
        if named:
            raise ValueError(
                f"{prefix}.json names a loss mask, and there is no {prefix}{ENDS[0]}: copy "
                f"{' and '.join(prefix + end for end in ENDS)} too (without the .json the loss of "
                "all tokens counts)"
            )
        return None
    mask = LossMask(tokens, cache)
    if record is not None and named != mask.digest:
        which = "is not the mask that it names" if named else "is there, and it names no mask"
        raise ValueError(
            f"{prefix}.json belongs to another pair than the loss mask: {mask.prefix}.bin {which}; "
            f"{AGAIN}, or copy all of its files"
        )
    return mask
