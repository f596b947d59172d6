# SPDX-License-Identifier: Apache-2.0
"""A bit that flips in replicated state is found and its rank named; sound replicas are equal."""

import random
from typing import Any

import pytest
import torch

import pretrain_llama
from mpu import native
from mpu.zero import digest
from mpu.zero.digest import digest_of
from mpu.zero.replica_check import ReplicaCheck, verdict
from tests.model.moe_twin import FILE, SPARSE
from tests.model.twin import config_of, micro_batches
from tests.sampling import sampled
from training.faults.monitor import FailureMonitor

SIZES = dict(sp=False, recompute=None, tied=True, m=2, rows=8, clip=0.1, lr=1e-2, bucket=500)
SIZES |= dict(dtype="float32", tp=1)
EXPERTS = dict(file=FILE, moe=SPARSE)
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp 2": dict(dp=2),
    "dp 2, bf16": dict(dp=2, dtype="bfloat16"),
    "dp 2, ZeRO 1": dict(dp=2, zero=1, gather=True),
    "dp 2, ZeRO 2": dict(dp=2, zero=2, dtype="bfloat16"),
    "tp 2": dict(dp=1, tp=2),
    "tp 2, sequence parallel": dict(dp=1, tp=2, sp=True),
    "tied pp 2": dict(dp=1, pp=2),
    "dp 4": dict(dp=4),
    "dp 4, ZeRO 1": dict(dp=4, zero=1),
    "tp 2 x dp 2": dict(dp=2, tp=2),
    "dp 4, two instances, ZeRO 3": dict(dp=4, zero=3, instances=2),
    "tied pp 2 x dp 2, bf16": dict(dp=2, pp=2, dtype="bfloat16"),
    "dp 4, ep 2": dict(dp=4, ep=2, **EXPERTS),
    "dp 4, ep 2, ZeRO 1": dict(dp=4, ep=2, zero=1, dispatch="alltoall", **EXPERTS),
    "tp 2 x dp 2, ep 2": dict(dp=2, tp=2, sp=True, ep=2, **EXPERTS),
}
INT = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def flip(values: torch.Tensor, at: int, bit: int) -> None:
    """Flip one bit of one number, in place; a second time undoes it."""
    words = values.view(-1).view(INT[values.element_size()])
    mask = torch.tensor([1], dtype=words.dtype) << bit
    words[at : at + 1] ^= mask


def plant(comm: Any, name: str, flips: int, seed: int) -> list[dict[str, Any]]:
    """Train, then flip one bit after the other: on one rank, found by all, and undone."""
    case, rng = SIZES | LAYOUTS[name], random.Random(seed)
    instances = case.get("instances", 1)
    config, pp = config_of(case), case.get("pp", 1)
    ep = config.expert_model_parallel_size
    grid = comm.grid(case["tp"], pp=pp, instances=instances, memory=True, ep=ep)
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    check, told = ReplicaCheck(grid, run.optimizer), []
    for number in range(flips):
        if number % 10 == 0:
            batches = micro_batches(case, grid.dp.rank, number // 10)
            pretrain_llama.train_step(run, batches, case["lr"])
            assert check.run() == [], name
        victim, draw = rng.randrange(comm.size), rng.random()
        held = list(check.tensors())
        param, kind, values, axes = held[int(draw * len(held))]
        at, bit = rng.randrange(10**9) % values.numel(), rng.randrange(8 * values.element_size())
        if comm.rank == victim:
            flip(values, at, bit)
        found = check.run()
        if comm.rank == victim:
            flip(values, at, bit)
        copies = sorted({rank for axis in axes for rank in axis.ranks})
        mine = dict(victim=victim, param=param, kind=kind, copies=copies)
        told.append(mine | {"found": [(d.suspects, d.what) for d in found]})
        assert check.run() == []
    return told


def check_flips(world: Any, name: str, flips: int, seed: int) -> None:
    case = SIZES | LAYOUTS[name]
    size = case["dp"] * case["tp"] * case.get("pp", 1)
    every = world(size).run(plant, name, flips, seed)
    for number in range(flips):
        rows = [told[number] for told in every]
        truth = rows[rows[0]["victim"]]
        assert all(row["found"] == truth["found"] for row in rows), "all ranks hear the same"
        assert truth["found"], f"{name}: not found: {truth}"
        suspects, what = truth["found"][0]
        assert truth["victim"] in suspects, truth
        assert what.endswith(f"({truth['kind']})")
        if len(truth["copies"]) > 2:
            assert suspects == (truth["victim"],), truth
        else:
            assert sorted(suspects) == truth["copies"], truth


@pytest.mark.parametrize("name", sampled(["tied pp 2", "dp 2, bf16", "dp 4, ep 2", "tp 2"], 2))
def test_a_flipped_bit_is_found_and_its_rank_named(world: Any, name: str) -> None:
    check_flips(world, name, 2, seed=1)


@pytest.mark.prove
def test_flips_on_every_layout_are_found(world: Any) -> None:
    """Random ranks, tensors, numbers and bits over every layout with replicas."""
    for seed, name in enumerate(LAYOUTS):
        check_flips(world, name, 8, seed)


def test_the_majority_is_right() -> None:
    row = {0: 5, 1: 5, 2: 7, 3: 5}
    (found,) = verdict([("w", row)])
    assert found.suspects == (2,) and "w differs on rank 2 of the ranks [0, 1, 2, 3]" in str(found)
    (pair,) = verdict([("w", {0: 5, 4: 7})])
    assert pair.suspects == (0, 4) and "rank 0 or rank 4" in str(pair)


def test_two_pairs_that_share_a_rank_name_it() -> None:
    """tp 2 x dp 2: a norm's copies are compared along both axes."""
    found = verdict([("w", {0: 5, 1: 7}), ("w", {1: 7, 3: 5}), ("v", {0: 1, 1: 2})])
    assert found[0].suspects == found[1].suspects == (1,) and found[2].suspects == (0, 1)


@pytest.mark.parametrize("dtype", sampled([torch.bfloat16, torch.float32, torch.float64], 3))
def test_every_single_bit_changes_the_digest(dtype: torch.dtype) -> None:
    values = torch.randn(33).to(dtype)
    before = int(digest_of(values))
    for at in range(len(values)):
        for bit in range(8 * values.element_size()):
            flip(values, at, bit)
            assert int(digest_of(values)) != before
            flip(values, at, bit)
    assert int(digest_of(values)) == before


@pytest.mark.parametrize("size", [0, 5, 1024, 5000])
def test_torch_digests_in_parts_as_the_extension_does_at_once(size: int) -> None:
    values = torch.randn(size)
    whole = int(digest_of(values))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "load", lambda: None)
        assert int(digest_of(values)) == whole
        patch.setattr(digest, "AT_ONCE", 3 * digest.ROW)
        assert int(digest_of(values)) == whole
