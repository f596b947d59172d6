# SPDX-License-Identifier: Apache-2.0
"""What happens to the flags of public Megatron scripts: each script, then docs/megatron.md's table.

python -m tests.training.flags.public_scripts
"""

import os
import re
import shlex
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from model.load import of_checkpoint
from training.flags import run_rules
from training.flags.foreign import sort
from training.flags.parse import parse
from training.settings.config import Config, UsageError

ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_suffix(".txt")
# Data, tokenizers and outputs of other machines: say that every file is there and writable.
YES = {name: lambda *_: True for name in ("exists", "isfile", "isdir", "lexists")}
PATHS = SimpleNamespace(**YES, dirname=os.path.dirname, abspath=os.path.abspath)
FILES = SimpleNamespace(path=PATHS, access=lambda *_: True, W_OK=os.W_OK, X_OK=os.X_OK)


@dataclass
class Script:
    """One script; `edit` is the change made to it, "" where it is as published."""

    repository: str
    path: str
    commit: str
    world: int
    edit: str
    flags: list[str]


def scripts(path: Path = LIST) -> list[Script]:
    """Read a list beside this file."""
    text = path.read_text()
    found = []
    for block in text.split("\n\n")[1:]:
        head, *flags = block.splitlines()
        repository, path, commit, world, *edit = head.split()
        words = shlex.split(" ".join(flags))
        found.append(Script(repository, path, commit, int(world), " ".join(edit), words))
    return found


def read_flags(flags: list[str], world: int) -> Config:
    """Parse a launch whose files are all there."""
    with patch.object(run_rules, "os", FILES):
        return parse(flags, world, of_checkpoint=of_checkpoint)


def refusal(flags: list[str], world: int) -> str:
    """Return why a launch with these flags is refused, "" where it is not, up to missing files."""
    return _refusal(tuple(flags), world)


@cache  # several tests ask for each script
def _refusal(flags: tuple[str, ...], world: int) -> str:
    try:
        read_flags(list(flags), world)
    except UsageError as error:
        return str(error)
    return ""


def unknown(flags: list[str]) -> list[str]:
    """Return what --ignore-flags takes, for the flags that neither Weft nor Megatron-LM knows."""
    counts = {use.name[2:]: len(use.values) for use in sort(flags, ()).unknown}
    return [f"{name}:{count}" for name, count in counts.items()]


def outcome(script: Script) -> str:
    """Return one cell: what happens to the script as it is, and with --ignore-flags."""
    why = refusal(script.flags, script.world)
    if not why:
        return "parses"
    names = unknown(script.flags)
    if not names:
        return f"refused: {shortened(why)}"
    given = f"`--ignore-flags {' '.join(names)}`"
    rest = refusal([*script.flags, "--ignore-flags", *names], script.world)
    if not rest:
        return f"another program's flags; with {given} it parses"
    return f"another program's flags; with {given} refused: {shortened(rest)}"


def shortened(why: str) -> str:
    """Return a sentence for a cell of the table."""
    return why if len(why) < 130 else f"{why[:120].rsplit(' ', 1)[0]} ..."


def rows() -> list[str]:
    """Return a line for each script: its address, the number of ranks and what happens."""
    lines = []
    for s in scripts():
        edit = f" with {s.edit}" if s.edit else ""
        lines.append(f"{s.repository}/{s.path} at {s.commit}{edit}, {s.world} ranks: {outcome(s)}")
    return lines


# the table's first words for each outcome, by the regular expression of the outcome
KINDS = {
    "parses as published": r"parses$",
    "parses with one `--ignore-flags`": r".*it parses$",
    "needs a file of the cluster: a checkpoint": r".*--use-checkpoint-args",
    "asks for fp16, or an embedding in fp32": r".*--(fp16|embedding-weights-in-fp32 is refused)",
    "names a tokenizer of its own tree": r".*--tokenizer-type",
    "has a mistake: batch size, data flags, a stray word": r"",
}


def summary() -> list[str]:
    """Return the lines of the table of docs/megatron.md: how many scripts have which outcome."""
    found = [outcome(s) for s in scripts()]
    count = Counter(next(k for k in KINDS if re.match(KINDS[k], each)) for each in found)
    return ["| what happens | scripts |", "|---|---|", *(f"| {k} | {count[k]} |" for k in KINDS)]


if __name__ == "__main__":
    print("\n".join([*rows(), "", *summary()]))
