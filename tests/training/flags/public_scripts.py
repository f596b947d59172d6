# SPDX-License-Identifier: Apache-2.0
"""What happens to the flags of public Megatron scripts; prints the table of docs/megatron.md.

    python -m tests.training.flags.public_scripts

"before" is what the same command says in a copy of commit BEFORE, about the same list of scripts.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
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

ROOT = Path(__file__).resolve().parents[3]
LIST = Path(__file__).with_suffix(".txt")
BEFORE = "0c88a3d"
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
    text = LIST.read_text()
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


def outcomes_before(commit: str = BEFORE) -> list[str]:
    """Return the cells of an earlier commit, one for each script.

    Raises CalledProcessError where git does not have the commit.
    """
    with tempfile.TemporaryDirectory() as folder:
        tar = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True)
        subprocess.run(["tar", "x", "-C", folder], input=tar.stdout, check=True)
        shutil.copy(LIST, Path(folder) / LIST.relative_to(ROOT))
        words = [sys.executable, "-m", "tests.training.flags.public_scripts"]
        done = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True)
    return [line.rsplit(" | ", 1)[1].removesuffix(" |") for line in done.stdout.splitlines()[2:]]


def rows(before: list[str]) -> list[str]:
    """Return the lines of the table. before: a cell for each script."""
    head = f"| script | WORLD_SIZE | before, at commit {BEFORE} | after |"
    lines = [head, "|---|---|---|---|"]
    for s, was in zip(scripts(), before, strict=True):
        url = f"https://github.com/{s.repository}/blob/{s.commit}/{s.path}"
        name = f"[{s.repository.split('/')[0]}: {s.path.rsplit('/', 1)[-1]}]({url})"
        edit = f", with `{s.edit}`" if s.edit else ""
        lines.append(f"| {name}{edit} | {s.world} | {was} | {outcome(s)} |")
    return lines


if __name__ == "__main__":
    print("\n".join(rows(outcomes_before())))
