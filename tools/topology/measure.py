# SPDX-License-Identifier: Apache-2.0
"""Measure links: alpha and beta of pairs of ranks.

alpha: half the fastest of many round trips of a few bytes. beta: the rate at which the messages of
a stream arrive at the receiver, after its first quarter, so that it includes neither a connection's
slow start nor the latency. It is the median slope over pairs of arrivals (Theil and Sen), so that a
short delay of a rank has little effect, and the median of several streams.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from torch import Tensor

from mpu.comm.collectives import all_gather, barrier
from mpu.comm.p2p import receive, send
from mpu.comm.transport import Axis, Handle
from tools.topology.levels import Matrix

TRIPS = 40  # round trips for one alpha
STREAMS = 5
PARTS = 32  # messages of a stream
LEAST, MOST = 1 << 18, 1 << 28  # bytes of a stream
LONG = 0.4  # seconds: a stream is doubled until it takes this long, or has MOST bytes


def rounds(n: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of disjoint pairs in which each two of n ranks meet once."""
    seats = [*range(n), -1] if n % 2 else list(range(n))
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], seats[half:][::-1], strict=True)
        yield [(min(pair), max(pair)) for pair in pairs if min(pair) >= 0]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def slope(at: Sequence[float]) -> float:
    """Return the median seconds per arrival, over pairs that are at least half of all apart."""
    number = np.arange(len(at))
    later, earlier = np.nonzero(number[:, None] - number[None, :] >= len(at) // 2)
    times = np.asarray(at)
    return float(np.median((times[later] - times[earlier]) / (later - earlier)))


@dataclass
class Prober:
    """Measures along an axis of all ranks. device: of the tensors."""

    axis: Axis
    device: torch.device

    def _done(self, handle: Handle) -> None:
        """Wait until a message is sent or received, on a GPU too."""
        handle.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _send(self, x: Tensor, to: int) -> None:
        self._done(send(x, self.axis, to))

    def _receive(self, count: int, source: int) -> None:
        self._done(receive((count,), torch.uint8, self.device, self.axis, source)[1])

    def _bytes(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.uint8, device=self.device)

    def pair(self, one: int, other: int) -> tuple[float, float, float]:
        """Return alpha, and beta each way, of two ranks, on both. Only these two ranks call it."""
        mine, ping = self.axis.rank, self._bytes(8)
        peer = other if mine == one else one
        trips = []
        for _ in range(TRIPS):
            began = time.perf_counter()
            if mine == one:
                self._send(ping, peer)
                self._receive(8, peer)
            else:
                self._receive(8, peer)
                self._send(ping, peer)
            trips.append(time.perf_counter() - began)
        # the second rank's trips include the first one's time between two trips
        there = self._rate(one, other)
        back = self._rate(other, one)
        return self._share(one, other, min(trips) / 2), there, back

    def _share(self, sender: int, other: int, number: float) -> float:
        """Send a number from one rank of a pair to the other; return it on both."""
        if self.axis.rank == sender:
            self._done(send(torch.tensor([number], dtype=torch.float64, device=self.device),
                            self.axis, other))  # fmt: skip
            return number
        got, handle = receive((1,), torch.float64, self.device, self.axis, sender)
        self._done(handle)
        return float(got.item())

    def _rate(self, source: int, target: int) -> float:
        """Return the bytes per second from one rank to another, on both."""
        size, found = LEAST, list[float]()
        while len(found) < STREAMS:
            rate, seconds = self._stream(source, target, size)
            rate, seconds = (self._share(target, source, x) for x in (rate, seconds))
            if seconds > LONG or size >= MOST:
                found.append(rate)
            else:
                size *= 2
        return median(found)

    def _stream(self, source: int, target: int, size: int) -> tuple[float, float]:
        """Send PARTS messages of `size` bytes in total; return the rate and the total seconds.

        Both are valid at the receiver only.
        """
        part = size // PARTS
        if self.axis.rank == source:
            x = self._bytes(part)
            for handle in [send(x, self.axis, target) for _ in range(PARTS)]:
                self._done(handle)
            return 0.0, 0.0
        handles = [
            receive((part,), torch.uint8, self.device, self.axis, source)[1] for _ in range(PARTS)
        ]
        began, at = time.perf_counter(), list[float]()
        for handle in handles:
            self._done(handle)
            at.append(time.perf_counter())
        return part / max(slope(at[PARTS // 4 :]), 1e-12), at[-1] - began

    def all_pairs(self, members: Sequence[int], at_once: int) -> tuple[Matrix, Matrix]:
        """Return alpha and beta of each two of some ranks, on every rank. All ranks call it.

        at_once: pairs that are measured at a time.
        """
        n, mine = len(members), self.axis.rank
        alpha, beta = np.zeros((n, n)), np.zeros((n, n))
        for pairs in rounds(n):
            for first in range(0, len(pairs), at_once):
                for one, other in pairs[first : first + at_once]:
                    if mine in (members[one], members[other]):
                        wait, there, back = self.pair(members[one], members[other])
                        if mine == members[one]:
                            alpha[one, other] = alpha[other, one] = wait
                            beta[one, other], beta[other, one] = there, back
                barrier(self.axis, self.device)
        both = torch.from_numpy(np.stack([alpha, beta])).to(self.device)
        every = all_gather(both[None], self.axis)[0].sum(0).cpu().numpy()  # others have 0
        return every[0], every[1]
