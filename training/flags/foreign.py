# SPDX-License-Identifier: Apache-2.0
"""Answer a flag that is not available: unknown, mistyped, refused, removed, or to be left out.

--ignore-flags leaves out the flags of another program, each with its values, or all of a tree's.
What does the same under another name is translated.

Only flags that neither Weft nor Megatron-LM knows can be left out, and none that may be a slip of
the pen for a flag of this program: nothing that this program would do is left undone.
"""

import difflib
import os
import re
from collections.abc import Collection, Sequence

from training.config import UsageError
from training.flags import flag_table
from training.flags.trees import SYNONYMS, TREES, VALUES
from training.untrusted import first_of

FLAG = "--ignore-flags"
ELSEWHERE = {  # flags of other programs, and what Megatron-LM and this program call them
    "--context-parallel-algo": "--cp-comm-type",
}


def translate(argv: Sequence[str], own_names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the words with the names of other programs in this one's, and a line on each.

    own_names: flags of a fork of this program, which stay.
    """
    words, notes, flag, ignoring = list[str](), list[str](), "", False
    for word in argv:
        name, equals, value = word.partition("=")
        ignoring = ignoring and not word.startswith("--") or word == FLAG
        if ignoring or name in own_names:
            words.append(word)
            flag = ""
            continue
        if not word.startswith("--"):
            here = VALUES.get((flag, word.lower()))
            if here is not None:
                notes.append(f"{flag} {word} is taken as {here}")
                words[-1:] = here.split() if here.startswith("--") else [words[-1], here]
            else:
                words.append(word)
            flag = ""
            continue
        flag = _here(name)
        spelled = SYNONYMS.get(flag, [flag])
        if spelled != [name]:
            notes.append(f"{name} is taken as {' '.join(spelled)}")
        words += [*spelled[:-1], f"{spelled[-1]}={value}" if equals else spelled[-1]]
        flag = spelled[-1]
        here = VALUES.get((flag, value.lower())) if equals else None
        if here is not None:
            notes.append(f"{flag} {value} is taken as {here}")
            words[-1:] = here.split() if here.startswith("--") else [f"{flag}={here}"]
    return words, notes


def _here(name: str) -> str:
    """Return a flag with - for _, where it is a flag then and was none."""
    plain = name.replace("_", "-")
    known = {*flag_table.known_flags(), *SYNONYMS, *(flag for flag, _ in VALUES)}
    return plain if plain in known and name not in known else name


def take_out(
    argv: Sequence[str], own_names: Collection[str]
) -> tuple[list[str], tuple[str, ...], list[str]]:
    """Return the words that are left, what was asked for, and a line on each flag left out.

    Asked for are NAME:COUNT, flags with the number of their values, and names of TREES. own_names:
    flags of a fork of this program. Raises UsageError.
    """
    rest, ignored, counts = [], [], {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word != FLAG:
            rest.append(word)
            continue
        while words and not (words[0].startswith("--") and ":" not in words[0]):
            ignored.append(words.pop(0).removeprefix("--"))
        if not ignored:
            raise UsageError(f"{FLAG} names no flag: give NAME:COUNT, such as trigger-path:1")
    of_trees: dict[str, str] = {}
    for each in ignored:
        found = re.fullmatch(r"([^\s:=-][^\s:=]*):(\d+)", each)
        if each in TREES:
            of_trees = dict.fromkeys(TREES[each], each) | of_trees
        elif found is None:
            raise UsageError(
                f"{FLAG} {each}: give NAME:COUNT, COUNT the number of its values, or one of the "
                f"trees {', '.join(TREES)}"
            )
        else:
            counts["--" + found[1]] = int(found[2])
    for name in counts:
        _refuse_known(name, own_names)
    lines = [
        f"{FLAG}: {name} is ignored: what it does in another program is not done here"
        for name in counts
    ]
    rest, left = _without_trees(_without(rest, counts), of_trees, own_names)
    for tree in dict.fromkeys(each for each in ignored if each in TREES):
        flags = [name for name, of in left.items() if of == tree]
        note = f"ignored, and what they do there is not done here: {', '.join(flags)}"
        lines.append(f"{FLAG} {tree}: {note if flags else 'no flag of it is given'}")
    return rest, tuple(ignored), lines


def _without_trees(
    words: Sequence[str], trees: dict[str, str], own_names: Collection[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the words without the flags of `trees`, and those that were there.

    A flag that has values loses all words up to the next flag.
    """
    remaining, left, taking = list[str](), dict[str, str](), False
    for word in words:
        name, equals, _ = word.partition("=")
        if word.startswith("--"):
            taking = name in trees and name not in own_names
            if taking:
                left[name] = trees[name]
                taking = TREES[trees[name]][name] and not equals
            else:
                remaining.append(word)
        elif not taking:
            remaining.append(word)
    return remaining, left


def unknown(argv: Sequence[str], own_names: Collection[str] = ()) -> list[str]:
    """Return NAME:COUNT for the flags that neither Weft nor Megatron-LM knows."""
    counts: dict[str, int] = {}
    name, known = "", {*flag_table.known_flags(), *own_names, "--"}
    for word in argv:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            if name not in known:
                counts[name] = int(bool(equals))
        elif name in counts:
            counts[name] += 1
    return [f"{name[2:]}:{count}" for name, count in counts.items()]


def refuse_unknown(argv: Sequence[str], own_names: Collection[str]) -> None:
    """Raise UsageError for unknown flags: the first typo of a known flag, else all of them at once.
    """
    found = unknown(argv, own_names)
    names = ["--" + each.rpartition(":")[0] for each in found]
    reasons = {name: _what_else(name) for name in names}
    if name := next((name for name in names if reasons[name]), None):
        raise UsageError(reasons[name])
    of = [tree for tree, flags in TREES.items() if all(name in flags for name in names)]
    given = " ".join(of[:1] or found)
    whose = f", but of {' and '.join(of[:3])}" if of else ""
    if len(found) == 1:
        raise UsageError(
            f"{names[0]} is not a flag of this program nor of Megatron-LM{whose}; --help all "
            f"lists the flags, {FLAG} {found[0]} ignores it"
        )
    if found:
        raise UsageError(
            f"{len(found)} flags are not flags of this program nor of Megatron-LM{whose}; "
            f"--help all lists the flags, and this ignores them: {FLAG} {given}"
        )


def refuse_unavailable(argv: Sequence[str], own_names: Collection[str]) -> None:
    """Raise UsageError for a flag of Megatron-LM, or of an older Weft, that is not available."""
    names = dict.fromkeys(word.partition("=")[0] for word in argv)
    found = [flag_table.known_flags().get(name) for name in names if name not in own_names]
    refused = [flag for flag in found if flag is not None and not flag.usable]
    if refused:
        first, *others = refused
        more = f" (refused too: {first_of([flag.name for flag in others])})" * bool(others)
        was = "was removed" if first.kind == flag_table.REMOVED_KIND else "is refused"
        raise UsageError(f"{first.name} {was}: {first.text}{more}")


def _what_else(name: str) -> str:
    """Return the sentence on a flag that was not meant, or that has another name here, or ""."""
    flag, *rest = name.split()
    if rest and flag in flag_table.known_flags():
        short = f"{name[:60]}{' ...' * (len(name) > 60)}"
        return f"{short!r} came as one word: leave out the quotes that hold flags together"
    if other := ELSEWHERE.get(name.replace("_", "-")):
        return f"{name} is not a flag of this program; here and in Megatron-LM it is {other}"
    close = suggest(name)
    if not close or any(name in flags for flags in TREES.values()):
        return ""  # a flag of a tree is no slip
    return f"{name} is not a flag of this program{close}"


def _refuse_known(name: str, own_names: Collection[str]) -> None:
    """Refuse a flag that is known, or close to one that is."""
    known = flag_table.known_flags()
    if name in known or name in own_names:
        raise UsageError(f"{FLAG} {name[2:]}: {name} is known here, so it cannot be ignored")
    usable = [flag.name for flag in known.values() if flag.usable]
    if close := like(name, [*usable, *own_names]):
        raise UsageError(
            f"{FLAG} {name[2:]}: too close to {close[0]}, for which {name} may be a typing mistake"
        )


def _without(words: list[str], counts: dict[str, int]) -> list[str]:
    """Return the words without the flags of `counts`, {flag: number of its values}."""
    remaining: list[str] = []
    while words:
        word, *words = words
        name, equals, _ = word.partition("=")
        if name not in counts:
            remaining.append(word)
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
    return remaining


def suggest(name: str) -> str:
    """Return the rest of a sentence on an unknown flag: the closest ones, "" without."""
    close = like(name, [f.name for f in flag_table.known_flags().values() if f.usable])
    return f"; did you mean {' or '.join(close)}?" if close else ""


def like(name: str, names: Sequence[str]) -> list[str]:
    """Return up to 3 of `names` that `name` may be a typing mistake for, the closest first.

    Case, "-" and "_" do not count. One letter may be left out, added, changed or swapped with the
    next, more in a long name.
    """
    by_folded = {_folded(known): known for known in names}
    plain = _folded(name)
    exact = [by_folded[plain]] if plain in by_folded else []
    near = exact or [known for short, known in by_folded.items() if _one_edit(plain, short)]
    alike = near or [
        by_folded[p] for p in difflib.get_close_matches(plain, by_folded, 3, cutoff=0.89)
    ]
    return alike[:3]


def _folded(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _one_edit(a: str, b: str) -> bool:
    """Return whether one letter left out, added, changed or swapped makes b of a."""
    start = len(os.path.commonprefix((a, b)))
    a, b = a[start:], b[start:]
    end = len(os.path.commonprefix((a[::-1], b[::-1])))
    a, b = a[: len(a) - end], b[: len(b) - end]
    return max(len(a), len(b)) <= 1 or (len(a) == len(b) == 2 and a == b[::-1])
