# SPDX-License-Identifier: Apache-2.0
"""What happens to the flags of public Megatron scripts; prints the table of docs/megatron.md.

python -m tests.training.flags.public_scripts
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from model.load import of_checkpoint
from training.config import UsageError
from training.flags import run_rules
from training.flags.foreign import translate, unknown
from training.flags.parse import parse
from training.flags.trees import TREES

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


def scripts() -> list[Script]:
    """Read the list beside this file."""
    text = Path(__file__).with_suffix(".txt").read_text()
    found = []
    for block in text.split("\n\n")[1:]:
        head, *flags = block.splitlines()
        repository, path, commit, world, *edit = head.split()
        words = shlex.split(" ".join(flags))
        found.append(Script(repository, path, commit, int(world), " ".join(edit), words))
    return found


def refusal(flags: list[str], world: int) -> str:
    """Return why a launch with these flags is refused, "" where it is not, up to missing files."""
    with patch.object(run_rules, "os", FILES):
        try:
            parse(flags, world, of_checkpoint=of_checkpoint)
        except UsageError as error:
            return str(error)
    return ""


def outcome(script: Script) -> str:
    """Return one cell: what happens to the script as it is, and with --ignore-flags."""
    why = refusal(script.flags, script.world)
    if not why:
        return "parses"
    flags, _ = translate(script.flags, ())
    names = unknown(flags)
    if not names:
        return f"refused: {shortened(why)}"
    of = [t for t in TREES if all("--" + n.rpartition(":")[0] in TREES[t] for n in names)]
    names = of[:1] or names
    given = f"`--ignore-flags {' '.join(names)}`"
    rest = refusal([*script.flags, "--ignore-flags", *names], script.world)
    if not rest:
        return f"another program's flags; with {given} it parses"
    return f"another program's flags; with {given} refused: {shortened(rest)}"


def shortened(why: str) -> str:
    """Return a sentence for a cell of the table."""
    return why if len(why) < 130 else f"{why[:120].rsplit(' ', 1)[0]} ..."


def rows() -> list[str]:
    """Return the lines of the table."""
    lines = ["| script | WORLD_SIZE | what happens |", "|---|---|---|"]
    for s in scripts():
        url = f"https://github.com/{s.repository}/blob/{s.commit}/{s.path}"
        name = f"[{s.repository.split('/')[0]}: {s.path.rsplit('/', 1)[-1]}]({url})"
        edit = f", with `{s.edit}`" if s.edit else ""
        lines.append(f"| {name}{edit} | {s.world} | {outcome(s)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(rows()))
