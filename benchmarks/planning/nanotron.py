# SPDX-License-Identifier: Apache-2.0
"""Predict the memory that nanotron's runs of the Ultra-Scale Playbook reserve.

A step takes and frees the tensors of nanotron in their order, of one pipeline rank, from an
allocator. Read in huggingface/nanotron, branch nouamane/bench2, with which the table's runs were
made: models/llama.py, optim/gradient_accumulator.py, optim/zero.py,
parallel/tensor_parallel/functional.py, distributed.py. The table's memory is what the first
pipeline rank has reserved after three steps.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from benchmarks.planning.allocator import MIB, Allocator, Taken
from tools.planner.published import GIB
from tools.planner.runs import Array, Runs

Tape = list[tuple[list[Taken], Taken]]  # of each layer: what it saves, and its input
Head = tuple[Taken, Taken] | None

QUEUE = 1024  # kernels that CUDA queues
FORWARD, BACKWARD = 10, 20  # kernels of a quarter of a layer
BUCKET = 25 * MIB  # ddp_bucket_cap_mb
WORKSPACE = 32 * MIB  # of cuBLAS on an H100, of forward's thread and of backward's


@dataclass(frozen=True)
class Stage:
    """A pipeline rank. behind: ranks after it.

    ahead: whether its host runs ahead of the device where messages let it.
    """

    layers: int
    hidden: int
    ffn: int
    vocab: int
    tokens: int
    micro_batch: int
    micro_batches: int
    tp: int
    dp: int
    zero: int
    first: bool
    last: bool
    tied: bool
    behind: int
    ahead: bool


class Step:
    """The tensors of a rank's steps. Names of tensors are those of the layers that make them."""

    def __init__(self, stage: Stage, limit: float) -> None:
        self.s = stage
        self.memory = Allocator(limit)
        self.one = stage.tokens * stage.hidden  # numbers of whole activations
        self.own = self.one // stage.tp
        self.wide = stage.tokens * stage.ffn // stage.tp
        self.rows = stage.vocab // stage.tp
        self.buffers: set[str] = set()

    def take(self, numbers: int, width: int = 2) -> Taken:
        return self.memory.take(max(1, numbers) * width)

    def give(self, *taken: Taken, elsewhere: bool = False) -> None:
        for each in taken:
            self.memory.give(each, elsewhere and self.s.tp > 1)

    def matrices(self) -> list[int]:
        """Return the numbers in each matrix of the rank."""
        s = self.s
        h, f, tp = s.hidden, s.ffn, s.tp
        ends = [self.rows * h] * (s.first + s.last - (s.first and s.last and s.tied))
        return ends + [3 * h * h // tp, h * h // tp, 2 * h * f // tp, f * h // tp] * s.layers

    def set_up(self) -> None:
        s, matrices = self.s, self.matrices()
        for size in (WORKSPACE, WORKSPACE):
            self.memory.take(size)
        for numbers in matrices:
            self.take(numbers)
        if s.dp > 1 and not s.zero:  # DistributedDataParallel's buckets
            bucket = 0
            for numbers in reversed(matrices):
                bucket += 2 * numbers
                if bucket >= BUCKET:
                    self.memory.take(bucket)
                    bucket = 0
            if bucket:
                self.memory.take(bucket)
        self.take(sum(matrices), 4)  # gradients in float32
        self.take(sum(matrices) // (s.dp if s.zero else 1), 4)  # weights in float32

    def update(self, first: bool) -> None:
        s, matrices = self.s, self.matrices()
        share = s.dp if s.zero else 1
        if first:
            for numbers in matrices:
                self.take(numbers // share, 4)
                self.take(numbers // share, 4)
        if s.zero and s.dp > 1:  # all_gather_coalesced copies weights into one part a rank, and one
            total = sum(matrices)
            parts = [self.take(total // s.dp) for _ in range(s.dp + 1)]
            self.give(*parts, self.take(total))

    def buffer(self, name: str) -> None:
        """Have one of the gathers' two buffers, which stay."""
        if self.s.tp > 1 and name not in self.buffers:
            self.buffers.add(name)
            self.take(self.one)

    def scattered(self, whole: Taken) -> Taken:
        """Reduce-scatter whole activations, on NCCL's stream."""
        if self.s.tp == 1:
            return whole
        part = self.take(self.own)
        self.give(whole, elsewhere=True)
        return part

    def layer(self) -> tuple[list[Taken], Taken]:
        """Run a layer forward: return what it saves and its output."""
        memory, take, own, wide = self.memory, self.take, self.own, self.wide
        norm = take(own)
        self.buffer("forward")
        memory.clock += FORWARD
        qkv, copy, joined, kv = take(3 * own), take(3 * own), take(2 * own), take(2 * own)
        self.give(joined)
        q = take(own)
        self.give(copy)
        memory.clock += FORWARD
        context = take(own)
        if self.s.micro_batch > 1:
            self.give(take(own))
        output = self.scattered(take(self.one))
        self.give(qkv)
        middle, second = take(own), take(own)
        memory.clock += FORWARD
        both, gate, product = take(2 * wide), take(wide), take(wide)
        down = take(self.one)
        memory.clock += FORWARD
        down = self.scattered(down)
        result = take(own)
        self.give(down, output, elsewhere=True)
        return [norm, q, kv, context, middle, second, both, gate, product], result

    def layer_back(
        self, saved: list[Taken], entry: Taken, gradient: Taken, weights: list[Taken]
    ) -> Taken:
        """Run a layer backward: return its input's gradient. weights: gets its matrices'."""
        memory, take, own, wide = self.memory, self.take, self.own, self.wide
        norm, q, kv, context, middle, second, both, gate, product = saved
        h, f, tp = self.s.hidden, self.s.ffn, self.s.tp
        self.buffer("backward")
        of_product = take(wide)
        weights.append(take(f * h // tp))
        self.give(product)
        memory.clock += BACKWARD
        of_gate, of_up = take(wide), take(wide)
        self.give(of_product, gate)
        of_silu = take(wide)
        self.give(of_gate)
        of_both = take(2 * wide)
        self.give(of_silu, of_up, both)
        of_second = take(self.one)
        weights.append(take(2 * h * f // tp))
        memory.clock += BACKWARD
        of_second = self.scattered(of_second)
        self.give(of_both, second)
        of_middle = take(own)
        self.give(of_second, elsewhere=True)
        self.give(middle)
        summed = take(own)
        self.give(of_middle, gradient)
        of_context = take(own)
        weights.append(take(h * h // tp))
        memory.clock += BACKWARD
        if self.s.micro_batch > 1:
            turned = take(own)
            self.give(of_context)
            of_context = turned
        of_q, of_kv = take(own), take(2 * own)
        self.give(take(own, 4))  # flash attention adds up the queries' gradient in float32
        self.give(of_context, context, q, kv)
        rotated_kv = take(2 * own)
        self.give(of_kv)
        rotated_q = take(own)
        self.give(of_q)
        stacked = take(3 * own)
        self.give(rotated_q, rotated_kv)
        of_qkv = take(3 * own)
        self.give(stacked)
        of_norm = take(self.one)
        weights.append(take(3 * h * h // tp))
        memory.clock += BACKWARD
        of_norm = self.scattered(of_norm)
        self.give(of_qkv, norm)
        of_entry = take(own)
        self.give(of_norm, elsewhere=True)
        self.give(entry)
        result = take(own)
        self.give(of_entry, summed)
        return result

    def forward(self) -> tuple[Tape, Taken, Head]:
        s = self.s
        if s.first and s.tp > 1:
            looked_up = self.take(self.one)
            masked = self.take(self.one)
            self.give(looked_up)
            entry = self.scattered(masked)
        else:
            entry = self.take(self.own)
        tape: Tape = []
        for _ in range(s.layers):
            saved, result = self.layer()
            tape.append((saved, entry))
            entry = result
        if not s.last:
            return tape, entry, None
        norm, tall = self.take(self.own), s.tokens * self.rows
        logits, float32 = self.take(tall), self.take(tall, 4)
        self.give(logits)
        exponents = self.take(tall, 4)
        self.give(float32)
        return tape, entry, (norm, exponents)

    def backward(self, tape: Tape, entry: Taken, head: Head) -> None:
        s = self.s
        weights: list[Taken] = []
        if head:
            norm, exponents = head
            of_logits = self.take(s.tokens * self.rows)
            self.give(exponents)
            of_norm = self.take(self.one)
            weights.append(self.take(self.rows * s.hidden))
            of_norm = self.scattered(of_norm)
            self.give(of_logits, norm)
            gradient = self.take(self.own)
            self.give(of_norm)
        else:
            gradient = self.take(self.own)
        self.give(entry)
        for saved, entry in reversed(tape):
            gradient = self.layer_back(saved, entry, gradient, weights)
        if s.first:
            if s.tp > 1:
                for _ in range(2):  # gathered, then masked
                    whole = self.take(self.one)
                    self.give(gradient)
                    gradient = whole
            weights.append(self.take(self.rows * s.hidden))
        self.give(gradient, *weights)

    def batch(self) -> None:
        """Run a step's micro-batches, 1F1B, as many as there are different ones.

        Without a pipeline the host runs ahead of the device. In one, a message that is received
        holds it; it still does where a message of the first rank finds the next one busy: from the
        third forward to the first backward.
        """
        s, memory = self.s, self.memory
        flight: deque[tuple[Tape, Taken, Head]] = deque()
        always = s.ahead and s.first and s.last
        for n in range(min(s.micro_batches, s.behind + 3)):
            lead = always or (s.ahead and s.first and 2 <= n <= s.behind)
            memory.ahead = QUEUE if lead else 0
            if not lead:
                memory.wait()
            flight.append(self.forward())
            memory.ahead = QUEUE if always else 0
            if len(flight) > s.behind:
                self._back(flight)
        while flight:
            self._back(flight)
        memory.wait()

    def _back(self, flight: deque[tuple[Tape, Taken, Head]]) -> None:
        if not self.memory.ahead:
            self.memory.wait()
        self.backward(*flight.popleft())


LOGIT = 10  # bytes: in bfloat16, in float32, and their exponents
OUTSIDE = 1.2 * GIB  # of a GPU: CUDA's context and NCCL's buffers
START = {"reserved_factor": 1.0, "reserved_gib": 0.0}  # of what `reserved` tells, and GiB more
STEPS = 2  # the first one makes the optimizer's state, the second has the fragments


@lru_cache(maxsize=1 << 15)
def reserved(stage: Stage, gpu: float) -> tuple[float, bool]:
    """Return the GiB that a rank reserves at most, and whether a GPU of so many GiB has them."""
    step = Step(stage, gpu * GIB - OUTSIDE)
    step.set_up()
    for n in range(STEPS):
        step.batch()
        step.update(first=n == 0)
    return step.memory.most / GIB, not step.memory.full


def memory(
    c: Mapping[str, float], r: Runs, gpu: Array, ahead: npt.NDArray[np.bool_]
) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """Return GiB of the first pipeline rank and of the fullest, and whether all ranks fit.

    c: START's constants. gpu: GiB of a GPU. ahead: whether the host runs ahead of the device.
    """
    cut = r.by_rank(r.cut)
    first, most, fits = np.zeros(len(r)), np.zeros(len(r)), np.ones(len(r), dtype=bool)
    for n in range(len(r)):
        place = int(r.head[n])
        for rank in (0, place):
            stage = Stage(
                layers=int(cut[n, rank]), hidden=int(r.hidden[n]), ffn=int(r.ffn[n]),
                vocab=int(r.vocab[n]), tokens=int(r.micro_batch[n] * r.sequence[n]),
                micro_batch=int(r.micro_batch[n]), micro_batches=int(r.micro_batches[n]),
                tp=int(r.tp[n]), dp=int(r.dp[n]), zero=int(r.zero[n]), first=rank == 0,
                last=rank == place, tied=bool(r.tied[n]), behind=int(r.pp[n]) - 1 - rank,
                ahead=bool(ahead[n]),
            )  # fmt: skip
            if rank and rough(stage) < most[n]:  # the end stage keeps less
                continue
            gib, enough = reserved(stage, float(gpu[n]))
            first[n] = first[n] if rank else gib
            most[n] = max(most[n], gib)
            fits[n] &= enough
    every = [c["reserved_factor"] * gib + c["reserved_gib"] for gib in (first, most)]
    return every[0], every[1], fits


def rough(s: Stage) -> float:
    """Return about the GiB of a rank, without fragments."""
    h, f = s.hidden, s.ffn
    numbers = (s.layers * (4 * h * h + 3 * h * f) + (s.first + s.last) * s.vocab * h) / s.tp
    kept = numbers * (8 + 12 / (s.dp if s.zero else 1))
    flight = min(s.micro_batches, s.behind + 1)
    saved = 2 * s.tokens * (8 * h + 4 * f) / s.tp * s.layers * flight
    return (kept + saved + s.last * LOGIT * s.tokens * s.vocab / s.tp) / GIB
