# SPDX-License-Identifier: Apache-2.0
"""What experts ask of the rest: bits, checkpoints, the dry run's bytes and memory."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_llama
from forecast.traffic import rows, totals
from model.load import load_model_file
from mpu.comm.transport import Axis
from tests.forecast.recorded import memory, recorded
from tests.model.moe_twin import SPARSE
from tests.model.test_moe_parity import BASE
from tests.model.twin import config_of, micro_batches, run_layout, same_bits
from tests.saved import check_equal, stored
from training.faults.monitor import FailureMonitor
from training.run import memory_report
from training.run.saver import Saver
from training.settings.arguments import CheckpointConfig

RUN = BASE | dict(layers=3, lr=1e-2, clip=0.5, sp=False)


def run_cases(comm: Any, cases: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    return [run_layout(comm, case, steps) for case in cases]


# --- bits

WAYS = [
    dict(zero=0),
    dict(zero=3, recompute="full"),
    dict(zero=2, gather=True, recompute="selective"),
    dict(zero=1, overlap=False, gather=True, bucket=3000),
]
VIRTUAL = {"1f1b": None, "zb-h1": None, "interleaved": 2, "zb-v": 2}
PIPES = [dict(pp=2, schedule=name, v=v) for name, v in VIRTUAL.items()]


@pytest.mark.parametrize(
    "base, ways",
    [
        (dict(dp=2, ep=2, dispatch="alltoall"), WAYS),
        pytest.param(dict(dp=2, ep=2, m=2), PIPES, marks=pytest.mark.prove),
        pytest.param(dict(dp=2, tp=2, sp=True, ep=4), WAYS, marks=pytest.mark.prove),
    ],
)
def test_bits_do_not_depend_on(world: Any, base: Any, ways: Any) -> None:
    """ZeRO stages, recomputation and schedules."""
    cases = [RUN | dict(dtype="bfloat16", layers=4) | base | way for way in ways]
    size = cases[0]["dp"] * cases[0]["tp"] * cases[0]["pp"]
    results = world(size).run(run_cases, cases, 2)
    for ranks in results:
        for case, other in zip(cases[1:], ranks[1:], strict=True):
            assert other["losses"] == ranks[0]["losses"], case
            assert other["norms"] == ranks[0]["norms"], case
            assert same_bits(other["weights"], ranks[0]["weights"]), case


# --- checkpoints


def build(comm: Any, case: dict[str, Any]) -> pretrain_llama.LlamaRun:
    config = config_of(case)
    ep = config.expert_model_parallel_size
    grid = comm.grid(case["tp"], case["cp"], case["pp"], ep=ep)
    return pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())


def saver_of(run: pretrain_llama.LlamaRun, load: str, save: str) -> Saver:
    file = load_model_file(run.config.model.model_file)
    places = CheckpointConfig(save=save, load=load)
    return Saver(
        replace(run.config, checkpoint=places), run.model.ctx, run.model, run.optimizer,
        file.hf_names(run.model), hf_config=file.hf_config, from_hf_config=file.from_hf_config,
        digests={}, note=lambda line: None,
    )  # fmt: skip


def train(
    run: pretrain_llama.LlamaRun, case: dict[str, Any], first: int, steps: int
) -> list[float]:
    rank = run.grid.dp.rank
    every = (micro_batches(case, rank, step) for step in range(first, first + steps))
    return [pretrain_llama.train_step(run, batches, case["lr"])[0].item() for batches in every]


def save(comm: Any, case: dict[str, Any], to: str) -> list[float]:
    run = build(comm, case)
    train(run, case, 0, 2)
    saver_of(run, "", to).save(2, 2 * case["rows"], must=True)
    return train(run, case, 2, 2)


def load_and_save(comm: Any, case: dict[str, Any], load: str, to: str) -> list[float]:
    run = build(comm, case)
    saver = saver_of(run, load, to)
    assert saver.resume.load() == (2, 2 * case["rows"])
    saver.save(2, 2 * case["rows"], must=True)
    return train(run, case, 2, 2)


@pytest.mark.prove
def test_any_ep_loads_any_ep(world: Any, tmp_path: Path) -> None:
    """A tensor a matrix of an expert, with its moments; on the same layout with the same bits."""
    from tests.model.test_moe_router import BIASED

    case = RUN | dict(
        dp=4, ep=4, zero=1, dispatch="alltoall", moe=BIASED, layers=4
    )
    went_on = world(4).run(save, case, str(tmp_path / "first"))[0]
    want = stored(tmp_path / "first" / "step_00000002")
    name = "model.layers.1.mlp.experts.13.down_proj.weight"
    assert want["model.layers.1.mlp.gate.e_score_correction_bias"].abs().max() == 0.1
    assert want["model.layers.1.mlp.gate.weight.tokens_per_expert"].sum() == 8 * 12 * 4
    assert want[name].shape == (28, 12) and want[f"{name}.exp_avg_sq"].shape == (28, 12)
    others = [
        dict(dp=4, ep=4, zero=1, dispatch="alltoall"),
        dict(dp=2, pp=2, ep=2, zero=3),
    ]
    for i, other in enumerate(others):
        to, mine = tmp_path / str(i), RUN | dict(moe=BIASED, layers=4) | other
        size = mine["dp"] * mine["tp"] * mine["pp"]
        losses = world(size).run(load_and_save, mine, str(tmp_path / "first"), str(to))[0]
        check_equal(stored(to / "step_00000002"), want)
        if i == 0:
            assert losses == went_on
        assert losses[0] == pytest.approx(went_on[0], rel=1e-11)


# --- what is computed without a run


class Sent:
    """A trace that adds up the bytes of a step by axis and verb."""

    def __init__(self) -> None:
        self.bytes: Counter[tuple[str, str]] = Counter()

    def issued(self, verb: str, axis: Axis, tensor: Any, sent: int, is_async: bool, label: Any):
        if label is not None:
            self.bytes[axis.name, verb] += sent


def measured(comm: Any, case: dict[str, Any]) -> Any:
    """Return (memory, as said), (bytes sent, as said) of this rank, at an even choice."""
    run, sent = build(comm, case), Sent()
    config, grid = run.config, comm.grid(case["tp"], case["cp"], case["pp"], ep=case["ep"])
    train(run, case, 0, 1)
    run = pretrain_llama.build(config, grid.traced(sent), torch.device("cpu"), FailureMonitor())
    train(run, case, 0, 2)
    sent.bytes.clear()
    train(run, case, 2, 1)
    run.sink.wait_for_weights()
    grid.traced(None)
    here = replace(config, parallel=replace(config.parallel, device="cpu"))
    said = recorded(here, grid)
    of_plan, of_run = (each.sink.buckets for each in (said.run, run))
    assert [each.length for each in of_plan] == [each.length for each in of_run]
    planned = {key: sent for key, (_, sent) in totals(rows(said)).items() if key[0] != "world"}
    have = run.optimizer.memory() | memory_report.transient(run.sink)
    return (have, memory(said)), (dict(sent.bytes), planned)


EVEN = SPARSE | dict(moe_router_force_load_balancing=True, moe_aux_loss_coeff=(0.5,))


LAYOUTS = [
    dict(dp=4, ep=2, zero=1),
    dict(dp=4, ep=4, zero=3, m=2),
    dict(dp=2, tp=2, sp=True, ep=4, zero=3, recompute="full"),
    dict(dp=2, pp=2, ep=2, zero=2, m=2),
]


@pytest.mark.prove
@pytest.mark.parametrize(
    "layout, dispatch", [*zip(LAYOUTS, ("allgather", "alltoall") * 2, strict=True)]
)
def test_bytes_and_memory_are_those_of_the_dry_run(world: Any, layout: Any, dispatch: str) -> None:
    """At an even choice: a rank's pairs divide by the experts."""
    case = RUN | dict(dtype="float32", moe=EVEN, dispatch=dispatch, s=16, layers=4) | layout
    k, b = SPARSE["moe_router_topk"], case["rows"] // (case["dp"] * case["m"])
    tokens = b * 16 // case["tp"]
    assert tokens * k % SPARSE["num_experts"] == 0
    for found in world(4).run(measured, case):
        (have, said), (sent, planned) = found
        assert have == said
        assert sent == planned
        layers, ep = case["layers"] // case["pp"], case["ep"]
        again = 2 if case["recompute"] == "full" else 1  # the forward runs again
        if dispatch == "alltoall":
            rows = tokens * k * (ep - 1) // ep * 28 * 4  # bytes of the rows for other ranks
            assert sent["ep", "all_to_all"] == case["m"] * layers * rows * 2 * (again + 1)
        else:
            whole = tokens * (ep - 1) * 28 * 4
            weights = tokens * (ep - 1) * k * 4
            assert sent["ep", "reduce_scatter"] >= case["m"] * layers * (2 * whole + weights)
