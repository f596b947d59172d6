# SPDX-License-Identifier: Apache-2.0
"""Answer a flag that is not available: unknown, mistyped, refused, removed, or to be left out.

--ignore-flags leaves out the flags of another program, each with its values, or all of a tree's.
What does the same under another name is translated.

Only flags that neither Weft nor Megatron-LM knows can be left out, and none that may be a slip of
the pen for a flag of this program: nothing that this program would do is left undone.
"""

import difflib
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from functools import cache

from training.files.untrusted import first_of
from training.flags import flag_table
from training.flags.names import ELSEWHERE, FALSE, SPELT, SYNONYMS, TRUE, VALUES
from training.flags.trees import TREES
from training.settings.config import UsageError

FLAG = "--ignore-flags"
SETTINGS_FILE = re.compile(r".*\.(py|json|ya?ml|toml|cfg|ini)")
# words that mean the same in a flag's name
SAME_WORDS = {
    "step": "iters", "steps": "iters", "iter": "iters", "iteration": "iters", "iterations": "iters",
    "len": "length", "layer": "layers", "head": "heads", "expert": "experts", "dim": "size",
    "number": "num", "n": "num", "learning": "lr", "rate": "", "embedding": "embeddings",
    "embed": "embeddings", "ckpt": "checkpoint", "eps": "epsilon", "val": "eval", "valid": "eval",
    "validation": "eval", "gradient": "grad", "gradients": "grad", "seq": "sequence",
    "optim": "optimizer", "scheduler": "style", "schedule": "style", "every": "interval",
    "freq": "interval", "frequency": "interval", "intermediate": "ffn", "mlp": "ffn", "vocabulary":
    "vocab", "gbs": "global", "checkpointing": "recompute", "minimum": "min", "maximum": "max",
    "beta": "adam", "clipping": "clip", "tokenizers": "tokenizer", "parallelism": "parallel",
}  # fmt: skip
LIKE = 0.5  # how much of the words two names share, of which one may mean the other


def translate(argv: Sequence[str], own_names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the words with the names of other programs in this one's, and a line on each.

    A switch may have the value true or false, which leaves it out. own_names: flags of a fork of
    this program, which stay. Raises UsageError where false would turn off what is always on.
    """
    words, notes, waiting = list[str](), list[str](), list(argv)
    while waiting:
        word = waiting.pop(0)
        name, equals, value = word.partition("=")
        if not word.startswith("--") or word == FLAG or name in own_names:
            words.append(word)
            continue
        after = waiting[0] if waiting and not waiting[0].startswith("--") else ""
        spelled, takes_next = in_our_words(name, value if equals else after)
        if takes_next and not equals:
            waiting.pop(0)
        if spelled is None:
            words.append(word)
            continue
        there = f"{name} {value or after}" if takes_next else name
        for flag in [] if spelled else map(flag_table.known_flags().get, turned_off(name)):
            # one that changes the run when it is given (note_for) is right to be left out
            always = flag and flag.kind == flag_table.CHECKED_KIND and not flag.note_for
            if flag and always and not flag.alias_of:
                raise UsageError(f"{there}: leave it out: {flag.text}")
        here = "nothing, as it is so here" if not spelled else " ".join(spelled)
        notes.append(f"{there} is taken as {here}")
        joined = bool(equals and not takes_next)
        words += [*spelled[:-1], f"{spelled[-1]}={value}"] if joined else spelled
    return words, notes


def in_our_words(name: str, value: str) -> tuple[list[str] | None, bool]:
    """Return the words of this program for a flag, None where it stays as it is, and whether they
    stand for its value too.
    """
    flag, known = _here(name), flag_table.known_flags()
    words = [flag] if flag in known else [*SYNONYMS.get(flag, (flag,))]
    if (here := VALUES.get((words[-1], value.lower()))) is not None:
        return [*words[:-1], *here], True
    last = known.get(words[-1])
    complete = not words[-1].startswith("--") or last is not None and last.rule.nargs == 0
    said = SPELT.get(value.lower(), value.lower())
    if complete and said in (TRUE, FALSE):
        return words if said == TRUE else [], True
    return (None if words == [name] else words), False


def turned_off(name: str) -> list[str]:
    """Return the flags of this program that a flag turns off, where it is taken as nothing."""
    flag = _here(name)
    others = [words[0] for (of, _), words in VALUES.items() if of == flag and words]
    return list(dict.fromkeys(others)) or [SYNONYMS.get(flag, (flag,))[0]]


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
    """Raise UsageError for unknown flags: what there is in place of each, as far as that is known.
    """
    found = unknown(argv, own_names)
    names = ["--" + each.rpartition(":")[0] for each in found]
    for name in names:
        if " " in name and name.split()[0] in flag_table.known_flags():
            short = f"{name[:60]}{' ...' * (len(name) > 60)}"
            raise UsageError(
                f"{short!r} came as one word: leave out the quotes that hold flags together"
            )
    values, reasons = _values(argv), dict[str, list[str]]()
    for name in names:
        reasons.setdefault(_what_else(name, values.get(name, "")), []).append(name)
    of = [tree for tree, flags in TREES.items() if all(name in flags for name in names)]
    others = reasons.pop("", [])
    told = "; ".join(f"{', '.join(typed)}{reason}" for reason, typed in reasons.items())
    if told and not (of and others):
        raise UsageError(told)
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
            + f"; {told}" * bool(told)
        )


def _values(argv: Sequence[str]) -> dict[str, str]:
    """Return the value of each flag, "" where it has none."""
    out: dict[str, str] = {}
    for word, after in zip(argv, [*argv, "--"][1:], strict=True):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            out[name] = value if equals else "" if after.startswith("--") else after
    return out


def refuse_strays(stray: Sequence[str]) -> None:
    """Raise UsageError for words that belong to no flag: what their writer may have meant."""
    first = stray[0]
    if SETTINGS_FILE.fullmatch(first):
        raise UsageError(f"{first}: a configuration file is not read: give its settings as flags")
    meant = [each for word in stray if (each := _as_flag(word))]
    flags = [words for words, _ in meant if words]
    reasons = [reason for _, reason in meant if reason]
    text = f"{first}: a value that belongs to no flag"
    if meant or re.match(r"-\D|[\u2013\u2014]", first):
        text += "; flags begin with --" + f": {' '.join(flags)}" * bool(flags)
    raise UsageError("; ".join([text, *reasons]))


def _as_flag(word: str) -> tuple[str, str] | None:
    """Return (this program's flag, "") for a word such as -lr or trainer.max_steps=9, or
    ("", what there is in its place); None for another word.
    """
    name, equals, value = word.lstrip("-\u2013\u2014").partition("=")
    if not (equals or re.match(r"-\D|[\u2013\u2014]", word)):
        return None
    for flag in (f"--{name}", f"--{name.rpartition('.')[2]}"):
        spelled, whole = in_our_words(flag, value)
        known = flag_table.known_flags().get(_here(flag))
        if known is not None and not known.usable:
            return "", f"{name}: {known.text}"
        spelled = [flag] if spelled is None and known else spelled
        if spelled is not None:
            return " ".join([*spelled, shlex.quote(value)] if value and not whole else spelled), ""
        if reason := instead(flag, value):
            return "", f"{name}: {reason}"
    return None


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


def instead(name: str, value: str = "") -> str:
    """Return what there is in place of a flag of other programs, "" where it is in no table."""
    plain = name.replace("_", "-").lower()
    found = ELSEWHERE.get(plain)
    if found is None:
        patterns = (text for pattern, text in ELSEWHERE.items() if fnmatchcase(plain, pattern))
        found = next(patterns, "")
    return found.replace("{}", value or "the number")


def _what_else(name: str, value: str) -> str:
    """Return the rest of the sentence on a flag that was not meant, or that has another name here;
    "" where nothing is like it.
    """
    last = f"--{name.rpartition('.')[2]}" if "." in name else name  # --training.steps
    for each in (name, last):
        if text := instead(each, value):
            return f": {text}"
    if last != name and (_here(last) in flag_table.known_flags() or _here(last) in SYNONYMS):
        here = SYNONYMS.get(_here(last), (_here(last),))
        return f" is not a flag of this program; did you mean {' '.join(here)}?"
    close = suggest(name)
    if any(name in flags for flags in TREES.values()):
        return ""  # a flag of a tree is no slip
    if not close and (alike := alike_in_words(last)):
        close = f"; did you mean {' or '.join(alike)}?"
    return f" is not a flag of this program{close}" if close else ""


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


def alike_in_words(name: str) -> list[str]:
    """Return up to 2 live flags that may mean the same as `name`, the likeliest first.

    Two names are alike where they share half of their words, each counted by how few of this
    program's flags have it (the inverse document frequency of text retrieval).
    """
    documents = _documents()
    seen = Counter(word for _, words in documents for word in words)
    weight = {word: math.log(1 + len(documents) / n) for word, n in seen.items()}
    typed, usual = _words(name), math.log(1 + len(documents) / 20)
    scores: dict[str, float] = {}
    for flag, words in documents:
        both = sum(weight[word] for word in words & typed)
        either = sum(weight.get(word, usual) for word in words | typed)
        scores[flag] = max(scores.get(flag, 0.0), both / either if either else 0.0)
    best = sorted(scores, key=lambda flag: -scores[flag])[:2]
    return [flag for flag in best if scores[flag] >= max(LIKE, 0.8 * scores[best[0]])]


@cache
def _documents() -> tuple[tuple[str, frozenset[str]], ...]:
    """Return (what to write, words of a name) of each live flag, and of its other names."""
    out = [(flag.name, _words(flag.name)) for flag in flag_table.live()]
    out += [(" ".join(here), _words(name)) for name, here in SYNONYMS.items()]
    return tuple(out)


def _words(name: str) -> frozenset[str]:
    """Return the words of a flag's name, those that mean the same as one."""
    parts = re.split(r"[-_.]+", name.lower().strip("-"))
    return frozenset(SAME_WORDS.get(part, part) for part in parts) - {""}


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
