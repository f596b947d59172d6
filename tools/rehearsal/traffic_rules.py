# SPDX-License-Identifier: Apache-2.0
"""Hold what a rehearsed rank sends in a step against estimate/traffic.py.

Bytes are compared for each axis and purpose, whatever the verbs: by the ideal algorithm a
reduce-scatter and an all-gather send what an all-reduce does, and a ring of messages what a gather
does. A layer without the transfer that its class makes is named by the line of its matmul.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from estimate.traffic import traffic
from mpu.layers.embedding import VocabParallelEmbedding
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from pretrain_llama import model_provider
from tools.rehearsal.events import Launch, Transfer
from tools.rehearsal.order import Finding
from tools.rehearsal.places import beginning

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

Purpose = tuple[str, str]  # the axis, and what for
ROUNDING = 4  # bytes of a transfer: what whole divisions leave out
PURPOSES = {  # what a transfer's label says that it is for
    "grad sum": "gradients",
    "gather": "weights",
    "update": "weights",
    "norm": "norm",
    "loss sum": "loss",
    "float8 scales": "scales",
    "amaxes": "scales",
}
ATTENTION = ("cp", "cp_a2a", "cp_p2p")


def unlike_formulas(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the purposes for which other bytes are sent in the last step than are worked out."""
    if not is_own_llama(seen):
        return  # what a fork sends outside of its layers is its own
    sent: dict[Purpose, int] = {}
    at: dict[Purpose, list[int]] = {}
    events = seen.recorder.events
    for index in range(seen.first, len(events)):
        event = events[index]
        if type(event) is Transfer and (purpose := purpose_of(event)) is not None:
            sent[purpose] = sent.get(purpose, 0) + event.sent
            at.setdefault(purpose, []).append(index)
    stated: dict[Purpose, int] = {}
    rows: dict[Purpose, list[str]] = {}
    for row in traffic(seen.config, model_provider, seen.grid.pp.rank):
        if (known := of_words(row.axis, row.verb, row.who, row.purpose)) is not None:
            stated[known] = stated.get(known, 0) + row.sent
            rows.setdefault(known, []).append(f"{row.who}: {row.purpose}")
    for known in {**stated, **sent}:
        found, wanted = sent.get(known, 0), stated.get(known, 0)
        indices = at.get(known, [])
        if abs(found - wanted) > ROUNDING * max(len(indices), 1):
            axis, what = known
            words = f"{found:,} bytes are sent over {axis} in a step, purpose {what}; "
            said = "; ".join([*dict.fromkeys(rows.get(known, ("nobody",)))][:5])
            words += f"estimate/traffic.py works out {wanted:,} ({said})"
            yield at_line(seen, known, words, indices, found < wanted)


def is_own_llama(seen: "Rehearsed") -> bool:
    """Return whether the model is this repository's."""
    return type(seen.run.model).__module__ == "model.llama"


def purpose_of(event: Transfer) -> Purpose | None:
    """Return a transfer's axis and what it is for; None for what is not held against bytes."""
    if event.axis == "background":
        return None
    who, _, what = event.label.rpartition(": ")
    forward = event.where.phase in ("forward", "recompute")
    return of_words(event.axis, event.verb, who, what, "forward" if forward else "backward")


def of_words(axis: str, verb: str, who: str, what: str, phase: str = "") -> Purpose | None:
    """Return the axis of what is sent, and for what. phase: what else says whether it is forward.

    who, what: of its label.
    """
    if verb == "receive" or axis == "world":
        return None
    axis = {"pp_back": "pp"}.get(axis, axis)
    if what in PURPOSES:
        return axis, PURPOSES[what]
    if who == "cross_entropy":
        return axis, "softmax"
    if axis == "pp":
        return axis, "messages"
    if axis in ATTENTION:
        return axis, "attention"
    return axis, phase or ("forward" if what == "forward" else "backward")


def at_line(
    seen: "Rehearsed", purpose: Purpose, words: str, indices: list[int], missing: bool
) -> Finding:
    """Return the finding, at the line of a layer that sends nothing, or at those that send."""
    recorder, (axis, what) = seen.recorder, purpose
    chains = [recorder.chains.get(i, ()) for i in indices]
    through = tuple(dict.fromkeys(line for chain in chains for line in chain))
    if missing and axis == "tp" and what in ("forward", "backward"):
        for place, chain, layer in silent(seen, axis, what):
            return Finding("traffic", place, f"{words}: {layer} sends nothing", "", chain)
    places = [recorder.events[i].where.place for i in indices]  # type: ignore[union-attr]
    place = max(dict.fromkeys(places), key=places.count) if places else beginning_of(axis, what)
    return Finding("traffic", place, words, "", through)


def silent(seen: "Rehearsed", axis: str, phase: str) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield the matmuls of layers that send nothing over tp though their class does."""
    sp = seen.run.model.ctx.sp
    speaks = {
        ("forward", RowParallelLinear): True,
        ("forward", ColumnParallelLinear): sp,
        ("forward", VocabParallelEmbedding): True,
        ("backward", ColumnParallelLinear): True,
        ("backward", RowParallelLinear): sp,
        ("backward", VocabParallelEmbedding): sp,
    }
    wanted = {
        name
        for name, module in seen.run.model.named_modules()
        if any(speaks.get((phase, kind)) for kind in type(module).__mro__)
    }
    phases = ("forward", "recompute") if phase == "forward" else ("backward", "wgrad")
    matmuls: dict[str, int] = {}
    spoke = set[str]()
    events = seen.recorder.events
    for index in range(seen.first, len(events)):
        event = events[index]
        if type(event) is Transfer and event.axis == axis and event.where.phase in phases:
            spoke.add(event.where.layer)
        elif type(event) is Launch and event.where.phase in phases:
            if event.where.layer in wanted and (event.flops or "embedding" in event.op):
                matmuls.setdefault(event.where.layer, index)
    for layer, index in matmuls.items():
        if layer not in spoke:
            event = events[index]
            assert type(event) is Launch
            yield event.where.place, seen.recorder.chains.get(index, ()), layer


def beginning_of(axis: str, what: str) -> str:
    """Return the line where what is missing would begin."""
    from mpu.comm import mappings
    from mpu.layers.cross_entropy import loss_of
    from mpu.zero.norm import GlobalNorm, _Part
    from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
    from mpu.zero.reduce import sum_over_data

    known: dict[str, Callable[..., Any]] = {
        "gradients": sum_over_data,
        "weights": ParamAndGradBuffer.gather_weights,
        "norm": GlobalNorm.__call__ if axis == "pp" else _Part.squares,
        "softmax": loss_of,
    }
    return beginning(known.get(what, mappings._pair))
