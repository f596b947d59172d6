# SPDX-License-Identifier: Apache-2.0
"""The checks of a run hold a mixture of experts too: of first gradients, and of replicas."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import pretrain_llama
from model import moe
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.param import PlacementError, Region, unique_parameters
from mpu.zero.gradient_check import GradientCheck
from tests.model.moe_twin import SPARSE
from tests.model.test_moe_parity import BASE, KINDS
from tests.model.twin import config_of, micro_batches
from tests.sampling import sampled
from tools.generate import generate, load_model
from training.checkpoint import parameter_pieces, save
from training.faults.monitor import FailureMonitor

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2 x dp 2, ep 4": dict(tp=2, sp=True, dp=2, ep=4, moe=KINDS["sigmoid, shared"]),
    "dp 4, ep 2": dict(dp=4, ep=2, zero=1, dispatch="alltoall"),
    "tp 2 x cp 2, ep 2, ZeRO 3": dict(
        layers=4, tp=2, sp=True, cp=2, ep=2, zero=3, moe=KINDS["qwen3"]
    ),
}
whole_region = LayerContext.replicated_parameter


def of_no_region(self: LayerContext, shape: tuple[int, ...], region: Region) -> Any:
    """A router says that it meets all tokens, and each rank gives it its own alone."""
    region = Region.REPLICATED if shape[0] == SPARSE["num_experts"] else region
    return whole_region(self, shape, region)


def first_gradients(comm: Any, case: dict[str, Any], wrong: bool) -> list[str]:
    """Return the error of a first step, or what was said."""
    config, said = config_of(case), list[str]()
    grid = comm.grid(case["tp"], case["cp"], ep=config.expert_model_parallel_size)
    planted = of_no_region if wrong else whole_region
    with patch.object(LayerContext, "replicated_parameter", planted):
        run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    run.sink.check = GradientCheck(grid, said.append)
    context = (grid.cp.rank, grid.cp.size)
    try:
        for step in range(3):
            batches = micro_batches(case, grid.dp.rank, step, context)
            pretrain_llama.train_step(run, batches, 1e-2)
    except PlacementError as error:
        return [str(error)]
    return said


@pytest.mark.parametrize("name", sampled(list(LAYOUTS), len(LAYOUTS)))
def test_right_gradients_of_experts_and_routers_pass_without_a_word(world: Any, name: str) -> None:
    case = BASE | dict(layers=2) | LAYOUTS[name]
    assert world(4).run(first_gradients, case, False) == [[]] * 4


def test_a_router_whose_gradient_is_not_summed_is_named(world: Any) -> None:
    case = BASE | dict(layers=2) | LAYOUTS["tp 2 x dp 2, ep 4"]
    for found in world(4).run(first_gradients, case, True):
        assert len(found) == 1
        assert found[0].startswith("layers.0.mlp.router.weight: its gradient differs among"), found


def saved_mixture(root: Path) -> Path:
    """Save a random Mixtral with a tokenizer of numbers."""
    config = moe.MoEConfig(101, 64, 96, 2, 4, 2, init_method_std=0.2, max_position_embeddings=64,
                           num_experts=4, make_vocab_size_divisible_by=16)  # fmt: skip
    model = moe.MoE(config, LayerContext()).initialize(1)
    pieces = parameter_pieces(unique_parameters(model), moe.hf_names(model), Grid())
    state = {"hf_config": moe.hf_config(config), "tokenizer_type": "NullTokenizer"}
    save(root, step=1, pieces=pieces, state=state, grid=Grid())
    return root


def said(comm: Any, root: str, ep: int, temperature: float) -> list[list[int]]:
    grid = comm.grid(comm.size, ep=ep)
    model, _ = load_model(root, grid, torch.device("cpu"), None)
    some = dict(samples=2, max_new_tokens=20, temperature=temperature, top_k=20, seed=7)
    return generate(model, [5, 17, 3, 99], **some)


@pytest.mark.prove
def test_ranks_that_deal_out_experts_generate_the_same(
    world: Any, tmp_path: Path
) -> None:
    temperature = 0.8
    root = str(saved_mixture(tmp_path / "run"))
    (alone,) = world(1).run(said, root, 0, temperature)
    assert len({*alone[0]}) > 3, "a model that repeats itself would prove little"
    for ep in (1, 2):
        for rows in world(2).run(said, root, ep, temperature):
            assert rows == alone
