# SPDX-License-Identifier: Apache-2.0
"""List the flags of this program: live and removed ones.

A live flag has an effect: it is a row of training/settings/arguments.py, from which
`training.flags.parse` builds argparse. Megatron-LM's other flags are in `training.flags.megatron`,
so that none is silently ignored. docs/flags.md lists all of them.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from training.data.tokenizer import OTHER_TYPE
from training.settings.arguments import GROUPS, OTHER_FLAGS
from training.settings.config import UsageError
from training.settings.setting import SWITCH, Rule, Setting

OTHERS = {  # {flag: what to give instead of a value of other programs}
    "--tokenizer-type": OTHER_TYPE,
}
REMOVED = {  # {flag that this program had: why it was removed, and what to do instead}
    "--checksum-messages": "TCP checks what it carries, and --check-replicas compares the results; "
    "leave it out",
    "--tp-comm-overlap-cache": "a checkpoint records what --tp-comm-overlap auto chose; leave it "
    "out, or name a method for the same bits in every run",
    "--hierarchical-context-parallel-sizes": "it gave the sizes of --cp-comm-type a2a+p2p, which "
    "was removed too, without a replacement; use --cp-comm-type p2p between nodes",
    "--fp8-auto": "--fp8-format puts every projection in float8; leave it out, or leave layers in "
    "bf16 by --first-last-layers-bf16",
    "--muon-coefficients": "--muon-coefficient-type names the coefficients of each iteration; add "
    "your own to mpu/optim/newton_schulz.py",
    "--memory-picture-rank": "--memory-picture draws the pipeline rank with the most memory; leave "
    "it out",
    "--save-hf-max-shard-size": "a file of weights has at most 5 GB, as transformers writes them; "
    "leave it out",
    "--cuda-graph": "it was no faster on an H200, and has no replacement; leave it out",
    "--data-local-copy": "leave it out; let the job script copy the data to each node, as in "
    "docs/data.md, and name the copy by --data-path",
    "--peer-checkpoint": "checkpoints are no longer copied to the memory of other ranks; leave it "
    "out: a restart begins at the newest checkpoint of --load or --save (--save-interval)",
}
LIVE_KIND, ACCEPTED_KIND, REFUSED_KIND, REMOVED_KIND = "live", "accepted", "refused", "removed"


@dataclass(frozen=True)
class Flag:
    """One flag; a live one has its row, and the group of --help that it is in."""

    name: str
    kind: str
    text: str  # its effect, if live; else why it is accepted, refused or removed
    rule: Rule = SWITCH
    row: Setting = Setting("")
    group: str = ""
    allowed: tuple[str, ...] = ()  # accepted: the values that may be given; empty: any
    note_for: str | bool = False  # accepted: print `text` with this value, or with any (True)
    alias_of: tuple[str, ...] = ()  # accepted: the words of this program that mean the same

    @property
    def dest(self) -> str:
        """Return the name of its field, or its key in OTHER_FLAGS."""
        return self.name[2:].replace("-", "_")

    @property
    def section(self) -> str:
        """Return the section of Config that a live flag is in."""
        return GROUPS[self.group][1]

    @property
    def usable(self) -> bool:
        """Return whether a command line may contain the flag."""
        return self.kind in (LIVE_KIND, ACCEPTED_KIND)

    def read(self, given: Any) -> Any:
        """Return the value of argparse's text or texts. Raises UsageError: flag, text and rule.

        given: the text or texts; for a flag that may be repeated, a list of words for each use.
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
def live_flags() -> dict[str, Flag]:
    """Return {name: flag} of the flags that have an effect: training/settings/arguments.py's."""
    out = dict[str, Flag]()
    for group, (kind, _) in GROUPS.items():
        rows = {part.name: part.metadata["setting"] for part in fields(kind) if part.metadata}
        for field, row in (rows | OTHER_FLAGS.get(group, {})).items():
            name = "--" + field.replace("_", "-")
            assert name not in out, f"{name} is twice in the table"
            out[name] = Flag(name, LIVE_KIND, row.help, row.rule, row, group)
    return out


def removed() -> dict[str, Flag]:
    """Return {name: flag} of the flags that were removed."""
    return {name: Flag(name, REMOVED_KIND, why) for name, why in REMOVED.items()}
