# SPDX-License-Identifier: Apache-2.0
"""Hold what was seen of a fault to what is promised about its kind, and add up the table."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from tests.chaos.scene import Seen, pattern

BLAME = re.compile(r"rank (\d+) failed first")
MISNAMED, RIGHT = "named wrong", 0.98  # the share that must be named right
TRACE = re.compile(r"Traceback \(most recent call last\)")


@dataclass
class Verdict:
    """What became of one fault. None: nothing is promised about it.

    detection: seconds from the fault to the first word about it; ended: to the last survivor's end;
    recovery: to the first new step. lost: steps that were done twice. broken: the promises that
    were not kept.
    """

    number: int
    kind: str
    layout: str
    struck: bool
    detected: bool | None = None
    named: bool | None = None
    detection: float | None = None
    ended: float | None = None
    recovery: float | None = None
    lost: int = 0
    equal: bool | None = None
    hang: bool = False
    left: int = 0
    seconds: float = 0.0
    hit: str = ""
    broken: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)  # where a promise is broken

    def json(self) -> dict[str, Any]:
        return asdict(self)


def judge(seen: Seen) -> Verdict:
    """Compare what was seen with the promise."""
    fault, promise = seen.fault, seen.kind.promise
    verdict = Verdict(fault.number, fault.kind, fault.layout, seen.struck is not None)
    verdict.hit, verdict.seconds, verdict.left = seen.hit, seen.seconds, len(seen.left)
    broken = verdict.broken
    if seen.struck is None:
        broken.append("the fault never struck")
        verdict.words = seen.words
        return verdict
    victim = fault.rank if seen.kind.victim is not None else None
    others = [rank for rank in range(len(seen.codes)) if rank != victim]
    wrong = [f"rank {r} ended with {seen.codes[r]}" for r in others
             if seen.codes[r] not in promise.codes]  # fmt: skip
    if not promise.goes_on and promise.who != "restart":
        verdict.ended = max(seen.ended[r] for r in others) - seen.struck
        verdict.hang = seen.late or verdict.ended > promise.limit
    verdict.hang = verdict.hang or seen.late
    if promise.honest:
        verdict.detected = set(seen.codes) != {0} or seen.told is not None
    else:
        broken += wrong
        if promise.who:
            name_right(verdict, seen, others)
    if verdict.hang:
        broken.append(f"ended after {verdict.ended or 0:.1f} s, promised {promise.limit:.0f}")
    broken += [f"left behind: {x}" for x in seen.left]
    if seen.recovered is not None:
        verdict.recovery = seen.recovered - seen.struck
    if seen.again is not None and set(seen.again) != {0}:
        broken.append(f"the same command ended with {seen.again}")
    if seen.again is not None:
        began, newest = seen.began_at
        verdict.lost = max(0, seen.reached - began)
        if began != newest:
            broken.append(f"went on from step {began}; the newest sound one is {newest}")
    if promise.equal:
        verdict.equal = seen.equal
        if not seen.equal:
            broken.append("the end differs from that of an undisturbed run")
    if broken:
        verdict.words = [*seen.words, *seen.again_words]
    return verdict


def name_right(verdict: Verdict, seen: Seen, others: Sequence[int]) -> None:
    """Judge whether the fault was noticed, and named right by whoever must."""
    promise, fault = seen.kind.promise, seen.fault
    assert seen.struck is not None
    if promise.who == "both sides":
        texts = seen.words
        right = [says(seen, text) for text in texts]
    else:
        texts = seen.again_words if promise.who == "restart" else seen.words
        if promise.who == "survivors":  # the one that is struck need not name itself
            texts = [text for rank, text in enumerate(texts) if rank != fault.rank]
        right = [says(seen, text) for text in texts]
    named = all(right) if promise.who in ("survivors", "both sides") else any(right)
    if promise.who == "survivors":
        blamed = {int(r) for text in texts for r in BLAME.findall(text)}
        named = named and blamed <= {fault.rank}
    verdict.named = named
    verdict.detected = named or (not promise.goes_on and all(seen.codes[r] != 0 for r in others))
    if seen.told is not None:
        verdict.detection = seen.told - seen.struck
    if not verdict.detected:
        verdict.broken.append("nobody noticed")
    elif not named:
        verdict.broken.append(MISNAMED)
    if promise.goes_on and any(TRACE.search(text) for text in texts):
        verdict.broken.append("a traceback")


def says(seen: Seen, text: str) -> bool:
    """Return whether a text names the fault right."""
    wanted = pattern(seen)
    return wanted is not None and bool(wanted.search(text))


def kept(verdicts: Sequence[Verdict]) -> bool:
    """Return whether a storm kept the promises: all of them, but for RIGHT of the names."""
    named = [v.named for v in verdicts if v.named is not None]
    rest = all(set(v.broken) <= {MISNAMED} for v in verdicts)
    return rest and sum(named) >= RIGHT * len(named)


def seconds(values: Sequence[float | None]) -> str:
    """Write "median / max"."""
    found = [value for value in values if value is not None]
    return f"{median(found):.1f} / {max(found):.1f}" if found else "-"


def share(values: Sequence[bool | None]) -> str:
    """Write "true of all"."""
    found = [value for value in values if value is not None]
    return f"{sum(found)} of {len(found)}" if found else "-"


HEAD = (
    "| kind | faults | found | named right | found after, s | survivors gone after, s "
    "| first new step after, s | steps lost | same end | left |\n|" + "---|" * 10
)


def row(name: str, verdicts: Sequence[Verdict]) -> str:
    """Write a line of the table."""
    cells = [
        name,
        str(len(verdicts)),
        share([v.detected for v in verdicts]),
        share([v.named for v in verdicts]),
        seconds([v.detection for v in verdicts]),
        seconds([v.ended for v in verdicts]),
        seconds([v.recovery for v in verdicts]),
        str(sum(v.lost for v in verdicts)),
        share([v.equal for v in verdicts]),
        str(sum(v.left for v in verdicts)),
    ]
    return "| " + " | ".join(cells) + " |"


def table(verdicts: Sequence[Verdict], honest: set[str]) -> str:
    """Write the table in Markdown: a line a kind, the kinds without a promise apart."""
    kinds: dict[str, list[Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda v: (v.kind in honest, v.kind)):
        kinds.setdefault(verdict.kind, []).append(verdict)
    lines = [HEAD, *(row(kind, kinds[kind]) for kind in kinds if kind not in honest)]
    lines.append(row("**all of these**", [v for v in verdicts if v.kind not in honest]))
    if honest & kinds.keys():
        lines += ["", "Nothing is promised about these; they are counted.", "", HEAD]
        lines += [row(kind, kinds[kind]) for kind in kinds if kind in honest]
    return "\n".join(lines)
