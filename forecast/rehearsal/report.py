# SPDX-License-Identifier: Apache-2.0
"""Write the report of a rehearsal, as text and as JSON."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from forecast.rehearsal.events import Event, Launch, Transfer
from training.run.text import in_units


def launches(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Add up the launches of a step by operation, part, phase and layer."""
    found: dict[tuple[str, str, str, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for event in events:
        if type(event) is Launch:
            key = (event.op, event.where.part, event.where.phase, event.where.layer)
            row = found[key]
            row[0] += 1
            row[1] += event.bytes
            row[2] += event.flops
    return [
        {
            "op": op, "part": part, "phase": phase, "layer": layer,
            "count": int(count), "bytes": int(nbytes), "flops": flops,
        }
        for (op, part, phase, layer), (count, nbytes, flops) in found.items()
    ]  # fmt: skip


def collectives(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the transfers of a step, in order."""
    return [
        {
            "verb": e.verb, "axis": e.axis, "ranks": list(e.group), "peer": e.peer,
            "stream": e.stream, "number": e.number, "bytes": e.bytes, "sent": e.sent,
            "dtype": e.dtype, "shape": list(e.shape), "label": e.label, "phase": e.where.phase,
            "layer": e.where.layer, "place": e.where.place, "urgent": e.urgent,
        }
        for e in events
        if type(e) is Transfer
    ]  # fmt: skip


def text(
    made: dict[str, Any],
    heading: str,
    time: Sequence[str],
    activations: Sequence[str],
) -> str:
    """Return the printed report. time, activations: the lines of these two sections."""
    lines = [heading, "", "Launches of the step, by part"]
    parts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in made["launches"]:
        parts[row["part"]].update(count=row["count"], bytes=row["bytes"], flops=round(row["flops"]))
    for part, sums in sorted(parts.items(), key=lambda item: -item[1]["count"]):
        nbytes = in_units(sums["bytes"])
        lines.append(
            f"  {part:<10} {sums['count']:>9,} launches  {nbytes:>9} read and written"
            f"  {sums['flops']:.3g} FLOPs"
        )
    lines += ["", f"Peak memory: {in_units(made['memory']['peak_bytes'])}"]
    for kind, nbytes in made["memory"]["by_kind"].items():
        lines.append(f"  {kind:<28} {in_units(nbytes):>9}")
    lines += [f"  not counted: {what}" for what in made["memory"]["not_counted"]]
    lines += ["", "Collectives and messages of the step"]
    rows: Counter[tuple[str, str]] = Counter()
    sent: Counter[tuple[str, str]] = Counter()
    urgent = set[tuple[str, str]]()
    for row in made["collectives"]:
        key = (row["axis"], row["verb"])
        rows[key] += 1
        sent[key] += row["sent"]
        urgent |= {key} if row["urgent"] else set()
    for key, count in sorted(rows.items()):
        nbytes, stream = in_units(sent[key]), ", high priority" if key in urgent else ""
        lines.append(f"  {key[0]:<12} {key[1]:<15} {count:>7,}  this rank sends {nbytes}{stream}")
    if not rows:
        lines.append("  none: one rank")
    if time:
        lines += ["", "Predicted time", *(f"  {line}" for line in time)]
    if activations:
        lines += ["", "Activations of a layer, one micro-batch", *(f"  {x}" for x in activations)]
    return "\n".join(lines)


def findings(made: dict[str, Any]) -> list[str]:
    """Return the printed lines of the findings."""
    lines = ["", f"Findings: {len(made['findings'])}"]
    for found in made["findings"]:
        lines.append(f"  {found['place']}: {found['kind']}: {found['what']}")
    return lines
