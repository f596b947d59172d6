# SPDX-License-Identifier: Apache-2.0
"""Leave out the flags of somebody's fork that --ignore-flags names, each with its values.

Only flags that neither Weft nor Megatron-LM knows can be left out, and none that may be a slip of
the pen for a flag of this program: nothing that this program would do is left undone.
"""

import re
from collections.abc import Collection, Sequence

from training.config import UsageError
from training.flags import table
from training.flags.spelling import like

FLAG = "--ignore-flags"


def take_out(argv: Sequence[str], own_names: Collection[str]) -> tuple[list[str], tuple[str, ...]]:
    """Return the words that are left, and the NAME:COUNT that were asked for.

    own_names: flags of a fork of this program. Raises UsageError.
    """
    rest, asked, counts = [], [], {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word != FLAG:
            rest.append(word)
            continue
        while words and not (words[0].startswith("--") and ":" not in words[0]):
            asked.append(words.pop(0).removeprefix("--"))
        if not asked:
            raise UsageError(f"{FLAG} names no flag: give NAME:COUNT, such as trigger-path:1")
    for each in asked:
        found = re.fullmatch(r"([^\s:=-][^\s:=]*):(\d+)", each)
        if found is None:
            raise UsageError(f"{FLAG} {each}: give NAME:COUNT, COUNT the number of its values")
        counts["--" + found[1]] = int(found[2])
    for name in counts:
        _refuse_known(name, own_names)
    return _without(rest, counts), tuple(asked)


def _refuse_known(name: str, own_names: Collection[str]) -> None:
    """Refuse a flag that is known, or close to one that is."""
    known = table.known_flags()
    if name in known or name in own_names:
        raise UsageError(f"{FLAG} {name[2:]}: {name} is known here, so it cannot be left out")
    usable = [flag.name for flag in known.values() if flag.kind != table.REFUSED_KIND]
    if close := like(name, [*usable, *own_names]):
        raise UsageError(
            f"{FLAG} {name[2:]}: too close to {close[0]}, for which {name} may be a slip of the pen"
        )


def _without(words: list[str], counts: dict[str, int]) -> list[str]:
    """Return the words without the flags of `counts`, {flag: number of its values}."""
    kept: list[str] = []
    while words:
        word, *words = words
        name, equals, _ = word.partition("=")
        if name not in counts:
            kept.append(word)
            continue
        count = counts[name] - bool(equals)
        values, words = words[: max(count, 0)], words[max(count, 0) :]
        if count < 0 or len(values) < count or any(v.startswith("--") for v in values):
            has = "more" if count < 0 else "fewer"
            raise UsageError(f"{FLAG} {name[2:]}:{counts[name]}: {word} has {has} values here")
        if words and not words[0].startswith("--"):
            raise UsageError(
                f"{FLAG} {name[2:]}:{counts[name]}: {words[0]} follows, a value more than that"
            )
    return kept
