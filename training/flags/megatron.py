# SPDX-License-Identifier: Apache-2.0
"""Read megatron.toml: flags that are not live here, and the names that other trainers use.

A run with flags of this program alone never reads it.
"""

import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from training.flags.flag_table import ACCEPTED_KIND, REFUSED_KIND, Flag, live_flags, removed
from training.settings.setting import SWITCH, TEXT, TEXTS, Rule

FILE = Path(__file__).with_name("megatron.toml")
VALUES: dict[str, Rule] = {"": SWITCH, "one": TEXT, "several": TEXTS}


class Difference(NamedTuple):
    """A flag, or its absence, with another meaning in Megatron-LM; --dry-run prints it."""

    flags: str  # their names
    there: str  # the meaning in Megatron-LM
    here: str
    given: str = "one"  # it applies if "one", "all" or "not all" of the flags are given
    name: str = ""

    def touches(self, given: Collection[str]) -> bool:
        """Return whether the difference applies to a command line with these flags."""
        found = [name in given for name in self.flags.split()]
        return {"one": any(found), "all": all(found), "not all": not all(found)}[self.given]

    @property
    def title(self) -> str:
        """Return the beginning of the line: the name of the difference, or its flags."""
        if self.given == "all":
            return " with ".join(self.flags.split())
        return self.name or "without " * (self.given == "not all") + ", ".join(self.flags.split())


@dataclass(frozen=True)
class Vocabulary:
    """The contents of megatron.toml."""

    flags: dict[str, Flag]  # Megatron-LM's, accepted or refused
    same: dict[str, tuple[str, ...]]  # {a name elsewhere: the words here}; its value follows
    values: dict[tuple[str, str], tuple[str, ...]]  # {(flag, its value elsewhere): the words here}
    instead: dict[str, str]  # {pattern of names: the alternative here}
    with_experts: dict[str, str]  # {flag: why it stops a run with --num-experts}
    differences: tuple[Difference, ...]


@cache
def vocabulary() -> Vocabulary:
    """Read the file."""
    tables = tomllib.loads(FILE.read_text())
    same = {
        name: tuple(words.split())
        for table in (tables["megatron-names"], tables["other-names"])
        for words, names in table.items()
        for name in names.split()
    }
    values = {
        (flag, value): tuple(words.split())
        for row in tables["values"]
        for words, values in row["here"].items()
        for flag in row["flags"].split()
        for value in values.split()
    }
    rows = [{k: _plain(v) for k, v in row.items()} for row in tables["difference"]]
    flags = list(_flags(tables, same))
    known = {flag.name: flag for flag in flags}
    assert len(known) == len(flags), "a flag is twice in megatron.toml"
    return Vocabulary(
        known,
        same,
        values,
        {name: _plain(row["why"]) for row in tables["instead"] for name in row["flags"].split()},
        tables["with-experts"],
        tuple(Difference(**row) for row in rows),
    )


@cache
def known_flags() -> dict[str, Flag]:
    """Return every flag by its name: live, accepted, refused and removed."""
    tables = (live_flags(), vocabulary().flags, removed())
    out = {name: flag for table in tables for name, flag in table.items()}
    assert len(out) == sum(map(len, tables)), "a flag is in two tables"
    return out


def _flags(tables: dict[str, Any], same: dict[str, tuple[str, ...]]) -> Iterator[Flag]:
    for names in tables["megatron-names"].values():
        for name in names.split():
            why = f"the same as {' '.join(same[name])}"
            yield Flag(name, ACCEPTED_KIND, why, alias_of=same[name])
    for row in tables["accepted"]:
        why, rule = _plain(row["why"]), VALUES[row.get("value", "")]
        for name in row["flags"].split():
            only, note = tuple(row.get("only", ())), row.get("note", False)
            yield Flag(name, ACCEPTED_KIND, why, rule, allowed=only, note_for=note)
    for row in tables["idle"]:
        why = f"it has no effect without {row['needs']}, also in Megatron-LM"
        for kind, rule in (("switches", SWITCH), ("values", TEXT)):
            for name in row.get(kind, "").split():
                yield Flag(name, ACCEPTED_KIND, why, rule)
    for row in tables["refused"]:
        instead = f"; {_plain(row['instead'])}" if "instead" in row else ""
        for name in row["flags"].split():
            yield Flag(name, REFUSED_KIND, f"{row['feature']} is not available here{instead}")


def _plain(text: str) -> str:
    """Return a text of several lines as one line."""
    return " ".join(text.split())
