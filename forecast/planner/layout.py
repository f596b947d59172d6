# SPDX-License-Identifier: Apache-2.0
"""List every layout of a model on a cluster: tp, cp, pipeline, dp, ZeRO stage, recomputation.

A layout is listed if the rules of pretrain_llama.py's flags allow it. Some are left out: ZeRO
stages 2 and 3 in a pipeline, as unsharded gradients and weights are the peak there; offload in
schedules that separate W from B; context parallelism with less than SHORTEST tokens per rank.
forecast/planner/search.py adds layouts that fit only with the optimizer's state in host memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from forecast.planner.cluster import Cluster
from forecast.planner.model import Model
from forecast.planner.pipeline import paired
from mpu.pipeline.schedules import CHUNKS, OVERLAPPING, SPLIT, V_SHAPED

TENSOR, CONTEXT = (1, 2, 4, 8, 16), (1, 2, 4, 8, 16, 32)
SCHEDULES = [  # all but GPipe, which has 1F1B's bubble and more activations
    (name, v) for name, chunks in CHUNKS.items() if name != "gpipe"
    for v in ((2, 4) if name == "interleaved" else (chunks,))
]  # fmt: skip
MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTE = ("none", "selective", "block", "full")
DEEPEST = 64  # most pipeline ranks
SHORTEST = 1024  # fewest tokens of a context-parallel rank
RECOMPUTE_FLAGS = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@dataclass(frozen=True)
class Layout:
    """One layout of a run; its fields correspond to flags."""

    tp: int
    pp: int
    virtual: int
    dp: int
    micro_batch: int
    micro_batches: int
    zero: int
    recompute: str
    again: int = 0  # layers of each stage that "block" recomputes
    cp: int = 1
    comm: str = "p2p"  # --cp-comm-type
    schedule: str = "1f1b"
    offload: bool = False  # activations are offloaded to host memory
    overlap: str = "none"  # --tp-comm-overlap
    dtype: str = "bf16"  # bf16, or a float8 recipe
    each: bool = False  # --zero-reduce-each-microbatch
    states: bool = False  # --optimizer-state-offload
    on_host: bool = False  # --optimizer-cpu-offload: the update runs on the host
    ep: int = 0  # expert-parallel ranks; 0: the model has none
    dispatcher: str = "auto"  # --moe-token-dispatcher-type
    overlap_ep: bool = False  # --overlap-moe-expert-parallel-comm

    def flags(self) -> str:
        """Return pretrain_llama.py's flags of the layout."""
        words = [f"--tensor-model-parallel-size {self.tp}"]
        if self.tp > 1:
            words.append("--sequence-parallel")
            words += [f"--tp-comm-overlap {self.overlap}"] * (self.overlap != "none")
        if self.cp > 1:
            words.append(f"--context-parallel-size {self.cp} --cp-comm-type {self.comm}")
        if self.ep:
            words.append(f"--expert-model-parallel-size {self.ep} --expert-tensor-parallel-size 1")
            words += [f"--moe-token-dispatcher-type {self.dispatcher}"] * (self.ep > 1)
            words += ["--overlap-moe-expert-parallel-comm"] * self.overlap_ep
        words.append(f"--pipeline-model-parallel-size {self.pp}")
        if self.pp > 1 and self.schedule not in ("1f1b", "interleaved"):
            words.append(f"--pipeline-schedule {self.schedule}")
        elif self.virtual > 1:
            words.append(f"--num-virtual-stages-per-pipeline-rank {self.virtual}")
        words.append(f"--micro-batch-size {self.micro_batch}")
        words.append(f"--global-batch-size {self.micro_batch * self.micro_batches * self.dp}")
        if self.zero:
            level = f"--zero-stage {self.zero}"
            words.append("--use-distributed-optimizer" if self.zero == 1 else level)
            words.append("--overlap-grad-reduce --overlap-param-gather")
            words += ["--zero-reduce-each-microbatch"] * self.each
        words.append(RECOMPUTE_FLAGS[self.recompute] + f" {self.again}" * (self.again > 0))
        words += ["--cpu-offload-activations"] * self.offload
        words += ["--optimizer-state-offload"] * self.states
        words += ["--optimizer-cpu-offload"] * self.on_host
        words.append(float8_flags(self.dtype))
        return " ".join(word for word in words if word).strip()

    @property
    def split(self) -> bool:
        """Return whether the schedule separates W from B."""
        return self.pp > 1 and self.schedule in SPLIT

    @property
    def mechanisms(self) -> int:
        """Return the number of mechanisms that the layout uses besides plain data parallelism.

        One each for tensor, context, expert and pipeline parallelism, a schedule with separate W,
        forwards that overlap backwards, ZeRO 2 or 3, recomputation, activations in host memory, the
        optimizer's state there, its update on the host.
        """
        return sum((self.tp > 1, self.cp > 1, self.ep > 1, self.pp > 1, self.split, self.overlap_ep,
                    self.zero > 1, self.recompute != "none", self.offload,
                    self.states, self.on_host))  # fmt: skip

    @property
    def can_overlap_ep(self) -> bool:
        """Return whether --overlap-moe-expert-parallel-comm is allowed and has an effect."""
        if self.ep <= 1 or self.offload or (self.zero == 3 and self.pp == 1):
            return False
        shape = self.schedule, self.pp, self.micro_batches, self.virtual
        return self.schedule in OVERLAPPING and paired(*shape) > 0

    @property
    def v_shape(self) -> bool:
        """Return whether the second chunks run from the last rank back to the first."""
        return self.pp > 1 and self.schedule in V_SHAPED


def float8_flags(dtype: str) -> str:
    """Return the flags of the layers' dtype: bf16, or a float8 recipe."""
    return "" if dtype == "bf16" else f"--fp8-format hybrid --fp8-recipe {dtype}"


class Choice(NamedTuple):
    """How a layer communicates: --cp-comm-type and --tp-comm-overlap."""

    comm: str = "p2p"
    overlap: str = "none"


def choices(model: Model, tp: int, cp: int) -> list[Choice]:
    """Return every Choice that the flags allow at a tp and a cp."""
    m = model.config.model
    heads = m.num_attention_heads // tp
    groups = max(1, (m.num_query_groups or m.num_attention_heads) // tp)
    kinds = ["p2p"]
    if cp > 1:
        kinds.append("all_gather")
        if heads % cp == 0 and (groups % cp == 0 or cp % groups == 0):
            kinds.append("a2a")
    return [Choice(*both) for both in product(kinds, ("none", "ring") if tp > 1 else ("none",))]


def grids(model: Model, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """Yield every tp and cp that the model's sizes and the cluster allow."""
    m = model.config.model
    groups = m.num_query_groups or m.num_attention_heads
    for tp, cp in product(TENSOR, CONTEXT):
        if tp > cluster.node or groups % tp or cluster.gpus % (tp * cp):
            continue
        if m.seq_length % (2 * tp * cp) or (cp > 1 and m.seq_length // cp < SHORTEST):
            continue
        yield tp, cp


def layouts(
    model: Model, cluster: Cluster, batch: int, how: dict[tuple[int, int, int], Choice],
    dtype: str = "bf16",
) -> Iterator[Layout]:  # fmt: skip
    """Yield every layout for a batch of `batch` sequences.

    how: the Choice for each (tp, cp, micro-batch size).
    """
    layers = model.config.model.num_layers
    for tp, cp in dict.fromkeys((tp, cp) for tp, cp, _ in how):
        ranks = cluster.gpus // (tp * cp)
        for pp in range(1, min(DEEPEST, layers, ranks) + 1):
            if ranks % pp:
                continue
            dp = ranks // pp
            for (schedule, virtual), b in product(SCHEDULES if pp > 1 else SCHEDULES[:1],
                                                  MICRO_BATCHES):  # fmt: skip
                count, rest = divmod(batch, dp * b)
                if rest or not count or pp * virtual > layers:
                    continue
                if schedule == "interleaved" and count % pp:
                    continue
                longest = -(-layers // (pp * virtual))
                kinds = product(_zeros(pp, dp * cp), RECOMPUTE, (0, 1), eps(model, tp * cp * dp))
                for zero, recompute, offload, ep in kinds:
                    again = longest // 2 if recompute == "block" else 0
                    if (recompute == "block" and not again) or (offload and recompute != "none"):
                        continue
                    if offload and (layers <= pp * virtual or schedule in SPLIT):
                        continue
                    each = Layout(
                        tp=tp, pp=pp, virtual=virtual, dp=dp, micro_batch=b, micro_batches=count,
                        zero=zero, recompute=recompute, again=again, cp=cp,
                        comm=how[tp, cp, b].comm, overlap=how[tp, cp, b].overlap,
                        schedule=schedule, offload=bool(offload), dtype=dtype,
                        each=zero > 1 and count > 1, ep=ep,
                    )  # fmt: skip
                    yield each
                    if each.can_overlap_ep:
                        yield replace(each, dispatcher="alltoall", overlap_ep=True)


def eps(model: Model, ranks: int) -> list[int]:
    """Return the possible expert-parallel sizes; [0] for a dense model."""
    if not model.experts:
        return [0]
    powers = (1 << n for n in range(model.experts.bit_length()))
    return [ep for ep in powers if model.experts % ep == 0 and ranks % ep == 0]


def _zeros(pp: int, sharing: int) -> tuple[int, ...]:
    if sharing == 1:
        return (0,)
    return (1, 2, 3) if pp == 1 else (1,)
