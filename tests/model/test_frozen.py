# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters, any subset on any layout: the serial twin's gradients, norms and weights.

The twin is plain torch: `requires_grad_(False)` and AdamW over the rest (tests/model/twin.py).
"""

import random
from functools import cache

import numpy as np
import pytest
import torch

import pretrain_llama
from mpu.grid import Grid
from mpu.param import PlacementError
from mpu.pipeline.schedules import CHUNKS
from tests.model.moe_twin import ExpertTwin
from tests.model.test_moe_overlap import PIPES
from tests.model.test_moe_overlap import RUN as OVERLAP
from tests.model.test_moe_overlap import WAYS as OVERLAPS
from tests.model.test_moe_parity import KINDS as MOE_KINDS
from tests.model.test_moe_parity import SAMPLE, size_of
from tests.model.test_zero_parity import WAYS
from tests.model.twin import (
    Twin,
    check,
    config_of,
    grid_of,
    micro_batches,
    run_cases,
    run_layout,
    same_bits,
)
from tests.sampling import sampled
from training.faults.monitor import FailureMonitor

FILE = "tests/model/frozen_fork.py"
SUBSETS = {  # by name: a pattern that finds the frozen parameters
    "embedding alone trains": r"^(?!embedding|head)",
    "head alone trains": r"^(?!head)",
    "every second layer trains": r"layers\.[02]\.",
    "embedding and head are frozen": r"^embedding|^head",
    "the first stage is frozen": r"^embedding|layers\.[01]\.",
    "the last stage is frozen": r"layers\.[123]\.|^norm|^head",
    "norms alone train": r"^(?!.*norm)",
    "norms are frozen": r"norm",
    "attention is frozen": r"\.attention\.",
    "one matrix of each layer is frozen": r"mlp\.down",
    "one vector trains": r"^(?!layers\.1\.mlp_norm)",
    "the middle layer trains": r"^(?!layers\.1\.)",
}
MOE = {
    "routers are frozen": r"\.router\.",
    "experts are frozen": r"\.experts\.",
    "routers alone train": r"^(?!.*\.router\.)",
    "experts alone train": r"^(?!.*\.experts\.)",
    "the last block trains": r"^(?!layers\.3\.)",
    "one matrix of the experts is frozen": r"experts\.down",
    "all but the first experts": r"^(?!layers\.1\.mlp\.experts)",
}
STEPS = 3


def drawn(seed: int, size: int) -> dict:
    """Draw a subset and a layout of so many ranks."""
    rng = random.Random(seed)
    names = sorted(SUBSETS)
    name = names[seed % len(names)]
    tied = rng.random() < 0.4 and not name.startswith(("head alone", "the "))
    tp = rng.choice([t for t in (1, 2) if size % t == 0])
    pp = rng.choice([p for p in (1, 2, 4) if size % (tp * p) == 0])
    cp = rng.choice([c for c in (1, 2) if size % (tp * pp * c) == 0])
    dp = size // (tp * pp * cp)
    case = dict(
        tp=tp, pp=pp, cp=cp, dp=dp, sp=rng.random() < 0.5 and tp > 1, tied=tied, file=FILE,
        rows=16, layers=3, lr=1e-2, clip=0.5, held=True, extra=(("frozen", SUBSETS[name]),),
        recompute=rng.choice([None, "full", "selective"]), masks=rng.random() < 0.3,
        zero=rng.choice([0, 1, 2, 3, 3]) if dp > 1 else 0, bucket=rng.choice([500, 0, 10**9]),
        overlap=rng.random() < 0.7, path=rng.choice(["none", "ring"]) if tp > 1 else "none",
        m=4,
    )  # fmt: skip
    if pp == 1:
        case["m"] = rng.choice([1, 2, 4])
        if rng.random() < 0.3:
            case["chunk"] = 5
    else:
        schedule = rng.choice(sorted(CHUNKS) if pp == 2 else ["1f1b", "zb-h1"])
        stages = pp * CHUNKS[schedule]
        case |= dict(schedule=schedule, v=CHUNKS[schedule], layers=2 if stages == 2 else 4)
    if case["zero"] >= 1:
        case["gather"] = rng.random() < 0.5
    if case["zero"] >= 2 and rng.random() < 0.3:
        case["each"] = True
    if case["zero"] and dp == 4 and rng.random() < 0.5:
        case["instances"] = 2
    return {"name": name, **case}


@cache
def trained(tied: bool, layers: int, masks: bool, pattern: str) -> tuple[Twin, list, list, dict]:
    """Return the twin after STEPS steps, its losses and norms, and its first weights."""
    twin = Twin(tied, layers, 16, file=FILE, extra=(("frozen", pattern),))
    first = {name: w.detach().clone() for name, w in twin.w.items()}
    assert {w.requires_grad for w in twin.w.values()} == {True, False}
    case = dict(masks=masks, rows=16)
    return twin, *twin.train(STEPS, 1e-2, 0.5, case=case), first


def hold(results: list[dict], case: dict) -> None:
    """Hold what every rank reports of a case against the twin."""
    pattern = dict(case["extra"])["frozen"]
    args = case["tied"], case["layers"], case["masks"], pattern
    twin, losses, norms, first = trained(*args)
    within = 1e-10
    check(results, twin, losses[0], norms[0], within)
    wanted = torch.cat([w.detach().flatten() for w in twin.w.values()]).norm().item()
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=within)
        assert result["norms"] == pytest.approx(norms, rel=within)
        assert result["params_norm"] == pytest.approx(wanted, rel=within)
        assert result["steps"] == STEPS
        for name, dim, start, local in result["held"]:
            w = twin.w[name]
            if not w.requires_grad:
                was = first[name].narrow(dim, start, local.shape[dim]).numpy()
                assert np.array_equal(local, was), f"{name} is frozen, and it moved"
            else:
                now = w.detach().narrow(dim, start, local.shape[dim]).numpy()
                assert np.abs(local - now).max(initial=0) < 1e-8, name
    # two moments for each element that trains, once in each of the places that hold it
    elements = sum(w.numel() for w in twin.w.values() if w.requires_grad)
    kept, copies = sum(r["state"] for r in results), case["tp"] * case["cp"] * case["dp"]
    assert kept >= 2 * elements
    assert kept <= 2 * copies * 3 * elements


def compare(world, size: int, seeds: list[int]) -> None:
    """Hold the first gradients to 1e-12, then steps of AdamW to 1e-10."""
    cases = [drawn(seed, size) for seed in seeds]
    first = world(size).run(run_cases, [case | dict(lr=0.0, clip=0.0) for case in cases], 1)
    results = world(size).run(run_cases, cases, STEPS)
    for i, case in enumerate(cases):
        try:
            args = case["tied"], case["layers"], case["masks"], dict(case["extra"])["frozen"]
            check([rank[i] for rank in first], *at_first(*args), 1e-12)
            hold([rank[i] for rank in results], case)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


@cache
def at_first(tied: bool, layers: int, masks: bool, pattern: str) -> tuple[Twin, float, float]:
    """Return a twin with its first gradients, the loss and the norm."""
    twin = Twin(tied, layers, 16, file=FILE, extra=(("frozen", pattern),))
    (loss,), (norm,) = twin.train(1, 0.0, 0.0, case=dict(masks=masks, rows=16))
    return twin, loss, norm


@pytest.mark.parametrize("first", sampled(range(0, 24, 3), 8))
def test_any_subset_on_two_ranks(world, first):
    compare(world, 2, [*range(first, first + 3)])


@pytest.mark.prove
@pytest.mark.parametrize("first", range(100, 124, 3))
def test_any_subset_on_four_ranks(world, first):
    compare(world, 4, [*range(first, first + 3)])


def expert_case(i: int, name: str) -> dict:
    """Return a layout of test_moe_parity.py with a subset of its model frozen."""
    return SAMPLE[i] | dict(file="tests/model/frozen_moe.py", extra=(("frozen", MOE[name]),))


PAIRS = [(i, name) for n, name in enumerate(MOE) for i in range(n, len(SAMPLE), len(MOE))]


@pytest.mark.parametrize("i, name", sampled(PAIRS, len(PAIRS)))
def test_routers_and_experts(world, i, name):
    case = expert_case(i, name)
    twin = ExpertTwin(
        case["moe"], case["rows"] // (case["dp"] * case["m"]), case["tied"], case["layers"],
        file=case["file"], extra=case["extra"],
    )  # fmt: skip
    (loss,), (norm,) = twin.train(1, 0.0, 0.0, case=case)
    results = world(size_of(case)).run(run_cases, [case], 1)
    check([rank[0] for rank in results], twin, loss, norm)
    for rank in results:  # of layers that backward does not reach, too
        assert rank[0]["auxiliary"] == pytest.approx(auxiliary(case), rel=1e-12)


@cache
def auxiliary_of(key: str) -> float:
    """Return the mean auxiliary loss of a case on one rank with nothing frozen."""
    case = cases_by_key[key]
    return run_layout(_One(), case)["auxiliary"]


cases_by_key: dict[str, dict] = {}


def auxiliary(case: dict) -> float:
    key = repr((case["moe"], case["tied"], case["layers"]))
    b = case["rows"] // (case["dp"] * case["m"])
    one = dict(tp=1, cp=1, dp=1, pp=1, ep=1, sp=False, zero=0, extra=(), m=case["rows"] // b)
    cases_by_key[key + str(b)] = case | one | dict(schedule=None, v=None, dispatch="allgather")
    return auxiliary_of(key + str(b))


class _One:
    """A world of one rank, as run_layout takes it."""

    rank, size = 0, 1

    def grid(self, *_: object, **__: object) -> Grid:
        return Grid()


@pytest.mark.prove
@pytest.mark.parametrize(
    "size, ways, name",
    [(2, OVERLAPS, "routers are frozen"), (4, PIPES, "one matrix of the experts is frozen")],
)
def test_interleaved_micro_batches(world, size, ways, name):
    """No bit depends on --overlap-moe-expert-parallel-comm."""
    base = OVERLAP | dict(file="tests/model/frozen_moe.py", extra=(("frozen", MOE[name]),))
    cases = [base | way | dict(beside=beside) for way in ways for beside in (False, True)]
    for ranks in world(size).run(run_cases, cases, 2):
        for plain, beside, way in zip(ranks[::2], ranks[1::2], ways, strict=True):
            assert beside["losses"] == plain["losses"], way
            assert beside["norms"] == plain["norms"], way
            assert same_bits(beside["weights"], plain["weights"]), way


class Spy:
    """Notes what travels over each axis of a grid."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    def issued(self, verb, axis, tensor, nbytes, async_op, label=None) -> None:
        self.seen.append((axis.name, verb, label.phase if label else ""))


def traffic(comm, case: dict) -> list[tuple[str, str, str]]:
    """Return (axis, verb, phase) of what a rank sends in a step."""
    config = config_of(case)
    grid, spy = grid_of(comm, config), Spy()
    grid.traced(spy)
    try:
        run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
        spy.seen.clear()
        pretrain_llama.train_step(run, micro_batches(case, grid.dp.rank, 0), 1e-3)
    finally:
        grid.traced(None)
    return spy.seen


def test_what_is_frozen_sends_nothing(world):
    """No gradient goes to a frozen first stage, none of a frozen weight is summed."""
    base = dict(tp=1, sp=False, recompute=None, tied=False, rows=16, layers=4, file=FILE, m=4)
    pipe = base | dict(pp=2, dp=1, schedule="1f1b")
    for pattern, expected in (("^$", 4), (SUBSETS["the first stage is frozen"], 0)):
        first, second = world(2).run(traffic, pipe | dict(extra=(("frozen", pattern),)))
        for seen in (first, second):  # receives, sends
            assert sum(axis == "pp_back" for axis, _, _ in seen) == expected
        assert sum(axis == "pp" and "send" in verb for axis, verb, _ in first) == 4
    for pattern, sums in (("^$", True), (r"^(?!norm)", False)):
        case = base | dict(dp=2, bucket=500, zero=1, extra=(("frozen", pattern),))
        for seen in world(2).run(traffic, case):
            assert (sum(phase == "grad sum" for _, _, phase in seen) > 1) == sums
            assert (sum(phase == "update" for _, _, phase in seen) > 1) == sums


MUON = dict(optimizer="muon", clip=0.5, lr=1e-2, rows=12, sp=False, recompute=None, held=True)
MUON |= dict(dtype="float64", bucket=900, tied=False, file=FILE, masks=False)
MUON_WAYS = [
    dict(tp=2, dp=1, m=1),
    dict(tp=1, dp=2, m=1, zero=3, gather=True),
    dict(tp=1, dp=1, m=3, pp=2, schedule="1f1b"),
    dict(tp=1, dp=2, m=3, zero=1),
]


@pytest.mark.parametrize(
    "subset",
    sampled(
        ["one vector trains", "the first stage is frozen"], 2,
    ),
)  # fmt: skip
def test_muon_owns_what_trains(world, subset):
    """Also where ranks own no matrix, and where a stage has none."""
    base = MUON | dict(extra=(("frozen", SUBSETS[subset]),))
    one = run_layout(_One(), base | dict(tp=1, dp=1, m=1), STEPS)
    full = {name: torch.from_numpy(values) for name, _, _, values in one["held"]}
    for rank in world(2).run(run_cases, [base | way for way in MUON_WAYS], STEPS):
        for way, got in zip(MUON_WAYS, rank, strict=True):
            assert got["losses"] == pytest.approx(one["losses"], rel=1e-10), way
            assert got["norms"] == pytest.approx(one["norms"], rel=1e-10), way
            for name, dim, start, local in got["held"]:
                wanted = full[name].narrow(dim, start, local.shape[dim])
                assert (torch.from_numpy(local) - wanted).abs().max() < 1e-8, (way, name)


@pytest.mark.prove
@pytest.mark.parametrize("subset", ["norms alone train", "head alone trains"])
def test_levels_change_no_bit(world, subset):
    """In bf16, with masters of what trains alone."""
    base = dict(tp=1, sp=False, recompute=None, tied=True, m=3, rows=12, lr=1e-2, clip=0.1, dp=2)
    base |= dict(dtype="bfloat16", file=FILE, extra=(("frozen", SUBSETS[subset]),))
    ways = [base | way for way in WAYS]
    if "embedding" in subset or "head" in subset:
        ways = [way | dict(tied=False) for way in ways]
    for rank in world(2).run(run_cases, ways, 2):
        for way, got in zip(ways, rank, strict=True):
            assert got["losses"] == rank[0]["losses"], way
            assert got["norms"] == rank[0]["norms"], way
            assert same_bits(rank[0]["weights"], got["weights"]), way


def test_nothing_trains():
    with pytest.raises(PlacementError, match="all 21 parameters of the model are frozen"):
        run_layout(_One(), MUON | dict(tp=1, dp=1, m=1, extra=(("frozen", ""),)))


def test_a_later_change_is_refused():
    """Of a model that is built, nothing would follow it."""
    case = MUON | dict(tp=1, dp=1, m=1, rows=4, extra=(("frozen", "norm"),))
    for frozen in (True, False):
        run = pretrain_llama.build(
            config_of(case), Grid(), torch.device("cpu"), FailureMonitor()
        )  # fmt: skip
        name = "head.weight" if frozen else "norm.weight"
        run.model.get_parameter(name).requires_grad_(not frozen)
        with pytest.raises(PlacementError, match=f"{name}: requires_grad is {not frozen}"):
            pretrain_llama.train_step(run, micro_batches(case, 0), 1e-3)


@pytest.mark.parametrize("pattern, moves", [("^$", True), (r"\.router\.", False)])
def test_the_bias_of_a_frozen_router_stays(pattern, moves):
    moe = MOE_KINDS["sigmoid, shared"] | dict(moe_router_enable_expert_bias=True)
    case = expert_case(0, "routers are frozen") | dict(dp=1, m=2, zero=0, moe=moe, lr=1e-2)
    case |= dict(extra=(("frozen", pattern),))
    run = pretrain_llama.build(config_of(case), Grid(), torch.device("cpu"), FailureMonitor())
    pretrain_llama.train_step(run, micro_batches(case, 0), 1e-2)
    biases = [b for n, b in run.model.named_buffers() if n.endswith("e_score_correction_bias")]
    assert biases and all(bool(bias.any()) == moves for bias in biases)
