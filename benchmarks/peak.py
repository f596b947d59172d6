# SPDX-License-Identifier: Apache-2.0
"""Measure the peak memory of ranks from outside, without changes to the program (Linux).

The kernel keeps each process's largest resident memory (VmHWM in /proc/PID/status) and resets it
when "5" is written to /proc/PID/clear_refs. The peers reset and read it themselves, before their
last warm-up step. This module does the same for other processes.
"""

import subprocess
from collections.abc import Callable
from pathlib import Path


def ranks_of(launcher: int, script: str) -> list[int]:
    """Return the process ids of the launcher's children that run `script`, else the launcher's."""
    found = []
    for pid in _children(launcher):
        if any(word.endswith(script) for word in _read(pid, "cmdline").split("\0")):
            found.append(pid)
    return found or [launcher]


def watch(
    launcher: subprocess.Popen, script: str, due: Callable[[], bool], pause: float = 0.05
) -> dict[int, float]:
    """Wait for the launcher; return each rank's peak in megabytes since `due()` was first true.

    Ranks are read every `pause` seconds, so a peak just before their end may be missed.
    """
    peaks: dict[int, float] = {}
    since = False
    while True:
        try:
            launcher.wait(pause)
            return peaks
        except subprocess.TimeoutExpired:
            pass
        if not since:
            if not due():
                continue
            since = True
            peaks = {pid: 0.0 for pid in ranks_of(launcher.pid, script)}
            for pid in peaks:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
        for pid in peaks:
            peaks[pid] = max(peaks[pid], _peak(pid))


def _peak(pid: int) -> float:
    """Return VmHWM in megabytes; 0 for a process that has ended."""
    for line in _read(pid, "status").splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def _children(pid: int) -> list[int]:
    """Return the processes started by any thread of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in task.read_text().split()]
    return found


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""
