# SPDX-License-Identifier: Apache-2.0
"""Let one fault happen to a real run, give the same command again, and write down what was seen."""

import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos import outside
from tests.chaos.apart import Program
from tests.chaos.fault import Fault, Kind, Layout
from tests.chaos.scene import Scene, Seen, command, write_corpus
from tests.launcher import Launcher, writers_into


@contextmanager
def disk(scene: Scene) -> Iterator[None]:
    """Mount a small disk at the directory of the folder that the kind names, if it names one."""
    name = scene.kind.job.get("disk")
    if not name:
        yield
        return
    path = scene.folder / name
    path.mkdir(mode=0o700)
    options = f"mode=0700,size={scene.kind.job['size']}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", str(path)], check=True)
    try:
        yield
    finally:
        kept = path.with_name(f"{name}.kept")
        shutil.copytree(path, kept, ignore=shutil.ignore_patterns("filler"))
        subprocess.run(["umount", "--lazy", str(path)], check=True)
        path.rename(path.with_name(f"{name}.mounted"))
        kept.rename(path)


class Oracle:
    """How the runs of a launcher end when nobody disturbs them: one of each command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known, self.lock = folder, dict[Any, Any](), threading.Lock()
        self.runs = 0

    def __call__(self, launcher: Launcher, layout: Layout, kind: Kind) -> tuple[Any, Any]:
        """Return (hashes of the last step's files of tensors, rows of the log)."""
        key = (layout.name, kind.base)
        with self.lock:
            if key not in self.known:
                self.runs += 1
                folder = self.folder / f"oracle {self.runs}"
                folder.mkdir()
                write_corpus(folder / "corpus")
                argv = [*command(layout, None), *kind.base.split(), "--peer-timeout", "60"]
                launcher.start(layout.ranks, argv, folder)
                result = launcher.wait()
                assert set(result.codes) == {0}, result.said(0)
                self.known[key] = final(folder, kind), losses(folder)
            return self.known[key]


def final(folder: Path, kind: Kind) -> dict[str, str] | None:
    """Return the hash of every file of tensors of the last step, if the run saved it."""
    manifest = folder / "saved" / f"step_{kind.steps:08d}" / "manifest.json"
    if not manifest.exists():
        return None
    files = json.loads(manifest.read_text())["files"]
    return {name: f["sha256"] for name, f in files.items() if name.endswith(".safetensors")}


def losses(folder: Path) -> set[tuple[Any, ...]]:
    """Return what the log says last of every step: the samples consumed, and the numbers."""
    keys = ("iteration", "consumed_samples", "loss", "grad_norm", "lr", "validation_loss")
    last = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        row = json.loads(line)
        last[row["iteration"], "loss" in row] = tuple(row.get(key) for key in keys)
    return set(last.values())


def left_behind(scene: Scene) -> list[str]:
    """List what the run left: processes that write into its folder, names in /dev/shm."""
    found = [f"process {pid}" for pid in writers_into(scene.folder, patience=5.0)]
    return found + [str(path) for path in scene.shared.iterdir()] if scene.shared else found


def play(
    launcher: Launcher,
    root: Path,
    fault: Fault,
    kind: Kind,
    oracle: Oracle,
    shared: Path | None = None,
) -> Seen:
    """Let a fault happen; give the same command again where the run did not reach its end."""
    began = time.monotonic()
    folder = root / f"{fault.number:04d}"
    folder.mkdir()
    write_corpus(folder / "corpus")
    scene = (Program if kind.apart else Scene)(launcher, folder, fault, kind, shared)
    seen = scene.seen
    end, rows = oracle(launcher, scene.layout, kind)
    with disk(scene):
        scene.start(inject=True)
        result = scene.attend(first=True)
        seen.codes, seen.late = result.codes, result.late
        seen.ended = [result.began + seconds for seconds in result.ended]
        seen.words, seen.reached = scene.texts(), scene.log.last
        seen.left = left_behind(scene)
        if final(folder, kind) is None or set(result.codes) != {0}:
            again(scene)
    seen.equal = final(folder, kind) == end
    if kind.log:
        seen.equal = seen.equal and losses(folder) == rows
    if scene.wire:
        scene.wire.close()
    for caller in scene.keep:
        caller.close()
    seen.seconds = time.monotonic() - began
    return seen


def again(scene: Scene) -> None:
    """Undo what stands in the way, give the same command again, and see where it goes on."""
    seen, folder = scene.seen, scene.folder
    for filler in folder.glob("*/filler"):
        filler.unlink()
    if scene.kind.name.startswith("corpus"):
        write_corpus(folder / "corpus")
    sound = [int(path.name.removeprefix("step_")) for path in scene.committed()]
    if scene.kind.outside.startswith("damage"):
        getattr(outside, scene.kind.outside)(scene)
        seen.struck = time.monotonic()
        sound.pop()
    if scene.wire:
        scene.wire.heal()
    for path in (p for kind in ("err", "out") for p in folder.glob(f"{kind}.?")):
        path.rename(path.with_name(f"first.{path.name}"))
    scene.go()
    scene.start(inject=False)
    result = scene.attend(first=False)
    seen.again, seen.again_words = result.codes, scene.texts()
    seen.left += left_behind(scene)
    loaded = re.findall(r"^loaded \S+step_(\d+): at iteration", seen.again_words[0], re.M)
    seen.began_at = (int(loaded[0]) if loaded else 0, max(sound, default=0))
