# SPDX-License-Identifier: Apache-2.0
"""A weight that a forward uses several times: on every layout the gradient of one rank.

Buckets leave under backward once all of their uses have given a gradient, so uses must be counted
as the model makes them. A forward that uses a weight less often on meta tensors, where they are
counted, ends the run with the weight's name, its module and its lines.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

import pretrain_llama
from mpu.grid import Grid
from tests.model.twin import config_of, micro_batches, run_cases
from tests.sampling import sampled
from training.faults.monitor import FailureMonitor
from training.run.pipeline_stages import uses_of

FILE = "tests/model/twice_fork.py"
ONE = dict(tp=1, dp=1, sp=False, recompute=None, tied=True, m=2, rows=8, layers=4, lr=1e-2,
           clip=0.5, file=FILE, bucket=500)  # fmt: skip
LAYOUTS = {
    "dp 2": dict(dp=2),
    "dp 2, one bucket": dict(dp=2, bucket=10**9),
    "dp 2, ZeRO 1": dict(dp=2, zero=1, gather=True),
    "dp 2, ZeRO 3": dict(dp=2, zero=3, gather=True, recompute="full"),
    "dp 2, ZeRO 2, each micro-batch": dict(dp=2, zero=2, each=True, recompute="full"),
    "tp 2 + SP": dict(tp=2, sp=True, recompute="selective"),
    "pp 2, zb-h1": dict(pp=2, schedule="zb-h1", m=4),
    "pp 2, zb-v": dict(pp=2, schedule="zb-v", v=2, m=4, recompute="full"),
}
KINDS = ("module", "vector", "layers")
# layers 0 and 1 are of one pipeline rank, but for zb-v
CASES = [
    (KINDS[i % 3], name)
    for i, name in enumerate([*LAYOUTS, *LAYOUTS])
    if (KINDS[i % 3], name[-4:]) != ("layers", "zb-v")
]


def case_of(kind: str, **more) -> dict:
    return ONE | dict(extra=(("twice", kind),)) | more


@cache
def alone(kind: str) -> dict:
    """Return what one rank computes, which sends no bucket before the end of backward."""

    class Alone:
        rank = 0

        def grid(self, *sizes, **named):
            return Grid()

    (made,) = run_cases(Alone(), [case_of(kind, overlap=False, memory=False)], 3)
    return made


@pytest.mark.parametrize("kind, name", sampled(CASES, len(CASES)))
def test_every_layout_has_the_gradients_of_one_rank(world, kind, name):
    case, one = case_of(kind, **LAYOUTS[name]), alone(kind)
    results = world(2).run(run_cases, [case], 3)
    for (made,) in results:
        assert made["losses"] == pytest.approx(one["losses"], rel=1e-10)
        assert made["norms"] == pytest.approx(one["norms"], rel=1e-10)


def built(kind: str, **more):
    config = config_of(case_of(kind, **more))
    run = pretrain_llama.build(config, Grid(), torch.device("cpu"), FailureMonitor())
    return run, micro_batches(case_of(kind, **more), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_the_derivative_of_the_loss(kind):
    """And buckets leave before the end of backward, each after the last gradient in it."""
    run, batches = built(kind, clip=0.0)
    left, leave = [], run.sink._leave
    run.sink._leave = lambda bucket: (left.append(bucket), leave(bucket))
    finish = run.sink.finish_grad_sync
    run.sink.finish_grad_sync = lambda: (left.append(None), finish())
    pretrain_llama.train_step(run, batches, 0.0)
    assert left.index(None) == len(run.sink.buckets)  # all of them left under backward
    name = {"vector": "layers.0.shift"}.get(kind, "layers.0.mlp.gate_up.weight")
    param = dict(run.model.named_parameters())[name]
    grad, ends = run.sink.main[param].clone(), []
    signs = torch.randint(0, 2, grad.shape, generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    for step in (1e-6, -2e-6):
        param.data += step * signs
        ends.append(pretrain_llama.train_step(run, batches, 0.0)[0].item())
    assert (ends[0] - ends[1]) / 2e-6 == pytest.approx((grad * signs).sum().item(), rel=1e-5)


def test_a_use_that_was_not_counted_is_named():
    run, batches = built("some", m=4)
    with pytest.raises(RuntimeError) as error:
        pretrain_llama.train_step(run, batches, 0.0)
    said = str(error.value)
    assert "layers.3.mlp.gate_up.weight of ColumnParallelLinear gave its gradient 5 times" in said
    lines = Path(FILE).read_text().splitlines()
    line = next(i for i, line in enumerate(lines, 1) if "y = self.mlp(x)" in line)
    assert f"a forward uses it 1 time ({FILE}:{line})" in said, said
    run, batches = built("some", m=4, overlap=False)  # sums begin when all is there
    pretrain_llama.train_step(run, batches, 0.0)


def test_a_weight_of_two_pipeline_ranks_is_refused():
    """Each would have one of its own."""
    more = dict(pp=2, schedule="1f1b", layers=2, m=4)
    config = config_of(case_of("layers", **more))
    for rank in (0, 1):
        with pytest.raises(
            ValueError, match=r"layers\.0\.mlp\S* is used in layer 0, layer 1, which"
        ):
            uses_of(config, pretrain_llama.model_provider, rank)
    config = config_of(case_of("layers", **more | dict(layers=4)))
    uses = uses_of(config, pretrain_llama.model_provider, 0)
    assert len(uses["layers.0.mlp.down.weight"]) == 2 and len(uses["embedding.weight"]) == 1
    uses = uses_of(config, pretrain_llama.model_provider, 1)
    assert len(uses["head.weight"]) == 1 and "layers.0.mlp.down.weight" not in uses
