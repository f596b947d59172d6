# SPDX-License-Identifier: Apache-2.0
"""Hold what a rehearsed rank sends in a step against the formulas of docs/parallelism.md.

Bytes are compared for each axis and purpose, whatever the verbs: by the ideal algorithm a
reduce-scatter and an all-gather send what an all-reduce does, and a ring of messages what a gather
does. A layer without the transfer that its class makes is named by the line of its matmul.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from mpu.layers.embedding import VocabParallelEmbedding
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from tools.explainer.formulas import apply, read_formulas
from tools.rehearsal.events import Launch, Transfer
from tools.rehearsal.order import Finding
from tools.rehearsal.places import beginning

if TYPE_CHECKING:
    from tools.rehearsal.run import Rehearsed

Purpose = tuple[str, str]  # the axis, and what for
ROUNDING = 4  # bytes of a transfer: what whole divisions leave out
OF_LABELS = {  # the end of a transfer's label: its purpose
    ": grad sum": "gradients",
    ": gather": "weights",
    ": update": "weights",
    "optimizer: norm": "norm",
    ": loss sum": "loss",
    ": float8 scales": "scales",
    "optimizer: float8 scales": "scales",
    "cross_entropy: forward": "softmax",
}
OF_ROWS = {  # words of a row of the document: its purpose
    "scales of": "scales",
    "squares, for": "norm",
    "the global norm": "norm",
    "sums of losses": "loss",
    "three numbers": "softmax",
    "gradients of the norms": "gradients",
    "gradients of tied": "gradients",
    "gradients, a bucket": "gradients",
    "their sums": "gradients",
    "updated weights": "weights",
    "weights,": "weights",
    "weights of": "weights",
}
ATTENTION = ("cp", "cp_a2a", "cp_p2p")
FORWARD = ("forward", "run again", "heads of k and v")


def unlike_formulas(seen: "Rehearsed") -> Iterator[Finding]:
    """Yield the purposes for which other bytes are sent in the last step than the document says."""
    if not is_own_llama(seen):
        return  # the document has no formulas for what a fork sends
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
    for row, _, size in apply(seen.config, read_formulas(), seen.grid.pp.rank):
        if (known := stated_for(row.axis, row.what)) is not None:
            if known[1] == "norm" and seen.config.log.log_params_norm:
                size *= 2  # that of the parameters, too
            stated[known] = stated.get(known, 0) + size
            rows.setdefault(known, []).append(row.what)
    for purpose in {**stated, **sent}:
        found, wanted = sent.get(purpose, 0), stated.get(purpose, 0)
        indices = at.get(purpose, [])
        if abs(found - wanted) > ROUNDING * max(len(indices), 1):
            axis, what = purpose
            words = f"{found:,} bytes are sent over {axis} in a step, purpose {what}; "
            said = "; ".join(dict.fromkeys(rows.get(purpose, ("no row for it",))))
            words += f"docs/parallelism.md says {wanted:,} ({said})"
            yield at_line(seen, purpose, words, indices, found < wanted)


def is_own_llama(seen: "Rehearsed") -> bool:
    """Return whether the model is the one for which the document has formulas."""
    model = seen.run.model
    return type(model).__module__ == "model.llama"


def purpose_of(event: Transfer) -> Purpose | None:
    """Return a transfer's axis and what it is for; None for what the document leaves out."""
    axis, label = event.axis, event.label
    if event.verb == "receive" or axis in ("world", "background") or label.startswith("agreement"):
        return None
    for end, what in OF_LABELS.items():
        if label.endswith(end):
            return axis, what
    if axis in ("pp", "pp_back"):
        return "pp", "messages"
    if axis in ATTENTION:
        return axis, "attention"
    return axis, "forward" if event.where.phase in ("forward", "recompute") else "backward"


def stated_for(axis: str, text: str) -> Purpose | None:
    """Return the axis and the purpose of a row of the document."""
    if axis == "world":
        return None
    for words, what in OF_ROWS.items():
        if text.startswith(words):
            if not (axis in (*ATTENTION, "pp") and what == "gradients"):
                return axis, what
    if axis == "pp":
        return axis, "messages"
    if axis in ATTENTION:
        return axis, "attention"
    forward = any(word in text for word in FORWARD)
    return axis, "forward" if forward and "backward" not in text else "backward"


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
