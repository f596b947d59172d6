# SPDX-License-Identifier: Apache-2.0
"""A step on a host's cores: matmuls by shape, the formulas' transfers, ranks that share cores."""

import pytest

from benchmarks.plan_cpu import CASES, Case
from benchmarks.planning.cpu_host import Host, HostError, Product, Rates
from benchmarks.planning.cpu_time import Rank, told
from tests.sampling import sampled

KERNELS = ("norm_forward", "norm_backward", "rope", "swiglu_forward", "swiglu_backward",
           "attention_forward", "attention_backward", "softmax_stats", "softmax_gradient",
           "update", "glue")  # fmt: skip
RATE = 1e9


def host_of(cores=2, transfers=None):
    """Return a host that does RATE FLOPs a second and nothing else."""
    products = {Product(kind, "float32", 64, 64, 64).key: 2 * 64**3 / RATE
                for kind in ("forward", "dgrad", "wgrad")}  # fmt: skip
    calls = {f"{name} float32": 0.0 for name in KERNELS}
    rates = Rates(products, calls, layer=0.0, micro_batch=0.0, step=0.0, step_layer=0.0)
    verbs = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
    nothing = {f"{verb} 2": [(0, 0.0)] for verb in verbs}
    return Host(cores, {1: rates, cores: rates}, nothing | (transfers or {}))


def flops(config):
    m = config.model
    inner = m.num_attention_heads * m.kv_channels
    qkv = inner + 2 * m.num_query_groups * m.kv_channels
    layer = m.hidden_size * (qkv + inner + 3 * m.ffn_hidden_size)
    weights = m.num_layers * layer + m.vocab_size * m.hidden_size
    return 6 * weights * m.seq_length * config.batch.global_batch_size


@pytest.mark.parametrize("case", sampled([(c,) for c in CASES if c.size == "tiny"], 7), ids=str)
def test_the_work_of_all_layouts_is_the_models_flops(case: Case) -> None:
    """Where only matmuls take time, all cores do the model's FLOPs, whoever shares them."""
    config = case.config()
    step = told(host_of(), config)
    bound = flops(config) / RATE / min(2, case.ranks)
    assert step.step >= bound * (1 - 1e-9)
    p = config.parallel
    if p.pipeline_model_parallel_size == 1:
        assert step.step == pytest.approx(bound)


def test_transfers_are_counted_and_share_cores() -> None:
    """Two of four ranks of a pair measured a second a call: four ranks on two cores take two."""
    one = Case("tiny", "fp32", 2, "--zero-stage 1 --micro-batch-size 4")
    many = host_of(transfers={"all_gather 2": [(0, 1.0)]})
    base = told(host_of(), one.config()).step
    calls = told(many, one.config()).step - base
    assert calls == pytest.approx(round(calls)) and calls >= 3  # weights, squares, losses
    sharing = Case("tiny", "fp32", 4, "--zero-stage 1 --micro-batch-size 2")
    of_four = told(many, sharing.config()).step - told(host_of(), sharing.config()).step
    assert of_four == pytest.approx(2 * calls)


def test_a_matmul_that_was_not_measured_has_the_nearest_ones_rate() -> None:
    rates = host_of().of(2)
    assert rates.product(Product("forward", "float32", 128, 64, 64)) == pytest.approx(
        4 * 64**3 / RATE
    )
    host = host_of(cores=3)
    assert (host.threads(1), host.threads(2)) == (3, 1)
    with pytest.raises(HostError, match="no product of forward bfloat16 was measured"):
        rates.product(Product("forward", "bfloat16", 1, 1, 1))


def test_a_ranks_matmuls_are_its_part_of_the_models() -> None:
    whole = Rank.of(Case("small", "fp32", 1, "--micro-batch-size 4").config())
    part = Rank.of(
        Case("small", "fp32", 2, "--tensor-model-parallel-size 2 --micro-batch-size 4").config()
    )
    for a, b in ((whole.of_layer, part.of_layer), (whole.of_head, part.of_head)):
        assert sum(p.flops for p in a) == 2 * sum(p.flops for p in b)
