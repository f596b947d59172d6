# SPDX-License-Identifier: Apache-2.0
"""Keep the activity of this process, in words, and print slow activities of a run's start.

A start may wait for imports from a slow file system, for another process that builds an index, for
a checkpoint's files, or for late ranks. An activity of more than FIRST seconds gets a line on
stderr, and further lines at growing intervals, with its time so far and its limit, if any. A
thread of its own prints them, also during a wait in C++. They end with the first line of the log.
There is no cost where all activities are quick.

Rank 0 prints for all ranks. Another rank prints only what rank 0 cannot: that rank 0 itself has not
come, or that rank 0 waits for this rank. Only one such rank on a host prints.
"""

import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from mpu.launch import Launch

FIRST, LONGEST = 5.0, 300.0  # seconds until the first line, and at most between two lines
LATER = 1.5  # times FIRST: when another rank prints its activity, unless rank 0 has printed it
LOOK = 0.5  # seconds between two looks at the activity
IN_TURN = 0.02  # seconds that each rank of a host waits longer to print than the one before it

ROOT = Path(__file__).resolve().parents[2]
_PATHS = sysconfig.get_paths()
# paths of code that is neither Weft's nor the user's; a test that injects a fault counts as such
_FOREIGN = ("<", *(_PATHS[key] for key in ("stdlib", "purelib", "platlib")), f"{ROOT}/tests/")


def say(text: str) -> None:
    """Write a line to stderr in one piece, so that ranks on one terminal do not mix lines."""
    with suppress(OSError):  # the terminal is gone
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class Stage:
    """One activity. what: in words. since: time.monotonic() at its start. due: the seconds after
    which its next line is printed. told: a line was printed. outer: the activity it is a part of.

    now: returns the words of its line, "" for no line yet; None: `what`, and the line of code that
    runs. limit: seconds after which it ends in an error, 0 if unknown. aloud: returns whether
    another rank than 0 may print it; None: it may if rank 0 is there and waits. over: returns the
    words at its end. on_line: called once, after the first line.
    """

    __slots__ = (
        *("aloud", "due", "ended", "limit", "now", "on_line"),
        *("outer", "over", "since", "told", "what"),
    )

    def __init__(self, what: str, due: float, outer: "Stage | None" = None) -> None:
        self.what, self.since, self.due, self.told = what, time.monotonic(), due, False
        self.outer, self.ended = outer, False
        self.now: Callable[[], str] | None = None
        self.over: Callable[[], str] | None = None
        self.aloud: Callable[[], bool] | None = None
        self.on_line: Callable[[], None] | None = None
        self.limit = 0.0


class Activity:
    """The activity of this process's main thread. launch: which rank it is. tell: prints a line.

    others: returns where the other ranks are, "" if that is unknown or irrelevant. As a context
    manager it prints slow activities of the block, until `started` is called.
    """

    def __init__(self, launch: Launch | None = None, tell: Callable[[str], None] = say) -> None:
        self.launch = launch or Launch()
        self.others: Callable[[], str] = str
        self._tell, self._main = tell, threading.get_ident()
        self._stage = self._begun("start-up")
        self._done, self._thread = threading.Event(), threading.Thread()
        self._voice: socket.socket | None = None
        self.begun = self._began = self._spoke = time.monotonic()

    @classmethod
    def of_process(cls) -> "Activity":
        """Return the watched activity of this process, whose environment defines its rank."""
        launch = None
        with suppress(ValueError, OSError):  # the program reports these errors
            launch = Launch.from_env()
        return cls(launch).__enter__()

    @property
    def first(self) -> float:
        """Seconds after which rank 0 prints an activity."""
        return FIRST

    @property
    def what(self) -> str:
        """The current activity, in words; setting it begins another one."""
        return self._stage.what

    @what.setter
    def what(self, words: str) -> None:
        before, self._stage = self._stage, self._begun(words)
        if before.told:
            self._end(before)

    @contextmanager
    def doing(self, what: str) -> Iterator[Stage]:
        """Make this the activity of the block, as a part of the current one.

        Activities of other threads than the main one count only as long as a start is watched.
        """
        stage = self._begun(what, self._stage)
        if self._done.is_set() and threading.get_ident() != self._main:
            yield stage
            return
        alone = not self._thread.is_alive() and not self._done.is_set()
        if alone:
            self.__enter__()
        self._stage = stage
        try:
            yield stage
            if stage.told:
                self._end(stage)
        finally:
            stage.ended, top = True, self._stage
            while top.ended and top.outer is not None:  # threads may end in another order
                top = top.outer
                top.due = time.monotonic() - top.since + FIRST
            self._stage = top
            if alone:
                self._finish()
                self._done.clear()

    @contextmanager
    def waiting(
        self,
        what: str,
        now: Callable[[], str],
        *,
        limit: float,
        over: Callable[[], str],
        aloud: Callable[[], bool] | None = lambda: True,
        on_line: Callable[[], None] = lambda: None,
        after: float = 1.0,
    ) -> Iterator[None]:
        """Make a wait the activity of the block; see Stage. after: of the first line, in FIRST."""
        with self.doing(what) as stage:
            stage.now, stage.limit, stage.over = now, limit, over
            stage.aloud, stage.on_line, stage.due = aloud, on_line, after * FIRST
            yield

    def started(self) -> None:
        """Stop printing: the log has its first line, or rank 0 prints for all."""
        self._done.set()

    def __enter__(self) -> "Activity":
        if not self._thread.is_alive() and not self._done.is_set():
            self._began = self._spoke = time.monotonic()
            self._thread = threading.Thread(target=self._watch, name="slow start", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._finish()

    def _finish(self) -> None:
        self._done.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * LOOK)  # it may be blocked in a store that does not answer

    def _begun(self, what: str, outer: Stage | None = None) -> Stage:
        return Stage(what, FIRST if self.launch.rank == 0 else LATER * FIRST, outer)

    def _watch(self) -> None:
        while not self._done.wait(min(LOOK, FIRST / 4)):
            self._look()
        self._hush()

    def _look(self) -> None:
        """Print a line where one is due."""
        stage, now, first = self._stage, time.monotonic(), self.launch.rank == 0
        seconds, lasted = now - stage.since, now - self._began
        if 0 < stage.limit < seconds + FIRST / 2:  # its error will be raised soon
            return
        if seconds < stage.due:
            patience = min(max(FIRST, self._spoke - self._began), LONGEST)
            if first and stage.now is None and now - self._spoke >= patience:
                self._speak(f"{self._line(stage)}: {lasted:.0f} s since the start")
            return
        stage.due = seconds + FIRST
        line = self._line(stage) if first or self._aloud(stage) else ""
        own = stage.aloud is None  # of this rank's activity one rank of a host prints, rank 0 first
        if not line or not ((first and not own) or self._alone_on_host() or first):
            return
        if stage is not self._stage or self._done.is_set():
            return  # it has ended meanwhile
        stage.due = seconds + min(seconds, LONGEST)
        before, stage.told = stage.told, True
        limit = f" of {stage.limit:.0f} s" if stage.limit else ""
        waits = f"waited {seconds:.0f} s{limit}"
        length = f"{seconds:.0f} s so far" if stage.now is None else waits
        self._speak(f"{line}: {length}")
        if stage.on_line is not None and not before:
            stage.on_line()

    def _speak(self, text: str) -> None:
        self._spoke = time.monotonic()
        self._tell(f"{self._name()}{text}")

    def _line(self, stage: Stage) -> str:
        others = self.others() if stage.aloud is None else ""
        if stage.now is None:
            own = own_lines(sys._current_frames().get(self._main))
            line = f"{stage.what}, at {own[0]}" if own else stage.what
        else:
            line = stage.now()
        return f"{line}; {others}" if line and others else line

    def _name(self) -> str:
        launch = self.launch
        if launch.world == 1:
            return ""
        where = f" on {socket.gethostname()}" if launch.local_world < launch.world else ""
        return f"[rank {launch.rank}{where}] "

    def _end(self, stage: Stage) -> None:
        """Print the end of an activity that has had a line."""
        seconds = time.monotonic() - stage.since
        words = stage.over() if stage.over is not None else f"{stage.what}: done"
        self._hush()
        if words and not self._done.is_set():
            self._speak(f"{words}, after {seconds:.0f} s")

    def _aloud(self, stage: Stage) -> bool:
        return self._awaited() if stage.aloud is None else stage.aloud()

    def _awaited(self) -> bool:
        """Return whether anything listens at the rendezvous: rank 0 is there, and waits."""
        point = self.launch.point
        try:
            socket.create_connection((point.host, point.port), timeout=2.0).close()
            return True
        except (OSError, UnicodeError, OverflowError):
            return False

    def _alone_on_host(self) -> bool:
        """Return whether this is the rank that prints for its host. It holds the name of a socket,
        which the kernel frees if it dies. Without such names (not Linux), each rank prints.
        """
        if self._voice is not None or sys.platform != "linux":
            return True
        if self._done.wait(IN_TURN * self.launch.local_rank):  # mostly the lowest rank prints
            return False
        point = self.launch.point
        voice = socket.socket(socket.AF_UNIX)
        try:
            voice.bind(f"\0weft/{os.getuid()}/{point.port}/{point.host[:64]}")
        except OSError:
            voice.close()
            return False
        self._voice = voice
        return True

    def _hush(self) -> None:
        voice, self._voice = self._voice, None
        if voice is not None:
            voice.close()


def own_line(file: str, number: int, function: str) -> str:
    """Return "file:line (function)", or "" if the file belongs to a library."""
    if file.startswith(_FOREIGN) or "site-packages" in file:
        return ""
    return f"{file.removeprefix(f'{ROOT}/')}:{number} ({function})"


def own_lines(frame: FrameType | None) -> list[str]:
    """Return "file:line (function)" of each frame of our or the user's code, innermost first."""
    lines = []
    while frame is not None:
        code = frame.f_code
        lines.append(own_line(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return [line for line in lines if line]
