# SPDX-License-Identifier: Apache-2.0
"""Compute the memory of pipeline ranks: estimates for many layouts at once, and exact values.

`exactly` calls --dry-run's own functions. `many` treats all parameters of a rank as one bucket, and
works on arrays over all layouts; activations come from a recorded layer and both ends of the model
(forecast/planner/units.py), once for each tp.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

import pretrain_llama
from forecast.dry_run import matmul_workspaces, memory
from forecast.like_ranks import alike
from forecast.planner.layout import RECOMPUTE_FLAGS, Layout, float8_flags
from forecast.planner.model import Model
from forecast.planner.pipeline import in_flight
from forecast.planner.runs import Array, Runs
from forecast.planner.units import FIRST, LAST, LONGER, MIDDLE, unit_config, units
from forecast.recording import HOST, recordings_of
from mpu.optim.interface import state_bytes
from mpu.pipeline.stage_layout import Stage
from mpu.zero.bucket_layout import BLOCK, LARGEST, SMALLEST, automatic_size
from training.run.model_profile import rank_parameters
from training.run.pipeline_stages import rank_stages
from training.settings.config import Config
from training.settings.update_rules import needs_full_matrices, optimizer_groups

PROVIDER = pretrain_llama.model_provider
ENDS = (FIRST, MIDDLE, LAST)
LAYER = Stage(1, 2)
NORM_BYTES = 9  # bytes of a block in the gradient norm's index: int64 and bool
Kinds = dict[str, int]  # bytes by kind of memory, as --dry-run names them


class Layers(NamedTuple):
    """Bytes of a rank for a micro-batch of one sequence, at one tp and recomputation, and cp 1."""

    layer: float  # saved by each layer
    first: float  # saved by the first stage outside of its layers
    middle: float  # saved by a stage in between, outside of its layers
    last: float  # saved by the last stage outside of its layers
    logits: float
    # working memory of an action of the first, a middle and the last stage, with recomputation
    working: tuple[float, ...]
    more: tuple[float, ...]  # increase of `working` with each further sequence


class Sizes(NamedTuple):
    """Sizes that do not depend on recomputation: elements of a layer and both ends, at one tp."""

    layer: float
    embedding: float
    head: float
    waits: float  # bytes that a layer keeps from B to W, in schedules that split them
    experts: float  # elements of a layer that are sharded over edp
    moments: tuple[float, float, float, float]  # bytes of optimizer state of each of the four above


@lru_cache(maxsize=256)
def of_layers(
    flags: tuple[str, ...], tp: int, recompute: str, dtype: str, ep: int = 0,
    dispatcher: str = "auto",
) -> Layers:  # fmt: skip
    """Return the recorded bytes at a tp and a recomputation: "none", "selective" or "full"."""
    low = float8_flags(dtype)
    more = f"{RECOMPUTE_FLAGS[recompute]} {low}"
    config = unit_config(flags, tp, more, ep, dispatcher=dispatcher)
    one = units(config)
    layer = one[LONGER].stored - one[MIDDLE].stored
    working = [float(one[at].working) for at in ENDS]
    further = working
    if low:  # weights in float8 do not depend on the number of sequences
        two = units(replace(config, batch=replace(config.batch, micro_batch_size=2)))
        further = [two[at].working - one[at].working for at in ENDS]
    first, middle, last = (one[at].stored - layer for at in ENDS)
    return Layers(
        layer=layer, first=first, middle=middle, last=last, logits=one[LAST].logits,
        working=tuple(working), more=tuple(further),
    )  # fmt: skip


@lru_cache(maxsize=64)
def sizes(flags: tuple[str, ...], tp: int, ep: int = 0) -> Sizes:
    """Return the Sizes at a tp and an ep."""
    config = unit_config(flags, tp, "", ep)
    each = state_bytes(optimizer_groups(config), torch.float32)

    def numbers_of(stage: Stage, cut: str = "") -> Array:
        found = rank_parameters(config, PROVIDER, (stage,), LAST * stage.loss).values()
        own = [p.entry for p in found if cut in ("", p.entry.cut)]
        return np.array([sum(e.numel for e in own), sum(e.numel * each[e.group] for e in own)])

    layer = numbers_of(LAYER)
    ends = (Stage(0, 1, embedding=True), Stage(4, 5, loss=True))
    first, last = (numbers_of(stage) - layer for stage in ends)
    both = units(unit_config(flags, tp, "--pipeline-schedule zb-h1", ep))
    waits = both[LONGER].waits - both[MIDDLE].waits
    parts = (layer, first, last, numbers_of(LAYER, "ep"))
    of_layer, embedding, head, experts = (float(part[0]) for part in parts)
    a, b, c, d = (float(part[1]) for part in parts)
    return Sizes(of_layer, embedding, head, waits, experts, (a, b, c, d))


class Bytes(NamedTuple):
    """Bytes of layouts. fullest: of the fullest rank. moved: most bytes of optimizer state that a
    rank copies to the host and back in a step.
    """

    fullest: Array
    moved: Array


def many(model: Model, found: Sequence[Layout], runs: Runs, host: float) -> Bytes:
    """Return the bytes of each layout's fullest rank, within a few percent of --dry-run's.

    host: bytes of a node's host memory for activations and state; inf for layouts that need more.
    """
    bytes_ = Bytes(np.zeros(len(found)), np.zeros(len(found)))
    key = [  # fmt: skip
        (e.tp, e.recompute, e.dtype, e.offload, e.zero, e.pp, e.virtual, e.schedule, e.states,
         e.on_host, e.ep, e.dispatcher, e.overlap_ep) for e in found
    ]
    order = sorted(range(len(found)), key=lambda n: key[n])
    for _, members in groupby(order, key=lambda n: key[n]):
        at = np.array(list(members))
        bytes_.fullest[at], bytes_.moved[at] = _group(
            model, [found[n] for n in at], runs[at], host
        )
    return bytes_


def _group(model: Model, found: Sequence[Layout], r: Runs, host: float) -> Bytes:
    """Return the bytes of layouts that differ only in cp, dp and their batches."""
    e = found[0]
    own = sizes(model.flags, e.tp, e.ep)
    kind = "full" if e.recompute == "block" else e.recompute
    u = of_layers(model.flags, e.tp, kind, e.dtype, e.ep, e.dispatcher)
    plain = of_layers(model.flags, e.tp, "none", e.dtype, e.ep, e.dispatcher)
    ranks = np.arange(e.pp)[None, :]
    layers = r.by_rank(r.cut)[:, : e.pp]
    stage = np.arange(r.cut.shape[1])[None, :]
    last = r.by_rank(np.broadcast_to(stage == e.pp * e.virtual - 1, r.cut.shape) * 1.0)[:, : e.pp]
    first = (ranks == 0) * np.ones_like(last)
    ends = first * own.embedding + last * own.head
    both = (r.tied > 0)[:, None] * first * last
    numbers = layers * (own.layer - own.experts) + ends - both * own.head
    of_layer, of_embedding, of_head, of_experts = own.moments
    moments = layers * (of_layer - of_experts) + first * of_embedding + last * of_head
    moments = moments - both * of_head
    state, moved = _state(model, e.zero, numbers, moments, (r.dp * r.cp)[:, None])
    if own.experts:
        dealt = layers * own.experts, layers * of_experts
        more = _state(model, e.zero, *dealt, r.edp[:, None], again=True)
        state, moved = state + more[0], moved + more[1]
    if e.zero >= 3:
        state = state + 2 * (2 * own.layer + (own.embedding + own.head) * 0.5)  # gathered weights
    elif e.dtype != "bf16":  # rows of w and of w^T, where micro-batches share them
        state = state + 2 * layers * own.layer * (r.micro_batches > 1)[:, None]
    b = (r.micro_batch / r.cp)[:, None]
    each = np.broadcast_to(u.layer, layers.shape)
    if e.recompute == "block":
        share = np.array([min(x.again * x.virtual, 1e9) for x in found])[:, None] / layers.clip(1)
        share = np.minimum(share, 1.0)
        each = share * u.layer + (1 - share) * plain.layer
    chunk, waiting, stored = layers / e.virtual, np.zeros(layers.shape), np.zeros(layers.shape)
    for m in np.unique(r.micro_batches):
        at = r.micro_batches == m
        waits = in_flight(e.schedule, e.pp, int(m), e.virtual, e.overlap_ep)
        waiting[at] = waits[:, :, 0].max(1) * chunk[at]
        both = waits[:, :, 0] * each[at, :, None] + waits[:, :, 1] * own.waits
        stored[at] = both.max(2) * chunk[at]
    if e.offload:
        offloaded = (b * waiting * u.layer * r.node[:, None]).max(1)
        of_last = waiting / np.maximum(layers / e.virtual, 1)  # one layer of each stage in flight
        stored = np.minimum(waiting, of_last + 2) * u.layer
    flight = waiting / np.maximum(layers, 1) * e.virtual  # of the rank's chunks
    at_ends = u.middle + first * (u.first - u.middle) + last * (u.last - u.middle)
    stored = stored + flight * at_ends * (layers > 0)
    stored = stored + e.overlap_ep * each  # a layer of the forward that overlaps a backward
    logits = last * u.logits

    def most(of: Sequence[float]) -> Array:
        ends = np.maximum(first * of[0], last * of[2])
        return np.where(ends > 0, ends, of[1])

    total = state + b * (stored + logits) + most(u.working) + (b - 1) * most(u.more)
    if e.states or e.on_host:
        offloaded = (moved * r.node[:, None]).max(1)
        # in host memory while activations are live; back on the device for an update on the GPU
        total = np.maximum(total - moved, 0 if e.on_host else state)
    else:
        moved = np.zeros(moved.shape)
    of_rank = total.max(1)
    if e.states or e.on_host or e.offload:
        of_rank = np.where(offloaded > host, np.inf, of_rank)
    return Bytes(of_rank, moved.max(1))


def _state(
    model: Model, zero: int, numbers: Array, moments: Array, shard: Array, again: bool = False
) -> tuple[Array, Array]:
    """Return the persistent bytes of ranks, and how many of these are masters and moments.

    At ZeRO stages 2 and 3 the unsharded gradients of two buckets are included. numbers: parameters
    of a rank, treated as one bucket. moments: bytes of their moments before sharding. shard: ranks
    that share them. again: leave out the workspaces, which another call counts.
    """
    own = numbers // shard if zero else numbers
    weights, gradients = own if zero == 3 else numbers, own if zero >= 2 else numbers
    moved = 4 * own + own * moments / np.maximum(numbers, 1)  # fp32 masters, and moments
    two = 8 * np.clip(numbers / 8, SMALLEST, LARGEST) if zero >= 2 else 0
    total = 2 * weights + 4 * gradients + moved + numbers // BLOCK * NORM_BYTES
    total = total + (0 if again else matmul_workspaces(model.config))
    return np.asarray(total + np.minimum(two, 4 * numbers)), np.asarray(moved)


class Exact(NamedTuple):
    """The bytes of a pipeline rank: on the device by kind, and in host memory."""

    kinds: Kinds
    in_host: float


def few_layers(config: Config) -> tuple[int, int]:
    """Return the two numbers of layers per stage that are recorded if stages have more.

    At ZeRO stages 2 and 3 unsharded gradients of two layers may exist beside those of a third.
    """
    return (2, 3) if config.parallel.zero < 2 else (3, 4)


def exactly(config: Config) -> list[Exact]:
    """Return the bytes of each pipeline rank, as --dry-run has them.

    in_host is that of the rank with the most. Stages of many equal layers are extrapolated from
    recordings of a few.
    """
    size, layers = config.parallel.pipeline_model_parallel_size, None
    few = few_layers(config)
    stages = [rank_stages(config, PROVIDER, rank) for rank in range(size)]
    if max(len(s.layers) for own in stages for s in own) > sum(few) and is_linear(config):
        parallel = replace(config.parallel, ddp_bucket_size=bucket_size(config, stages))
        config, layers = replace(config, parallel=parallel), few
    found = recordings_of(config, pretrain_llama, layers)
    most = max(recording.most(HOST) for recording in found)
    return [Exact(memory(config, recording), most) for recording in found]


def is_linear(config: Config) -> bool:
    """Return whether the memory of a rank is linear in the layers of its stages.

    It is not if layers differ, if only some of them are recomputed or several form one recomputed
    block, if whole matrices have owners, or if a bucket holds several layers.
    """
    p = config.parallel
    some = p.recompute_method == "block" or (p.recompute_num_layers or 1) > 1
    if some or needs_full_matrices(config) or not alike(config, PROVIDER):
        return False
    return numbers(config, LAYER) >= (p.ddp_bucket_size or LARGEST)


def numbers(config: Config, stage: Stage) -> int:
    """Return the number of parameters of a rank with this stage."""
    return sum(p.entry.numel for p in rank_parameters(config, PROVIDER, (stage,), 0).values())


def bucket_size(config: Config, stages: Sequence[Sequence[Stage]]) -> int:
    """Return the bucket size of a run, which depends on the pipeline rank with most parameters."""
    layer = numbers(config, LAYER)
    of_ranks = (
        sum(layer * len(s.layers) + numbers(config, replace(s, first=0, last=0)) for s in own)
        for own in stages
    )
    return config.parallel.ddp_bucket_size or automatic_size(max(of_ranks))
