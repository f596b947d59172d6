# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of one host share, and flags by which they signal one another.

    rank 0                              rank 1
    write data                          wait(0, epoch)
    signal(1, epoch)        ->          read the data in place

Flags count epochs and are never reset (csrc/shared_memory.h). The memory has no name: rank 0 makes
it (memfd_create), and the other ranks open it through /proc/<pid>/fd. So a killed rank leaves
nothing behind, and a small /dev/shm does not matter. It needs Linux, one host and the native
library; otherwise `Unavailable` names what is missing. Collectives use it through
mpu/comm/workspace.py.
"""

import ctypes
import json
import mmap
import os
import secrets
import select
import time
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpu import native
from mpu.comm.collectives import gather_bytes
from mpu.comm.transport import Axis, CommunicationError, blocked

LINE = 64  # bytes of a flag
SPINS = 200  # polls of a flag before the wait sleeps: some microseconds
# the same if each rank has a core of its own: a sleep and a wake cost two system calls
OWN_CORE_SPINS = 5000
SLICE = 20_000_000  # nanoseconds of one sleep, after which the wait checks that peers are alive
LARGE = 1 << 20  # bytes from which a copy bypasses the caches
GRACE = 1.0  # seconds that a wait continues after a rank other than the awaited one has ended


class Unavailable(RuntimeError):
    """The ranks of an axis cannot share memory; the message gives the reason."""


@cache
def _library() -> ctypes.CDLL:
    library = native.load()
    assert library is not None
    i64, u32 = ctypes.c_int64, ctypes.c_uint32
    library.weft_signal.argtypes = [i64, i64, i64, u32]
    library.weft_signal.restype = None
    library.weft_wait.argtypes = [i64, i64, i64, u32, i64, i64]
    library.weft_wait.restype = i64
    library.weft_copy.argtypes = [i64, i64, i64]
    library.weft_copy.restype = None
    library.weft_arrive.argtypes = [i64, u32]
    library.weft_arrive.restype = u32
    return library


def copy(to: Tensor, x: Tensor) -> None:
    """Copy x into `to`, of the same shape; LARGE copies bypass the caches, up to twice as fast."""
    large = x.nbytes >= LARGE and to.dtype == x.dtype
    if large and to.is_contiguous() and x.is_contiguous():
        _library().weft_copy(to.data_ptr(), x.data_ptr(), x.nbytes)
    else:
        to.copy_(x)


class SymmetricBuffer:
    """`nbytes` of memory (data, uint8) mapped by all ranks of an axis on one host.

    All ranks create it together, over the axis' process group. flag(src, dst) holds the last epoch
    that src has ready for dst. A wait raises CommunicationError when a rank has died, or after
    `timeout`. ranks: number of ranks on this host, over all axes (0: unknown). Raises Unavailable,
    on all ranks, where the memory cannot be allocated or shared.
    """

    def __init__(self, axis: Axis, nbytes: int, timeout: timedelta, ranks: int = 0) -> None:
        self.axis, self.rank, self.size = axis, axis.rank, axis.size
        self.timeout = timeout.total_seconds()
        self._pid = os.getpid()
        lines = 4 + self.size + self.size * self.size
        control = -(-lines * LINE // 4096) * 4096  # token | barrier | closed | flags
        memory, pids = self._map(control + nbytes)
        self._peers = [_Life(pid) for pid in pids]
        own_core = self.size <= ranks <= len(os.sched_getaffinity(0))
        self._spins = OWN_CORE_SPINS if own_core else SPINS
        region = torch.frombuffer(memory, dtype=torch.uint8)
        self.data = region[control:]
        self._barrier = region.data_ptr() + 2 * LINE
        self._closed = self._barrier + 2 * LINE
        self.flags = self._closed + self.size * LINE  # address of flag(0, 0)

    def _map(self, nbytes: int) -> tuple[mmap.mmap, list[int]]:
        """Make the memory on rank 0, open it on the other ranks; return it and the ranks' pids."""
        fd, why, memory, token = -1, self._reason(), None, secrets.token_bytes(16)
        if self.rank == 0 and not why:
            try:
                fd = os.memfd_create("weft")
                os.posix_fallocate(fd, 0, nbytes)  # fail now, not by a SIGBUS at the first access
                memory = mmap.mmap(fd, nbytes)
                memory[: len(token)] = token
            except OSError as error:
                why = f"{nbytes / 2**20:.0f} MiB of shared memory cannot be allocated: {error}"
        here = "" if why else host()  # reads /proc, which only Linux has
        mine = dict(host=here, pid=self._pid, fd=fd, token=token.hex(), why=why)
        every = [json.loads(d) for d in gather_bytes(json.dumps(mine).encode(), self.axis)]
        why = next((answer["why"] for answer in every if answer["why"]), "")
        if not why and any(answer["host"] != here for answer in every):
            why = "the ranks are not all on one host (or in one container)"
        if self.rank and not why:
            try:
                fd = os.open(f"/proc/{every[0]['pid']}/fd/{every[0]['fd']}", os.O_RDWR)
                memory = mmap.mmap(fd, nbytes)
                if memory[: len(token)].hex() != every[0]["token"]:
                    why = "the memory that was opened is not rank 0's"
            except (OSError, ValueError) as error:
                why = f"rank 0's memory cannot be opened: {error}"
        every_why = gather_bytes(why.encode(), self.axis)
        if fd >= 0:
            os.close(fd)
        if why := next((text.decode() for text in every_why if text), ""):
            raise Unavailable(why)
        assert memory is not None
        return memory, [answer["pid"] for answer in every]

    def _reason(self) -> str:
        if not hasattr(os, "memfd_create"):
            return "shared memory needs Linux"
        return native.reason() if native.load() is None else ""

    def signal(self, dst: int, epoch: int) -> None:
        """Raise the flag for rank dst: the data written for it is ready."""
        self.refuse_fork()
        _library().weft_signal(self.flags + LINE * (self.rank * self.size + dst), 0, 1, epoch)

    def signal_all(self, epoch: int) -> None:
        """Raise the flags for all ranks: the data written for each is ready."""
        self.refuse_fork()
        first = self.flags + LINE * self.rank * self.size
        _library().weft_signal(first, LINE, self.size, epoch)

    def wait(self, src: int, epoch: int, what: str) -> None:
        """Wait until rank src's flag for this rank has reached the epoch."""
        first = self.flags + LINE * (src * self.size + self.rank)
        self._wait(first, 0, [src], epoch, what)

    def wait_all(self, epoch: int, what: str) -> None:
        """Wait until every rank's flag for this rank has reached the epoch."""
        first = self.flags + LINE * self.rank
        self._wait(first, LINE * self.size, range(self.size), epoch, what)

    def ready(self, epoch: int) -> bool:
        """Return at once whether every rank's flag for this rank has reached the epoch."""
        args = (self.flags + LINE * self.rank, LINE * self.size, self.size, epoch & 0xFFFFFFFF)
        return bool(_library().weft_wait(*args, 0, 0) == self.size)

    def close(self, epoch: int) -> None:
        """Notify all ranks that this one no longer reads that epoch or an earlier one."""
        self.refuse_fork()
        _library().weft_signal(self._closed + LINE * self.rank, 0, 1, epoch)

    def wait_closed(self, epoch: int, what: str) -> None:
        """Wait until every rank has closed the epoch."""
        self._wait(self._closed, LINE, range(self.size), epoch, what)

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.refuse_fork()
        generation = _library().weft_arrive(self._barrier, self.size)
        self._wait(self._barrier + LINE, 0, [-1], generation, "a barrier")

    def _wait(self, first: int, stride: int, ranks: Any, epoch: int, what: str) -> None:
        self.refuse_fork()
        if _library().weft_wait(first, stride, len(ranks), epoch & 0xFFFFFFFF, 0, 0) == len(ranks):
            return  # no wait: skip the overhead of recording one
        waits = self.axis.waits
        wait = None if waits is None else waits.of(self.axis.name, self.axis.ranks, what)
        with blocked(waits, wait):
            self._until(first, stride, ranks, epoch, what)

    def _until(self, first: int, stride: int, ranks: Any, epoch: int, what: str) -> None:
        call = _library().weft_wait
        args, count = (first, stride, len(ranks), epoch & 0xFFFFFFFF), len(ranks)
        if (there := call(*args, self._spins, SLICE)) == count:
            return
        begin, alone = time.monotonic(), 0.0
        while there < count:
            dead = [r for r, life in enumerate(self._peers) if life.over()]
            now, late = time.monotonic(), ranks[there]
            if dead and (there := call(*args, 0, 0)) < count:  # it may have signalled and left
                alone = alone or now
                late = ranks[there]
                if late in dead or now - alone > GRACE:
                    who = late if late in dead else dead[0]
                    name = f"rank {self.axis.ranks[who]}"
                    raise CommunicationError(f"{name} has ended; this rank waited in {what}")
            if now - begin > self.timeout:
                name = f"rank {self.axis.ranks[late]}" if late >= 0 else "every rank"
                raise CommunicationError(
                    f"no answer from {name} for {self.timeout:.0f} s, in {what}"
                )
            there = call(*args, 0, SLICE)

    def refuse_fork(self) -> None:
        """Raise RuntimeError in a forked child of the process that made the buffer."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this process was forked from one that shares memory with other ranks, and may "
                "not use this memory: start it with multiprocessing's method spawn"
            )


class _Life:
    """Detect that a process has ended, even if its parent has not reaped it yet (a zombie)."""

    def __init__(self, pid: int) -> None:
        self._poll = None
        self._fd = -1
        try:
            self._fd = os.pidfd_open(pid)
        except OSError:  # it has ended, or Linux before 5.3: only the timeout detects its death
            return
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def over(self) -> bool:
        return self._poll is not None and bool(self._poll.poll(0))

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def host() -> str:
    """Return a text that is equal for processes that see one another in /proc; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.getuid()}"
    except OSError:
        return ""
