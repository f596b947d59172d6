# SPDX-License-Identifier: Apache-2.0
"""Format the page of tools/explain.py: head, a rank's collectives, their sums, the pipeline."""

import re
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from forecast.explainer.trace import Explainer, Seen
from forecast.explainer.zero import WIDTH
from forecast.traffic import Totals, Traffic, totals
from mpu.pipeline.schedules import table
from pretrain_llama import model_provider
from training.run.pipeline_stages import describe_stages, rank_stages
from training.settings import batch_size
from training.settings.config import Config
from training.settings.layer_options import main_grads_dtype
from training.settings.pipeline_schedule import schedule_of

BEFORE = (
    "ZeRO stage {level}. This is the second step: the gathers of new weights of the first step may "
    "still be in flight, and the order of uses is known."
)
AXES = (
    "tp: parts of a layer; tp_kv: ranks that share a key/value head; cp: parts of the rows; "
    "dp_cp (dp x cp): model copies; "
)
PIPELINE_AXES = (
    "pp: the pipeline, messages to higher ranks; pp_back: to lower ranks; embd: its first rank and "
    "its last"
)


def rule(text: str, line: str = "-") -> str:
    """Return a heading as wide as the page."""
    return f"{line * 3} {text} ".ljust(WIDTH, line)


def head(config: Config, level: int) -> list[str]:
    """Return the opening lines: the run, its ZeRO stage, and explanations of words on the page."""
    p, m, e = config.parallel, config.model, config.run.dtype.itemsize
    t, pp, cp = (
        p.tensor_model_parallel_size, p.pipeline_model_parallel_size, p.context_parallel_size
    )  # fmt: skip
    alone, sp = pp == 1, p.sequence_parallel and t > 1
    seen = ", as rank 0 sees it" if alone else f": pipeline {pp} ({p.schedule})"
    return [
        f"One step of a tiny Llama on {p.world_size} ranks{seen}"
        f"{':' if alone else ','} tensor parallel {t}, data parallel {p.data_parallel_size}, "
        f"{f'context parallel {cp} ({p.cp_comm_type}), ' * (cp > 1)}sequence "
        f"parallelism {'on' if sp else 'off'}, recomputed: {p.recompute_granularity or 'nothing'}",
        *([BEFORE.format(level=level)] if level else []),
        "",
        f"  of a rank: s sequence {m.seq_length // cp}, b micro-batch "
        f"{config.batch.micro_batch_size}, h hidden {m.hidden_size}; layers of the model "
        f"{m.num_layers}, micro-batches {batch_size.micro_batches(config, 0)}; bytes of a "
        f"number {e}, of a gradient {main_grads_dtype(config).itemsize}",
        "  hidden states are [s/t, b, h] between the layers, [s, b, h] inside attention and MLP"
        if sp
        else "  hidden states are [s, b, h], the same on every rank of tp",
        "",
        *([] if alone else [f"  axis    {PIPELINE_AXES}"]),
        f"  {'axis' if alone else '    '}    {AXES}world: all ranks",
        "  F, BW   forward of a micro-batch; backward: B, the gradient of a stage's input, and W, "
        "those of its weights",
        "  sends   bytes that leave this rank, by the best algorithm",
        "  how     blocks: the rank waits; async: the rank continues, and waits when it needs the "
        "result",
        "  needs   the operation that produced the sent tensor (dgrad, wgrad: the gradient of a "
        "layer's input, of its weight)",
        "",
    ]


_ROW = "{:>3}  {:<9} {:<23} {:<14} {:<37} {:>8}  {:<6}  {}"


def story(explainer: Explainer, every_action: bool) -> list[str]:
    """Return the lines of each collective: facts, then its inputs and the work that hides it.

    every_action: also name actions without collectives or messages.
    """
    title = _ROW.format(
        "#", "phase", "layer", "verb", _two("axis", "shape in -> out"), "sends", "how", "called at"
    )
    lines = []
    if explainer.before:
        lines += ["", rule("started by the update of the previous step"), title, ""]
        for event in explainer.before:
            lines += _event_lines(event, "")
    for number, action in enumerate(explainer.actions):
        events = [event for event in explainer.events if event.action == number]
        if events:
            lines += ["", rule(action), title]
        elif every_action:
            lines += ["", rule(f"{action}: no communication")]
        group = ""
        for event in events:
            block = ".".join(event.place.layer.split(".")[:2])
            if block != group:
                group = block
                lines.append("")
            lines += _event_lines(event, event.number)
    return lines


def _event_lines(event: Seen, number: int | str) -> list[str]:
    place, how = event.place, "async" if event.is_async else "blocks"
    facts = (number, place.phase, place.layer, event.verb, _where(event), f"{event.sent:,}", how)
    lines = [_ROW.format(*facts, place.site)]
    for text in _why(event):
        lines += wrap(text, WIDTH, initial_indent=" " * 14, subsequent_indent=" " * 18)
    return lines


def _two(axis: str, shape: str) -> str:
    return f"{axis:<10} {shape}"


def _where(event: Seen) -> str:
    """Return the axis or the peer, and the shapes of input and output."""
    first, *rest = event.shape
    if event.payload:
        way = "to" if event.verb == "send" else "from"
        return f"{event.axis} {way} rank {event.payload.peer}".ljust(20) + str([first, *rest])
    out = first
    if event.verb == "all_gather":
        out = first * event.size
    elif event.verb == "reduce_scatter":
        out = first // event.size
    return _two(f"{event.axis} of {event.size}", f"{[first, *rest]} -> {[out, *rest]}")


def _why(event: Seen) -> list[str]:
    """Return the inputs of an event, the place of its wait, and the work that ran meanwhile."""
    actions = [_short(action) for action in event.explainer.actions]
    needs = f"needs {event.needs or 'nothing computed in this step'}"
    if event.verb == "receive":
        under = actions[event.action : event.waited_in]
        hidden = f"hidden under: {' and '.join(under)}" if under else "nothing runs meanwhile"
        what = f"the input of {actions[event.waited_in]}"
        return [f"{what}, which waits for it at {event.waited_at}; {hidden}"]
    if event.verb == "send":
        following = [*actions[event.action + 1 :], "the end of the step"]
        return [needs, f"the send queue waits for it, and the rank continues with {following[0]}"]
    reasons = [needs, _hidden(event)] if event.is_async else [needs]
    return reasons if event.place.bucket is None else _why_bucket(event, reasons)


def _why_bucket(event: Seen, reasons: list[str]) -> list[str]:
    """Return `reasons`, with why a bucket's gradients are summed or its weights gathered."""
    place, buckets = event.place, event.explainer.buckets
    assert buckets is not None and place.bucket is not None
    if place.phase == "grad sum":
        if not place.during or event.verb != "reduce_scatter":
            return reasons
        before = f", before {event.pending}" if event.pending else ""
        return [f"starts when a gradient of {place.during} is done{before}", *reasons]
    if place.phase == "update":
        return [f"the new weights of {buckets.contents(place.bucket)}", *reasons[1:]]
    gathered = " and ".join(f"bucket {other}" for other in event.gathered)
    requested = f"{buckets.contents(place.bucket)}, requested by {place.during}"
    return [f"{requested}; gathered at the same time: {gathered or 'nothing'}", *reasons[1:]]


def _short(action: str) -> str:
    return action.partition(" in stage ")[0]


def _hidden(event: Seen) -> str:
    """Return the place of a collective's wait, and the work between its start and that."""
    stories = list(dict.fromkeys(event.meanwhile))
    matmuls = [story for story in stories if "matmul of" in story]
    under = matmuls or stories
    if len(under) > 2:
        what = "matmuls" if matmuls else "operations"
        hidden = f"hidden under {len(under)} {what}, {under[0]} to {under[-1]}"
    else:
        hidden = f"hidden under: {' and '.join(under)}" if under else "nothing ran meanwhile"
    if not event.waited_at:
        return "not done at the end: the next step waits for it before the first use"
    return f"waited for at {event.waited_at}; {hidden}"


def sums(counted: Totals, rows: Sequence[Traffic], who: str = "rank 0") -> list[str]:
    """Compare the totals of the trace with those of a recording without ranks."""
    stated, differ = totals(rows), []
    lines = ["", rule(f"what {who} sent in this step, compared with a recording without ranks")]
    for key in dict.fromkeys([*counted, *stated]):
        (count, sent), (times, size) = counted.get(key, (0, 0)), stated.get(key, (0, 0))
        verdict = "equal"
        if (count, sent) != (times, size):
            verdict = f"DIFFERS: the recording has {times:,} and {size:,} bytes"
            differ.append(" ".join(key))
        lines += ["", f"{key[0]:<11} {key[1]:<15} {count:>4,} x {sent:>12,} bytes   {verdict}"]
        lines += [
            f"    {row.purpose:<10} {row.who:<40} {row.times:>4,} of {row.bytes:>10,} bytes, "
            f"{row.sent:>12,} sent"
            for row in rows
            if (row.axis, row.verb) == key
        ]
    lines += ["", f"DIFFERENT: {', '.join(differ)}" if differ else "All equal."]
    return lines


def in_order(explainer: Explainer, chunks: int) -> list[str]:
    """Return a line for each action of a rank: source of its input, destination of its output."""
    messages = [(e, e.payload) for e in explainer.events if e.payload is not None]
    taken = {(e.waited_in, p.kind): p.peer for e, p in messages if e.verb == "receive"}
    sent_to = {(e.action, p.kind): p.peer for e, p in messages if e.verb == "send"}
    lines = []
    for number, action in enumerate(explainer.actions):
        prefix = ""  # an F and the B that it overlaps: two lines
        for words in action.split(" overlapping "):
            if found := re.match(r"(\w+) chunk (\d+) micro-batch (\d+) in stage (\d+)", words):
                kind, _, micro_batch, stage = found.groups()
                at = number, kind[0]
                source = f"{taken[at]} >" if at in taken else ""
                name = f"{prefix}{kind}{micro_batch}" + (f" stage {stage}" if chunks > 1 else "")
                to = f"> {sent_to[at]}" if at in sent_to else ""
                lines.append(f"{source:>4} {name:<{12 if chunks > 1 else 5}}{to}".rstrip())
                prefix = "+ "
    return lines


def columns(texts: list[list[str]], titles: list[str], width: int = WIDTH) -> list[str]:
    """Return lists of lines side by side, as many as fit, the rest below."""
    wide = 4 + max(len(line) for lines in [titles, *texts] for line in lines)
    some, lines = max(1, width // wide), []
    for at in range(0, len(texts), some):
        here = [[t, "", *each] for t, each in zip(titles, texts, strict=True)][at : at + some]
        for row in range(max(map(len, here))):
            cells = [each[row] if row < len(each) else "" for each in here]
            lines.append(("  " + "".join(cell.ljust(wide) for cell in cells)).rstrip())
        lines.append("")
    return lines


def pipeline(config: Config, every: list[dict[str, Any]]) -> tuple[bool, list[str]]:
    """Return whether all ranks' sums are equal, and the lines of a whole pipeline.

    The lines are the schedule, the ranks' orders side by side, then each rank's story. every: for
    each pipeline rank its order, its story with the sums, the numbers of activations and gradients
    that it sent, and whether its sums are equal.
    """
    schedule = schedule_of(config, batch_size.micro_batches(config, 0))
    of_ranks = [rank_stages(config, model_provider, rank) for rank in range(len(every))]
    lines = [
        f"  pipeline rank {rank}: {describe_stages(stages)}" for rank, stages in enumerate(of_ranks)
    ]
    lines += ["", rule("the schedule, if F, B and W take equally long and messages no time")]
    lower = "; the second chunk of a rank is in lower case" if schedule.chunks == 2 else ""
    lines += [f"  one row for each rank; F0: the forward of micro-batch 0{lower}", ""]
    lines += [f"  {line}" for line in table(schedule).splitlines()]
    lines += ["", rule("what each pipeline rank did, each in its own order")]
    lines += [
        "  0 > F1: its input came from rank 0; F1 > 1: its output went to rank 1; no arrow: an end "
        "of the model, or the same rank",
        "",
        *columns([own["order"] for own in every], [f"rank {r}" for r in range(len(every))]),
    ]
    for own in every:
        lines += own["story"]
    m, stages = schedule.micro_batches, range(schedule.stages)
    ranks = [schedule.place(stage)[0] for stage in stages]
    inside = sum(ranks[stage] == ranks[stage + 1] for stage in stages[:-1])
    formula, expected = "m(pv - 1)", m * (schedule.stages - 1 - inside)
    if inside:
        formula = "m(pv - 2), since one stage sends to its own rank,"
    activations, gradients = (sum(own["sent"][i] for own in every) for i in (0, 1))
    equal = activations == gradients == expected and all(own["equal"] for own in every)
    lines += ["", rule("the whole pipeline", "=")]
    lines.append(f"  {activations} activations, {gradients} gradients: {formula} = {expected}")
    return equal, [*lines, "", "All equal." if equal else "DIFFERENT: see the ranks above."]
