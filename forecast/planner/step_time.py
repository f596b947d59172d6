# SPDX-License-Identifier: Apache-2.0
"""Estimate step times from sizes: rooflines of operations, alpha-beta collectives, the schedule.

Functions take runs as arrays and return arrays of seconds. `c` holds the constants: those of the
device file, and the others that constants.py lists with their meanings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from forecast.device_file import PROTOCOLS
from forecast.planner.constants import LINKS
from forecast.planner.pipeline import SCHEDULES, SPLIT_SCHEDULES, bubble
from forecast.planner.runs import COMMS, DISPATCHERS, Array, Runs
from forecast.rehearsal import links as cost
from forecast.rehearsal import roofline
from forecast.rehearsal.links import Links, strided, ways_of
from forecast.rehearsal.roofline import memory_seconds
from mpu.zero.bucket_layout import LARGEST, SMALLEST

Constants = Mapping[str, float]
HOST_MEMORY = 40e9  # bytes per second for each GPU: a guess, 12 channels of DDR5 for four GPUs
RING_SLOWS = 0.1  # share of an overlapped transfer's time by which matmuls take longer
EXPERT_LAUNCHES, PAIR_LAUNCHES = 52, 11  # per layer with experts; in addition for each of top-k
MATMULS = 12  # matmuls of F and B of a layer; a ring splits each into tp parts


@dataclass(frozen=True)
class Times:
    """Seconds of steps: (micro-batches x slot + bubble) x jitter, plus gradient sums and update.

    slot: F and B of a micro-batch on the slowest pipeline rank. bubble: the pipeline's bubble.
    """

    slot: Array
    bubble: Array
    step: Array


def matmul(
    c: Constants, r: Runs, m: Array, n: Array, k: Array, batch: Array | int = 1
) -> Array:
    """Return the time of `batch` [m, k] x [k, n] in the dtype of the layers' matmuls."""
    low, full = c["peak.float8"] * c["matmul.float8"], c["peak.bfloat16"] * c["matmul"]
    is_low = r.float8 > 0
    rate, size = np.where(is_low, low, full), np.where(is_low, 1, 2)
    return np.asarray(roofline.matmul(c, m, n, k, rate, size, batch=batch).seconds)


def passes(c: Constants, bytes_: Array) -> Array:
    """Return the time of passes over memory, without the starts of their kernels (layer_start)."""
    return np.asarray(memory_seconds(c, bytes_, starts=False))


def links(c: Constants, r: Runs) -> Links:
    """Return the links in a node and between nodes."""
    rings, trees = ([[c[f"{level}.{kind}.{protocol}"] for protocol in PROTOCOLS]
                     for level in LINKS] for kind in ("ring", "tree"))  # fmt: skip
    return Links(
        rates=[np.full(len(r), c["link"] * c["link_share"]), r.network * c["network_share"]],
        start=c["collective_start"],
        ways=ways_of(c, rings, trees),
        message=[c["message_start"]] * 2,
        decay=c["network_decay"],
    )


def collective(
    c: Constants, r: Runs, verb: str, total: Array, size: Array, inner: Array,
    calls: Array | float = 1.0,
) -> Array:  # fmt: skip
    """Return the time of a collective of `total` bytes, split into `calls` calls.

    total: bytes of all ranks' parts together. size: number of ranks of the group. inner: distance
    of its ranks in rank order.
    """
    sent = total / calls / (size if verb == "all_gather" else 1)
    crossed = strided(size, inner, r.node)
    return np.asarray(calls * cost.collective(links(c, r), verb, sent, size, crossed))


class Layer(NamedTuple):
    """Seconds of F and B of a layer: computation, exposed exchanges of experts, other exposed
    transfers.
    """

    compute: Array
    exchanges: Array
    transfers: Array

    @property
    def seconds(self) -> Array:
        return self.compute + self.exchanges + self.transfers


class Experts(NamedTuple):
    """Seconds of a layer's experts in F and B: matmuls, passes over memory, exchanges of rows.

    exchange: of one exchange over ep; F and B have two each, recomputation two more. under: the
    part of one of B's that a weight gradient hides.
    """

    forward: Array
    backward: Array
    f_passes: Array
    b_passes: Array
    exchange: Array
    under: Array


def experts(c: Constants, r: Runs, own: Array) -> Experts:
    """Return the seconds of a layer's mixture of experts. own: tokens of a rank that are routed.

    The fullest rank of ep has expert_skew times the mean number of rows; the others wait for it. A
    rank multiplies its rows by E / ep experts, one after another. An all-to-all sends k rows per
    token to the ranks of its experts; an all-gather sends one row per token to all ranks, which
    `auto` uses if ep is at most k. c["dispatch"] is the time of these transfers divided by that by
    the links' rates.
    """
    if not (r.experts > 0).any():
        return Experts(*np.zeros((6, len(r))))
    has, h, f, up = r.experts > 0, r.hidden, r.expert_ffn, r.expert_ffn * (1 + r.gated)
    local, spread = np.where(has, r.experts / r.ep, 1), r.ep > 1
    rows = own * r.topk * np.where(spread, c["expert_skew"], 1.0)
    m = rows / local

    def product(m: Array, n: Array, k: Array) -> Array:
        return matmul(c, r, m, n, k, local)

    def wgrad(n: Array, k: Array) -> Array:
        # each expert's gradient is read and written in fp32, however few its rows are
        alone = local * matmul(c, r, n, k, m) if c["expert_loop"] else matmul(c, r, n, k, m, local)
        return np.maximum(alone, passes(c, 8 * local * n * k))

    m = np.where(has, m, 1.0)
    forward = product(m, up, h) + product(m, h, f)
    first_wgrad = wgrad(up, h)
    backward = product(m, h, up) + first_wgrad + product(m, f, h) + wgrad(h, f)
    auto = (r.dispatcher == DISPATCHERS.index("auto")) & (r.ep <= r.topk)
    gathers = spread & (auto | (r.dispatcher == DISPATCHERS.index("allgather")))
    moved = np.where(gathers, r.ep, 1.0) * rows * h
    width = c["ffn_bytes"] * f * rows
    first = passes(c, c["dispatch_forward"] * moved + width)
    second = passes(c, c["dispatch_backward"] * moved + c["backward_bytes"] * width)
    inner = np.ones_like(r.ep)
    exchange = collective(c, r, "all_to_all", 2 * rows * h, r.ep, inner)
    gather = collective(c, r, "all_gather", 2 * own * h * r.ep, r.ep, inner)
    one_way = np.where(gathers, gather, exchange) * c["dispatch"] * spread
    under = c["expert_wgrad"] * ~gathers * np.minimum(one_way, first_wgrad)
    times = (forward, backward, first, second, one_way, under)
    return Experts(*(np.where(has, each, 0.0) for each in times))


def layer(c: Constants, r: Runs) -> Layer:
    """Return the seconds of F and B of a layer."""
    t = r.micro_batch * r.sequence / r.cp
    h, f, tp = r.hidden, r.ffn, r.tp
    q = r.queries
    qkv = q + 2 * r.kv_heads * r.head_size
    up = f * (1 + r.gated)
    forward = (
        matmul(c, r, t, qkv / tp, h) + matmul(c, r, t, h, q / tp)
        + matmul(c, r, t, up / tp, h) + matmul(c, r, t, h, f / tp)
    )  # fmt: skip
    backward = (
        matmul(c, r, t, h, qkv / tp) + matmul(c, r, qkv / tp, h, t)
        + matmul(c, r, t, q / tp, h) + matmul(c, r, h, q / tp, t)
        + matmul(c, r, t, h, up / tp) + matmul(c, r, up / tp, h, t)
        + matmul(c, r, t, f / tp, h) + matmul(c, r, h, f / tp, t)
    )  # fmt: skip
    score = 2 * t * r.sequence * q / tp  # masked blocks are skipped
    ring = (r.cp > 1) & (r.comm == COMMS.index("p2p"))  # one kernel per pair of blocks
    length = np.where(ring, r.sequence / (2 * r.cp), r.sequence)
    rate = c["peak.bfloat16"] * c["attention"] * length / (length + c["attention_ramp"])
    read = 4 * t * (q + r.kv_heads * r.head_size) / tp  # q, k, v and the output
    f_attention = roofline.attention(c, score, read, rate)
    rate = rate * c["attention_backward"]
    b_attention = roofline.attention(c, 2.5 * score, 2 * read, rate)
    scores = c["scores_bytes"] * t * r.sequence * r.heads / tp
    own = t / np.where(r.sequence_parallel > 0, tp, 1)
    moved = own * c["hidden_bytes"] * h + t / tp * (c["inner_bytes"] * h + c["ffn_bytes"] * f)
    mixture = experts(c, r, own)
    forward, backward = forward + mixture.forward, backward + mixture.backward
    cast = c["float8_bytes"] * r.float8 * t  # casts of each matmul's left operand
    inputs, sent = cast * (2 * h + (h + f) / tp), cast * (2 * h + (qkv + up) / tp)
    dealt = r.experts * r.expert_weights / r.ep
    f_passes = passes(c, moved + scores + inputs) + mixture.f_passes
    b_passes = passes(c, c["backward_bytes"] * moved + scores + sent + c["accumulate_bytes"]
                      * (r.layer_weights / tp + dealt)) + mixture.b_passes  # fmt: skip
    f_compute = forward + f_attention + f_passes
    again = r.core_again * (1 - r.recompute) * f_attention + r.recompute * f_compute
    b_compute = backward + b_attention + b_passes + again
    down, fsdp = r.offload / c["host_bandwidth"], np.zeros(len(r))
    if (r.zero >= 3).any():  # in a pipeline weights stay gathered for a step: see gradients()
        size, weights = r.dp * r.cp, r.layer_weights / tp
        gather = collective(c, r, "all_gather", c["parameter_bytes"] * weights, size, tp)
        scatter = collective(c, r, "reduce_scatter", c["gradient_bytes"] * weights, size, tp)
        if (dealt > 0).any():
            both = c["parameter_bytes"] * dealt, c["gradient_bytes"] * dealt
            gather = gather + collective(c, r, "all_gather", both[0], r.edp, r.ep)
            scatter = scatter + collective(c, r, "reduce_scatter", both[1], r.edp, r.ep)
        moved = (2 * gather + scatter * c["fsdp"]) * ((r.zero >= 3) & (r.pp == 1))
        fsdp = np.maximum(
            moved - c["fsdp_hidden"] * (f_compute + b_compute), c["fsdp_least"] * moved
        )
    copies = np.maximum(0.0, down - f_compute) + np.maximum(0.0, down - b_compute)
    starts = c["layer_start"] * (1 + r.recompute / 3)
    return Layer(
        compute=f_compute + b_compute + starts,
        exchanges=_exchanges(r, mixture, f_compute, b_compute),
        transfers=_tensor(c, r, t, forward + backward) + _context(c, r, t, f_compute + b_compute)
        + fsdp + copies,
    )  # fmt: skip


def _tensor(c: Constants, r: Runs, t: Array, matmuls: Array) -> Array:
    """Return the exposed tp transfers of F and B of a layer.

    matmuls: seconds of the matmuls that a ring overlaps.
    """
    one = _of_rows(c, r, t)
    split = c["split_backward"] * np.isin(r.schedule, SPLIT_SCHEDULES)
    gathered, reduced = c["tp_backward"] + split, np.minimum(4, c["tp_backward"])
    shown = np.where(r.sequence_parallel > 0, gathered, reduced)
    plain = one * (4 + (shown + 4 * r.recompute))  # an all-reduce counts as two
    first = plain / r.tp  # a ring's first part overlaps no matmul
    ring = np.maximum(plain - matmuls, first) + RING_SLOWS * plain
    ring = ring + MATMULS * (r.tp - 1) * c["kernel_seconds"]
    return np.where(r.overlap > 0, ring, plain)


def _exchanges(r: Runs, of: Experts, f_compute: Array, b_compute: Array) -> Array:
    """Return the exposed exchanges of F and B of a layer. f_compute, b_compute: seconds of F and B.

    An F and the B that it overlaps alternate: while one exchanges rows, the other computes its
    experts or the rest of a layer, up to its own next exchange (mpu/interleave.py). The exchanges
    of a recomputed forward overlap no F.
    """
    one, again = of.exchange, r.recompute
    every = one * (4 + 2 * again)
    plain = every - (1 - RING_SLOWS) * of.under
    if not (r.paired > 0).any():
        return plain
    f_experts = of.forward + of.f_passes
    b_experts = of.backward + of.b_passes + again * f_experts
    parts = (f_experts, f_compute - f_experts, b_experts, b_compute - b_experts)
    shown = sum((np.maximum(one - part, 0.0) for part in parts), 2 * again * one)
    slowed = RING_SLOWS * (every - shown)  # due to the hidden exchanges
    return np.asarray(plain + r.paired * (shown + slowed - plain))


def _context(c: Constants, r: Runs, t: Array, compute: Array) -> Array:
    """Return the exposed cp transfers of F and B of a layer. compute: seconds of F and B."""
    if not (r.cp > 1).any():
        return np.zeros(len(r))
    kv, q = 4 * r.kv_heads * r.head_size, 2 * r.hidden
    ring = collective(c, r, "all_gather", t * r.cp * kv / r.tp, r.cp, r.tp)
    moved = ring * (3 + r.recompute)  # K and V forward; K, V and their gradients backward
    heads = collective(c, r, "all_to_all", t * (2 * q + kv) / r.tp, r.cp, r.tp)
    heads = heads * (2 + r.recompute)
    round_ = np.maximum(moved - compute * c["cp_hidden"], 0.2 * ring)
    seconds = np.where(r.comm == COMMS.index("all_gather"), moved, round_)
    return np.asarray(np.where(r.comm == COMMS.index("a2a"), heads, seconds))


def head(c: Constants, r: Runs) -> Array:
    """Return the seconds of F and B of the output layer and the loss."""
    t = r.micro_batch * r.sequence / r.cp
    own = r.vocab / r.tp
    plain = replace(r, float8=np.zeros_like(r.float8))
    products = (
        matmul(c, plain, t, own, r.hidden) + matmul(c, plain, t, r.hidden, own)
        + matmul(c, plain, own, r.hidden, t)
    )  # fmt: skip
    moved = passes(c, c["logit_bytes"] * t * own)
    return np.asarray(products + moved + 3 * _of_rows(c, r, t))


def _of_rows(c: Constants, r: Runs, t: Array) -> Array:
    """Return the time to gather the rows of t tokens over tp.

    Without sequence parallelism it is half of an all-reduce, which counts as two of these.
    """
    total, inner = 2 * t * r.hidden, np.ones_like(r.tp)
    gather = collective(c, r, "all_gather", total, r.tp, inner)
    both = collective(c, r, "all_reduce", total, r.tp, inner)
    return np.where(r.sequence_parallel > 0, gather, both / 2)


def host_layer(c: Constants, r: Runs) -> Array:
    """Return the host's seconds for F and B of a layer, with latencies of its collectives."""
    seconds = np.where(r.tp > 1, c["host_layer_tp"], c["host_layer"])
    seconds = seconds + np.where(r.overlap > 0, (r.tp - 1) * c["host_ring"], 0.0)
    more = c["expert_host"] * (EXPERT_LAUNCHES + PAIR_LAUNCHES * r.topk + 2 * r.experts / r.ep)
    seconds = seconds + np.where(r.experts > 0, more, 0.0)
    return seconds * (1 + c["host_recompute"] * r.recompute)


def messages(c: Constants, r: Runs) -> Array:
    """Return the seconds of the message of one activation between stages, if it is waited for."""
    sent = 2 * r.micro_batch * r.sequence / r.cp * r.hidden
    far = r.tp * r.cp * r.dp >= r.node
    sent = sent / np.where((r.sequence_parallel > 0) | far, r.tp, 1)  # each rank sends its part
    return np.where(r.pp > 1, cost.message(links(c, r), sent, far.astype(int)), 0.0)


def rank_weights(r: Runs) -> Array:
    """Return the number of parameters of the fullest pipeline rank, without experts'."""
    ends = r.vocab * r.hidden
    number = np.arange(r.cut.shape[1])[None, :]
    has = r.by_rank((number == 0) + (number == r.head[:, None]).astype(float))
    has = np.where((has > 1) & (r.tied > 0)[:, None], 1.0, has)
    weights = r.by_rank(r.cut) * r.layer_weights[:, None] + has * ends[:, None]
    return np.asarray(weights.max(1) / r.tp)


def rank_experts(r: Runs) -> Array:
    """Return the number of the experts' parameters on the fullest pipeline rank."""
    return np.asarray(r.by_rank(r.cut).max(1) * r.experts * r.expert_weights / r.ep)


def gradients(c: Constants, r: Runs, backward: Array) -> Array:
    """Return the exposed seconds of gradient sums and parameter gathers.

    backward: seconds of the last backward.
    """
    weights = rank_weights(r)
    inner = r.tp
    size = r.dp * r.cp
    layers = r.cut.max(1) * r.virtual
    calls = np.where(r.zero > 0, c["sum_calls"], c["sum_calls_0"]) * layers
    gradient, parameter = c["gradient_bytes"] * weights, c["parameter_bytes"] * weights
    scatter = collective(c, r, "reduce_scatter", gradient, size, inner, calls=calls)
    reduced = collective(c, r, "all_reduce", gradient, size, inner, calls=calls)
    gather = collective(c, r, "all_gather", parameter, size, inner, calls=calls)
    if (r.experts > 0).any():
        dealt = rank_experts(r)
        gradient, parameter = c["gradient_bytes"] * dealt, c["parameter_bytes"] * dealt
        of = {"size": r.edp, "inner": r.ep, "calls": calls}
        several = r.edp > 1
        scatter = scatter + several * collective(c, r, "reduce_scatter", gradient, **of)
        reduced = reduced + several * collective(c, r, "all_reduce", gradient, **of)
        gather = gather + several * collective(c, r, "all_gather", parameter, **of)
    sums = np.where((r.zero > 0) & (c["zero1_all_reduce"] == 0), scatter, reduced) * r.reduces
    hidden = np.where(r.zero > 0, c["sum_hidden"], c["sum_hidden_0"]) * backward * r.reduces
    exposed = np.maximum(sums - hidden, c["sum_least"] * sums)
    by_layer = (r.zero >= 3) & (r.pp == 1)  # layer() counts these gathers
    shown = np.where((r.zero > 0) & ~by_layer, gather * c["gather_exposed"], 0.0)
    return np.where(size > 1, exposed + shown, 0.0) + ties(c, r)


def ties(c: Constants, r: Runs) -> Array:
    """Return the seconds in which a pipeline's ends sum the gradient of their tied matrix."""
    shared = c["gradient_bytes"] * r.vocab * r.hidden / r.tp
    both = collective(c, r, "all_reduce", shared, np.full(len(r), 2.0), r.tp * r.cp * r.dp)
    return np.where((r.tied > 0) & (r.pp > 1), both, 0.0)


def update(c: Constants, r: Runs) -> Array:
    shard = np.where(r.zero > 0, r.dp * r.cp, 1)
    each = c["update_bytes"] / shard
    of_expert = c["update_bytes"] / np.where(r.zero > 0, r.edp, 1)
    return passes(c, each * rank_weights(r) + of_expert * rank_experts(r)) + c["host_step"]


def carried(c: Constants, r: Runs, moved: Array, slot: Array) -> Array:
    """Return the exposed seconds of optimizer state that is in host memory between updates.

    moved: its bytes in each direction. It is copied to the device during the last micro-batch's
    backward, and back during the next step's first forward, bucket by bucket
    (mpu/optim/state_offload.py). At least one bucket is exposed in each direction.
    """
    each, forward, numbers = moved / c["host_bandwidth"], slot / (3 + r.recompute), rank_weights(r)
    one = each * np.minimum(np.clip(numbers / 8, SMALLEST, LARGEST) / numbers, 1.0)
    up, down = np.maximum(each - (slot - forward), one), np.maximum(each - forward, one)
    return np.asarray(up + down)


def updated_on_host(c: Constants, r: Runs, moved: Array) -> Array:
    """Return the seconds of an update on the host, which is not hidden.

    moved: bytes of masters and moments, 12 per parameter. Gradients are copied to the host in fp32
    and weights back in bf16; the host reads and writes 28 bytes per parameter, at a GPU's share of
    its memory bandwidth (HOST_MEMORY).
    """
    numbers = moved / 12
    return np.asarray(numbers * (6 / c["host_bandwidth"] + 28 / HOST_MEMORY))


def times(c: Constants, r: Runs) -> Times:
    """Return the times of steps of these runs."""
    each, on_layer = layer(c, r), host_layer(c, r)
    stages = r.cut.shape[1]
    number = np.arange(stages)[None, :]
    used = number < (r.pp * r.virtual)[:, None]
    is_head = (number == r.head[:, None]) & used
    gpu = r.cut * each.seconds[:, None] + is_head * head(c, r)[:, None]
    host = r.cut * on_layer[:, None] + used * c["host_stage"] + is_head * c["host_head"]
    both = _busy(c, gpu, host)
    ranks = r.by_rank(both)  # sums over each rank's chunks
    at = np.arange(len(r)), ranks.argmax(1)
    slowest = ranks[at]
    virtual, pp = r.virtual, r.pp
    first, total = slowest, both.sum(1)
    if (r.paired > 0).any():  # in the pipeline's fill and drain no F overlaps a B
        alone = layer(c, replace(r, paired=np.zeros(len(r))))
        apart = _busy(c, gpu + r.cut * (alone.exchanges - each.exchanges)[:, None], host)
        first, total = r.by_rank(apart)[at], apart.sum(1)
    message = messages(c, r)
    slot = slowest + np.where(pp > 1, c["message_exposed"] * 2 * message, 0.0) * virtual
    bubbles = np.maximum(total / virtual - first / virtual, 0.0) * bubble_share(r)
    bubbles = bubbles + np.where(pp > 1, 2 * (pp - 1) * message, 0.0)
    jitter = 1 + c["jitter"] * np.log2(np.maximum(1.0, r.nodes))
    body = r.micro_batches * slot
    step = (body + bubbles) * jitter + gradients(c, r, both.max(1) * 2 / 3) + update(c, r)
    return Times(slot, bubbles, step)


def _busy(c: Constants, gpu: Array, host: Array) -> Array:
    """Return the seconds of stages: a soft maximum of those of the GPU and of the host."""
    sharp = c["sharp"]  # with 8 the soft maximum of two equal values is 9 % above them
    return np.asarray((gpu**sharp + host**sharp) ** (1 / sharp))


def bubble_share(r: Runs) -> Array:
    """Return the bubble in units of 1F1B's, by simulating each schedule with equal stages.

    If a share of the layers is recomputed, the bubble is interpolated between those of none and of
    all.
    """
    share, again = np.zeros(len(r)), np.clip(r.recompute, 0.0, 1.0)
    shapes = np.stack(
        [r.schedule, r.pp, r.micro_batches, r.virtual, r.paired > 0], axis=1
    ).astype(int)
    piped = np.flatnonzero(r.pp > 1)
    for shape in np.unique(shapes[piped], axis=0):
        kind, p, m, v, overlaps = map(int, shape)
        at = piped[(shapes[piped] == shape).all(1)]
        none, every = (
            bubble(SCHEDULES[kind], p, m, v, way, bool(overlaps)) for way in (False, True)
        )
        share[at] = (3 * none * (1 - again[at]) + 4 * every * again[at]) / (3 + again[at])
    return share
