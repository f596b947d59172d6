# SPDX-License-Identifier: Apache-2.0
"""Answer a flag that is not available: unknown, mistyped, refused, removed, or to be left out.

--ignore-flags leaves out the flags of another program, each with its values.

Only flags that neither Weft nor Megatron-LM knows can be left out, and none that may be a slip of
the pen for a flag of this program: nothing that this program would do is left undone.
"""

import difflib
import os
import re
from collections.abc import Collection, Sequence

from training.config import UsageError
from training.flags import table

FLAG = "--ignore-flags"
ELSEWHERE = {  # flags of other programs, and what Megatron-LM and this program call them
    "--rope-theta": "--rotary-base",
    "--num-key-value-heads": "--group-query-attention --num-query-groups",
    "--tokenizer-name-or-path": "--tokenizer-type HuggingFaceTokenizer --tokenizer-model",
    "--context-parallel-algo": "--cp-comm-type",
    "--wandb-name": "--wandb-exp-name",
    "--learning-rate": "--lr",
    "--max-steps": "--train-iters",
    "--tp-size": "--tensor-model-parallel-size",
    "--pp-size": "--pipeline-model-parallel-size",
    "--cp-size": "--context-parallel-size",
}


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


def unknown(argv: Sequence[str], own_names: Collection[str] = ()) -> list[str]:
    """Return NAME:COUNT for the flags that neither Weft nor Megatron-LM knows."""
    counts: dict[str, int] = {}
    name, known = "", {*table.known_flags(), *own_names, "--help", "--"}
    for word in argv:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            if name not in known:
                counts[name] = int(bool(equals))
        elif name in counts:
            counts[name] += 1
    return [f"{name[2:]}:{count}" for name, count in counts.items()]


def refuse_unknown(argv: Sequence[str], own_names: Collection[str]) -> None:
    """Raise UsageError for flags that nobody knows: a slip of the pen first, else all at once."""
    found = unknown(argv, own_names)
    names = ["--" + each.rpartition(":")[0] for each in found]
    said = {name: _what_else(name) for name in names}
    if name := next((name for name in names if said[name]), None):
        raise UsageError(said[name])
    if len(found) == 1:
        raise UsageError(
            f"{names[0]} is not a flag of this program nor of Megatron-LM; --help lists the flags, "
            f"{FLAG} {found[0]} leaves it out"
        )
    if found:
        raise UsageError(
            f"{len(found)} flags are not flags of this program nor of Megatron-LM; --help lists "
            f"the flags, and this leaves them out: {FLAG} {' '.join(found)}"
        )


def refuse_unavailable(argv: Sequence[str], own_names: Collection[str]) -> None:
    """Raise UsageError for a flag of Megatron-LM, or of an older Weft, that is not available."""
    names = dict.fromkeys(word.partition("=")[0] for word in argv)
    found = [table.known_flags().get(name) for name in names if name not in own_names]
    refused = [flag for flag in found if flag is not None and not flag.usable]
    if refused:
        first, *others = refused
        listed = ", ".join(flag.name for flag in others[:3])
        listed += f" and {len(others) - 3} more" * (len(others) > 3)
        more = f" (refused too: {listed})" * bool(others)
        was = "was removed" if first.kind == table.REMOVED_KIND else "is refused"
        raise UsageError(f"{first.name} {was}: {first.text}{more}")


def _what_else(name: str) -> str:
    """Return the sentence on a flag that was not meant, or that has another name here, or ""."""
    flag, *rest = name.split()
    if rest and flag in table.known_flags():
        short = f"{name[:60]}{' ...' * (len(name) > 60)}"
        return f"{short!r} came as one word: leave out the quotes that hold flags together"
    if other := ELSEWHERE.get(name.replace("_", "-")):
        return f"{name} is not a flag of this program; here and in Megatron-LM it is {other}"
    close = suggest(name)
    return f"{name} is not a flag of this program{close}" if close else ""


def _refuse_known(name: str, own_names: Collection[str]) -> None:
    """Refuse a flag that is known, or close to one that is."""
    known = table.known_flags()
    if name in known or name in own_names:
        raise UsageError(f"{FLAG} {name[2:]}: {name} is known here, so it cannot be left out")
    usable = [flag.name for flag in known.values() if flag.usable]
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


def suggest(name: str) -> str:
    """Return the rest of a sentence on an unknown flag: the closest ones, "" without."""
    close = like(name, [f.name for f in table.known_flags().values() if f.usable])
    return f"; did you mean {' or '.join(close)}?" if close else ""


def like(name: str, names: Sequence[str]) -> list[str]:
    """Return up to 3 of `names` that `name` may be a slip of the pen for, the closest first.

    Case, "-" and "_" do not count. One letter may be left out, added, changed or swapped with the
    next, more in a long name.
    """
    told = {_folded(known): known for known in names}
    plain = _folded(name)
    exact = [told[plain]] if plain in told else []
    near = exact or [known for short, known in told.items() if _one_edit(plain, short)]
    alike = near or [told[p] for p in difflib.get_close_matches(plain, told, 3, cutoff=0.89)]
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
