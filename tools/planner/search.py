# SPDX-License-Identifier: Apache-2.0
"""Enumerate the layouts of a model on a cluster, tell their memory and time, and rank them.

Memory is what --dry-run counts (training/plan), from two small models at each tp and recomputation.
Time is tools/planner/step_time.py. Every layout is timed; there is no heuristic that leaves one out
but the rules of pretrain_llama.py's flags.

t tp, p pipeline ranks, v virtual stages a rank, m micro-batches, b sequences of a micro-batch
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from mpu.pipeline import layout
from mpu.pipeline.schedules import stage_of
from tools.planner.cluster import Cluster
from tools.planner.constants import device_constants, profile
from tools.planner.model import RECOMPUTE, Model
from tools.planner.runs import SCHEDULES, Array, Runs, stacked
from tools.planner.step_time import Times, times
from tools.rehearsal.device_file import read_device

CHUNKS = (1, 2, 4)
MICRO_BATCHES = (1, 2, 4, 8)
DEEPEST = 64  # pipeline ranks
OVERHEAD, POOL = 1.5e9, 0.94  # bytes of context and libraries; share of a GPU that a pool can use


class PlanError(ValueError):
    """A plan that is asked for and not there: the text says why."""


@dataclass(frozen=True)
class Layout:
    """One layout of a run: what the flags say."""

    tp: int
    pp: int
    virtual: int
    dp: int
    micro_batch: int
    micro_batches: int
    zero: int
    recompute: str

    def flags(self) -> str:
        """Return pretrain_llama.py's flags of the layout."""
        words = [f"--tensor-model-parallel-size {self.tp}"]
        words += ["--sequence-parallel"] * (self.tp > 1)
        words.append(f"--pipeline-model-parallel-size {self.pp}")
        if self.virtual > 1:
            words.append(f"--num-virtual-stages-per-pipeline-rank {self.virtual}")
        words.append(f"--micro-batch-size {self.micro_batch}")
        words.append(f"--global-batch-size {self.micro_batch * self.micro_batches * self.dp}")
        if self.zero:
            words.append("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
        return " ".join([*words, RECOMPUTE[self.recompute]]).strip()


@dataclass(frozen=True)
class Plans:
    """Layouts with what is told of them, in the same order. bytes: of the fullest rank."""

    model: Model
    cluster: Cluster
    layouts: list[Layout]
    runs: Runs
    times: Times
    bytes: Array
    limit: float

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        return self.bytes <= self.limit

    @property
    def rate(self) -> Array:
        """Return tokens a second and GPU."""
        return self.runs.tokens / self.times.step / self.runs.gpus

    @property
    def mfu(self) -> Array:
        return self.rate * self.runs.flops / device_constants(self.cluster.device)["peak"]

    def order(self) -> npt.NDArray[np.intp]:
        """Return the layouts that fit, fastest first; of equals the one with more memory left."""
        found = np.flatnonzero(self.fits)
        return found[np.lexsort((self.bytes[found], self.times.step[found]))]


def layouts(model: Model, cluster: Cluster, batch: int) -> Iterator[Layout]:
    """Yield every layout that the flags allow for a batch of so many sequences."""
    m = model.config.model
    groups = m.num_query_groups or m.num_attention_heads
    for tp in (1, 2, 4, 8, 16):
        if tp > cluster.node or groups % tp or m.seq_length % tp or cluster.gpus % tp:
            continue
        for pp in range(1, min(DEEPEST, m.num_layers, cluster.gpus // tp) + 1):
            if cluster.gpus % (tp * pp):
                continue
            dp = cluster.gpus // (tp * pp)
            for virtual, b, recompute in product(CHUNKS, MICRO_BATCHES, RECOMPUTE):
                count, rest = divmod(batch, dp * b)
                if rest or not count or (virtual > 1 and (pp == 1 or count % pp)):
                    continue
                if pp * virtual > m.num_layers:
                    continue
                yield Layout(
                    tp=tp,
                    pp=pp,
                    virtual=virtual,
                    dp=dp,
                    micro_batch=b,
                    micro_batches=count,
                    zero=int(dp > 1),
                    recompute=recompute,
                )


def cut_of(model: Model, pp: int, virtual: int, costs: tuple[float, float, float]) -> list[int]:
    """Return the layers of each stage as pretrain_llama.py balances them."""
    embedding, layer, head = costs
    each = (layer,) * model.config.model.num_layers
    ends = {"embedding_cost": embedding, "head_cost": head}
    stages = layout.stages(each, pp, virtual, **ends)
    return [len(stage.layers) for stage in stages]


def runs_of(model: Model, cluster: Cluster, found: list[Layout], float8: bool = False) -> Runs:
    """Return layouts as runs to be timed."""
    m, costs = model.config.model, model.costs()
    heads = m.num_attention_heads
    records = []
    for each in found:
        records.append({
            "layers": m.num_layers, "hidden": m.hidden_size, "heads": heads,
            "kv_heads": m.num_query_groups or heads, "ffn": _ffn(model),
            "vocab": m.vocab_size, "sequence": m.seq_length, "gated": 1,
            "tied": not m.untie_embeddings_and_output_weights, "causal": 1, "tp": each.tp,
            "cp": 1, "dp": each.dp, "pp": each.pp, "virtual": each.virtual,
            "micro_batch": each.micro_batch, "micro_batches": each.micro_batches,
            "zero": each.zero, "recompute": each.recompute == "full",
            "sequence_parallel": each.tp > 1, "float8": float8,
            "schedule": SCHEDULES.index("interleaved" if each.virtual > 1 else "1f1b"),
            "node": cluster.node, "network": cluster.network, "head": each.pp * each.virtual - 1,
            "idle": 0, "cut": cut_of(model, each.pp, each.virtual, costs),
        })  # fmt: skip
    return stacked(records)


def _ffn(model: Model) -> float:
    """Return the ffn size that gives a layer's parameters: a fork's layer may be another."""
    m = model.config.model
    heads = m.num_attention_heads
    attention = 2 * m.hidden_size + 2 * (m.num_query_groups or heads) * m.hidden_size / heads
    numbers = model.unit(1, "none", m.seq_length).layer_numbers
    return (numbers / m.hidden_size - attention) / 3


def memory_of(model: Model, found: list[Layout], runs: Runs) -> Array:
    """Return the bytes that --dry-run tells of each layout's fullest rank."""
    sequence = model.config.model.seq_length
    tied = not model.config.model.untie_embeddings_and_output_weights
    told = np.zeros(len(found))
    for n, each in enumerate(found):
        unit = model.unit(each.tp, each.recompute, sequence)
        cut = runs.cut[n]
        for rank in range(each.pp):
            own = [stage_of(rank, chunk, each.pp, False) for chunk in range(each.virtual)]
            layers = sum(cut[stage] for stage in own)
            first, last = rank == 0, rank == each.pp - 1
            share = unit.end_numbers * ((first or last) if tied else (first + last) / 2)
            numbers = layers * unit.layer_numbers + share
            shard = each.dp if each.zero else 1
            state = numbers * (6 + 12 / shard)
            b = each.micro_batch
            held = waiting(each, rank) * layers / each.virtual
            kept = b * (held * unit.layer + unit.again + (unit.logits if last else 0))
            told[n] = max(told[n], state + kept + unit.working + (b - 1) * unit.working_more)
    return told


def waiting(each: Layout, rank: int) -> int:
    """Return the micro-batches of a chunk that a rank has in flight at its fullest moment."""
    total = each.micro_batches * each.virtual
    if each.virtual == 1:
        return min(each.pp - rank, total)
    return min(2 * (each.pp - rank - 1) + (each.virtual - 1) * each.pp + 1, total)


def plan(model: Model, cluster: Cluster, batch: int, float8: bool = False) -> Plans:
    """Return every layout of a model on a cluster, timed. Raises PlanError where there is none."""
    found = list(layouts(model, cluster, batch))
    if not found:
        raise PlanError(
            f"no layout of {cluster.gpus} GPUs divides a batch of {batch} sequences, "
            f"{model.config.model.num_layers} layers and {model.config.model.num_attention_heads} "
            "heads: another --global-batch-size may"
        )
    return told(model, cluster, found, float8)


def told(model: Model, cluster: Cluster, found: list[Layout], float8: bool = False) -> Plans:
    """Return what is told of given layouts."""
    runs = runs_of(model, cluster, found, float8)
    limit = read_device(cluster.device)["memory"] * POOL - OVERHEAD
    timed = times(profile(f"weft_{cluster.device}"), runs)
    return Plans(
        model=model,
        cluster=cluster,
        layouts=found,
        runs=runs,
        times=timed,
        bytes=memory_of(model, found, runs),
        limit=limit,
    )
