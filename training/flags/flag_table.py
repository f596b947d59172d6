# SPDX-License-Identifier: Apache-2.0
"""Classify every flag: live (it does something), checked (accepted as it is), refused or removed.

A live flag is a row of training/settings/arguments.py. Megatron-LM's other flags are in
`training.flags.megatron`, so that none is silently ignored. `training.flags.parse` builds argparse
from all of them; docs/flags.md lists them.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from training.data.tokenizer import OTHER_TYPE
from training.flags.megatron import ACCEPTED, IDLE, REFUSED, SPELLED
from training.settings.arguments import GROUPS, OTHER_FLAGS
from training.settings.config import UsageError
from training.settings.setting import SWITCH, Rule, Setting

OTHERS = {  # what to write for a value that other programs have
    "--tokenizer-type": OTHER_TYPE,
}
REMOVED = {  # flags that this program had, and what to do instead
    "--checksum-messages": "TCP checks what it carries, and --check-replicas compares the results; "
    "leave it out",
    "--tp-comm-overlap-cache": "a checkpoint records what --tp-comm-overlap auto chose; leave it "
    "out, or name a method for the same bits in every run",
    "--hierarchical-context-parallel-sizes": "--cp-comm-type a2a+p2p, which took them, is no more, "
    "and nothing takes its place; use --cp-comm-type p2p over nodes",
    "--fp8-auto": "--fp8-format puts every projection in float8; leave it out, or leave layers in "
    "bf16 by --first-last-layers-bf16",
    "--peer-checkpoint": "no copies are kept in memory, and nothing takes their place: leave it "
    "out; a restart begins at the newest checkpoint of --load or --save (--save-interval)",
}
LIVE_KIND, CHECKED_KIND, REFUSED_KIND, REMOVED_KIND = "live", "checked", "refused", "removed"


@dataclass(frozen=True)
class Flag:
    """One flag; a live one has its row, and the group of --help that it is in."""

    name: str
    kind: str
    text: str  # what it does, if live; else why it is accepted, or is not
    rule: Rule = SWITCH
    row: Setting = Setting("")
    group: str = ""
    allowed: tuple[str, ...] = ()  # checked: the values that are accepted; empty: any
    note_for: str | bool = False  # checked: print `text` with this value, or with any (True)
    alias_of: tuple[str, ...] = ()  # checked: the live flag that it is another name of

    @property
    def dest(self) -> str:
        """Return the name of the field, or of the other flag in OTHER_FLAGS."""
        return self.name[2:].replace("-", "_")

    @property
    def section(self) -> str:
        """Return the section of Config that a live flag is in."""
        return GROUPS[self.group][1]

    @property
    def usable(self) -> bool:
        """Return whether a command line may have the flag."""
        return self.kind in (LIVE_KIND, CHECKED_KIND)

    def read(self, given: Any) -> Any:
        """Return the value of a text, or of several. Raises UsageError: flag, text and rule.

        given: of a flag that may be repeated, the words of each use.
        """
        if self.rule.nargs == 0:
            return True
        if self.rule.repeated:
            return tuple(self._read(" ".join(words)) for words in given)
        return tuple(map(self._read, given)) if self.rule.nargs == "*" else self._read(given)

    def _read(self, text: str) -> Any:
        if type(self.rule) is Rule and self.rule.nargs is None and not text.strip():
            raise UsageError(f"{self.name} is empty: omit the flag instead")
        try:
            return self.rule.read(text)
        except ValueError as error:
            other = f"; {OTHERS[self.name]}" if self.name in OTHERS else ""
            raise UsageError(f"{self.name} {text}: {error}{other}") from None


@cache
def known_flags() -> dict[str, Flag]:
    """Return every known flag by its name."""
    flags = [*_live(), *_others()]
    out = {flag.name: flag for flag in flags}
    assert len(out) == len(flags), "a flag is twice in the table"
    return out


def _live() -> Iterator[Flag]:
    """Yield the flags of training/settings/arguments.py, and their other names."""
    for group, (kind, _) in GROUPS.items():
        rows = {part.name: part.metadata["setting"] for part in fields(kind) if part.metadata}
        for field, row in (rows | OTHER_FLAGS.get(group, {})).items():
            name = "--" + field.replace("_", "-")
            yield Flag(name, LIVE_KIND, row.help, row.rule, row, group)
            for other in row.also:
                yield Flag(other, CHECKED_KIND, f"another name of {name}", alias_of=(name,))


def _others() -> Iterator[Flag]:
    """Yield the flags that do nothing of their own."""
    for name, words in SPELLED.items():
        why = f"the same as {' '.join(words)}"
        yield Flag(name, CHECKED_KIND, why, alias_of=words)
    for row in (*ACCEPTED, *(row for idle in IDLE for row in idle.accepted)):
        for name in row.flags.split():
            yield Flag(
                name, CHECKED_KIND, row.why, row.rule, allowed=row.only, note_for=row.note_for
            )
    for refused in REFUSED:
        for name in refused.flags.split():
            yield Flag(name, REFUSED_KIND, refused.why)
    for name, why in REMOVED.items():
        yield Flag(name, REMOVED_KIND, why)


def live() -> list[Flag]:
    """Return the flags that do something."""
    return [flag for flag in known_flags().values() if flag.kind == LIVE_KIND]
