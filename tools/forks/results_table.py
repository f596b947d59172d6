# SPDX-License-Identifier: Apache-2.0
"""Format the results of tools/fork_check.py: a row for each layout, then sentences."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tools.compare.first_difference import TOLERANCE, Comparison, Difference
from tools.compare.verdict import Verdict
from tools.forks.case import NUMBER, Case
from tools.forks.layouts import pattern

COLUMNS = ("loss", "gradients", "weights", "decode")
MEASURED = {  # kinds of tensors of a record that are a column
    "loss": ("loss",),
    "gradients": ("own gradient", "gradient", "gradient norm"),
    "weights": ("weight",),
}
STEPS = ("first", "second", "third")
ALONE = {
    "rounded",
    "derivative",
    "decode",
    "documents",
    "refused",
    "shape",
    "initial",
    "names",
    "random",
    "internal",
    "config",
    "transformers",
    "loss of logits",
    "auxiliary",
}  # their sentences name the cause themselves
WORDY = {
    "raised",
    "refused",
    "hung",
    "internal",
}  # their sentences differ by more than a number
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
    """A layout: its largest errors, and its disagreements, (kind, parameter, sentence)."""

    case: Case
    seconds: float
    errors: dict[str, float] = field(default_factory=dict)
    findings: list[tuple[str, str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    result: str = "agrees"  # where there are no findings
    refused: str = ""  # why it is not run: the rule that its flags break
    verdict: Verdict | None = None  # what differs first in a step

    @property
    def differs(self) -> bool:
        """Whether the layout disagrees with one rank."""
        return any(kind not in ALONE for kind, _, _ in self.findings)

    @property
    def compared(self) -> bool:
        """Whether it differs in values; an error that was raised does not count."""
        return any(kind not in ALONE | {"raised"} for kind, _, _ in self.findings)

    @property
    def blocks(self) -> bool:
        """Whether other layouts cannot be compared with this one."""
        return any(kind in BLOCKING for kind, _, _ in self.findings)

    def found(self, kind: str) -> bool:
        """Return whether there is a finding of a kind."""
        return any(each[0] == kind for each in self.findings)

    def measure(self, found: Comparison) -> None:
        """Record the largest errors of a comparison with one rank's record."""
        for column, kinds in MEASURED.items():
            far = [found.errors[kind] for kind in kinds if kind in found.errors]
            if far:
                self.errors[column] = max(*far, self.errors.get(column, 0.0))

    def explain_with(self, number: int, losses: tuple[float, float], verdict: Verdict) -> None:
        """Add a finding on the first difference of a step, counted from 0.

        losses: the layout's, and one rank's.
        """
        known = [text for kind, _, text in self.findings if kind == "replicas"]
        self.findings = [each for each in self.findings if each[0] != "replicas"]
        if verdict.begins:
            known = ["the loaded checkpoint differs from what was saved"]
        elif not math.isclose(*losses, rel_tol=TOLERANCE["float64"]):
            step = f"the loss of the {STEPS[number]} step"
            known = [f"{step} is {losses[0]:.10g} and not {losses[1]:.10g}"]
        elif number:
            known = [f"in the {STEPS[number]} step"]
        self.verdict = verdict
        text = "; ".join([*known, verdict.sentence])
        self.findings.insert(0, ("tensor", verdict.name or verdict.what, text))

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
    case: Case, answers: Sequence[Any], seconds: float, hung: Callable[[], str]
) -> Row:
    """Return a layout's row from the answers of its ranks: a Report each, an error, or None."""
    row = Row(case, seconds)
    if not case.oracle and all(a and a.get("by model") for a in answers):
        row.refused = answers[0]["error"]
        return row
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
    first: dict[tuple[str, str], tuple[str, str, str]] = {}
    counts: dict[tuple[str, str], set[str]] = {}
    for finding in row.findings:  # keep the first of most kinds and their number, all of fields
        one = (finding[0], finding[1] if finding[0] in ("config", "transformers") else "")
        first.setdefault(one, finding)
        counts.setdefault(one, set()).add(finding[1])
    row.findings = []
    for one, (kind, name, text) in first.items():
        more = len(counts[one]) - 1
        row.findings.append((kind, name, text + f" (and {more} more)" * (more > 0)))
    return row


def initial_finding(first: Difference, verdict: Verdict) -> tuple[str, str, str]:
    """Return the finding of an initial weight."""
    name = verdict.name
    if verdict.kind in ("another shape", "a shard"):
        one, other = (list(x.shape) for x in (first.one, first.other))
        line = (
            f"{name} has the full shape {other} here and {one} on one rank: a dimension that is "
            "divided by tp needs a Placement (mpu/param.py)"
        )
        return "shape", name, line
    if verdict.kind == "a part that no rank holds" or isinstance(first.one, bool):
        return "shape", name, verdict.sentence
    line = (
        f"{name}: initialize() gives it other values here than on one rank: draw it with "
        "mpu.param.draw_normal, which cuts the same whole tensor for every layout"
    )
    return "initial", name, line


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
    failed = [
        row.case.name
        for row in rows
        if row.compared and not (row.verdict and row.verdict.begins)  # a wrong checkpoint
    ]
    ran = [row.case.name for row in rows if row.result == "agrees"]
    kinds = {(v.kind, "gradient" in v.what) for row in rows if (v := row.verdict)}
    alike = kinds.pop() if len(kinds) == 1 else ("", False)
    lines += filter(None, [pattern(failed, ran, alike)])
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
