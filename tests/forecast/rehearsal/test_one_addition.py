# SPDX-License-Identifier: Apache-2.0
"""A collective that no part of the program knows enters every reader by one line of a model.

The line is a fork's: an all-to-all over tp in each block, a verb that nothing else sends there. The
collectives of experts come the same way, from mpu/layers/dispatch.py.
"""

from pathlib import Path

import pytest

from forecast.device_file import read_device
from forecast.planner.cluster import read_cluster
from forecast.planner.layout import Layout
from forecast.planner.model import read_model
from forecast.planner.played import Worker
from forecast.planner.recorded import Recorded, play
from forecast.rehearsal.links import collective_seconds

LATER = pytest.mark.prove
ROOT = Path(__file__).resolve().parents[3]
OLD = "        return h + self.mlp(x)"
NEW = "        return h + self.mlp(EXCHANGE(x, self.ctx.grid.tp))"
IMPORT = "from mpu.comm.mappings import differentiable_all_to_all as EXCHANGE\nimport torch\n"
KEPT = "        self.mlp = self.mlp_type(config, ctx)\n"
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-router-force-load-balancing
    --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1
""".split()
LAYERS, BATCHES = 2, 3
WORDS = f"""
    --num-layers {LAYERS} --hidden-size 64 --ffn-hidden-size 160 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --vocab-size 500 --seq-length 16 --lr 1e-3
    --untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --sequence-parallel
    --micro-batch-size 2 --global-batch-size {2 * BATCHES} --overlap-grad-reduce --bf16
    --mock-data --train-iters 8
""".split()


def fork(folder: Path, axis: str = "tp") -> str:
    """Copy the model, with one more collective in each block."""
    text = (ROOT / "model" / "llama.py").read_text()
    new = NEW.replace(".tp)", f".{axis})")
    edits = {OLD: new, "import torch\n": IMPORT, KEPT: KEPT + "        self.ctx = ctx\n"}
    for old, new in edits.items():
        text = text.replace(old, new, 1)
    path = folder / "exchanging.py"
    path.write_text(text)
    return str(path)


LARGE = """
    --num-layers 4 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --vocab-size 32000 --swiglu
    --untie-embeddings-and-output-weights
"""


@pytest.fixture(scope="module")
def worker():
    with Worker() as found:
        yield found


def planned(worker, flags, **more):
    """Return what a step of Llama 3 8B's layers waits for, as plan.py has it, by axis. flags: the
    model's, a fork's too.
    """
    layout = Layout(**{"tp": 2, "dp": 4, "pp": 1, "virtual": 1, "micro_batch": 1,
                       "micro_batches": 4, "zero": 1, "recompute": "none", **more})  # fmt: skip
    model = read_model(f"{LARGE} {flags}", 8192)
    (run,) = play([Recorded(model, read_cluster("8xh100"), layout.flags())], worker)
    return run.played.exposed_seconds


@pytest.mark.parametrize(
    ("axis", "more", "times", "tokens", "group"),
    [
        pytest.param("tp", {}, 2, 8192, (0, 1), marks=LATER),
        pytest.param("tp", {"recompute": "full"}, 3, 8192, (0, 1), marks=LATER),  # runs F again
        pytest.param("cp", {"cp": 4, "dp": 1}, 2, 2048, range(0, 8, 2), marks=LATER),
        pytest.param("dp_cp", {}, 2, 8192, range(0, 8, 2), marks=LATER),
    ],
)
def test_the_planner_times_a_new_collective(axis, more, times, tokens, group, tmp_path, worker):
    name = f"--model-file {fork(tmp_path, axis)}"
    plain, found = planned(worker, "", **more), planned(worker, name, **more)
    sent = 2 * 4096 * tokens // 2  # a rank's rows of hidden states, in bf16
    each = collective_seconds(read_device("h100"), "all_to_all", sent, tuple(group))
    grown = found[axis] - plain.get(axis, 0.0)
    alone = 4 * 4 * times * each  # layers, micro-batches
    if axis == "dp_cp":  # it also waits for the sums of gradients before it
        assert 0.99 * alone < grown < 2 * alone
    else:
        assert grown == pytest.approx(alone, rel=0.05)
    for other in {*plain, *found} - {axis}:
        assert found[other] == pytest.approx(plain[other], rel=0.05, abs=0.05 * grown)
