# SPDX-License-Identifier: Apache-2.0
"""Find data that a run would read twice, or validate on although it trains on it.

Pairs are compared by their tokens, not by their names: links, other spellings of a path and copies
are the same data, even with another token type or other boundaries of documents. If the 64 blocks
that are read of every file at the start are equal, all tokens are compared: by digests or, if types
or documents differ, token by token.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from training.data.indexed import IndexedTokens
from training.data.loss_mask import LossMask


@dataclass(frozen=True)
class Part:
    """A data set that a split reads, as a part of the blend that `flag` names.

    prefix: as typed. documents: those that are read. weighted: whether the blend has weights.
    """

    split: str
    flag: str
    prefix: str
    file: IndexedTokens
    documents: range
    weighted: bool
    loss_mask: LossMask | None = None


@dataclass(frozen=True)
class Twice:
    """A report that two parts have the same data. split: "train" if it concerns training."""

    split: str
    what: str
    instead: str


def twice(parts: Sequence[Part], cut: bool) -> Iterator[Twice]:
    """Yield data that is read twice. cut: --split gives each split other documents of the pairs.

    Several stages may read one data set, which continues in the later ones, and copies of it, which
    start over.
    """
    alike = defaultdict[str, list[Part]](list)
    for part in parts:
        alike[part.file.probe].append(part)
    for group in alike.values():
        seen: list[Part] = []  # one of each blend
        for part in group:
            again = False
            for one in seen:
                found = _compare(one, part, cut)
                if found and _same(one, part):
                    yield found
                    again |= (one.split, one.flag) == (part.split, part.flag)
            if not again:
                seen.append(part)


def _same(one: Part, other: Part) -> bool:
    """Return whether two parts with the same blocks hold the same tokens."""
    if one.file.sketch == other.file.sketch:
        return _one_file(one, other) or one.file.digest == other.file.digest
    return one.file.holds_tokens_of(other.file)


def _one_file(one: Part, other: Part) -> bool:
    """Return whether both are one file of tokens, under whatever names."""
    return os.path.samefile(f"{one.prefix}.bin", f"{other.prefix}.bin")


def _compare(one: Part, other: Part, cut: bool) -> Twice | None:
    """Return the error in two parts if they hold the same data, None if that is allowed."""
    a, b, flag = one.prefix, other.prefix, other.flag
    again = f"{b} is named twice" if a == b else f"{b} holds the same data as {a}"
    if one.split == other.split and one.flag == flag:
        return Twice(
            "train" if cut else one.split,
            f"{flag}: {again}, so each of its samples is read twice",
            "name it once"
            + (
                ", with the sum of its weights"
                if one.weighted
                else "; give weights to read it more often"
            ),
        )
    if cut:
        return None
    if one.split == other.split == "train":
        names = {os.path.realpath(f"{prefix}.bin") for prefix in (a, b)}
        if len(names) == 1 or not _one_file(one, other):
            return None
        return Twice(
            "train",
            f"{flag}: {b} is a hard link to {a} of {one.flag}, so its samples begin again",
            f"name {a} to continue its samples, or a copy to begin again",
        )
    if one.split == "train":
        trained = f"{b} is trained on" if a == b else f"{again}, which is trained on"
        return Twice(
            other.split,
            f"{flag}: {trained} ({one.flag})",
            "hold out other documents, as --split does with --data-path",
        )
    if one.split.startswith("valid") and other.split.startswith("valid"):
        return Twice(other.split, f"--multiple-validation-sets: {again}", "leave one out")
    return None
