# SPDX-License-Identifier: Apache-2.0
"""Time the collectives of a model's layers and ends that the formulas of step_time.py do not name.

The list is the recorded one (tools/planner/units.py): the collectives that the model calls for in a
micro-batch. What the formulas count is taken from it, by axis, verb and action; the rest, such as a
fork's own collective, is timed by the same links, and nothing hides it. It is recorded once for
each tp, with and without cp, and each ep: in bf16, with sequence parallelism and plain collectives.
Bytes of one rank's input are taken as proportional to its tokens, so that those of other
micro-batches and cp follow. Where a layer sends less than the formulas count, they are not
corrected.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from tools.planner.layout import Layout
from tools.planner.model import Model
from tools.planner.runs import Array, Runs
from tools.planner.step_time import Constants, Exposed, Unnamed, links
from tools.planner.units import FIRST, LAST, LONGER, MIDDLE, Key, Sent, unit_config, units
from tools.rehearsal import links as cost
from training.config import Config

TERMS = {"tp": "tp", "tp_kv": "tp", "cp": "cp", "ep": "ep"}  # of Exposed; other axes: fsdp
PARTS = ("layer", "first", "head")


def unnamed(c: Constants, model: Model, found: Sequence[Layout], r: Runs) -> Unnamed:
    """Return the seconds of layouts' collectives that no formula names."""
    seconds = {part: {name: np.zeros(len(r)) for name in Exposed._fields} for part in PARTS}
    keys = [(e.tp, e.cp > 1, e.ep) for e in found]
    for key in dict.fromkeys(keys):
        if not any(rest := unnamed_of(model.flags, *key)):
            continue
        at = np.array([n for n, own in enumerate(keys) if own == key])
        for part, rows in zip(PARTS, rest, strict=True):
            for row, sent in rows.items():
                seconds[part][TERMS.get(row[0], "fsdp")][at] += _seconds(
                    c, r[at], row, sent, key[1]
                )
    return Unnamed(**{part: Exposed(**values) for part, values in seconds.items()})


def _seconds(c: Constants, r: Runs, key: Key, sent: Sent, cut: bool) -> Array:
    """Return the seconds of collectives in each run's micro-batch, forward ones again where the
    layer is recomputed. cut: whether they were measured at a cp of 2.
    """
    axis, verb, phase = key
    size, inner = _ranks(r, axis)
    each = sent.bytes / sent.calls * r.micro_batch * (2 if cut else 1) / r.cp
    if verb == "send":
        far = (size * inner > r.node).astype(int)
        seconds = np.where(size > 1, cost.message(links(c, r), each, far), 0.0)
    else:
        crossed = cost.strided(size, inner, r.node)
        seconds = cost.collective(links(c, r), verb, each, size, crossed)
    return np.asarray(sent.calls * seconds * (1 + (r.recompute if phase == "F" else 0)))


def _ranks(r: Runs, axis: str) -> tuple[Array, Array]:
    """Return the ranks of an axis' groups, and the neighbours between two of a group."""
    one = np.ones(len(r))
    known: dict[str, tuple[Array, Array]] = {
        "tp": (r.tp, one), "cp": (r.cp, r.tp), "dp": (r.dp, r.tp * r.cp),
        "dp_cp": (r.dp * r.cp, r.tp), "ep": (r.ep, one), "edp": (r.edp, r.ep),
        "tp_kv": (np.maximum(1.0, r.tp / r.kv_heads), one),
    }  # fmt: skip
    return known.get(axis, (r.gpus, one))


@lru_cache(maxsize=256)
def unnamed_of(
    flags: tuple[str, ...], tp: int, cut: bool, ep: int
) -> tuple[dict[Key, Sent], dict[Key, Sent], dict[Key, Sent]]:
    """Return what a layer, the first stage's and the last stage's end send of one sequence beyond
    what the formulas count. cut: at a cp of 2; the ends are measured without.
    """
    uncut = unit_config(flags, tp, "", ep)
    config = unit_config(flags, tp, "", ep, cp=2) if cut else uncut
    plain = units(uncut)
    ends = (_less(plain[at].sent, plain[MIDDLE].sent) for at in (FIRST, LAST))
    first, head = (_less(found, named) for found, named in zip(ends, ends_of(uncut), strict=True))
    if cut:  # as _seconds scales them
        first, head = ({key: Sent(n, size / 2) for key, (n, size) in part.items()}
                       for part in (first, head))  # fmt: skip
    return _less(layer_of(config), named_of(config)), first, head


def layer_of(config: Config) -> dict[Key, Sent]:
    """Return what one layer sends in a micro-batch."""
    found = units(config)
    return _less(found[LONGER].sent, found[MIDDLE].sent)


def named_of(config: Config) -> dict[Key, Sent]:
    """Return what the formulas count of a layer: _tensor, _context (rings) and experts there.

    The rows of a layer's tokens are gathered before attention and before the MLP, and summed after
    each, over tp; so are those of its gradients, and backward gathers both inputs again. The rows
    of routed tokens go to the ranks of ep and back, with the router's choices.
    """
    m, p, moe = config.model, config.parallel, config.moe
    tp, cp, ep = (
        p.tensor_model_parallel_size, p.context_parallel_size,
        config.expert_model_parallel_size or 1,
    )  # fmt: skip
    tokens = config.batch.micro_batch_size * m.seq_length // cp
    row, own = 2 * tokens * m.hidden_size, tokens // tp
    found = Counter[Key](), Counter[Key]()

    def add(axis: str, verb: str, phase: str, calls: int, given: int) -> None:
        found[0][axis, verb, phase] += calls
        found[1][axis, verb, phase] += calls * given

    if tp > 1:
        for phase, gathers in (("F", 2), ("B", 4)):
            add("tp", "all_gather", phase, gathers, row // tp)
            add("tp", "reduce_scatter", phase, 2, row)
    if cp > 1:  # K and V forward; K, V and their gradients in fp32 backward
        size = m.kv_channels or m.hidden_size // m.num_attention_heads
        heads = m.num_query_groups or m.num_attention_heads
        block = 2 * 2 * tokens * max(1, heads // tp) * size
        add("cp", "send", "F", cp - 1, block)
        add("cp", "send", "B", cp - 1, block)
        add("cp", "send", "B", cp - 1, 2 * block)
    if ep > 1:
        rows, choices = 2 * own * m.hidden_size, 4 * own * moe.moe_router_topk
        if ep > moe.moe_router_topk:
            for phase in "FB":
                add("ep", "all_to_all", phase, 2, moe.moe_router_topk * rows)
            add("ep", "all_gather", "F", 1, 4 * moe.experts)
        else:
            add("ep", "all_gather", "F", 1, rows)
            add("ep", "all_gather", "F", 2, choices)
            add("ep", "reduce_scatter", "F", 1, ep * rows)
            add("ep", "all_gather", "B", 1, rows)
            add("ep", "reduce_scatter", "B", 1, ep * rows)
            add("ep", "reduce_scatter", "B", 1, ep * choices)
    return {key: Sent(calls, found[1][key]) for key, calls in found[0].items()}


def ends_of(config: Config) -> tuple[dict[Key, Sent], dict[Key, Sent]]:
    """Return what `head` there counts, which passes over the embedding's, or leaves out as small:
    of the first stage's end, and of the last one's.
    """
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    tokens = config.batch.micro_batch_size * m.seq_length
    row = 2 * tokens * m.hidden_size
    first = {
        ("tp", "reduce_scatter", "F"): Sent(1, row),
        ("tp", "all_gather", "B"): Sent(1, row // tp),
    }
    sums = 3 * 4 * tokens  # of each token: of the loss, over parts of the vocabulary
    head = {
        ("tp", "all_gather", "F"): Sent(2, row // tp + sums),
        ("tp", "all_gather", "B"): Sent(1, row // tp),
        ("tp", "reduce_scatter", "B"): Sent(1, row),
    }
    return first, head


def _less(found: Mapping[Key, Sent], other: Mapping[Key, Sent]) -> dict[Key, Sent]:
    """Return what is in `found` beyond `other`."""
    none = Sent(0, 0)
    rest = {key: Sent(max(1, n - other.get(key, none).calls), size - other.get(key, none).bytes)
            for key, (n, size) in found.items()}  # fmt: skip
    return {key: sent for key, sent in rest.items() if sent.bytes > 0}
