# SPDX-License-Identifier: Apache-2.0
"""Commands on hostile or unlucky folders: made from a seed, run, and held to three things.

The command ends in time with a code that its case allows; it says a sentence that a person can
read, without a traceback or an escape code; and each folder that it must leave alone has the
bytes, names, links and permissions that it had.

A kind is a function `kind(rng, folder) -> Case`: it fills an empty folder, as `rng` says.
"""

import hashlib
import os
import random
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 60  # that a command may take


@dataclass(frozen=True)
class Case:
    """A command, `python ARGV...`, and what it owes.

    codes: the exit codes that are right. says: a pattern of its words, stdout and stderr. kept:
    files and folders that must stay as they are. memory: most bytes of address space beyond what
    the started process has. env: more of the environment. absent: paths that must not be made.
    """

    argv: Sequence[str | Path]
    codes: Sequence[int] = (2,)
    says: str = ""
    kept: Sequence[Path] = ()
    memory: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    absent: Sequence[Path] = ()


Kind = Callable[[random.Random, Path], Case]


def drawn(kinds: Mapping[str, Kind], count: int, seed: int = 0) -> list[tuple[str, int]]:
    """Return `count` cases as (name of the kind, seed), each kind in turn."""
    names = sorted(kinds)
    return [(names[i % len(names)], seed + i) for i in range(count)]


def digest(place: Path) -> str:
    """Return a digest of a file, or of all that is in a folder: names, modes, links, bytes."""
    found = hashlib.sha256()
    for path in [place, *sorted(place.rglob("*"))]:
        facts = os.lstat(path)
        found.update(f"{path.relative_to(place)}\0{facts.st_mode:o}\0".encode())
        if stat.S_ISLNK(facts.st_mode):
            found.update(os.readlink(path).encode())
        elif stat.S_ISREG(facts.st_mode):
            found.update(path.read_bytes())
    return found.hexdigest()


def check(launcher: Any, kind: Kind, seed: int, folder: Path) -> str:
    """Make a case, run it, hold it to what it owes; return what it said."""
    case = kind(random.Random(seed), folder)
    before = {place: digest(place) for place in case.kept}
    words: dict[str, Any] = {"limit": SECONDS, "memory": case.memory}
    env = {**os.environ, "OMP_NUM_THREADS": "1", **case.env}
    argv = [str(word) for word in case.argv]
    root = str(Path(__file__).resolve().parent.parent)
    ended = launcher.run(1, [], python=argv, cwd=root, env=env, **words)
    said = ended.said(0, "out") + ended.said(0)
    assert ended.codes[0] in case.codes, f"exit code {ended.codes[0]}: {said}"
    assert "Traceback (most recent call last)" not in said, said
    assert all(c.isprintable() or c in "\n\t\r" for c in said), repr(said)
    assert re.search(case.says, said), f"{case.says!r} is not in: {said}"
    changed = [str(place) for place, was in before.items() if digest(place) != was]
    assert not changed, f"changed: {changed}; it said: {said}"
    made = [str(place) for place in case.absent if os.path.lexists(place)]
    assert not made, f"made: {made}; it said: {said}"
    return said
