# SPDX-License-Identifier: Apache-2.0
"""Let one fault happen to a real run, give the same command again, and write down what was seen."""

import json
import random
import re
import select
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import outside
from tests.chaos.fault import (
    EVALUATE_EVERY,
    LAYOUTS,
    PEER_TIMEOUT,
    SAVE_EVERY,
    STEPS,
    Fault,
    Kind,
    Layout,
)
from tests.faults.repeated_kills import Log
from tests.launcher import Launcher, Result, writers_into
from training.data.indexed import IndexedWriter, token_dtype

VOCABULARY, LENGTH = 300, 16
LIMIT = 90.0  # seconds after which a run is killed that should have ended long before
MODEL = (
    f"--data-path {{dir}}/corpus --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} "
    "--split 9,1 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    f"--seq-length {LENGTH} --lr 1e-3 --log-interval 1 --num-workers 1 --global-batch-size 4 "
    f"--train-iters {STEPS} --save-interval {SAVE_EVERY} --eval-interval {EVALUATE_EVERY} "
    f"--eval-iters 1 --save {{dir}}/saved --load {{dir}}/saved --peer-timeout {PEER_TIMEOUT}"
)


def free_port() -> int:
    """Find a free TCP port on the loopback device."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def write_corpus(prefix: Path) -> None:
    """Write documents enough for every step of a run."""
    rng = random.Random(0)
    with IndexedWriter(str(prefix), token_dtype(VOCABULARY)) as out:
        for _ in range(60):
            out.add(rng.choices(range(VOCABULARY - 1), k=rng.randint(10, 60)))


def command(layout: Layout, kind: Kind | None) -> list[str]:
    """Return the flags of a run, as tests/launcher.py takes them."""
    words = f"{MODEL} --tensor-model-parallel-size {layout.tp} "
    words += f"--pipeline-model-parallel-size {layout.pp} {layout.flags}"
    return (f"{words} {kind.base} {kind.flags}" if kind else words).split()


@dataclass
class Seen:
    """What was seen of one fault. Times are by time.monotonic(), of each rank's end too."""

    fault: Fault
    kind: Kind
    struck: float | None = None
    hit: str = ""  # where a wrong number was written, or the damaged file
    codes: list[int] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    late: bool = False  # it had to be killed
    words: list[str] = field(default_factory=list)  # of each rank
    told: float | None = None  # the first time that a rank said it
    reached: int = 0  # the last step of the first run
    again: list[int] | None = None  # exit codes of the same command, where it was given again
    again_words: list[str] = field(default_factory=list)
    began_at: tuple[int, int] = (0, 0)  # the step it went on from, and the newest sound one
    recovered: float | None = None  # its first new step
    equal: bool = False  # it ended with the weights, moments and losses of an undisturbed run
    left: list[str] = field(default_factory=list)  # processes, files in /dev/shm
    seconds: float = 0.0


def pattern(fault: Fault, kind: Kind, name: str) -> re.Pattern[str] | None:
    """Return what must be said, with the fault's own rank, step and file."""
    if kind.promise.who is None:
        return None
    names = {"rank": fault.rank, "other": 1 - fault.rank, "step": fault.step}
    text = kind.promise.says.replace("{name}", re.escape(name))
    for key, value in names.items():
        text = text.replace(f"{{{key}}}", str(value))
    return re.compile(text)


class Scene:
    """One run in its folder, and what is done to it."""

    def __init__(self, launcher: Launcher, folder: Path, fault: Fault, kind: Kind) -> None:
        self.launcher, self.folder, self.fault, self.kind = launcher, folder, fault, kind
        self.layout = LAYOUTS[fault.layout]
        self.rng = random.Random(fault.seed)
        self.name, self.keep = "", list[Any]()
        self.seen = Seen(fault, kind)
        self.log = Log(folder / "log.jsonl")

    @property
    def pids(self) -> list[int]:
        return [int((self.folder / f"pid.{r}").read_text()) for r in range(self.layout.ranks)]

    @property
    def port(self) -> int:
        return self.launcher.port

    def go(self) -> None:
        """Let the ranks that wait go on."""
        (self.folder / "go").touch()

    def start(self, inject: bool) -> None:
        """Start the command; inject: with the fault."""
        faults: list[dict[str, Any]] = []
        for fault in self.fault.inject if inject else ():
            path = fault.get("path", "").replace("{dir}", str(self.folder))
            faults.append(fault | ({"path": path} if path else {}))
        job: dict[str, Any] = {k: v for k, v in self.kind.job.items() if k not in ("disk", "size")}
        if "stdout" in job:
            job["stdout"] = job["stdout"].replace("{dir}", str(self.folder))
        job |= {"held": [self.fault.rank]} if inject and self.kind.held else {}
        argv = command(self.layout, self.kind)
        self.launcher.start(self.layout.ranks, argv, self.folder, fault=faults, limit=LIMIT, **job)

    def attend(self, first: bool) -> Result:
        """Wait for the run's end, look at it all the time, and do what is done from outside."""
        acted = not (first and self.kind.outside) or self.kind.outside.startswith("damage")
        seen = self.seen
        while not select.select([self.launcher.process.stdout], [], [], 0.01)[0]:
            now = time.monotonic()
            if self.log.poll() and not first and seen.recovered is None:
                seen.recovered = now
            if first and seen.struck is None:
                self.look_for_strike()
            if not acted and self.all_wait():
                acted = True
                getattr(outside, self.kind.outside)(self)
                self.go()
            if seen.told is None and seen.struck is not None and self.says():
                seen.told = now
        result = self.launcher.wait(in_time=False)
        if self.log.poll() and not first and seen.recovered is None:
            seen.recovered = time.monotonic()
        if first:
            self.look_for_strike()
        if seen.told is None and self.says():
            seen.told = time.monotonic()
        return result

    def all_wait(self) -> bool:
        return len(list(self.folder.glob("struck.?"))) == self.layout.ranks

    def look_for_strike(self) -> None:
        """Note when the fault struck first, and what it hit."""
        found = []
        for path in self.folder.glob("struck.?"):
            with suppress(OSError, ValueError):
                found.append(json.loads(path.read_text()))
        if found:
            first = min(found, key=lambda x: x["at"])
            self.seen.struck, self.seen.hit = first["at"], first["hit"]

    def says(self) -> bool:
        """Return whether a rank has said what it must say."""
        wanted = pattern(self.fault, self.kind, self.name)
        return wanted is not None and any(wanted.search(text) for text in self.texts())

    def texts(self) -> list[str]:
        """Return what each rank has written."""
        texts = []
        for rank in range(self.layout.ranks):
            text = ""
            for kind in ("err", "out"):
                with suppress(OSError):
                    text += (self.folder / f"{kind}.{rank}").read_text(errors="replace")
            texts.append(text)
        return texts

    def committed(self) -> list[Path]:
        """List the committed checkpoints, the newest last."""
        found = (self.folder / "saved").glob("step_????????/manifest.json")
        return sorted(path.parent for path in found)


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
        path.rmdir()
        kept.rename(path)


class Oracle:
    """How the runs of a launcher end when nobody disturbs them: one of each command."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known, self.lock = folder, dict[Any, Any](), threading.Lock()

    def __call__(self, launcher: Launcher, layout: Layout, kind: Kind) -> tuple[Any, Any]:
        """Return (hashes of the last step's files of tensors, rows of the log)."""
        key = (layout.name, kind.base)
        with self.lock:
            if key not in self.known:
                folder = self.folder / f"oracle {len(self.known)}"
                folder.mkdir()
                write_corpus(folder / "corpus")
                argv = [*command(layout, None), *kind.base.split()]
                launcher.start(layout.ranks, argv, folder)
                result = launcher.wait()
                assert set(result.codes) == {0}, result.said(0)
                self.known[key] = final(folder), losses(folder)
            return self.known[key]


def final(folder: Path) -> dict[str, str] | None:
    """Return the hash of every file of tensors of the last step, if the run saved it."""
    manifest = folder / "saved" / f"step_{STEPS:08d}" / "manifest.json"
    if not manifest.exists():
        return None
    files = json.loads(manifest.read_text())["files"]
    return {name: f["sha256"] for name, f in files.items() if name.endswith(".safetensors")}


def losses(folder: Path) -> set[tuple[Any, ...]]:
    """Return what the log says of every step: the samples consumed, and the numbers."""
    keys = ("iteration", "consumed_samples", "loss", "grad_norm", "lr", "validation_loss")
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {tuple(row.get(key) for key in keys) for row in rows}


def left_behind(scene: Scene) -> list[str]:
    """List what the run left: processes that write into its folder, names in /dev/shm."""
    found = [f"process {pid}" for pid in writers_into(scene.folder, patience=5.0)]
    shared = Path(f"/proc/{scene.launcher.process.pid}/root/dev/shm")
    return found + [f"/dev/shm/{path.name}" for path in shared.iterdir()]


def play(launcher: Launcher, root: Path, fault: Fault, kind: Kind, oracle: Oracle) -> Seen:
    """Let a fault happen; give the same command again where the run did not reach its end."""
    began = time.monotonic()
    folder = root / f"{fault.number:04d}"
    folder.mkdir()
    write_corpus(folder / "corpus")
    scene = Scene(launcher, folder, fault, kind)
    seen = scene.seen
    end, rows = oracle(launcher, scene.layout, kind)
    with disk(scene):
        scene.start(inject=True)
        result = scene.attend(first=True)
        seen.codes, seen.late = result.codes, result.late
        seen.ended = [result.began + seconds for seconds in result.ended]
        seen.words, seen.reached = scene.texts(), scene.log.last
        seen.left = left_behind(scene)
        if final(folder) is None or set(result.codes) != {0}:
            again(scene)
    if kind.name.startswith("disk: full under the log"):
        (folder / "log.jsonl").touch()
    seen.equal = final(folder) == end and (not rows or losses(folder) <= rows)
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
        seen.hit, seen.struck = scene.name, time.monotonic()
        sound.pop()
    scene.go()
    scene.start(inject=False)
    result = scene.attend(first=False)
    seen.again, seen.again_words = result.codes, scene.texts()
    seen.left += left_behind(scene)
    loaded = re.findall(r"^loaded \S+step_(\d+): at iteration", seen.again_words[0], re.M)
    seen.began_at = (int(loaded[0]) if loaded else 0, max(sound, default=0))
