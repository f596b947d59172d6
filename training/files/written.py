# SPDX-License-Identifier: Apache-2.0
"""Record which files and folders a purpose has written, so that it replaces and removes no other.

The record is a JSON file of the purpose's own: that of --save-hf is in the --save of its run, under
that one's lock. What another program reads (a Hugging Face folder, a Megatron checkpoint) so holds
nothing of ours. A name is recorded before anything is at it: a name that cannot be guessed before
its folder is made, and that of a finished folder with what is in it.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from training.files.owned import empty, plain_files
from training.files.untrusted import open_plain, private, read_json

FORMAT = "weft-written"
LIMIT = 1 << 28  # most bytes of a record


class Written:
    """The record at `path`: for each name, what it has had in it.

    Names are of things in one folder, given to `ours` by their paths. One process at a time may
    have the record. Raises ValueError where the file is something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._names: dict[str, list[dict[str, str]]] = {}
        if not os.path.lexists(path):
            return
        try:
            found = read_json(path, LIMIT)
            if not isinstance(found, dict) or found.get("format") != FORMAT:
                raise ValueError(f"it is not a record of the format {FORMAT!r}")
            names = found["names"]
            sound = all(type(p) is dict for prints in names.values() for p in prints)
            self._names = {str(name): list(prints) for name, prints in names.items() if sound}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(
                f"{path} says what may be replaced, and cannot be read ({why}): move it away, and "
                "nothing that was written before is replaced"
            ) from None

    def temporary(self, name: str, kind: str) -> str:
        """Record and return a new name for what will get the name `name`, or had it."""
        made = f".{name}.{kind}-{secrets.token_hex(8)}"
        self._names[made] = []
        self._write()
        return made

    def add(self, name: str, made: Path, sums: Mapping[str, str] | None = None) -> None:
        """Record that what is at `made` will get the name `name`.

        sums: the XXH3-128 of its files; None: they are read; {}: times alone are compared later.
        """
        found = {"sizes": _sizes(made), "times": _times(made)}
        found["sums"] = _sums(made, sums) if sums is None or sums else ""
        self._names.setdefault(name, []).append(found)
        self._write()

    def leftovers(self) -> list[str]:
        """Return the recorded names of what was not finished, or not removed."""
        return [name for name, prints in self._names.items() if not prints]

    def names(self) -> list[str]:
        """Return the recorded names of what was finished."""
        return [name for name, prints in self._names.items() if prints]

    def settle(self, *gone: str, latest: str = "") -> None:
        """Forget names at which there is nothing any more, and what `latest` held before."""
        before = dict(self._names)
        for name in gone:
            self._names.pop(name, None)
        if latest:
            self._names[latest] = self._names[latest][-1:]
        if self._names != before:
            self._write()

    def ours(self, place: Path) -> bool:
        """Return whether what is at `place` is as recorded under its name, or an empty folder."""
        if empty(place):
            return True
        prints = self._names.get(place.name)
        if prints is None:
            return False
        if not prints:
            return place.is_dir() and not place.is_symlink()
        return self._as_recorded(place, prints)

    def was(self, place: Path, name: str) -> bool:
        """Return whether what is at `place` is as it was recorded under another name."""
        return self._as_recorded(place, self._names.get(name, []))

    def _as_recorded(self, place: Path, prints: list[dict[str, str]]) -> bool:
        try:
            same = [p for p in prints if p.get("sizes") == _sizes(place)]
            if any(p.get("times") == _times(place) for p in same):
                return True
            sums = [p["sums"] for p in same if p.get("sums")]
            return bool(sums) and _sums(place, None) in sums
        except (OSError, ValueError):
            return False

    def _write(self) -> None:
        aside = self.path.with_name(f".{self.path.name}-{secrets.token_hex(8)}")
        record = {"format": FORMAT, "names": self._names}
        with open(aside, "x", encoding="utf-8", opener=private) as file:
            file.write(json.dumps(record, indent=1, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path)  # it was read as ours, under the lock of its folder


def _files(place: Path) -> dict[str, os.stat_result]:
    """Return the facts of a folder's files, or of one file. Raises ValueError for others."""
    found = plain_files(place) if not place.is_file() else {"": os.lstat(place)}
    if found is None or place.is_symlink():
        raise ValueError(f"{place} is not a folder of plain files")
    return found


def _sizes(place: Path) -> str:
    return _hash((name, facts.st_size) for name, facts in _files(place).items())


def _times(place: Path) -> str:
    """Return a hash of sizes and times. A file's ctime changes with all that is done to it."""
    return _hash((name, f.st_size, f.st_ctime_ns) for name, f in _files(place).items())


def _sums(place: Path, known: Mapping[str, str] | None) -> str:
    found = known if known is not None else {name: _sum(place / name) for name in _files(place)}
    return _hash(found.items())


def _sum(path: Path) -> str:
    with open_plain(path, os.O_NOFOLLOW) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def _hash(facts: Any) -> str:
    return hashlib.sha256(repr(sorted(facts)).encode()).hexdigest()[:32]
