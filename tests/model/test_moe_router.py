# SPDX-License-Identifier: Apache-2.0
"""The bias of the choice, groups, the loss of the global batch, capacities: the serial twin's.

Counts are of the global batch, so the bias has the same bits on every layout.
"""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import pretrain_llama
from model import moe
from model.load import load_model_file
from mpu.context import ExpertOptions, LayerContext
from mpu.grid import Grid
from mpu.interleave import Interleaver
from mpu.layers import dispatch
from tests.launcher import Launcher
from tests.model.moe_twin import SPARSE, ExpertTwin
from tests.model.test_moe_parity import BASE, held, run_cases, size_of
from tests.model.twin import S, check, config_of, micro_batches
from training.faults.monitor import FailureMonitor

BIASED = SPARSE | dict(
    moe_router_topk=4,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.05,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    moe_shared_expert_intermediate_size=10,
    moe_router_load_balancing_type=("seq_aux_loss", "lagged_global_aux_loss"),
    moe_aux_loss_coeff=(0.3, 0.5),
)
RUN = BASE | dict(lr=1e-2, clip=0.5, sp=False, moe=BIASED)
LAYOUTS = [
    dict(dp=2, ep=2, zero=1, dispatch="alltoall", recompute="full"),
    dict(tp=2, sp=True, ep=2, m=2),
]
LONG = [
    dict(pp=2, schedule="zb-v", v=2, m=2),
    dict(cp=2, ep=2, recompute="selective"),
    dict(dp=4, ep=4, zero=2, dispatch="alltoall"),
    dict(tp=2, sp=True, cp=2, ep=2, m=2, dispatch="alltoall"),
    dict(pp=2, schedule="interleaved", v=2, tp=2, sp=True, m=2, recompute="full"),
]


GROUPS = dict(moe_router_score_function="softmax", moe_router_pre_softmax=True)
GROUPS |= dict(moe_router_enable_expert_bias=False, moe_router_bias_update_rate=0.0)


def test_groups_before_a_softmax_are_chosen_by_probabilities(world: Any) -> None:
    """By the sums of their best two: of logits it would be other groups."""
    held(world, [RUN | dict(moe=BIASED | GROUPS)], steps=2, within=1e-11)


@pytest.mark.parametrize(
    "layouts", [LAYOUTS, pytest.param(LONG, marks=pytest.mark.prove)], ids=["few", "many"]
)
def test_three_steps_are_the_twins(world: Any, layouts: list[dict[str, Any]]) -> None:
    """Loss, norm and the last gradients: experts are chosen by the bias, and losses by counts."""
    held(world, [RUN | each for each in layouts], steps=3, within=1e-11)


FULL = SPARSE | dict(
    moe_router_topk=3,
    moe_expert_capacity_factor=0.8,
    moe_router_load_balancing_type=("seq_aux_loss",),
    moe_aux_loss_coeff=(0.5,),
)
PADDED = dict(moe_pad_expert_input_to_capacity=True)
DROPPING = [
    (dict(dp=2, ep=2, zero=1, dispatch="alltoall"), {}),
    (dict(dp=2, ep=2, m=2, recompute="full"), {}),
    (dict(dp=2, ep=2, zero=3, dispatch="alltoall"), PADDED),
    (dict(tp=2, sp=True, ep=2, recompute="full"), PADDED),
]
LONG_DROPPING = [
    (dict(), dict(moe_router_topk=1, moe_router_pre_softmax=True) | PADDED),
    (dict(dp=2, ep=2), dict(moe_router_topk=1, moe_router_score_function="sigmoid") | PADDED),
    (dict(dp=2, ep=2), dict(moe_expert_capacity_factor=4.0) | PADDED),
    (dict(dp=2, ep=2, dispatch="alltoall"), dict(moe_expert_capacity_factor=0.01) | PADDED),
    (dict(dp=4, ep=4, dispatch="alltoall", zero=2), {}),
    (dict(tp=2, sp=True, cp=2, ep=4, dispatch="alltoall"), PADDED),
    (dict(pp=2, schedule="zb-v", v=2, dp=2, ep=2, m=2), PADDED),
]


def parts_of(case: dict[str, Any]) -> list[list[int]]:
    """Return the positions of a row that each rank of tp x cp routes."""
    found, cp = [], case["cp"]
    for rank in range(cp):
        batch = micro_batches(case, 0, 0, (rank, cp))[0]
        own = torch.arange(S) if batch.position_ids is None else batch.position_ids[0]
        found += [part.tolist() for part in own.chunk(case["tp"])]
    return found


@pytest.mark.parametrize(
    "cases", [DROPPING, pytest.param(LONG_DROPPING, marks=pytest.mark.prove)], ids=["few", "many"]
)
def test_gradients_of_a_capacity_are_the_twins(world: Any, cases: list[Any]) -> None:
    """With the same pairs dropped. Which these are depends on the ranks' tokens."""
    for layout, more in cases:
        moe = FULL | more
        case = BASE | dict(sp=False, layers=3 + bool(layout.get("pp")), moe=moe) | layout
        b = case["rows"] // (case["dp"] * case["m"])
        twin = ExpertTwin(moe, b, layers=case["layers"], parts=parts_of(case))
        (loss,), (norm,) = twin.train(1, 0.0, 0.0)
        assert twin.margin > 1e-9, "a choice hangs on rounding"
        assert bool(twin.dropped) == (moe["moe_expert_capacity_factor"] < 1)
        results = world(size_of(case)).run(run_cases, [case], 1)
        try:
            check([ranks[0] for ranks in results], twin, loss, norm)
        except AssertionError as error:
            raise AssertionError(f"{case}: {error}") from error


def test_a_padded_plan_looks_at_no_value() -> None:
    """So nothing waits for the device, with one rank's experts as with an exchange."""
    choice = torch.randint(0, 8, (12, 2), device="meta")
    load = torch.zeros(8, dtype=torch.long, device="meta")
    capacity = dispatch.Capacity.of(choice, load, 1.0, torch.ones(12, 2, device="meta"), True)
    with patch.object(torch.Tensor, "tolist", side_effect=AssertionError("a wait")):
        plan = dispatch.Dispatcher(8, Grid().ep, None, Interleaver()).plan(choice, load, capacity)
    assert plan.counts.each == (3,) * 8 and len(plan.flat) == 24


def test_a_copy_of_an_older_moe_drops_the_same_pairs(tmp_path: Path) -> None:
    """It asks which policy drops them, of which there were two."""
    line = "weights, padded = self.weights(scores, choice), options.pad_to_capacity"
    older = """best = self.weights(scores, choice) if options.drop_policy == "probs" else None
            weights, padded = best, options.pad_to_capacity"""
    text, copy = Path(moe.__file__).read_text(), tmp_path / "older.py"
    assert line in text
    copy.write_text(text.replace(line, older))
    config = moe.MoEConfig(
        vocab_size=16, hidden_size=8, ffn_hidden_size=8, num_layers=1, num_attention_heads=2,
        num_query_groups=1, num_experts=4,
    )  # fmt: skip
    tokens, found = torch.arange(12)[None], []
    for file in (moe, load_model_file(str(copy))):
        for factor in (0.5, None):
            ctx = LayerContext(experts=ExpertOptions(capacity_factor=factor))
            found.append(file.Model(config, ctx).initialize(1)(tokens))
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])


def biased(comm: Any, cases: list[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Return the bias and the counts of each layer of this rank, after steps and an evaluation."""
    found = []
    for case in cases:
        config = config_of(case)
        grid = comm.grid(case["tp"], case["cp"], case["pp"], ep=config.expert_model_parallel_size)
        run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
        for step in range(steps):
            batches = micro_batches(case, grid.dp.rank, step, (grid.cp.rank, grid.cp.size))
            pretrain_llama.train_step(run, batches, case["lr"])
            schedule = pretrain_llama.forward_only(run.schedule(len(batches)))
            pretrain_llama.run_schedule(run, schedule, batches, 1, "of an evaluation")
        loads = {n: m for n, m in run.model.named_modules() if n.endswith("mlp.load")}
        found.append({n: (m.e_score_correction_bias, m.before) for n, m in loads.items()})
    return found


@pytest.mark.prove
def test_the_bias_has_the_same_bits_on_every_layout(world: Any) -> None:
    """Evaluations and recomputation in between do not count."""
    layouts = [dict(dp=2, ep=2, m=2, recompute="full"), dict(tp=2, sp=True), dict(cp=2, ep=2),
               dict(pp=2, schedule="1f1b", v=None, m=2)]  # fmt: skip
    steps, twin = 2, ExpertTwin(BIASED, layers=4)
    twin.train(steps, RUN["lr"], RUN["clip"])
    twin.end_step()
    assert twin.margin > 1e-9, "a choice hangs on rounding"
    for ranks in world(2).run(biased, [RUN | each for each in layouts], steps):
        for layer in ranks:
            for name, (bias, before) in layer.items():
                at = f"model.layers.{name.split('.')[1]}."
                assert torch.equal(before, twin.before[at].double()), name
                assert torch.allclose(bias, twin.bias[at], rtol=0, atol=1e-15), name
                assert torch.equal(bias, ranks[0].get(name, (bias,))[0]), name
    assert bias.abs().max() > 0.09  # it moves by 0.05


def test_a_skipped_step_and_a_measurement_leave_the_bias() -> None:
    case = RUN | dict(m=2)
    run = pretrain_llama.build(config_of(case), Grid(), torch.device("cpu"), FailureMonitor())
    batches = micro_batches(case, 0)
    pretrain_llama.train_step(run, batches, 1e-2)
    load = run.model.layers["1"].mlp.load
    kept = load.e_score_correction_bias.clone(), load.before.clone()
    assert kept[1].sum() == batches[0].tokens.numel() * 2 * 4
    schedule = run.schedule(2)
    run.sink.begin_step(2)
    pretrain_llama.run_schedule(run, schedule, batches, 1, "of a measurement")  # with its backward
    weight = run.model.head.weight.detach()
    value = weight[0, 0].item()
    weight[0, 0] = torch.nan
    _, _, found_inf = pretrain_llama.train_step(run, batches, 1e-2)
    assert found_inf.item() == 1
    assert torch.equal(load.e_score_correction_bias, kept[0]) and torch.equal(load.before, kept[1])
    weight[0, 0] = value
    pretrain_llama.train_step(run, batches, 1e-2)
    assert load.before.sum() == kept[1].sum() and not torch.equal(load.before, kept[1])


def test_the_log_says_how_even_the_load_is(launcher: Launcher) -> None:
    """Of all layers of a pipeline; with --moe-per-layer-logging each layer's."""
    flags = """--num-layers 4 --hidden-size 32 --ffn-hidden-size 24 --num-attention-heads 4
        --seq-length 16 --vocab-size 64 --mock-data --num-experts 4 --micro-batch-size 2
        --global-batch-size 4 --train-iters 4 --lr 1e-3 --device cpu --num-workers 0
        --moe-layer-freq [0,1,1,1] --moe-aux-loss-coeff 1e-2 --log-interval 2
        --moe-router-load-balancing-type lagged_global_aux_loss --moe-per-layer-logging"""
    done = launcher.run(1, flags.split())
    assert done.codes == [0], done.said(0)
    rows = [row for row in done.rows() if "expert_load" in row]
    assert [row["iteration"] for row in rows] == [2, 4]
    for row in rows:
        assert [layer for layer, _ in row["expert_tokens"]] == [1, 2, 3]
        for layer, counts in row["expert_tokens"]:
            assert sum(counts) == 4 * 16 * 2
            assert row[f"layer_{layer}/expert_load"] == pytest.approx(max(counts) / 32)
        assert row["expert_load"] == max(row[f"layer_{i}/expert_load"] for i in (1, 2, 3))
        parts = [row[f"layer_{i}/router_loss"] for i in (1, 2, 3)]
        assert sum(parts) == pytest.approx(row["auxiliary_loss"], rel=1e-5)
        assert f"load {row['expert_load']:.2f}" in done.said(0, "out")


def test_a_tie_goes_to_the_lower_number() -> None:
    """As torch.topk does not promise."""

    class Layer:
        config = moe.MoEConfig(100, 16, 16, 2, 2, 2, num_experts=8, moe_router_topk=3)
        ctx = type("ctx", (), {"experts": type("o", (), {"force_balance": False})})

    scores = torch.tensor([[1.0, 2, 2, 0, 2, 2, 1, 2], [0.0] * 8])
    chosen = moe.SparseMLP.choose(Layer, scores)
    assert chosen.tolist() == [[1, 2, 4], [0, 1, 2]]
