# SPDX-License-Identifier: Apache-2.0
"""Inspect another rank's process on this host: whether it is stopped, and where it is blocked.

A rank that sends no heartbeat cannot report why. Its peers on the same host can: the kernel shows
whether it is stopped, and faulthandler has written its stacks into memory (Dump) that they open
through /proc. They also kill it, since a signal that Python handles would not end it.
"""

import faulthandler
import os
import re
import signal
from pathlib import Path
from typing import Any

from mpu.comm.symmetric import host
from training.faults.activity import own_line

LIMIT = 1 << 16  # bytes of a dump that are read
NAME = "weft-stacks"  # the name of a dump's memory in /proc
_FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class Dump:
    """Anonymous memory into which faulthandler writes all stacks of this process.

    thread: the identifier of the main thread.
    """

    def __init__(self, thread: int) -> None:
        self.thread, self._fd = thread, -1

    def arm(self, seconds: float, end: bool = False) -> None:
        """Write the stacks after these seconds, unless this is called again before.

        end: write them to stderr, then end the process with exit code 1.
        """
        if end:
            faulthandler.dump_traceback_later(seconds, exit=True)
        elif self._open() >= 0:
            os.ftruncate(self._fd, 0)
            os.lseek(self._fd, 0, os.SEEK_SET)
            faulthandler.dump_traceback_later(seconds, file=self._fd)

    def _open(self) -> int:
        if self._fd < 0 and hasattr(os, "memfd_create"):
            self._fd = os.memfd_create(NAME)
        return self._fd

    def disarm(self) -> None:
        """Cancel the dump and close its memory."""
        faulthandler.cancel_dump_traceback_later()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def address(self) -> dict[str, Any]:
        """Return the identifiers of this process and of its dump, for `Process`."""
        pid = os.getpid()
        return {
            "host": host(),
            "pid": pid,
            "began": _stat(pid)[1],
            "fd": self._open(),
            "thread": self.thread,
        }


class Process:
    """A rank's process, as its peers see it. address: that of its Dump.

    here: it runs on this host. gone: it ran on this host, and has ended.
    """

    def __init__(self, address: dict[str, Any]) -> None:
        self._pid, self._fd = int(address.get("pid", 0)), int(address.get("fd", -1))
        self._thread = int(address.get("thread", 0))
        began = str(address.get("began", ""))
        self.here = bool(began) and address.get("host") == host() and self._pid > 0
        state, since = _stat(self._pid) if self.here else ("", "")
        other = since not in ("", began)  # the process id has been reused
        ended = other or state in ("Z", "X") or not Path(f"/proc/{self._pid}").exists()
        self.gone = self.here and ended
        self.here = self.here and since == began

    def state(self) -> str:
        """Return the kernel's letter: R runs, S sleeps, D waits for a disk, T is stopped; or ""."""
        return _stat(self._pid)[0] if self.here else ""

    def lines(self) -> list[str]:
        """Return "file:line (function)" of our code in the main thread, innermost first."""
        if not self.here or self._fd < 0:
            return []
        path = f"/proc/{self._pid}/fd/{self._fd}"
        try:
            if NAME not in os.readlink(path):  # disarmed: the descriptor may have been reused
                return []
            with open(path, "rb") as file:
                text = file.read(LIMIT).decode(errors="replace")
        except OSError:
            return []
        for block in re.split(r"\n(?=Thread |Current thread )", text):
            found = re.search(r"hread (0x[0-9a-f]+)", block)
            if found and int(found[1], 16) == self._thread:
                frames = (_FRAME.match(line) for line in block.splitlines())
                lines = [own_line(m[1], int(m[2]), m[3]) for m in frames if m]
                return [line for line in lines if line]
        return []

    def end(self) -> None:
        """Kill the process, if it is on this host and is not the current one."""
        if self.here and self._pid != os.getpid():
            try:
                os.kill(self._pid, signal.SIGKILL)
            except OSError:
                pass  # it has ended, or belongs to another user


def _stat(pid: int) -> tuple[str, str]:
    """Return a process's state and its start time (ticks after boot), or two empty strings."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""
