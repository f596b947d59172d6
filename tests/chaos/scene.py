# SPDX-License-Identifier: Apache-2.0
"""One run in its folder: how it is started, looked at all the time, and disturbed from outside."""

import json
import random
import re
import socket
import time
from contextlib import suppress
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
from tests.chaos.wires import ENVIRONMENT, Wire
from tests.launcher import Launcher, Result
from training.data.indexed import IndexedWriter, token_dtype

VOCABULARY, LENGTH = 300, 16
LIMIT = 300.0  # seconds after which a run is killed, however slow the machine is
MODEL = (
    f"--data-path {{dir}}/corpus --tokenizer-type NullTokenizer --vocab-size {VOCABULARY} "
    "--split 9,1 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 "
    f"--seq-length {LENGTH} --lr 1e-3 --log-interval 1 --num-workers 1 --global-batch-size 4 "
    f"--train-iters {STEPS} --save-interval {SAVE_EVERY} --eval-interval {EVALUATE_EVERY} "
    f"--eval-iters 1 --save {{dir}}/saved --load {{dir}}/saved --peer-timeout {PEER_TIMEOUT}"
)


class Log:
    """The iterations in a JSON log that grows."""

    def __init__(self, path: Path) -> None:
        self.path, self.count, self.last = path, 0, 0

    def poll(self) -> int:
        """Return how many steps have been added since the last call."""
        rows = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        steps = [row for row in rows if '"loss"' in row]
        new, self.count = len(steps) - self.count, len(steps)
        if steps:
            self.last = int(steps[-1].partition('"iteration":')[2].partition(",")[0])
        return new


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


def pattern(seen: Seen) -> re.Pattern[str] | None:
    """Return what must be said, with the fault's own rank and step, and with what it hit."""
    fault, promise = seen.fault, seen.kind.promise
    if promise.who is None:
        return None
    name = seen.hit.split(",")[0]
    names = {"rank": fault.rank, "other": 1 - fault.rank, "step": fault.step}
    bare = name.split(" (")[0]
    names |= {"name": re.escape(name), "bare": re.escape(bare)}
    names["module"] = re.escape(bare.removesuffix(".weight"))
    text = promise.says
    for key, value in names.items():
        text = text.replace(f"{{{key}}}", str(value))
    return re.compile(text)


class Scene:
    """One run in its folder, and what is done to it. shared: a /dev/shm that no others use."""

    def __init__(
        self, launcher: Launcher, folder: Path, fault: Fault, kind: Kind, shared: Path | None
    ) -> None:
        self.launcher, self.folder, self.fault, self.kind = launcher, folder, fault, kind
        self.shared = shared
        self.layout = LAYOUTS[fault.layout]
        self.rng = random.Random(fault.seed)
        self.keep: list[Any] = []
        self.wire = Wire(fault.seed) if kind.job.get("wire") else None
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

    def faults(self) -> list[dict[str, Any]]:
        """Return what is to be injected."""
        found = []
        for fault in self.fault.inject:
            path = fault.get("path", "").replace("{dir}", str(self.folder))
            found.append(fault | ({"path": path} if path else {}))
        return found

    def start(self, inject: bool) -> None:
        """Start the command; inject: with the fault."""
        faults = self.faults() if inject else []
        job: dict[str, Any] = {"patient": True} if "patient" in self.kind.job else {}
        if "stdout" in self.kind.job:
            job["stdout"] = self.kind.job["stdout"].replace("{dir}", str(self.folder))
        if self.wire:
            job |= {"netns": self.wire.paths, "env": ENVIRONMENT}
        job |= {"held": [self.fault.rank]} if inject and self.kind.held else {}
        argv = command(self.layout, self.kind)
        self.launcher.start(self.layout.ranks, argv, self.folder, fault=faults, limit=LIMIT, **job)

    def attend(self, first: bool) -> Result:
        """Wait for the run's end, look at it all the time, and do what is done from outside."""
        acted = not (first and self.kind.outside) or self.kind.outside.startswith("damage")
        seen = self.seen
        while not self.over():
            now = time.monotonic()
            self.look_for_steps(first, now)
            if first and seen.struck is None:
                self.look_for_strike()
            if not acted and self.all_wait():
                acted = True
                getattr(outside, self.kind.outside)(self)
                self.go()
            if seen.told is None and seen.struck is not None and self.says():
                seen.told = now
        result = self.result()
        self.look_for_steps(first, time.monotonic())
        if first:
            self.look_for_strike()
        if seen.told is None and self.says():
            seen.told = time.monotonic()
        return result

    def over(self) -> bool:
        """Return whether all ranks have ended, after a moment."""
        return self.launcher.over(0.03)

    def result(self) -> Result:
        """Return how they ended."""
        return self.launcher.wait(in_time=False)

    def look_for_steps(self, first: bool, now: float) -> None:
        """Note the first step that is done after the fault: by the second run, or by restarts."""
        if self.log.poll() and self.seen.recovered is None and not first:
            self.seen.recovered = now

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
        wanted = pattern(self.seen)
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
