# SPDX-License-Identifier: Apache-2.0
"""Runs to be timed: models, layouts and batches, as arrays with an element for each run.

With arrays, tens of thousands of layouts are timed in a second.
"""

from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import numpy.typing as npt

from forecast.planner.pipeline import V_SHAPED

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Runs:
    """Runs of one framework on one kind of device; every field is an array over the runs."""

    layers: Array  # sizes of the model, up to `sequence`
    hidden: Array
    heads: Array
    kv_heads: Array
    ffn: Array
    vocab: Array
    sequence: Array
    gated: Array  # 1: the MLP has a gate
    tied: Array  # 1: embedding and output layer are one matrix
    tp: Array
    cp: Array
    dp: Array
    pp: Array
    virtual: Array
    micro_batch: Array
    micro_batches: Array  # of a data-parallel rank in a step
    zero: Array
    recompute: Array  # share of the layers that are recomputed
    sequence_parallel: Array  # 0 or 1
    float8: Array  # 1: the matmuls of layers are in float8
    schedule: Array  # index into SCHEDULES of pipeline.py
    node: Array  # GPUs of a node
    network: Array  # bytes/s of a GPU's share of the node's network cards, one direction
    head: Array  # the stage with the output layer
    core_again: Array  # 1: core attention is recomputed
    comm: Array  # how keys and values are exchanged, an index into COMMS
    overlap: Array  # 1: tp's transfers overlap with matmuls, in a ring
    offload: Array  # bytes of a layer and micro-batch that are offloaded to host memory
    reduces: Array  # reductions of gradients a step
    experts: Array  # experts per layer; `ffn` is then that of the dense MLP
    topk: Array  # experts per token
    expert_ffn: Array  # ffn size of an expert
    ep: Array  # expert-parallel size
    dispatcher: Array  # an index into DISPATCHERS
    paired: Array  # share of the forwards that overlap a backward
    channels: Array  # size of an attention head; 0: hidden / heads
    cut: Array  # [runs, stages]: layers of each stage, 0 beyond pp * virtual

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, chosen: npt.NDArray[np.bool_] | npt.NDArray[np.intp]) -> Self:
        return type(self)(**{f.name: getattr(self, f.name)[chosen] for f in fields(self)})

    @property
    def gpus(self) -> Array:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def nodes(self) -> Array:
        return np.ceil(self.gpus / self.node)

    @property
    def head_size(self) -> Array:
        return np.where(self.channels > 0, self.channels, self.hidden / self.heads)

    @property
    def queries(self) -> Array:
        """Return the elements of a token's queries."""
        return np.where(self.channels > 0, self.heads * self.channels, self.hidden)

    @property
    def layer_weights(self) -> Array:
        """Return the parameters in a layer's matrices, without its experts'."""
        attention = 2 * self.queries + 2 * self.kv_heads * self.head_size
        return self.hidden * (attention + (2 + self.gated) * self.ffn)

    @property
    def expert_weights(self) -> Array:
        """Return the parameters in one expert's matrices."""
        return (2 + self.gated) * self.hidden * self.expert_ffn

    @property
    def edp(self) -> Array:
        """Return the number of ranks of a stage that hold the same experts."""
        return self.tp * self.cp * self.dp / self.ep

    def by_rank(self, values: Array) -> Array:
        """Return [runs, ranks] from [runs, stages]: sums over each pipeline rank's own stages."""
        width = int(self.pp.max())
        if not (self.virtual > 1).any():
            return np.asarray(values[:, :width])
        pp = np.maximum(self.pp, 1).astype(int)[:, None]
        number = np.arange(values.shape[1])[None, :]
        chunk, place = number // pp, number % pp
        back = np.isin(self.schedule, V_SHAPED)[:, None] & (chunk % 2 == 1)
        place = np.where(back, pp - 1 - place, place)
        used = chunk < self.virtual[:, None]
        at = np.arange(len(self))[:, None] * width + np.where(used, place, 0)
        total = np.bincount(at.ravel(), np.where(used, values, 0.0).ravel(), len(self) * width)
        return np.asarray(total.reshape(len(self), width))


COMMS = ("p2p", "all_gather", "a2a")
DISPATCHERS = ("auto", "allgather", "alltoall")
