# SPDX-License-Identifier: Apache-2.0
"""Time steps from sizes: roofline of each operation, alpha and beta of each collective, schedule.

Every function takes runs as arrays and returns an array, in seconds. `c` holds the constants: those
of the device file, and the fitted ones that constants.py lists with their meanings.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tools.planner.runs import COMMS, SCHEDULES, Array, Runs

Constants = Mapping[str, float]
SOCKET = 4  # GPUs of one socket
RING_SLOWS = 0.1  # of a transfer's time by which the matmuls beside it take longer
MATMULS = 12  # of F and B of a layer, each in as many parts as there are tp ranks


@dataclass(frozen=True)
class Times:
    """What a step is made of, in seconds.

    slot: F and B of a micro-batch on the slowest pipeline rank. It is the sum of that rank's
    compute, its exposed transfers (tp, cp, fsdp: of weights and gradients layer by layer), copies
    to and from the host, waits for the host (host), and waits for messages. bubble: the pipeline's
    ends. sums: exposed transfers of gradients and parameters beside micro-batches. update: the
    optimizer's. stages: [runs, stages], F and B of each. message: between them. host_share: what
    the host needs to issue the slowest rank, over what that rank computes and waits for transfers.
    jitter: factor by which other nodes slow micro-batches and bubble. step is
    (micro-batches x slot + bubble) x jitter + sums + update, exactly.
    """

    slot: Array
    compute: Array
    tp: Array
    cp: Array
    fsdp: Array
    copies: Array
    waits: Array
    host: Array
    bubble: Array
    sums: Array
    update: Array
    step: Array
    stages: Array
    message: Array
    host_share: Array
    jitter: Array


def matmul(c: Constants, r: Runs, m: Array, n: Array, k: Array, batch: float = 1.0) -> Array:
    """Return the time of [m, k] x [k, n] on whole tiles of the SMs, and at least its bytes'."""
    tiles = batch * np.ceil(m / c["tile_m"]) * np.ceil(n / c["tile_n"])
    waves = tiles / c["sms"] + c["wave"]
    low, full = c["peak.float8"] * c["matmul.float8"], c["peak"] * c["matmul"]
    rate = np.where(r.float8 > 0, low, full) / c["sms"]
    work = 2 * c["tile_m"] * c["tile_n"] * (k + c["ramp"])
    bytes_ = 2 * batch * (m * k + k * n + m * n)
    return np.maximum(waves * work / rate, passes(c, bytes_)) + c["kernel_seconds"]


def passes(c: Constants, bytes_: Array) -> Array:
    return bytes_ / (c["bandwidth"] * c["memory_share"])


def collective(
    c: Constants, r: Runs, bytes_: Array, size: Array, inner: Array, calls: Array | float = 1.0
) -> Array:
    """Return the time of an all-gather or reduce-scatter of so many whole bytes, in so many calls.

    size: ranks of the group. inner: neighbours in rank order that belong to other groups, so that
    node / inner of the group's ranks share a node.
    """
    members = np.minimum(size, np.maximum(1.0, np.floor(r.node / inner)))
    blocks = np.ceil(size / members)
    inside = c["link"] * c["link_share"]
    network = r.network * c["network_share"] / np.maximum(1.0, blocks) ** c["network_decay"]
    bus = np.where(blocks > 1, np.minimum(inside, network * members), inside)
    steps = (size - 1) * np.where(blocks > 1, c["network_step"], c["link_step"])
    time = (c["collective_start"] + steps) * calls + bytes_ * (size - 1) / size / bus
    return np.where(size > 1, time, 0.0)


class Exposed(NamedTuple):
    """What nothing hides of a layer's F and B: see Times."""

    tp: Array
    cp: Array
    fsdp: Array
    copies: Array


def layer(c: Constants, r: Runs) -> tuple[Array, Exposed]:
    """Return compute and exposed transfers of F and B of a layer."""
    t = r.micro_batch * r.sequence / r.cp
    h, f, tp = r.hidden, r.ffn, r.tp
    qkv = h + 2 * r.kv_heads * r.head_size
    up = f * (1 + r.gated)
    forward = (
        matmul(c, r, t, qkv / tp, h) + matmul(c, r, t, h, h / tp)
        + matmul(c, r, t, up / tp, h) + matmul(c, r, t, h, f / tp)
    )  # fmt: skip
    backward = (
        matmul(c, r, t, h, qkv / tp) + matmul(c, r, qkv / tp, h, t)
        + matmul(c, r, t, h / tp, h) + matmul(c, r, h, h / tp, t)
        + matmul(c, r, t, h, up / tp) + matmul(c, r, up / tp, h, t)
        + matmul(c, r, t, f / tp, h) + matmul(c, r, h, f / tp, t)
    )  # fmt: skip
    score = 4 * t * r.sequence * h / tp * np.where(r.causal > 0, 0.5, 1.0)
    ring = (r.cp > 1) & (r.comm == COMMS.index("p2p"))  # a kernel for each pair of blocks
    length = np.where(ring, r.sequence / (2 * r.cp), r.sequence)
    full = c["attention"] * length / (length + c["attention_ramp"])
    attention = score / (c["peak"] * full)
    scores = c["scores_bytes"] * t * r.sequence * r.heads / tp
    own = t / np.where(r.sequence_parallel > 0, tp, 1)
    moved = own * c["hidden_bytes"] * h + t / tp * (c["inner_bytes"] * h + c["ffn_bytes"] * f)
    cast = c["float8_bytes"] * r.float8 * t  # of each matmul's left operand, rows and columns
    inputs, sent = cast * (2 * h + (h + f) / tp), cast * (2 * h + (qkv + up) / tp)
    f_passes = passes(c, moved + scores + inputs)
    b_passes = passes(c, c["backward_bytes"] * moved + scores + sent + c["accumulate_bytes"]
                      * r.layer_weights / tp)  # fmt: skip
    f_compute = forward + attention + f_passes
    b_compute = backward + 2.5 * attention + b_passes + r.recompute * f_compute
    b_compute = b_compute + r.core_again * (1 - r.recompute) * attention
    down, fsdp = r.offload / c["host_bandwidth"], np.zeros(len(r))
    if (r.zero >= 3).any():  # in a pipeline a stage's weights stay whole for a step: gradients()
        size, weights = r.dp * r.cp, r.layer_weights / tp
        gather = collective(c, r, c["parameter_bytes"] * weights, size, tp)
        scatter = collective(c, r, c["gradient_bytes"] * weights, size, tp)
        moved = (2 * gather + scatter * c["fsdp"]) * ((r.zero >= 3) & (r.pp == 1))
        fsdp = np.maximum(
            moved - c["fsdp_hidden"] * (f_compute + b_compute), c["fsdp_least"] * moved
        )
    exposed = Exposed(
        tp=_tensor(c, r, t, forward + backward),
        cp=_context(c, r, t, f_compute + b_compute),
        fsdp=fsdp,
        copies=np.maximum(0.0, down - f_compute) + np.maximum(0.0, down - b_compute),
    )
    return f_compute + b_compute + c["layer_start"] * (1 + r.recompute / 3), exposed


def _tensor(c: Constants, r: Runs, t: Array, matmuls: Array) -> Array:
    """Return the exposed tp transfers of F and B of a layer. matmuls: seconds beside them."""
    one = collective(c, r, 2 * t * r.hidden, r.tp, np.ones_like(r.tp))
    shown = np.where(r.sequence_parallel > 0, c["tp_backward"], np.minimum(4, c["tp_backward"]))
    plain = one * (4 + (shown + 4 * r.recompute))  # an all-reduce is two of these
    first = plain / r.tp  # a ring's first part has no matmul beside it, and parts slow matmuls
    ring = np.maximum(plain - matmuls, first) + RING_SLOWS * plain
    ring = ring + MATMULS * (r.tp - 1) * c["kernel_seconds"]
    return np.where(r.overlap > 0, ring, plain)


def _context(c: Constants, r: Runs, t: Array, compute: Array) -> Array:
    """Return the exposed cp transfers of F and B of a layer. compute: seconds of F and B."""
    if not (r.cp > 1).any():
        return np.zeros(len(r))
    kv, q = 4 * r.kv_heads * r.head_size, 2 * r.hidden
    ring = collective(c, r, t * r.cp * kv / r.tp, r.cp, r.tp)
    moved = ring * (3 + r.recompute)  # K and V forward; K, V and their gradients backward
    heads = collective(c, r, t * (2 * q + kv) / r.tp, r.cp, r.tp) * (2 + r.recompute)
    round_ = np.maximum(moved - compute * c["cp_hidden"], 0.2 * ring)
    told = np.where(r.comm == COMMS.index("all_gather"), moved, round_)
    return np.asarray(np.where(r.comm == COMMS.index("a2a"), heads, told))


def head(c: Constants, r: Runs) -> tuple[Array, Array]:
    """Return compute and exposed transfers of the output layer and the loss."""
    t = r.micro_batch * r.sequence / r.cp
    own = r.vocab / r.tp
    plain = Runs(**{**r.__dict__, "float8": np.zeros_like(r.float8)})
    products = (
        matmul(c, plain, t, own, r.hidden) + matmul(c, plain, t, r.hidden, own)
        + matmul(c, plain, own, r.hidden, t)
    )  # fmt: skip
    one = collective(c, r, 2 * t * r.hidden, r.tp, np.ones_like(r.tp))
    return products + passes(c, c["logit_bytes"] * t * own), 3 * one


def host_layer(c: Constants, r: Runs) -> Array:
    """Return the seconds in which a host, or the latency of its collectives, passes a layer."""
    seconds = np.where(r.tp > 1, c["host_layer_tp"], c["host_layer"])
    seconds = seconds + np.where(r.tp > SOCKET, c["host_socket"], 0.0)
    beside = (r.pp > 1) & (r.nodes > 1) & (r.tp > 1)
    each = c["host_beside"] + c["host_crossing"] * (r.tp > r.node)
    seconds = seconds + np.where(beside, r.tp * each, 0.0)
    return seconds * (1 + c["host_recompute"] * r.recompute)


def messages(c: Constants, r: Runs) -> Array:
    """Return the seconds of one activation's message between stages, to be waited for."""
    sent = 2 * r.micro_batch * r.sequence / r.cp * r.hidden
    far = r.tp * r.cp * r.dp >= r.node
    sent = sent / np.where((r.sequence_parallel > 0) | far, r.tp, 1)  # each rank sends its part
    rate = np.where(far, r.network * c["network_share"], c["link"] * c["link_share"])
    return np.where(r.pp > 1, c["message_start"] + sent / rate, 0.0)


def rank_weights(r: Runs) -> Array:
    """Return the numbers that the fullest pipeline rank holds."""
    ends = r.vocab * r.hidden
    number = np.arange(r.cut.shape[1])[None, :]
    has = r.by_rank((number == 0) + (number == r.head[:, None]).astype(float))
    has = np.where((has > 1) & (r.tied > 0)[:, None], 1.0, has)
    held = r.by_rank(r.cut) * r.layer_weights[:, None] + has * ends[:, None]
    return np.asarray(held.max(1) / r.tp)


def gradients(c: Constants, r: Runs, backward: Array) -> Array:
    """Return the exposed seconds of gradient sums and parameter gathers. backward: the last one."""
    weights = rank_weights(r)
    inner = r.tp
    size = r.dp * r.cp
    layers = r.cut.max(1) * r.virtual
    calls = np.where(r.zero > 0, c["sum_calls"], c["sum_calls_0"]) * layers
    scatter = collective(c, r, c["gradient_bytes"] * weights, size, inner, calls)
    gather = collective(c, r, c["parameter_bytes"] * weights, size, inner, calls)
    shares = (r.zero > 0) & (c["sum_whole"] == 0)
    sums = np.where(shares, scatter, 2 * scatter) * r.reduces
    hidden = np.where(r.zero > 0, c["sum_hidden"], c["sum_hidden_0"]) * backward * r.reduces
    exposed = np.maximum(sums - hidden, c["sum_least"] * sums)
    by_layer = (r.zero >= 3) & (r.pp == 1)  # layer() has these gathers, and FSDP's sums
    shown = np.where((r.zero > 0) & ~by_layer, gather * c["gather_exposed"], 0.0)
    total = np.where(by_layer & (c["fsdp"] > 0), 0.0, exposed) + shown
    return np.where(size > 1, total, 0.0) + ties(c, r)


def ties(c: Constants, r: Runs) -> Array:
    """Return the seconds in which a pipeline's ends sum the gradient of the matrix they share."""
    shared = c["gradient_bytes"] * r.vocab * r.hidden / r.tp
    both = 2 * collective(c, r, shared, np.full(len(r), 2.0), r.tp * r.cp * r.dp)
    return np.where((r.tied > 0) & (r.pp > 1), both, 0.0)


def update(c: Constants, r: Runs) -> Array:
    shard = np.where(r.zero > 0, r.dp * r.cp, 1)
    each = c["update_bytes"] / shard + c["update_whole"]
    return passes(c, each * rank_weights(r)) + c["host_step"]


def times(c: Constants, r: Runs) -> Times:
    """Return the times of steps of these runs."""
    compute, shown = layer(c, r)
    exposed = sum(shown)
    on_layer = host_layer(c, r)
    head_compute, head_exposed = head(c, r)
    stages = r.cut.shape[1]
    number = np.arange(stages)[None, :]
    count = (r.pp * r.virtual)[:, None]
    used = number < count
    is_head = (number == r.head[:, None]) & used
    gpu = r.cut * (compute + exposed)[:, None] + is_head * (head_compute + head_exposed)[:, None]
    host = r.cut * on_layer[:, None] + used * c["host_stage"] + is_head * c["host_head"]
    sharp = c["sharp"]  # 8: the soft maximum is 9 % above where both are equal
    both = (gpu**sharp + host**sharp) ** (1 / sharp)
    ranks = r.by_rank(both)  # a rank's own chunks, one after another
    at = np.arange(len(r)), ranks.argmax(1)
    slowest = ranks[at]
    virtual, pp, total = r.virtual, r.pp, both.sum(1)
    message = messages(c, r)
    waits = np.where(pp > 1, c["message_exposed"] * 2 * message, 0.0) * virtual
    slot = slowest + waits
    ends = np.maximum(total / virtual - slowest / virtual, 0.0) * bubble_share(r)
    ends = ends + np.where(pp > 1, 2 * (pp - 1) * message, 0.0)
    jitter = 1 + c["jitter"] * np.log2(np.maximum(1.0, r.nodes))
    body = r.micro_batches * slot
    sums = gradients(c, r, both.max(1) * 2 / 3)
    optimizer = update(c, r)
    step = (body + ends) * jitter + sums + optimizer
    busy, launches = r.by_rank(gpu)[at], r.by_rank(host)[at]
    layers, has_head = r.by_rank(r.cut)[at], r.by_rank(is_head * 1.0)[at]
    return Times(
        slot=slot, compute=compute * layers + head_compute * has_head,
        tp=shown.tp * layers + head_exposed * has_head, cp=shown.cp * layers,
        fsdp=shown.fsdp * layers, copies=shown.copies * layers, waits=waits, host=slowest - busy,
        bubble=ends, sums=sums, update=optimizer, step=step, stages=both,
        message=message, host_share=launches / busy, jitter=jitter,
    )  # fmt: skip


def bubble_share(r: Runs) -> Array:
    """Return the bubble in units of 1F1B's: its formula for each schedule (docs/pipeline.md).

    With F = W = 1 and B = 1 + what runs again, (p - 1) (F + B - W) of zb-h1, and of a chunk
    (p - 1) F of zb-v, 3 (p - 1) F of v-half; B that is longer adds to both.
    """
    again = np.maximum(r.recompute, 0.0)
    shares = {
        "zb-h1": (1 + again) / (3 + again), "zb-v": (1 + 2 * again) / (3 + again),
        "v-half": np.ones(len(r)), "zb-2p": np.zeros(len(r)),
    }  # fmt: skip
    told = np.ones(len(r))
    for name, share in shares.items():
        told = np.where(r.schedule == SCHEDULES.index(name), share, told)
    return told
