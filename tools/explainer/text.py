# SPDX-License-Identifier: Apache-2.0
"""Format what tools/explain.py saw: the head, a rank's collectives, its sums, and the pipeline."""

import re
from textwrap import wrap
from typing import Any

from estimate.stages import describe_stages, rank_stages
from mpu.pipeline.schedules import table
from pretrain_llama import model_provider
from tools.explainer.formulas import Applied, Totals, read_formulas, symbols
from tools.explainer.trace import Explainer, Seen
from tools.explainer.zero import WIDTH, ZERO_SIZES
from training.config import Config
from training.schedule import schedule_of

SIZES = [  # one rank of one stage
    "  s sequence {s}, b micro-batch {b}, h hidden {h}, L layers {L}, R of them run again {R}, "
    "m micro-batches {m}",
    "  e bytes of a number {e}, g bytes of a gradient {g}, B gradient buckets {B}, "
    "G numbers in them {G:,}, N in that of the norms {N:,}",
    "  E {E} and H {H}: embedding and head are here, P parameters {P}",
]
PIPELINE_SIZES = [
    "  s sequence {s}, b micro-batch {b}, h hidden {h}, m micro-batches {m}, Q parameters {Q}, "
    "e bytes of a number {e}, g bytes of a gradient {g}"
]
RANK_SIZES = [
    "  here E {E} embedding, L layers {L}, R of them run again {R}, H {H} head; stages that hand "
    "their output to another rank A {A}, their gradient C {C}",
    "  P parameters {P}, B gradient buckets {B}, G numbers in them {G:,}, N in that of the norms "
    "{N:,}, T in that of tied embeddings {T:,}",
]
BEFORE = (
    "ZeRO level {Z}. It is the second step: new weights of the first one may still be on their "
    "way, and the order of uses is known."
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


def head(config: Config) -> list[str]:
    """Return the opening lines: what was run, and what the words mean."""
    n, p = symbols(config), config.parallel
    alone, cp = n["p"] == 1, p.context_parallel_size
    seen = ", as rank 0 sees it" if alone else f": pipeline {n['p']} ({p.schedule})"
    sizes = [*SIZES, *(ZERO_SIZES if n["Z"] else [])] if alone else PIPELINE_SIZES
    return [
        f"One step of a tiny Llama on {n['t'] * n['D'] * n['p']} ranks{seen}"
        f"{':' if alone else ','} tensor parallel {n['t']}, data parallel {p.data_parallel_size}, "
        f"{f'context parallel {cp} ({p.cp_comm_type[0]}), ' * (cp > 1)}sequence "
        f"parallelism {'on' if n['sp'] else 'off'}, recomputed: "
        f"{config.parallel.recompute_granularity or 'nothing'}",
        *([BEFORE.format(**n)] if n["Z"] else []),
        "",
        *(line.format(**n) for line in sizes),
        "  hidden states are [s/t, b, h] between the layers, [s, b, h] inside attention and MLP"
        if n["sp"]
        else "  hidden states are [s, b, h], the same on every rank of tp",
        "",
        *([] if alone else [f"  axis    {PIPELINE_AXES}"]),
        f"  {'axis' if alone else '    '}    {AXES}world: everybody",
        "  F, BW   forward of a micro-batch; backward: B, the gradient of a stage's input, and W, "
        "those of its weights",
        "  sends   bytes that leave this rank, by the best algorithm",
        "  how     blocks: the rank stands still; async: it computes on, and waits when it needs "
        "the result",
        "  needs   the operation that made the tensor that is sent (dgrad, wgrad: the gradient of "
        "a layer's input, of its weight)",
        "",
    ]


_ROW = "{:>3}  {:<9} {:<23} {:<14} {:<37} {:>8}  {:<6}  {}"


def story(explainer: Explainer, every_action: bool) -> list[str]:
    """Return each collective's lines: one of facts, then what it needs and what hides it.

    every_action: also name the actions during which nothing is sent.
    """
    title = _ROW.format(
        "#", "phase", "layer", "verb", _two("axis", "shape in -> out"), "sends", "how", "called at"
    )
    lines = []
    if explainer.before:
        lines += ["", rule("on their way since the update of the step before"), title, ""]
        for event in explainer.before:
            lines += _told(event, "")
    for number, action in enumerate(explainer.actions):
        events = [event for event in explainer.events if event.action == number]
        if events:
            lines += ["", rule(action), title]
        elif every_action:
            lines += ["", rule(f"{action}: nothing travels")]
        group = ""
        for event in events:
            block = ".".join(event.place.layer.split(".")[:2])
            if block != group:
                group = block
                lines.append("")
            lines += _told(event, event.number)
    return lines


def _told(event: Seen, number: int | str) -> list[str]:
    place, how = event.place, "async" if event.is_async else "blocks"
    facts = (number, place.phase, place.layer, event.verb, _where(event), f"{event.sent:,}", how)
    lines = [_ROW.format(*facts, place.site)]
    for text in _why(event):
        lines += wrap(text, WIDTH, initial_indent=" " * 14, subsequent_indent=" " * 18)
    return lines


def _two(axis: str, shape: str) -> str:
    return f"{axis:<10} {shape}"


def _where(event: Seen) -> str:
    """Return the axis, or the peer, and the shapes that go in and come out."""
    first, *rest = event.shape
    if event.parcel:
        way = "to" if event.verb == "send" else "from"
        return f"{event.axis} {way} rank {event.parcel.peer}".ljust(20) + str([first, *rest])
    out = first
    if event.verb == "all_gather":
        out = first * event.size
    elif event.verb == "reduce_scatter":
        out = first // event.size
    return _two(f"{event.axis} of {event.size}", f"{[first, *rest]} -> {[out, *rest]}")


def _why(event: Seen) -> list[str]:
    """Return what an event needs, who waited for it, and what ran meanwhile."""
    actions = [_short(action) for action in event.explainer.actions]
    needs = f"needs {event.needs or 'nothing that was computed in this step'}"
    if event.verb == "receive":
        under = actions[event.action : event.waited_in]
        hidden = f"hidden under: {' and '.join(under)}" if under else "nothing runs meanwhile"
        what = f"the input of {actions[event.waited_in]}"
        return [f"{what}, which waits for it at {event.waited_at}; {hidden}"]
    if event.verb == "send":
        following = [*actions[event.action + 1 :], "the end of the step"]
        return [needs, f"the outbox waits for it, the rank goes on: {following[0]}"]
    reasons = [needs, _hidden(event)] if event.is_async else [needs]
    return reasons if event.place.bucket is None else _why_bucket(event, reasons)


def _why_bucket(event: Seen, reasons: list[str]) -> list[str]:
    """Return the same for a bucket, and why its gradients leave or its weights are gathered."""
    place, buckets = event.place, event.explainer.buckets
    assert buckets is not None and place.bucket is not None
    if place.phase == "grad sum":
        if not place.during or event.verb != "reduce_scatter":
            return reasons
        before = f", before {event.pending}" if event.pending else ""
        return [f"leaves as a gradient of {place.during} is done{before}", *reasons]
    if place.phase == "update":
        return [f"the new weights of {buckets.contents(place.bucket)}", *reasons[1:]]
    whole = " and ".join(f"bucket {other}" for other in event.whole)
    asked = f"{buckets.contents(place.bucket)}, asked for by {place.during}"
    return [f"{asked}; whole beside it: {whole or 'nothing'}", *reasons[1:]]


def _short(action: str) -> str:
    return action.partition(" in stage ")[0]


def _hidden(event: Seen) -> str:
    """Return who waited, and what ran between the start of a collective and the wait."""
    stories = list(dict.fromkeys(event.meanwhile))
    matmuls = [story for story in stories if "matmul of" in story]
    under = matmuls or stories
    if len(under) > 2:
        what = "matmuls" if matmuls else "operations"
        hidden = f"hidden under {len(under)} {what}, {under[0]} to {under[-1]}"
    else:
        hidden = f"hidden under: {' and '.join(under)}" if under else "nothing ran meanwhile"
    if not event.waited_at:
        return "still on its way at the end: the next step waits for it before the first use"
    return f"waited for at {event.waited_at}; {hidden}"


def sums(counted: Totals, stated: Totals, applied: list[Applied], who: str = "rank 0") -> list[str]:
    """Return the totals of the trace beside the formulas that they should equal.

    The document has none for an axis that only a fork uses.
    """
    known = {row.axis for row in read_formulas()}
    lines = ["", rule(f"what {who} sent in this step, and the formulas of docs/parallelism.md")]
    differ = []
    for key in dict.fromkeys([*counted, *stated]):
        (count, sent), (times, size) = counted.get(key, (0, 0)), stated.get(key, (0, 0))
        verdict = "equal"
        if key[0] not in known:
            verdict = f"the document has no formula for {key[0]}"
        elif (count, sent) != (times, size):
            verdict = f"DIFFERS: the document says {times:,} and {size:,} bytes"
            differ.append(" ".join(key))
        lines += ["", f"{key[0]:<6} {key[1]:<15} {count:>4,} x {sent:>12,} bytes   {verdict}"]
        for row, n, size in applied:
            if (row.axis, row.verb) == key:
                counts = f"    {row.what:<36} {row.count:<15} = {n:<4,}"
                each = f"{row.bytes} = {size:,}"
                if len(counts) + 1 + len(each) <= WIDTH:
                    lines.append(f"{counts} {each}")
                else:
                    lines += [counts.rstrip(), f"      bytes: {each}"]
    lines += ["", f"DIFFERENT: {', '.join(differ)}" if differ else "All equal."]
    return lines


def in_order(explainer: Explainer, chunks: int) -> list[str]:
    """Return a rank's actions, one a line: where the input came from, where the output went."""
    messages = [(e, e.parcel.peer) for e in explainer.events if e.parcel]
    taken = {e.waited_in: peer for e, peer in messages if e.verb == "receive"}
    given = {e.action: peer for e, peer in messages if e.verb == "send"}
    lines = []
    for number, action in enumerate(explainer.actions):
        if found := re.match(r"(\w+) chunk (\d+) micro-batch (\d+) in stage (\d+)", action):
            kind, _, micro_batch, stage = found.groups()
            source = f"{taken[number]} >" if number in taken else ""
            name = f"{kind}{micro_batch}" + (f" stage {stage}" if chunks > 1 else "")
            to = f"> {given[number]}" if number in given else ""
            lines.append(f"{source:>4} {name:<{12 if chunks > 1 else 5}}{to}".rstrip())
    return lines


def columns(texts: list[list[str]], titles: list[str], width: int = WIDTH) -> list[str]:
    """Return lists of lines set side by side, as many as fit, the rest below."""
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

    The lines are the schedule, the ranks' orders side by side, then each rank's story. every: each
    pipeline rank's order, its story with the sums, how many activations and gradients it sent, and
    whether its sums are equal.
    """
    schedule = schedule_of(config, symbols(config)["m"])
    held = [rank_stages(config, model_provider, rank) for rank in range(len(every))]
    lines = [
        f"  pipeline rank {rank}: {describe_stages(stages)}" for rank, stages in enumerate(held)
    ]
    lines += ["", rule("the schedule, were F, B and W equally long and messages free")]
    lower = "; the second of a rank's chunks in lower case" if schedule.chunks == 2 else ""
    lines += [f"  a row a rank, F0 the forward of micro-batch 0{lower}", ""]
    lines += [f"  {line}" for line in table(schedule).splitlines()]
    lines += ["", rule("what each pipeline rank did, each in its own order")]
    lines += [
        "  0 > F1: its input came from rank 0; F1 > 1: its output went to rank 1; no arrow: an end "
        "of the model, or this very rank",
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
        formula = "m(pv - 2), since one stage hands on to its own rank,"
    activations, gradients = (sum(own["sent"][i] for own in every) for i in (0, 1))
    equal = activations == gradients == expected and all(own["equal"] for own in every)
    lines += ["", rule("the whole pipeline", "=")]
    lines.append(f"  {activations} activations, {gradients} gradients: {formula} = {expected}")
    return equal, [*lines, "", "All equal." if equal else "DIFFERENT, as the ranks say."]
