# SPDX-License-Identifier: Apache-2.0
"""Put together what the ranks of tools/fork_check.py found: a row each layout, then sentences."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.bisect.verdict import Verdict
from tools.forks.case import Case, Desk
from tools.forks.layouts import pattern

COLUMNS = ("loss", "gradients", "weights", "decode")
HIDDEN_BY = {  # findings of a kind say nothing new where there are some of these
    "initial": ("shape",),
    "loss": ("shape",),
    "replicas": ("shape", "loss"),
    "gradient": ("shape", "loss"),
    "norm": ("shape", "loss", "gradient"),
    "update": ("shape", "loss", "gradient", "norm", "load"),
    "later": ("shape", "loss", "gradient", "norm", "load"),
    "held": ("shape",),
}
ALONE = {
    "rounded",
    "derivative",
    "decode",
    "plan",
    "refused",
    "shape",
    "initial",
    "names",
    "random",
    "internal",
    "config",
    "transformers",
    "loss of logits",
}  # they say themselves what the cause is
NUMBER = re.compile(r"(?<=layers\.)\d+")
FACTOR = re.compile(r"is ([0-9.]+) times what it should be")
RECORDED = {  # the step, counted from 0, that differs where there is a finding of a kind
    "loss": 0,
    "replicas": 0,
    "gradient": 0,
    "norm": 0,
    "update": 1,
    "later": 1,
}
WORDY = {
    "raised",
    "refused",
    "hung",
    "plan",
    "internal",
}  # their sentences differ in more than a number
BLOCKING = {
    "rounded",
    "names",
    "random",
    "raised",
    "refused",
    "hung",
    "internal",
}  # of one rank: nothing can be compared with it


@dataclass
class Row:
    """A layout: its largest errors, and what disagrees, (kind, parameter, sentence)."""

    case: Case
    seconds: float
    errors: dict[str, float] = field(default_factory=dict)
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    result: str = "agrees"  # where there are no findings
    refused: str = ""  # why it is not run: the rule that its flags break

    @property
    def differs(self) -> bool:
        """Whether the layout, as one among others, is wrong."""
        return any(kind not in ALONE for kind, _, _ in self.findings)

    @property
    def compared(self) -> bool:
        """Whether it differs in numbers. What ended with an error says itself why."""
        return any(kind not in ALONE | {"raised"} for kind, _, _ in self.findings)

    @property
    def blocks(self) -> bool:
        """Whether other layouts cannot be compared with this one."""
        return any(kind in BLOCKING for kind, _, _ in self.findings)

    @property
    def to_record(self) -> int:
        """Return the step of which a record would say what differs first, or -1."""
        steps = [RECORDED[kind] for kind, _, _ in self.findings if kind in RECORDED]
        return min(steps, default=-1) if not self.case.oracle else -1

    def explain_with(self, verdict: Verdict) -> None:
        """Let the engine's sentence stand for the findings that it explains."""
        if verdict.same:
            return
        known = [f for f in self.findings if f[0] in RECORDED]
        text = f"{known[0][2]}; {verdict.sentence}"
        rest = [f for f in self.findings if f[0] not in RECORDED]
        self.findings = [("tensor", verdict.name or verdict.what, text), *rest]

    def line(self, width: int) -> str:
        """Return the row of the table."""
        cells = [f"{self.errors[c]:.1e}" if c in self.errors else "-" for c in COLUMNS]
        result = f"DISAGREES: {short(self.findings[0])}" if self.findings else self.result
        result = "not run: the model refuses it" if self.refused else result
        if self.warnings:
            result += ", with a warning"
        row = f"{self.case.name:<{width}}{''.join(f'{c:>10}' for c in cells)}"
        return f"{row}{self.seconds:>6.1f} s  {result}"


def head(width: int) -> str:
    """Return the table's head."""
    return f"{'layout':<{width}}{''.join(f'{c:>10}' for c in COLUMNS)}{'time':>8}  result"


def short(finding: tuple[str, str, str]) -> str:
    """Return a finding in a few words."""
    kind, name, text = finding
    return (
        f"{kind}, {name}" if name else kind if kind in ("raised", "refused", "hung") else text[:60]
    )


def row_of(
    case: Case, answers: Sequence[Any], seconds: float, hung: Callable[[], str], desk: Desk
) -> Row:
    """Return a layout's row from the answers of its ranks: a Report each, an error, or None."""
    row = Row(case, seconds)
    errors = [(a["kind"], "", a["error"]) for a in answers if a and "error" in a]
    errors.sort(key=lambda e: e[2].startswith("CommunicationError"))
    lost = errors and errors[0][2].startswith("CommunicationError")  # a peer has failed, or died
    if errors and not (lost and None in answers):
        row.findings.append(errors[0])
        return row
    if None in answers:
        row.findings.append(("hung", "", f"it hung, or a rank died; {hung()}"))
        return row
    for report in answers:
        row.findings += [tuple(f) for f in report["findings"]]
        row.warnings += report["warnings"]
        row.notes += report["notes"]
        for kind, value in report["errors"].items():
            row.errors[kind] = max(value, row.errors.get(kind, 0.0))
    row.warnings = list(dict.fromkeys(row.warnings))
    if not case.oracle and not row.findings or any(f[0] == "loss" for f in row.findings):
        row.findings += covered([report["rectangles"] for report in answers], desk, case)
    kinds = {kind for kind, _, _ in row.findings}
    shown = [f for f in row.findings if not kinds & set(HIDDEN_BY.get(f[0], ()))]
    order = list(HIDDEN_BY)
    first: dict[tuple[str, str], tuple[str, str, str]] = {}
    counts: dict[tuple[str, str], set[str]] = {}
    for finding in shown:  # of most kinds the first and the number, of fields each
        one = (finding[0], finding[1] if finding[0] in ("config", "transformers") else "")
        first.setdefault(one, finding)
        counts.setdefault(one, set()).add(finding[1])
    row.findings = []
    for one, (kind, name, text) in sorted(
        first.items(), key=lambda item: order.index(item[0][0]) if item[0][0] in order else 99
    ):
        more = len(counts[one]) - 1
        row.findings.append((kind, name, text + f" (and {more} more)" * (more > 0)))
    return row


def covered(
    rectangles: Sequence[Sequence[tuple[str, int, int, int]]], desk: Desk, case: Case
) -> list[tuple[str, str, str]]:
    """Return a finding for each weight of which no rank holds some part."""
    found = []
    rows: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for name, dim, first, size in (part for own in rectangles for part in own):
        rows.setdefault((name, dim), []).append((first, first + size))
    every = desk.oracle(case.tied).tensors["start"]
    found += [
        ("held", name, f"no rank holds {name}") for name in every.keys() - {n for n, _ in rows}
    ]
    for (name, dim), parts in rows.items():
        reached = 0
        for first, last in sorted(parts):
            reached = max(reached, last) if first <= reached else reached
        if name in every and reached < every[name].shape[dim]:
            line = f"no rank holds the rows of {name} from {reached} on, along dimension {dim}"
            found.append(("held", name, line))
    return found


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines under the rows: findings with their layouts, the likely cause, notes."""
    by_cause: dict[tuple[str, str], list[str]] = {}
    first: dict[tuple[str, str], str] = {}
    refused = [row for row in rows if row.refused]
    rows = [row for row in rows if not row.refused]
    for row in refused:
        same = ("not run", row.refused)
        first.setdefault(same, f"not run, as the model refuses it: {row.refused}")
        by_cause.setdefault(same, []).append(row.case.name)
    for row in rows:
        for kind, name, text in row.findings:
            same = (kind, name or (text if kind in WORDY else ""))
            first.setdefault(same, text)
            by_cause.setdefault(same, []).append(row.case.name)
    lines = [""]
    for same, names in by_cause.items():
        text = first[same]
        where = "; ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)
        lines.append(f"{where}: {text}")
    failed = [row.case.name for row in rows if row.compared]
    wrong = ("gradient", "tensor")
    texts = [text for row in rows for kind, _, text in row.findings if kind in wrong]
    factors = [float(found[1]) for text in texts if (found := FACTOR.search(text))]
    factor = factors[0] if factors and len(set(factors)) == 1 else 0.0
    lines += filter(None, [pattern(failed, [row.case.name for row in rows], factor)])
    notes = dict.fromkeys(note for row in rows for note in row.notes)
    lines += [f"note: {note}" for note in notes]
    warned: dict[str, list[str]] = {}  # of every layer the same
    for row in rows:
        for text in row.warnings:
            warned.setdefault(NUMBER.sub("N", text), []).append(f"{row.case.name}: {text}")
    for texts in warned.values():
        more = f" (and {len(texts) - 1} more)" * (len(texts) > 1)
        lines.append(f"warning, {texts[0]}{more}")
    bad = sum(bool(row.findings) for row in rows)
    lines.append(
        f"{bad} of {len(rows)} layouts disagree" if bad else f"all {len(rows)} layouts agree"
    )
    lines[-1] += f", and {len(refused)} were not run" if refused else ""
    return lines
