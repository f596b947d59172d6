# SPDX-License-Identifier: Apache-2.0
"""Bytes over each level of links, for an order of the ranks: exact against what real runs send.

The run is instrumented below mpu: what is counted are the calls of torch.distributed, with the
ranks of their groups and the bytes of their tensors.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist

from forecast.explainer.trace import Explainer
from forecast.planner.cluster import FOLDER, ClusterError, Level, read_cluster
from forecast.planner.model import read_model
from forecast.planner.rank_order import (
    GLOO,
    Flow,
    across,
    choices,
    distinct,
    faster,
    ledger,
    seconds,
)
from mpu.comm import collectives
from mpu.comm.transport import Axis
from mpu.grid import ORDER, Grid
from mpu.launch import Launch
from tools import plan
from tools.explain import explain, tiny
from training.flags.parse import parse
from training.run.model_profile import make_grid

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 100 "
    "--mock-data --train-iters 1 --lr 1e-3"
).split()
LEVELS = (
    Level("node", 2, 400e9, 2e-6),
    Level("rail", 4, 50e9, 5e-6),
    Level("spine", 0, 50e9, 8e-6, 4.0),
)
CASES = {  # name: tp, dp, pp, cp, and tiny's other arguments
    "tp, dp": (2, 2, 1, 1, dict(zero=1)),
    "tp, pp": (2, 1, 2, 1, dict(micro_batches=3, tied=True)),
    "dp, pp": (1, 2, 2, 1, dict(schedule="zb-v", micro_batches=4)),
    "cp, dp": (1, 2, 1, 2, dict(zero=3)),
    "cp by heads, pp": (1, 1, 2, 2, dict(more=["--cp-comm-type", "a2a"])),
}
EIGHT = {
    "tp, dp, pp": (2, 2, 2, 1, dict(zero=1, tied=True)),
    "tp, cp, dp": (2, 2, 1, 2, dict(zero=2)),
    "tp, cp, pp": (2, 1, 2, 2, dict(schedule="interleaved", micro_batches=2)),
    "instances": (2, 4, 1, 1, dict(zero=1, more=["--num-distributed-optimizer-instances", "2"])),
}


def grid_of(tp, cp, dp, pp):
    world = tp * cp * dp * pp
    return Grid(world, tp, cp, pp, Launch(0, world))


def config_of(case, order):
    tp, dp, pp, cp, more = case
    words = [*more.get("more", []), "--rank-order", "-".join(order)]
    return tiny(tp, dp, pp, cp=cp, **more | {"more": words})


STANDS_FOR = {"pp_back": "pp"}  # one name for both, as in the ledger


class Counted:
    """Takes the place of torch.distributed's calls and notes (axis, sender, receiver, bytes)."""

    def __init__(self, rank):
        self.rank, self.axis, self.sent = rank, "", []

    def note(self, to, count):
        assert count == int(count)
        if not self.axis:
            return
        self.sent.append((STANDS_FOR.get(self.axis, self.axis), self.rank, to, int(count)))

    def install(self, patch):
        start, begin, real = Axis.start, Explainer.begin, SimpleNamespace(**vars(dist))

        def started(axis, *given, **named):
            self.axis = axis.name if axis.trace else ""  # what explain tells at the end is none
            return start(axis, *given, **named)

        def began(explainer, count):
            self.sent.clear()
            begin(explainer, count)

        def ring(group, count):
            ranks = dist.get_process_group_ranks(group)
            self.note(ranks[(ranks.index(self.rank) + 1) % len(ranks)], count)

        def gather(out, x, group, async_op):
            ring(group, x.nbytes * (dist.get_world_size(group) - 1))
            return real_gather(out, x, group=group, async_op=async_op)

        def reduce(x, op, group, async_op):
            n = dist.get_world_size(group)
            ring(group, 2 * x.nbytes * (n - 1) // n)
            return real.all_reduce(x, op=op, group=group, async_op=async_op)

        def exchange(out, x, *rows, group, async_op):
            ranks = dist.get_process_group_ranks(group)
            for other in ranks:
                if other != self.rank:
                    self.note(other, x.nbytes / len(ranks))
            return real.all_to_all_single(out, x, *rows, group=group, async_op=async_op)

        def isend(x, to, group):
            self.note(to, x.nbytes)
            return real.isend(x, to, group=group)

        def batch(ops):
            for op in ops:
                if op.op is real.isend:
                    self.note(op.peer, op.tensor.nbytes)
            return real.batch_isend_irecv(ops)

        def operation(op, *rest):
            return real.P2POp(real.isend if op is isend else op, *rest)

        real_gather = collectives._all_gather
        patch.setattr(Axis, "start", started)
        patch.setattr(Explainer, "begin", began)
        patch.setattr(collectives, "_all_gather", gather)
        patch.setattr(collectives.dist, "all_reduce", reduce)
        patch.setattr(collectives.dist, "all_to_all_single", exchange)
        changed = {"isend": isend, "batch_isend_irecv": batch, "P2POp": operation}
        for name, call in changed.items():
            patch.setattr(collectives.dist, name, call)


def send(comm, case, order):
    """Run a step on one rank; return what it sent."""
    config, counted = config_of(case, order), Counted(comm.rank)
    tp, _, pp, cp, _ = case
    instances = config.parallel.num_distributed_optimizer_instances
    groups = config.model.num_query_groups
    grid = comm.grid(tp, cp, pp, instances, query_groups=groups, order=order)
    with pytest.MonkeyPatch.context() as patch:
        counted.install(patch)
        assert explain(config, grid).equal
    return counted.sent


def hold(world, case, orders):
    size = int(np.prod(case[:4]))
    for order in orders:
        config = config_of(case, order)
        told = across(make_grid(config, Launch(0, size)), LEVELS, ledger(config), GLOO)
        seen = {axis: [0] * len(LEVELS) for axis in told}
        for sent in world(size).run(send, case, order):
            for axis, source, target, count in sent:
                level = 0 if source // 2 == target // 2 else 1 if source // 4 == target // 4 else 2
                seen[axis][level] += count
        assert told == seen, order
        assert sum(map(sum, told.values())) > 100_000


@pytest.mark.prove
def test_the_bytes_of_real_runs(world):
    hold(world, CASES["dp, pp"], [("pp", "dp", "cp", "tp")])


@pytest.mark.prove
@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_real_runs_of_four(world, name):
    tp, dp, pp, cp, _ = CASES[name]
    hold(world, CASES[name], distinct(grid_of(tp, cp, dp, pp)))


@pytest.mark.prove
@pytest.mark.parametrize("name", EIGHT)
def test_the_bytes_of_real_runs_of_eight(world, name):
    tp, dp, pp, cp, _ = EIGHT[name]
    hold(world, EIGHT[name], distinct(grid_of(tp, cp, dp, pp)))


def test_the_order_that_keeps_most_bytes_near_is_chosen():
    """Two nodes of 4. tp sends most: it stays inside. Then pp's messages, or dp's sums, cross."""
    levels = (Level("node", 4, 400e9, 0.0), Level("network", 0, 50e9, 0.0))
    flows = [Flow("tp", "all_gather", rank, 10, 10_000) for rank in (0, 1)]
    flows += [Flow("pp", "send", rank, 10, 100, 1 - rank) for rank in (0, 1)]
    sums = [Flow("dp_cp", "all_reduce", rank, 1, 5_000) for rank in (0, 1)]
    best, *rest = choices(grid_of(2, 1, 2, 2), levels, flows + sums)
    assert best.order == ORDER and len(rest) == 5  # dp inside, pp between the nodes
    assert best.bytes == {"tp": [80_000, 0], "pp": [0, 800], "dp_cp": [40_000, 0]}
    assert best.seconds["pp"] == pytest.approx(400 / (4 * 50e9))
    light = [flow._replace(sent=1) for flow in sums]
    heavy = [flow._replace(sent=9_000) if flow.axis == "pp" else flow for flow in flows]
    best, *_ = choices(grid_of(2, 1, 2, 2), levels, heavy + light)
    assert best.order == ("tp", "pp", "dp", "cp") and best.bytes["pp"] == [72_000, 0]
    equal, *_ = choices(grid_of(2, 1, 2, 2), levels[1:], flows + sums)
    assert equal.order == ORDER  # one level: none is better


def test_the_orders_of_a_layout_are_ranked_and_the_flag_parses(tmp_path, capsys):
    """Sites of 32 GPUs: what sends least goes between them."""
    level = {"latency_us": 5, "oversubscription": 1}
    content = {
        "name": "two sites", "device": "h100", "nodes": 8, "gpus_per_node": 8,
        "source": "this test's",
        "levels": [{"name": "node", "gpus": 8, "gbps_per_gpu": 3600, **level},
                   {"name": "rail", "gpus": 32, "gbps_per_gpu": 400, **level},
                   {"name": "site", "gpus": 0, "gbps_per_gpu": 4, **level}],
    }  # fmt: skip
    path = tmp_path / "sites.json"
    path.write_text(json.dumps(content))
    flags = "--tensor-model-parallel-size 4 --sequence-parallel --pipeline-model-parallel-size 2"
    flags += " --micro-batch-size 1 --global-batch-size 64 --zero-stage 1 --bf16"
    assert plan.main(["8B", str(path), "--rank-orders", flags]) == 0
    head, first, *lines, last = capsys.readouterr().out.splitlines()
    rest = [line for line in lines if line.split()[0].count("-") == 3]
    told = lines[-1]
    assert head.split()[:3] == ["order", "over", "node"] and len(rest) == 5
    assert first.split()[0] == "tp-cp-dp-pp"  # messages between the sites, sums inside
    assert last == "flag of the first: --rank-order tp-cp-dp-pp" and "tp " in told
    # more micro-batches: more messages than sums
    many = flags.replace("batch-size 64", "batch-size 8192")
    assert plan.main(["1B", str(path), "--rank-orders", many]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "flag of the first: --rank-order tp-pp-dp-cp"
    config = parse([*MODEL, *flags.split(), *lines[-1].split()[-2:]], 64)
    assert config.parallel.rank_order == "tp-pp-dp-cp"
    assert plan.main(["8B", str(path), "--rank-orders", "--zero-stage 9"]) == 2
    flag, saved = faster(read_model("1B", 8192), read_cluster(str(path)), many)  # as the table asks
    assert flag == "--rank-order tp-pp-dp-cp" and saved > 0
    assert faster(read_model("8B", 8192), read_cluster(str(path)), flags) == ("", 0.0)


def test_every_level_has_its_time():
    """8 ranks of dp in a ring: two blocks of 4, each of two nodes of 2; one rank's bytes cross."""
    flows = [Flow("dp_cp", "all_gather", 0, 3, 7_000)]
    grid = grid_of(1, 1, 8, 1)
    told = across(grid, LEVELS, flows)
    assert told == {"dp_cp": [28_000, 14_000, 14_000]}
    spine = 7_000 / (50e9 / 4.0 * 4)  # a block of 4 shares its links, 4 times oversubscribed
    rail = 7_000 / (50e9 * 2)
    assert seconds(grid, LEVELS, flows)["dp_cp"] == pytest.approx(
        max(spine, rail, 7_000 / 400e9) + 3 * 7 * 8e-6
    )


@pytest.mark.parametrize(
    "axis, words", [("tp", "--tp-comm-overlap ring"), ("cp", "--cp-comm-type p2p")]
)
def test_messages_round_a_ring_have_their_time(axis, words):
    size = "--tensor-model-parallel-size" if axis == "tp" else "--context-parallel-size"
    more = " --sequence-parallel" if axis == "tp" else ""
    config = parse([*MODEL, *f"--bf16 {size} 4 {words}{more}".split()], 4)
    grid = make_grid(config, Launch(0, 4))
    flows = [flow for flow in ledger(config) if flow.axis == axis and flow.verb == "send"]
    calls, sent = sum(flow.calls for flow in flows), sum(flow.sent for flow in flows)
    assert calls and seconds(grid, LEVELS[1:], flows) == {
        axis: pytest.approx(calls * 5e-6 + sent / 50e9)
    }


def test_a_cluster_file_has_one_to_four_levels(tmp_path):
    old = read_cluster("h100_8_nodes")
    assert [level.gpus for level in old.levels] == [8, 0] and old.network == 50e9
    base = {"name": "x", "device": "h100", "nodes": 16, "gpus_per_node": 8, "source": "this test's"}
    level = {"gbps_per_gpu": 400, "latency_us": 5, "oversubscription": 1}
    four = [
        {"name": "nvlink", "gpus": 8, **level, "gbps_per_gpu": 3600},
        {"name": "rail", "gpus": 32, **level},
        {"name": "spine", "gpus": 64, **level, "oversubscription": 2},
        {"name": "site", "gpus": 0, **level, "gbps_per_gpu": 100},
    ]
    path = tmp_path / "c.json"

    def read(levels):
        path.write_text(json.dumps(base | {"levels": levels}))
        return read_cluster(str(path))

    cluster = read(four)
    assert [each.gpus for each in cluster.levels] == [8, 32, 64, 0]
    assert [cluster.of(n).network for n in (1, 4, 8, 16)] == [50e9, 50e9, 25e9, 12.5e9]
    assert read(four[3:]).network == 12.5e9 and len(read(four[3:]).levels) == 1
    for levels, said in (
        ([], "levels must be a list of 1 to 4"),
        (four[:1] * 5, "levels must be a list of 1 to 4"),
        (four[:2], r"levels\[1\].gpus is 32: the last level has 0"),
        ([four[0], {**four[1], "gpus": 20}, four[3]], r"levels\[1\].gpus is 20: must be a multi"),
        ([four[1], four[0], four[3]], r"levels\[1\].gpus is 8: must be a multiple of 32"),
        ([four[0], {**four[3], "latency_us": -1}], r"levels\[1\].latency_us is -1"),
        ([four[0], {"name": "x"}], r"levels\[1\] must be an object"),
    ):
        with pytest.raises(ClusterError, match=said):
            read(levels)
    with pytest.raises(ClusterError, match="must be an object with"):
        content = json.loads((FOLDER / "h100_8_nodes.json").read_text())
        path.write_text(json.dumps(content | {"levels": four}))
        read_cluster(str(path))
