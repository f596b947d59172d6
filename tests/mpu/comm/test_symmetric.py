# SPDX-License-Identifier: Apache-2.0
"""A shared buffer when something goes wrong; afterwards nothing of it stays behind.

The cases: a rank that is late or dead, a fork, no memory, ranks on several hosts, Ctrl-C.
"""

import copy
import gc
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from mpu import native
from mpu.comm import symmetric
from mpu.comm.collectives import (
    all_gather,
    all_reduce,
    barrier,
    by_process_group,
    group_of,
)
from mpu.comm.shared_memory import SharedMemoryTransport
from mpu.comm.symmetric import SymmetricBuffer, Unavailable
from mpu.comm.transport import Axis, CommunicationError
from mpu.comm.workspace import Workspace
from mpu.connect import share

WAIT = timedelta(seconds=20)


def own(comm: Any, wait: timedelta = WAIT) -> Axis:
    """Return an axis of all ranks with a workspace of its own."""
    axis = comm.grid().dp_cp
    workspace = Workspace(axis, wait)
    return replace(axis, transport=SharedMemoryTransport(group_of(axis), workspace))


def works(axis: Axis, n: int = 5) -> None:
    """Check a few collectives, more of them than there are slots."""
    for i in range(4):
        full, _ = all_gather(torch.full((n,), float(axis.rank + i)), axis)
        assert full.view(axis.size, n)[:, 0].tolist() == [float(r + i) for r in range(axis.size)]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:weft")


# A rank that is late


def late(comm) -> None:
    axis, rank_1 = own(comm, timedelta(seconds=0.3)), comm.rank == 1
    buffer, begin = axis.transport.workspace.buffer, time.monotonic()
    if not rank_1:
        with pytest.raises(CommunicationError) as caught:
            all_gather(torch.ones(3), axis)
        said = str(caught.value)
        assert said.startswith("all_gather over dp_cp (ranks [0, 1, 2]): "), said
        assert "no answer from rank 1 for 0 s, in shared memory" in said
        with pytest.raises(CommunicationError, match="no answer from rank 1 for 0 s, in here"):
            buffer.wait(1, 2, "here")
        buffer.close(1)
        with pytest.raises(CommunicationError, match="no answer from rank 1 .* in the turn before"):
            buffer.wait_closed(1, "the turn before")
        with pytest.raises(CommunicationError, match="no answer from every rank .* in a barrier"):
            buffer.barrier()
        assert time.monotonic() - begin >= 1.2  # four waits of 0.3 s
    barrier(comm.grid().dp_cp)  # through gloo: rank 1 lives, and says nothing in memory until then
    works(own(comm))


def test_a_wait_ends_at_its_deadline_and_names_the_late_rank(world):
    world(3).run(late)


# A forked child


def forked(comm) -> list[str]:
    axis, kept, said = own(comm), own(comm), []
    works(axis)
    _, handle = all_gather(torch.ones(2), kept, async_op=True)
    barrier(comm.grid().dp_cp)  # through gloo
    before = axis.transport.workspace.buffer.data.clone()
    buffer = axis.transport.workspace.buffer
    uses: list[Callable[[], Any]] = [
        lambda: all_gather(torch.ones(3), axis),
        lambda: all_gather(torch.ones(1 << 20), axis),  # grows
        lambda: all_reduce(torch.ones(3), axis),
        handle.wait,
        lambda: all_gather(torch.ones(1 << 20), kept),
        lambda: buffer.signal(0, 99),
        lambda: buffer.signal_all(99),
        lambda: buffer.close(99),
        lambda: buffer.wait(0, 0, ""),
        buffer.barrier,
    ]
    if comm.rank == 0:
        out, into = os.pipe()
        pid = os.fork()
        if pid == 0:
            for use in uses:
                try:
                    use()
                    os.write(into, b"nothing\n")
                except BaseException as error:
                    os.write(into, f"{type(error).__name__} {error}\n".encode())
            os._exit(0)
        os.close(into)
        said = open(out).read().splitlines()
        os.waitpid(pid, 0)
        assert len(said) == len(uses)
    assert torch.equal(buffer.data, before)
    barrier(comm.grid().dp_cp)
    handle.wait()
    works(axis)
    works(kept, 1 << 18)
    return said


def test_a_forked_child_is_refused_and_harms_nothing(world):
    said, _ = world(2).run(forked)
    for line in said:
        assert "Error" in line and "was forked from one that shares memory" in line, said
    assert sum(line.startswith("RuntimeError ") for line in said) >= 5


# Memory that cannot be had, or not be shared


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    """Let no file of this process grow further: memory without a name is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def too_large(comm) -> list[str]:
    axis, said = own(comm), []
    works(axis)
    with largest_file(1 << 20 if comm.rank == 0 else resource.RLIM_INFINITY):
        for _ in range(2):
            with pytest.raises(CommunicationError) as caught:
                all_gather(torch.ones(1 << 20), axis)
            said.append(str(caught.value))
            works(axis)
        with pytest.raises(Unavailable, match="cannot be allocated"):
            SymmetricBuffer(by_process_group(axis), 1 << 21, WAIT)
    works(axis, 1 << 18)
    return said


def test_growth_that_cannot_be_had_is_an_error_on_all_ranks(world):
    every = world(2).run(too_large)
    assert every[0] == every[1] and every[0][0] == every[0][1]
    assert "16 MiB of shared memory cannot be allocated: [Errno 27] File too large" in every[0][0]
    assert every[0][0].endswith("--no-shared-memory avoids it")


def shared_lines(comm, hosts: list[str], library: bool) -> list[str]:
    grid = copy.copy(comm.grid())
    host, load, reason = symmetric.host, native.load, native.reason
    symmetric.host = lambda: hosts[comm.rank]
    if not library and comm.rank == 1:
        native.load = lambda: None
        native.reason = lambda: "there is no compiler"
    try:
        lines = share(grid, WAIT)
        try:
            Workspace(grid.dp_cp, WAIT)
        except Unavailable as error:
            lines.append(str(error))
    finally:
        symmetric.host, native.load, native.reason = host, load, reason
    assert (not grid.dp_cp.symmetric) == (len(lines) == 2)
    works(grid.dp_cp)
    return lines


@pytest.mark.parametrize("hosts", ["aab", "aba"])
def test_ranks_on_several_hosts_stay_on_gloo(world, hosts):
    why = "the ranks are not all on one host (or in one container)"
    for lines in world(3).run(shared_lines, list(hosts), True):
        assert lines == [f"collectives of dp_cp (3 ranks): gloo; {why}", why]


def test_a_rank_without_the_library_keeps_all_on_gloo(world):
    for lines in world(3).run(shared_lines, list("aaa"), False):
        said = "collectives of dp_cp (3 ranks): gloo; there is no compiler"
        assert lines == [said, "there is no compiler"]
    for lines in world(3).run(shared_lines, list("aaa"), True):
        assert lines == ["collectives of dp_cp (3 ranks): shared memory"]


def share_elsewhere(comm) -> list[str]:
    """Share on a system that has neither memfd nor /proc."""

    def no_such_file() -> str:
        raise FileNotFoundError("/proc/sys/kernel/random/boot_id")

    grid = copy.copy(comm.grid())
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(symmetric.os, "memfd_create")
        patch.setattr(symmetric, "host", no_such_file)
        lines = share(grid, WAIT)
    works(grid.dp_cp)
    return lines


def test_other_systems_stay_on_gloo(world):
    for lines in world(2).run(share_elsewhere):
        assert lines == ["collectives of dp_cp (2 ranks): gloo; shared memory needs Linux"]


# What stays behind


def grown(comm, times: int) -> None:
    axis = own(comm)
    works(axis)
    gc.collect()  # else what an earlier test of this world left may go while we count
    before, maps = descriptors(), mappings()
    for i in range(times):
        works(axis, (i % 3 + 1) << 18)
        if i % 3 == 2:
            axis = own(comm)
    works(axis)
    assert (descriptors(), mappings()) == (before, maps)
    del axis
    assert (descriptors(), mappings()) < (before, maps)


def test_growth_leaves_no_descriptor_and_no_mapping(world):
    world(2).run(grown, 12)


