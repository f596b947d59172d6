# SPDX-License-Identifier: Apache-2.0
"""A collective that no part of the program knows enters every reader by one line of a model.

The line is a fork's: an all-to-all over tp in each block, a verb that nothing else sends there. The
collectives of experts come the same way, from mpu/layers/dispatch.py.
"""

from collections import Counter
from pathlib import Path

import pytest

import pretrain_llama
from forecast.device_file import read_device
from forecast.dry_run import report
from tools.explain import explain
from tools.planner import search
from tools.planner.cluster import read_cluster
from tools.planner.layout import Layout
from tools.planner.model import read_model
from tools.planner.rank_order import ledger, orders
from tools.rehearsal.links import collective_seconds
from training.flags.parse import parse

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


def planned(flags, **more):
    """Return times of Llama 3 8B's layers by the planner. flags: the model's, a fork's too."""
    layout = Layout(**{"tp": 2, "dp": 4, "pp": 1, "virtual": 1, "micro_batch": 1,
                       "micro_batches": 4, "zero": 1, "recompute": "none", **more})  # fmt: skip
    cluster = read_cluster("h100_8_nodes").of(1)
    model = read_model(f"{LARGE} {flags}", 8192)
    return search.evaluate(model, cluster, [layout]).times


@pytest.mark.parametrize(
    ("more", "times", "tokens"),
    [
        ({}, 2, 8192),
        pytest.param({"recompute": "full"}, 3, 8192, marks=LATER),  # forward runs again
        ({"cp": 2, "dp": 2, "micro_batch": 2}, 2, 8192),
        ({"pp": 2, "dp": 2, "schedule": "zb-h1"}, 2, 8192),
        pytest.param(
            {"overlap": "ring", "dtype": "tensorwise", "micro_batch": 2}, 2, 2 * 8192, marks=LATER
        ),
    ],
)
def test_the_planner_times_a_new_collective(more, times, tokens, tmp_path):
    plain, found = planned("", **more), planned(f"--model-file {fork(tmp_path)}", **more)
    sent = 2 * 4096 * tokens // 2  # a rank's rows of hidden states, in bf16
    each = collective_seconds(read_device("h100"), "all_to_all", sent, (0, 1))
    layers = 4 // more.get("pp", 1)
    assert each > 0
    assert found.tp[0] - plain.tp[0] == pytest.approx(layers * times * each, rel=1e-6)
    for name in ("cp", "ep", "fsdp", "sums", "update", "compute"):
        assert getattr(found, name)[0] == pytest.approx(getattr(plain, name)[0], rel=1e-12)
    grown = 4 * layers * times * each * plain.jitter[0]  # 4 micro-batches; a pipeline's ends too
    assert 0.8 * grown < found.step[0] - plain.step[0] < (1 if layers == 4 else 1.6) * 1.001 * grown


@pytest.mark.parametrize(
    ("axis", "term", "more", "group"),
    [("cp", "cp", {"cp": 4, "dp": 1}, range(0, 8, 2)), ("dp_cp", "fsdp", {}, range(0, 8, 2))],
)
def test_and_one_over_another_axis(axis, term, more, group, tmp_path):
    plain, found = planned("", **more), planned(f"--model-file {fork(tmp_path, axis)}", **more)
    sent = 2 * 4096 * 8192 // (2 * more.get("cp", 1))
    each = collective_seconds(read_device("h100"), "all_to_all", sent, tuple(group))
    grown = {name: getattr(found, name)[0] - getattr(plain, name)[0]
             for name in ("tp", "cp", "ep", "fsdp", "sums", "update")}  # fmt: skip
    assert grown.pop(term) == pytest.approx(4 * 2 * each, rel=1e-6)
    assert not any(grown.values())


def explained(comm, more):
    """Explain a step on two ranks in earnest."""
    config = parse([*WORDS, *more, "--device", "cpu"], 2)
    found = explain(config, comm.grid(2, ep=config.expert_model_parallel_size or 1))
    return found.equal, found.counted, found.text


@pytest.mark.prove
@pytest.mark.parametrize("axis", ["tp", "ep"])
def test_a_new_collective_enters_every_reader(axis, world, rehearse, tmp_path):
    more = ["--model-file", fork(tmp_path)] if axis == "tp" else EXPERTS
    key = axis, "all_to_all"
    equal, counted, text = world(2).run(explained, more)[0]
    assert equal and "all_to_all" in text
    times, sent = counted[key]
    each = 1 if axis == "tp" else 2  # rows go to experts and come back
    assert times == BATCHES * LAYERS * 2 * each and sent > 0  # forward and backward

    config = parse([*WORDS, *more], 2)
    listed = [line.split() for line in report(config, pretrain_llama).splitlines()]
    assert [axis, "all-to-all"] in [line[:2] for line in listed if f"{times}" in line]

    flows = [flow for flow in ledger(config) if flow[:2] == key]
    assert [(flow.calls, flow.sent) for flow in flows] == [(times, sent)]
    first = orders(config, read_cluster("h100_8_nodes"))[0]
    assert first.seconds[axis] > 0 and sum(first.bytes[axis]) >= 2 * sent

    found = rehearse(" ".join([*WORDS, *more]), 2, small=False)
    assert (found.code, found.report["findings"]) == (0, []), found.text[-2000:]
    played = Counter()
    for row in found.report["collectives"]:
        played[row["axis"], row["verb"]] += row["sent"]
    assert played[key] == sent
