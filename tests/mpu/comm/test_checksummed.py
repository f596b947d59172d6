# SPDX-License-Identifier: Apache-2.0
"""Messages with checksums: the bits of the verbs stay, and no flipped bit gets through."""

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpu.comm import checksummed
from mpu.comm.checksummed import DamagedMessage
from mpu.comm.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    gather_bytes,
    reduce_scatter,
)
from mpu.comm.p2p import exchange, receive, send
from mpu.comm.transport import Axis, Label
from mpu.connect import checksum
from mpu.grid import Grid
from mpu.launch import Launch
from tests.faults.small_run import MODEL, weights
from tests.launcher import Launcher

VERBS = (
    "all_gather", "all_reduce", "maximum", "reduce_scatter", "all_to_all", "send", "exchange",
    "bytes",
)  # fmt: skip
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def axis_of(comm: Any, sealed: bool) -> Axis:
    """Return the axis of all ranks, of a grid of its own."""
    from datetime import timedelta

    grid = Grid(comm.size, launch=Launch(comm.rank, comm.size, comm.rank, comm.size))
    grid.backend = "gloo"
    grid.add_groups(torch.device("cpu"), timedelta(seconds=60))
    if sealed:
        checksum(grid)
    return grid.dp


def do(verb: str, axis: Axis, dtype: torch.dtype, seed: int, async_op: bool = False) -> Any:
    """Run a verb with each rank's own numbers; return the result."""
    label = Label("a test", "forward")
    torch.manual_seed(100 * seed + axis.rank)
    x = torch.randn(4 * axis.size, 3).to(dtype)
    into = torch.empty(2 * axis.size, 3, dtype=dtype)
    to, source = (axis.rank + 1) % axis.size, (axis.rank - 1) % axis.size
    if verb == "bytes":
        return gather_bytes(b"x" * (axis.rank + seed), axis)
    if verb == "all_gather":
        out, handle = all_gather(x, axis, async_op, label=label)
    elif verb == "all_reduce":
        out, handle = all_reduce(x, axis, async_op, label=label)
    elif verb == "maximum":
        out, handle = all_reduce(x, axis, async_op, op=dist.ReduceOp.MAX, label=label)
    elif verb == "reduce_scatter":
        out, handle = reduce_scatter(x, axis, async_op, label=label)
    elif verb == "all_to_all":
        out, handle = all_to_all(x, axis, async_op, label=label)
    elif verb == "exchange":
        out, handle = into, exchange(x[: len(into)], axis, to, source, into, label)
    else:
        sent = send(x, axis, to, label)
        out, handle = receive(tuple(x.shape), dtype, x.device, axis, source, label)
        try:
            handle.wait()
        finally:
            sent.wait()  # a send that is dropped on the way never arrives
    handle.wait()
    return out.clone()


def same_bits(comm: Any) -> list[str]:
    """Name the verbs whose results differ from those without checksums."""
    plain, sealed, wrong = axis_of(comm, False), axis_of(comm, True), []
    for verb in VERBS:
        for dtype in DTYPES:
            for async_op in (False, True):
                a, b = (do(verb, axis, dtype, 1, async_op) for axis in (plain, sealed))
                if a != b if verb == "bytes" else not torch.equal(a, b):
                    wrong.append(f"{verb} {dtype}")
    return wrong


def test_the_verbs_do_what_they_do_without(world: Any) -> None:
    assert world(2).run(same_bits) == [[], []]


def damage(comm: Any, flips: int, seed: int) -> list[tuple[int, str, list[str]]]:
    """Flip a bit of what one rank sealed, once for each case; return who told what."""
    axis, rng, told = axis_of(comm, True), random.Random(seed), []
    seal = checksummed.seal
    for number in range(flips):
        verb, victim = rng.choice(VERBS), rng.randrange(comm.size)
        dtype, draw, hit = rng.choice(DTYPES), rng.random(), []

        def spoilt(*args: Any, draw: float = draw, hit: list[int] = hit) -> torch.Tensor:
            wire = seal(*args)
            if not hit:
                bit = int(draw * 8 * len(wire))
                wire[bit // 8] ^= 1 << bit % 8
                hit.append(bit)
            return wire

        if comm.rank == victim:
            checksummed.seal = spoilt
        try:
            do(verb, axis, dtype, number)
            found = ""
        except DamagedMessage as error:
            found = str(error)
        finally:
            checksummed.seal = seal
        told.append((victim, verb, found))
    return told


def check_damage(world: Any, size: int, flips: int, seed: int) -> None:
    every = world(size).run(damage, flips, seed)
    for number in range(flips):
        victim, verb, _ = every[0][number]
        found = [told[number][2] for told in every if told[number][2]]
        assert found, f"{verb} of rank {victim}: not found"
        assert all(f"rank {victim}'s" in text and "over dp" in text for text in found)
        if verb in ("all_gather", "all_reduce", "maximum"):
            assert len(found) == size, "every rank was given the part"


@pytest.mark.parametrize(
    ("size", "flips"),
    [(2, 40), pytest.param(3, 300, marks=pytest.mark.prove)],
)
def test_every_flipped_bit_is_found_and_its_sender_named(world: Any, size: int, flips: int) -> None:
    check_damage(world, size, flips, seed=size)


LAYOUTS = [
    pytest.param("--pipeline-model-parallel-size 2", marks=pytest.mark.prove),
    pytest.param("--tensor-model-parallel-size 2 --sequence-parallel", marks=pytest.mark.prove),
    pytest.param("--zero-stage 3 --bf16", marks=pytest.mark.prove),
    pytest.param("--zero-stage 1 --async-save", marks=pytest.mark.prove),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_has_the_same_bits(launcher: Launcher, layout: str) -> None:
    flags = [flag for flag in MODEL if flag != "--sequence-parallel"]
    flags += ["--global-batch-size", "4", "--save", "{dir}/saved", *layout.split()]
    runs = [launcher.run(2, [*flags, *more]) for more in ([], ["--checksum-messages"])]
    for result in runs:
        assert result.codes == [0, 0], result.said(0)
    assert "each with its XXH3 checksum" in runs[1].said(0, "out")
    assert weights(runs[0]) == weights(runs[1]) and runs[0].losses() == runs[1].losses()
