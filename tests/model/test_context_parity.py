# SPDX-License-Identifier: Apache-2.0
"""Context parallelism against the serial twin (twin.py), in fp64: loss, norm, EVERY gradient, over
communication types, tensor, pipeline and data parallelism, ZeRO, recomputation and documents.
"""

import random

import pytest
import torch

import pretrain_llama
from mpu.grid import Grid
from mpu.layers.attention.shards import shards
from mpu.layers.packed_seq_params import PackedSeqParams
from tests.model.context_cases import (
    COMM,
    LAYERS,
    ROWS,
    S,
    case_of,
    cases,
    twin_of,
    world_of,
    worst,
)
from tests.model.twin import Twin, V, config_of, run_cases
from tests.sampling import sampled
from training.data.batch import Batch
from training.data.context_part import context_part
from training.faults.monitor import FailureMonitor

LIMIT = 1e-12


def compare(world, some: list[dict]) -> int:
    """Hold cases against their twins; return how many there were."""
    by_size: dict[int, list[dict]] = {}
    for case in some:
        by_size.setdefault(world_of(case), []).append(case)
    for size, those in by_size.items():
        for first in range(0, len(those), 20):  # a world answers within its time-out
            part = those[first : first + 20]
            results = world(size).run(run_cases, part)
            for i, case in enumerate(part):
                found = worst([r[i] for r in results], *twin_of(case))
                told = {k: v for k, v in case.items() if k != "edit"}
                assert max(found.values()) < LIMIT, f"{told}: {found}"
    return len(some)


def test_a_sample_of_the_matrix(world):
    every = [c for c in cases() if c["cp"] > 1]
    pick = random.Random(11)
    two = [c for c in every if world_of(c) == 2]
    some = [pick.choice([c for c in two if c["comm"] == kind]) for kind in COMM]
    some += [case_of(2, comm, documents=True, recompute="full") for comm in COMM]
    some += pick.sample([c for c in every if world_of(c) == 4], 2)
    compare(world, some)


YARN = dict(
    use_rope_scaling=False, position_embedding_type="yarn", rotary_scaling_factor=6.0,
    yarn_original_max_position_embeddings=8, yarn_beta_fast=1.5, yarn_beta_slow=0.02,
    no_yarn_correction_range_round_to_int=True,
)  # fmt: skip


def test_yarn(world):
    """Each layout has the gradients of YaRN's formula, written out in the twin."""
    some = [case_of(1, sizes=YARN), case_of(2, "p2p", sizes=YARN, recompute="selective")]
    some += [case_of(2, comm, sizes=YARN, documents=True) for comm in ("all_gather", "a2a")]
    for documents in (False, True):
        those = [case for case in some if ("edit" in case) is documents]
        twin = Twin(False, LAYERS, ROWS, sizes=YARN)
        assert len({round(f, 9) for f in twin.yarn(6)[0]}) == 3 and twin.yarn(6)[1] > 1.17
        (loss,), (norm,) = twin.train(1, lr=0.0, clip=0.0, case=those[-1])
        for case in those:
            results = world(world_of(case)).run(run_cases, [case])
            found = worst([r[0] for r in results], twin, loss, norm)
            assert max(found.values()) < LIMIT, (case["cp"], case["comm"], found)


def losses_of(comm, case: dict, lengths: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Return this rank's positions in a row of documents, and the loss of each token there."""
    grid = Grid() if comm is None else comm.grid(1, case["cp"])
    run = pretrain_llama.build(config_of(case), grid, torch.device("cpu"), FailureMonitor())
    g, rows = torch.Generator().manual_seed(3), []
    for n in case["made"]:
        rows.append(torch.randint(1, V, (n + 1,), generator=g))
    rows = [row for row in rows if len(row) - 1 in lengths]
    places = torch.cat([torch.arange(n) for n in lengths])[None]
    whole = Batch(
        torch.cat([row[:-1] for row in rows])[None], torch.cat([row[1:] for row in rows])[None],
        loss_mask=None, position_ids=places, packed_seq_params=PackedSeqParams.of(lengths),
        first_sample=0, token_count=sum(lengths),
    )  # fmt: skip
    part = context_part(whole, grid.cp.rank, grid.cp.size)
    ids = (part.tokens, part.labels, part.position_ids, part.packed_seq_params)
    held = shards(grid.cp.size, lengths)[grid.cp.rank]
    return [i for r in held for i in r], run.model(*ids)[0].tolist()


@pytest.mark.parametrize("cp, comm", sampled([(2, "all_gather"), (4, "p2p")], 2))
@pytest.mark.parametrize("dtype, limit", [("float64", 1e-13)])
def test_a_packed_document_has_the_loss_that_it_has_alone(world, cp, comm, dtype, limit):
    lengths = (29, 19)
    case = case_of(cp, comm, dtype=dtype, made=lengths)
    found = {}
    for places, losses in world(cp).run(losses_of, case, lengths):
        found |= zip(places, losses, strict=True)
    packed = torch.tensor([found[i] for i in range(S)], dtype=torch.float64)
    one = case_of(1, dtype=dtype, made=lengths)
    alone = [losses_of(None, one | {"s": n}, (n,))[1] for n in lengths]
    want = torch.tensor([x for losses in alone for x in losses], dtype=torch.float64)
    assert ((packed - want).abs() / want).max() < limit


@pytest.mark.prove
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_more_of_the_matrix(world, size):
    every = [c for c in cases() if world_of(c) == size]
    compare(world, random.Random(size).sample(every, min(16, len(every))))


@pytest.mark.prove
def test_data_ranks_and_instances(world):
    """dp 2 beside cp 2 and 4; the optimizer's instances are groups of dp x cp ranks."""
    more, comm = dict(dp=2, m=1), "p2p"
    some = [case_of(2, comm, documents=True, zero=z, gather=z == 3, **more) for z in (0, 1, 2, 3)]
    some += [case_of(2, comm, zero=3, instances=n, **more) for n in (2, 4)]
    some += [case_of(4, comm, documents=True, zero=1, instances=2, **more)]
    some += [case_of(2, comm, documents=True, tp=(2, True), zero=2, **more)]
    compare(world, some)


def test_qwen3(world):
    compare(world, [case_of(2, "all_gather", documents=True, file="model/qwen3.py")])
