# SPDX-License-Identifier: Apache-2.0
"""Translate, accept or refuse the flags of other programs in a command line.

A flag with another name here is translated; a flag of Megatron-LM that changes nothing here is
accepted; --ignore-flags drops flags that neither Weft nor Megatron-LM has. Any other flag is
refused, with the alternative here. megatron.toml classifies the flags.

--ignore-flags refuses a name that may be a typing mistake for a flag of this program, so no flag
that would have an effect is dropped.
"""

import difflib
import os
import re
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from training.files.untrusted import first_of
from training.flags import flag_table
from training.flags.flag_table import Flag, live_flags
from training.flags.megatron import known_flags, vocabulary
from training.settings.config import UsageError

FLAG = "--ignore-flags"
TRUE, FALSE = "true", "false"  # values of a switch in other programs
SPELT = {"1": TRUE, "yes": TRUE, "0": FALSE, "no": FALSE}  # as Hugging Face's Trainer reads them
SETTINGS_FILE = re.compile(r".*\.(py|json|ya?ml|toml|cfg|ini)")
# {word in a flag's name: the synonym by which names are compared}
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
LIKE = 0.5  # the least share of common words with which a flag is suggested for another


@dataclass(frozen=True)
class Use:
    """A flag in a command line. name: "" for the words before the first flag."""

    name: str
    values: tuple[str, ...] = ()  # the words up to the next flag
    joined: bool = False  # whether = joins the first value to the name

    @property
    def dashed(self) -> str:
        """Return the name with - for _, which a command line may have."""
        return self.name.replace("_", "-")

    @property
    def value(self) -> str:
        """Return the first value, "" if there is none."""
        return self.values[0] if self.values else ""

    @property
    def on(self) -> bool:
        """Return whether a switch is on: it has no value, or none that turns it off."""
        return SPELT.get(self.value.lower(), self.value.lower()) != FALSE

    @property
    def words(self) -> list[str]:
        """Return the words as typed."""
        if self.joined:
            return [f"{self.name}={self.value}", *self.values[1:]]
        return [self.name] * bool(self.name) + [*self.values]


def uses_of(argv: Sequence[str]) -> list[Use]:
    """Return the flags of a command line, each with its values."""
    found = [Use("")]
    for word in argv:
        name, equals, value = word.partition("=")
        to_ignore = found[-1].name == FLAG and ":" in name  # --ignore-flags --NAME:COUNT
        if word.startswith("--") and not to_ignore:
            found.append(Use(name, (value,) if equals else (), bool(equals)))
        else:
            found[-1] = replace(found[-1], values=(*found[-1].values, word))
    return found if found[0].values else found[1:]


@dataclass
class Sorted:
    """The flags of a command line by class."""

    words: list[str] = field(default_factory=list)  # of this program and of a fork of it
    accepted: list[Use] = field(default_factory=list)  # flags that change nothing here
    stray: list[str] = field(default_factory=list)  # words that belong to no flag
    ignored: tuple[str, ...] = ()  # what --ignore-flags names
    notes: list[str] = field(default_factory=list)  # lines to print
    unknown: list[Use] = field(default_factory=list)
    refused: list[Flag] = field(default_factory=list)
    # {flag: (the name that set it first, the words typed, the value)}; {flag: words that turn it
    # on}, and off
    values: dict[str, tuple[str, str, Any]] = field(default_factory=dict)
    on: dict[str, str] = field(default_factory=dict)
    off: dict[str, str] = field(default_factory=dict)


def in_our_words(argv: Sequence[str], own_names: Collection[str]) -> Sorted:
    """Translate a command line into the flags of this program.

    own_names: flags of a fork of this program, which stay. Raises UsageError for a flag that is
    unknown, refused or removed, has an invalid value, or is set to different values by two names.
    """
    found = sort(argv, own_names)
    if found.unknown:
        _refuse_unknown(found.unknown)
    if found.refused:
        first, *others = found.refused
        more = f" (refused too: {first_of([flag.name for flag in others])})" * bool(others)
        was = "was removed" if first.kind == flag_table.REMOVED_KIND else "is refused"
        raise UsageError(f"{first.name} {was}: {first.text}{more}")
    if found.stray:
        refuse_strays(found.stray)
    for name in found.on.keys() & found.off.keys():
        raise UsageError(
            f"{found.on[name]} and {found.off[name]} contradict each other: give one of them"
        )
    return found


def sort(argv: Sequence[str], own_names: Collection[str]) -> Sorted:
    """Classify each flag. Raises UsageError for a mistake in --ignore-flags, for the value false of
    a switch that is always on, and for a flag that two names set to different values.
    """
    uses, found = uses_of(argv), Sorted()
    counts = _ignored(uses, own_names, found)
    for use in uses:
        if use.name in counts:
            _check_count(use, counts[use.name])
        elif use.name in own_names:
            found.words += use.words
        elif use.name != FLAG:
            _sort(use, found)
    return found


def _sort(use: Use, found: Sorted) -> None:
    """Classify a flag, or its translation."""
    here, whole = _spelled(use.name, use.value)
    uses = [use] if here is None else _translated(use, here, whole, found.notes)
    if here == []:
        found.off |= dict.fromkeys(_turned_off(use.name), f"{use.name} {use.value}")
    valued = here is None or whole or here[-1:] == [uses[-1].name]  # the value is the user's
    typed = f"{use.name} {use.value}".strip() if valued else use.name
    for each in uses:
        _place(each, found)
        _refuse_two_names(each, typed, use.name, found)


def _place(use: Use, found: Sorted) -> None:
    flag = known_flags().get(use.name)
    if use.name == "":
        found.stray += use.values
    elif use.name == "--" or flag and flag.kind == flag_table.LIVE_KIND:
        found.words += use.words
    elif flag is None:
        found.unknown.append(use)
    elif flag.usable:
        found.accepted.append(use)
    elif flag not in found.refused:
        found.refused.append(flag)


def accept(found: Sorted) -> None:
    """Check the values of accepted flags, and add their notes. Raises UsageError for a value that
    is invalid or one too many.
    """
    for use in found.accepted:
        if stray := _accept(known_flags()[use.name], use.values, found.notes):
            refuse_strays(stray, found.accepted)


def _accept(flag: Flag, values: tuple[str, ...], notes: list[str]) -> tuple[str, ...]:
    """Check an accepted flag, add its note, and return the values that are too many."""
    if flag.rule.nargs is None and not values:
        raise UsageError(f"{flag.name}: expected one argument")
    number = 0 if flag.rule.nargs == 0 else 1 if flag.rule.nargs is None else len(values)
    for value in values[:number] if flag.allowed else ():
        if not any(_same(value, allowed) for allowed in flag.allowed):
            what = " or ".join(flag.allowed)
            raise UsageError(f"{flag.name} {value}: only {what} is accepted; {flag.text}")
    if flag.note_for is True or flag.note_for and flag.note_for == "".join(values[:1]):
        notes.append(f"{flag.name}: {flag.text}")
    return values[number:]


def _same(value: str, allowed: str) -> bool:
    """Return whether two values are equal, as numbers where both are: 0 is 0.0."""
    try:
        return float(value) == float(allowed)
    except ValueError:
        return value == allowed


def _translated(use: Use, here: list[str], whole: bool, notes: list[str]) -> list[Use]:
    """Return a flag translated into the words `here`, and add a line on it to `notes`.

    whole: `here` replaces the flag's value too. A switch may have the value true, or false, which
    drops it. Raises UsageError if false would turn off a switch that is always on.
    """
    there = f"{use.name} {use.value}" if whole else use.name
    for flag in [] if here else map(known_flags().get, _turned_off(use.name)):
        # a flag that changes the run if it is given (note_for) may be dropped
        always = flag and flag.kind == flag_table.ACCEPTED_KIND and not flag.note_for
        if flag and always and not flag.alias_of:
            raise UsageError(f"{there}: leave it out: {flag.text}")
    means = f"is taken as {' '.join(here)}" if here else "changes nothing here"
    notes.append(f"{there} {means}")
    made = uses_of(here) or [Use("")]
    joined = use.joined and not whole and not made[-1].values
    more = use.values[1:] if whole else use.values
    return [*made[:-1], replace(made[-1], values=(*made[-1].values, *more), joined=joined)]


def value_of(argv: Sequence[str], name: str) -> str:
    """Return the last value of a flag, by any of its names, "" if it is not given."""
    value = ""
    for use in uses_of(argv):
        here, whole = (None, False) if use.name in live_flags() else _spelled(use.name, use.value)
        for each in [use] if here is None else _translated(use, here, whole, []):
            value = each.value if each.dashed == name else value
    return value


def _spelled(name: str, value: str) -> tuple[list[str] | None, bool]:
    """Return the words of this program for a flag, None if it stays as it is, and whether they
    replace its value too.
    """
    tables = vocabulary()
    flag = _here(name)
    words = [*tables.same.get(flag, (flag,))]
    if (here := tables.values.get((words[-1], value.lower()))) is not None:
        return [*words[:-1], *here], True
    last = known_flags().get(words[-1])
    complete = not words[-1].startswith("--") or last is not None and last.rule.nargs == 0
    said = SPELT.get(value.lower(), value.lower())
    if complete and said in (TRUE, FALSE):
        return words if said == TRUE else [], True
    return (None if words == [name] else words), False


def _turned_off(name: str) -> list[str]:
    """Return the flags of this program that a flag with an empty translation turns off."""
    flag, tables = _here(name), vocabulary()
    others = [words[0] for (of, _), words in tables.values.items() if of == flag and words]
    return list(dict.fromkeys(others)) or [tables.same.get(flag, (flag,))[0]]


def _here(name: str) -> str:
    """Return a flag with - for _ if only that spelling is known, else unchanged."""
    plain = name.replace("_", "-")
    return plain if plain in _names() and name not in _names() else name


@cache
def _names() -> frozenset[str]:
    """Return the names of all known flags."""
    tables = vocabulary()
    return frozenset({*known_flags(), *tables.same, *(flag for flag, _ in tables.values)})


def _refuse_two_names(use: Use, typed: str, other_name: str, found: Sorted) -> None:
    """Raise UsageError if two names set one flag to different values.

    One name may be repeated, and its last value counts, so that words after those of a script
    override them. other_name, typed: the name as typed, and the name with its value if it has one.
    """
    found.on[use.name] = typed
    flag = live_flags().get(use.name)
    if flag is None or flag.rule.nargs is not None or not use.values:
        return
    try:
        value = flag.rule.read(use.value)
    except ValueError:
        return  # reported later, with the rule
    first, other, before = found.values.setdefault(use.name, (other_name, typed, value))
    if before != value and first != other_name:
        raise UsageError(
            f"{other} and {typed} contradict each other, as both set {use.name}: give one of them"
        )


def _ignored(uses: Sequence[Use], own_names: Collection[str], found: Sorted) -> dict[str, int]:
    """Return {flag: the number of its values} of --ignore-flags, and note each."""
    counts = dict[str, int]()
    for use in uses:
        if use.name != FLAG:
            continue
        if not use.values:
            raise UsageError(f"{FLAG} names no flag: give NAME:COUNT, such as trigger-path:1")
        for each in (word.removeprefix("--") for word in use.values):
            match = re.fullmatch(r"([^\s:=-][^\s:=]*):(\d+)", each)
            if match is None:
                raise UsageError(
                    f"{FLAG} {each}: give NAME:COUNT, where COUNT is the number of values of the "
                    f"flag; the error without {FLAG} lists them"
                )
            counts["--" + match[1]] = int(match[2])
            found.ignored = (*found.ignored, each)
    for name in counts:
        _refuse_known(name, own_names)
    found.notes += [
        f"{FLAG}: {name} is ignored: its effect in another program is missing here"
        for name in counts
    ]
    return counts


def _refuse_known(name: str, own_names: Collection[str]) -> None:
    """Raise UsageError if --ignore-flags names a known flag, or a name close to one."""
    known = known_flags()
    if name in known or name in own_names or name in vocabulary().same:
        raise UsageError(f"{FLAG} {name[2:]}: {name} is known here, so it cannot be ignored")
    usable = [flag.name for flag in known.values() if flag.usable]
    if close := like(name, [*usable, *own_names]):
        raise UsageError(
            f"{FLAG} {name[2:]}: not ignored, as {name} may be a typing mistake for {close[0]}"
        )


def _check_count(use: Use, count: int) -> None:
    """Raise UsageError if an ignored flag does not have `count` values."""
    typed = use.words[0]
    if len(use.values) < count or count < int(use.joined):
        has = "more" if count < int(use.joined) else "fewer"
        raise UsageError(f"{FLAG} {use.name[2:]}:{count}: {typed} has {has} values here")
    if len(use.values) > count:
        raise UsageError(
            f"{FLAG} {use.name[2:]}:{count}: {typed} has more values here: {use.values[count]}"
        )


def refuse_unknown(name: str) -> None:
    """Raise UsageError for an unknown flag, with the alternative here."""
    _refuse_unknown([Use(name)])


def _refuse_unknown(unknown: Sequence[Use]) -> None:
    counts, reasons = {use.name: len(use.values) for use in unknown}, dict[str, list[str]]()
    values = {use.name: use.value for use in unknown}
    for name in counts:
        if " " in name and name.split()[0] in known_flags():
            short = f"{name[:60]}{' ...' * (len(name) > 60)}"
            raise UsageError(
                f"{short!r} came as one word: remove the quotes around several flags"
            )
        reasons.setdefault(_what_else(name, values[name]), []).append(name)
    others = reasons.pop("", [])
    told = "; ".join(f"{', '.join(typed)}{reason}" for reason, typed in reasons.items())
    # several flags that only resemble flags of this program come from another program
    guessed = [
        name
        for reason, names in reasons.items()
        if "did you mean" in reason
        for name in names
        if not suggest(name)
    ]
    if not others and (not guessed or len(counts) == 1):
        raise UsageError(told)
    given = " ".join(f"{name[2:]}:{count}" for name, count in counts.items())
    if len(counts) == 1:
        raise UsageError(
            f"{others[0]} is not a flag of this program nor of Megatron-LM; --help all lists the "
            f"flags, {FLAG} {given} ignores it"
        )
    raise UsageError(
        f"{len(counts)} flags are not flags of this program nor of Megatron-LM; --help all lists "
        f"the flags, and this ignores them: {FLAG} {given}" + f"; {told}" * bool(told)
    )


def refuse_strays(stray: Sequence[str], uses: Sequence[Use] = ()) -> None:
    """Raise UsageError for words that belong to no flag, with the flag that may be meant, or the
    number of values that the flag before them takes. uses: the flags of the command line.
    """
    first = stray[0]
    if SETTINGS_FILE.fullmatch(first):
        raise UsageError(f"{first}: a configuration file is not read: give its settings as flags")
    meant = [each for word in stray if (each := _as_flag(word))]
    flags = [words for words, _ in meant if words]
    reasons = [reason for _, reason in meant if reason]
    text = f"{first}: a value that belongs to no flag"
    for use in uses:
        flag = known_flags().get(use.name)
        takes = 0 if flag and flag.rule.nargs in (0, "*") and not use.joined else 1
        if flag and first in use.values[takes:] and not meant:
            given = " ".join(use.values[:3]) + " ..." * (len(use.values) > 3)
            text = f"{use.name} {given}: must be one value"
            if flag.rule.nargs == 0:
                text = f"{use.name}: a switch takes no value, not {first!r}"
            elif flag.rule.nargs == "*" and use.joined:
                text = f"{use.name}={given}: give several values after a space, not after ="
            elif flag.rule.nargs == "*":
                text = f"{use.name} {first}: a value of this flag cannot begin with -"
    if meant or re.match(r"-\D|[\u2013\u2014]", first):
        text += "; flags begin with --" + f": {' '.join(flags)}" * bool(flags)
    raise UsageError("; ".join([text, *reasons]))


def _as_flag(word: str) -> tuple[str, str] | None:
    """Return (this program's flag, "") for a word such as -lr or trainer.max_steps=9, or
    ("", the alternative to it); None for another word.
    """
    name, equals, value = word.lstrip("-\u2013\u2014").partition("=")
    if not (equals or re.match(r"-\D|[\u2013\u2014]", word)):
        return None
    for flag in (f"--{name}", f"--{name.rpartition('.')[2]}"):
        spelled, whole = _spelled(flag, value)
        known = known_flags().get(_here(flag))
        if known is not None and not known.usable:
            return "", f"{name}: {known.text}"
        spelled = [flag] if spelled is None and known else spelled
        if spelled is not None:
            return " ".join([*spelled, shlex.quote(value)] if value and not whole else spelled), ""
        if reason := instead(flag, value):
            return "", f"{name}: {reason}"
    return None


def instead(name: str, value: str = "") -> str:
    """Return the alternative to a flag of other programs, "" if it is in no table."""
    plain = name.replace("_", "-").lower()
    table = vocabulary().instead
    found = table.get(plain)
    if found is None:
        patterns = (text for pattern, text in table.items() if fnmatchcase(plain, pattern))
        found = next(patterns, "")
    return found.replace("{}", value or "the number")


def _what_else(name: str, value: str) -> str:
    """Return the rest of the sentence on an unknown flag: the alternative or similar flags, "" if
    there are none.
    """
    last = f"--{name.rpartition('.')[2]}" if "." in name else name  # --training.steps
    for each in (name, last):
        if text := instead(each, value):
            return f": {text}"
    same = vocabulary().same
    if last != name and (_here(last) in known_flags() or _here(last) in same):
        here = same.get(_here(last), (_here(last),))
        return f" is not a flag of this program; did you mean {' '.join(here)}?"
    close = suggest(name)
    if not close and (alike := alike_in_words(last)):
        close = f"; did you mean {' or '.join(alike)}?"
    return f" is not a flag of this program{close}" if close else ""


def alike_in_words(name: str) -> list[str]:
    """Return up to 2 live flags that may mean the same as `name`, the likeliest first.

    These are flags that share at least LIKE of the words of both names with it.
    """
    typed, scores = _words(name), dict[str, float]()
    for flag, words in _documents():
        alike = len(words & typed) / max(1, len(words | typed))
        scores[flag] = max(scores.get(flag, 0.0), alike)
    best = sorted(scores, key=lambda flag: -scores[flag])[:2]
    return [flag for flag in best if scores[flag] >= max(LIKE, 0.8 * scores[best[0]])]


@cache
def _documents() -> tuple[tuple[str, frozenset[str]], ...]:
    """Return (the flag to give, words of a name) for each live flag and each of its other names."""
    out = [(name, _words(name)) for name in live_flags()]
    out += [(" ".join(here), _words(name)) for name, here in vocabulary().same.items()]
    return tuple(out)


def _words(name: str) -> frozenset[str]:
    """Return the words of a flag's name, with synonyms replaced by one word."""
    parts = re.split(r"[-_.]+", name.lower().strip("-"))
    return frozenset(SAME_WORDS.get(part, part) for part in parts) - {""}


def suggest(name: str) -> str:
    """Return the rest of a sentence on an unknown flag: the closest ones, "" if there are none."""
    close = like(name, [f.name for f in known_flags().values() if f.usable])
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
    as_long = [short for short in by_folded if short.count("-") == plain.count("-")]
    alike = near or [
        by_folded[p] for p in difflib.get_close_matches(plain, as_long, 3, cutoff=0.89)
    ]
    return alike[:3]


def _folded(name: str) -> str:
    return name.lstrip("-").replace("_", "-").lower()


def _one_edit(a: str, b: str) -> bool:
    """Return whether one letter left out, added, changed or swapped turns a into b."""
    start = len(os.path.commonprefix((a, b)))
    a, b = a[start:], b[start:]
    end = len(os.path.commonprefix((a[::-1], b[::-1])))
    a, b = a[: len(a) - end], b[: len(b) - end]
    return max(len(a), len(b)) <= 1 or (len(a) == len(b) == 2 and a == b[::-1])
