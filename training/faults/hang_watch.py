# SPDX-License-Identifier: Apache-2.0
"""Determine whether this rank makes progress, and where it is if it does not.

The monitor's thread calls `status()` at each beat; rank 0 (hang_detector.py) compares the results
of all ranks. A rank makes progress when its action changes, when a wait for other ranks ends, and,
in set-up, a load and a save, or while it waits for a save in any phase, when it reads or writes a
MiB. A rank has a limit in each phase:
FACTOR times the longest of the phase's last times, and no less than `floor`. A phase that has not
been measured has no limit, so set-up, the first step, the first evaluation and the first save are
exempt.

If Python itself is blocked (a library holds the GIL), no thread of this process can report. Then
faulthandler, which is written in C, writes the stacks into memory that the ranks of this host can
read (training/faults/process.py), and finally an alarm of the kernel ends the process.
"""

import math
import signal
import sys
import threading
import time
import traceback
from collections import deque
from types import FrameType
from typing import Any

from mpu.comm.waits import Waits
from mpu.torch_private import nccl_record
from training.faults.activity import own_lines, say
from training.faults.process import Dump

FACTOR = 10.0
WINDOW = 20  # last times of a phase that are kept
QUIET = 1.0  # seconds without progress after which a status has the rank's place
BYTES = 1 << 20  # read or written: this much is progress
IN_FILES = ("set-up", "load", "save")  # phases in which files are read or written
LATE = 5.0  # seconds after the deadline at which the kernel's alarm ends the process
FRAMES = 12  # of our own code, in a report

# where the main thread waits for a thread of its own: (file, that thread's name)
_HELPERS = (("training/data/", "weft-loader"), ("training/checkpoint/stage.py", "save"))


class HangWatch:
    """The progress of this rank and its limits. The rank calls `enter`, the monitor's thread calls
    the rest.

    waits: of the rank's thread that is watched (None: a rank without peers, this thread). floor:
    the least limit, in seconds. deadline: seconds without progress after which the run ends in any
    phase; hang_timeout: after set-up (None: the deadline).
    """

    def __init__(
        self,
        waits: Waits | None = None,
        deadline: float = math.inf,
        hang_timeout: float | None = None,
        *,
        floor: float = 30.0,
    ) -> None:
        self.waits, self.deadline, self.hang_timeout = waits or Waits(), deadline, hang_timeout
        self.floor = floor
        self.phase, self._durations = "set-up", dict[str, deque[float]]()
        self._entered = self._moved = self._queried = time.monotonic()
        self._action, self._bytes, self._unsure = "", 0, 0.0
        self.dump = Dump(self.waits.thread)
        self._lock, self._over = threading.Lock(), False

    def enter(self, phase: str) -> None:
        """Begin a phase: "data", "step", "evaluation", "save", "load"."""
        now = time.monotonic()
        if self.phase != "set-up":
            self._durations.setdefault(self.phase, deque(maxlen=WINDOW)).append(now - self._entered)
        self.phase, self._entered = phase, now

    def limit(self) -> float | None:
        """Return the seconds that this phase may make no progress, None if not known yet."""
        durations = self._durations.get(self.phase)
        return max(self.floor, FACTOR * max(durations)) if durations else None

    def patience(self, silence: float) -> float:
        """Return the seconds of silence after which a rank counts as lost. silence: in set-up."""
        return silence if self.phase == "set-up" else min(silence, self.hang_timeout or silence)

    def status(self, action: str, beat: float) -> dict[str, Any]:
        """Return this rank's status for rank 0. action: the rank's. beat: seconds between calls."""
        now = time.monotonic()
        if action is not self._action:  # a new one, even with the same words
            self._action, self._moved = action, now
            self._unsure = min(now - self._queried, 2 * beat)
        if now - self._queried > 5 * beat + QUIET:
            self._moved = now  # this process or this thread was stopped: measure anew
        self._queried = now
        wait, moved = self.waits.now, max(self._moved, self.waits.moved)
        stuck = now - moved
        if stuck > QUIET and (self.phase in IN_FILES or self.place()[0] == "checkpoint"):
            done = _bytes_moved()
            if done > self._bytes + BYTES:
                self._bytes, self._moved, stuck = done, now, 0.0
        if stuck < QUIET:
            return {"phase": self.phase, "stuck": stuck}
        kind, line, _ = self.place()
        if wait is not None and wait is self.waits.now:
            kind = "wait"
        return {
            "phase": self.phase,
            "stuck": stuck,
            "unsure": self._unsure if moved > self.waits.moved else 0.0,
            "limit": self.limit(),
            "wait": wait.pack() if wait is not None and kind == "wait" else None,
            "started": dict(self.waits.started),
            "kind": kind,
            "line": line,
        }

    def place(self) -> tuple[str, str, list[str]]:
        """Return the kind of place where the main thread is, its line, and our frames there."""
        return place_of(sys._current_frames(), self.waits.thread, self.phase)

    def stacks(self) -> str:
        """Return the stacks of the main thread and of the threads that it may be waiting for."""
        frames, parts = sys._current_frames(), []
        helpers = tuple(name for _, name in _HELPERS)
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            busy = thread.name.startswith(helpers) and own_lines(frame)
            if frame is not None and (busy or thread.ident == self.waits.thread):
                lines = "".join(traceback.format_stack(frame))
                parts.append(f"stack of the thread {thread.name}:\n{lines}")
        return ("".join(parts) + flight_recorder()).rstrip()

    def report(self, rank: int, text: str) -> str:
        """Write the stacks to stderr, on other ranks than 0 below rank 0's text; return the lines
        of our code.
        """
        say(f"[rank {rank}] {text}\n{self.stacks()}" if rank else self.stacks())
        return " <- ".join(self.place()[2])

    def arm(self, silence: float, several: bool) -> None:
        """Make C code report and end this process unless Python calls this again in time.

        silence: seconds after which the other ranks count this one as lost. several: there are
        other ranks; the stacks of a single rank go to stderr, and only --hang-timeout ends it,
        since a user may stop and continue it.
        """
        with self._lock:
            if self._over:
                return
            if several:
                # set-up's silence is longer, but a step may begin before this is called again
                self.dump.arm(min(silence, self.hang_timeout or silence) / 2)
                end = min(self.deadline, self.hang_timeout or self.deadline) + LATE
                if end < math.inf:
                    signal.setitimer(signal.ITIMER_REAL, max(end, silence + LATE))
            elif self.hang_timeout is not None:
                self.dump.arm(self.hang_timeout + LATE / 2, end=True)

    def disarm(self) -> None:
        """Undo arm() and prevent further calls of it."""
        with self._lock:
            self._over = True
            self.dump.disarm()
            signal.setitimer(signal.ITIMER_REAL, 0)


def place_of(frames: dict[int, FrameType], thread: int, phase: str) -> tuple[str, str, list[str]]:
    """Return where a thread is: the kind of place, its line of our code, and our frames.

    The kinds: "data", "checkpoint", "evaluation", "set-up", "communication" (but in no recorded
    wait) and "compute". The place of a thread that waits for its helper thread is the helper's.
    """
    own = own_lines(frames.get(thread))
    for where, name in _HELPERS:
        if own and own[0].startswith(where):
            helpers = (t.ident for t in threading.enumerate() if t.name.startswith(name))
            stacks = (own_lines(frames.get(ident or 0)) for ident in helpers)
            own = next((stack for stack in stacks if stack), []) + own
    if own and own[0].startswith("mpu/comm/"):
        kind = "communication"
    elif phase == "data" or any(line.startswith("training/data/") for line in own):
        kind = "data"
    elif phase in ("load", "save") or any(line.startswith("training/checkpoint/") for line in own):
        kind = "checkpoint"
    else:
        kind = "compute" if phase == "step" else phase
    return kind, own[0] if own else "code that is not Python", own[:FRAMES]


def _bytes_moved() -> int:
    """Return the bytes that this process has read and written, 0 if they are not known."""
    try:
        with open("/proc/self/io") as file:
            pairs = (line.split(":") for line in file)
            return sum(int(n) for key, n in pairs if key in ("rchar", "wchar", "read_bytes"))
    except (OSError, ValueError):
        return 0


def flight_recorder() -> str:
    """Return NCCL's record of unfinished collectives, "" if there is none."""
    dump = nccl_record()
    if dump is None:
        return ""
    try:
        text = dump(includeCollectives=True, onlyActive=True)
    except (RuntimeError, TypeError) as error:
        return f"NCCL's flight recorder cannot be read: {error}\n"
    text = text.decode() if isinstance(text, bytes) else text
    return f"NCCL's flight recorder, unfinished collectives: {text}\n"
