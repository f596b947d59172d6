# SPDX-License-Identifier: Apache-2.0
"""Read what a run has written of its steps, and find the first step at which two runs differ.

Digests (--log-digests) say it of every tensor; without them the log (--log-json) says it of losses
and gradient norms. Nothing of the product is imported.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bisect.compare import TOLERANCE, Allowed

DIGESTS, FORMAT = "digests.jsonl", "weft digests 1"
KINDS = ("gradient", "weight")


@dataclass
class Lines:
    """What one run has written. head: of its last start; steps: lines by iteration."""

    head: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    log: dict[int, dict[str, Any]] = field(default_factory=dict)
    saves: dict[int, Path] = field(default_factory=dict)  # by iteration
    state: dict[str, Any] = field(default_factory=dict)  # of the newest checkpoint

    @property
    def config(self) -> dict[str, Any]:
        """Return all settings by dotted name, {} where nothing says them."""
        return dict(self.head.get("config") or self.state.get("config") or {})

    @property
    def command_line(self) -> list[str] | None:
        """Return the flags of the run, None where nothing says them."""
        found = self.head.get("command_line") or self.state.get("command_line")
        return None if found is None else [str(word) for word in found]


@dataclass
class Step:
    """The first step that differs. what: batch, loss, ...; names: of tensors, in words `text`.

    between: the last step before it that is known to be equal.
    """

    iteration: int
    what: str
    text: str
    between: int
    names: list[str] = field(default_factory=list)


def read(folder: Path) -> Lines:
    """Read the files of a run's folder. Raises ValueError for digests of another format."""
    found = Lines()
    for path in sorted(folder.rglob("*.jsonl")):
        for row in _rows(path):
            if "format" in row:
                if row["format"] != FORMAT:
                    raise ValueError(f"{path}: its format is {row['format']!r}, not {FORMAT!r}")
                found.head = row
                later = [i for i in found.steps if i > row["iteration"]]
                for i in later:  # the run went on from an earlier step
                    del found.steps[i]
            elif path.name == DIGESTS and "iteration" in row:
                found.steps[row["iteration"]] = row
            elif "loss" in row and "iteration" in row:
                found.log[row["iteration"]] = row
                for i, loss in row.get("step_losses", []):
                    found.log.setdefault(i, {"iteration": i, "loss": loss})
    for path in sorted(folder.rglob("step_*/state.json")):
        state = json.loads(path.read_text())
        found.saves[int(state["iteration"])] = path.parent
        found.state = state
    return found


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a killed run's last line
        if isinstance(row, dict):
            yield row


def first_step(one: Lines, other: Lines, allowed: Allowed) -> Step | None:
    """Return the first step that differs, None where no step does.

    Raises ValueError where the runs have no step in common.
    """
    digests = bool(one.steps and other.steps)
    ours, theirs = (one.steps, other.steps) if digests else (one.log, other.log)
    common = sorted(ours.keys() & theirs.keys())
    if not common:
        raise ValueError("the two runs have written no step in common: no digests and no log")
    before = 0
    for i in common:
        differ = _digest_differs if digests else _log_differs
        what, names = differ(ours[i], theirs[i], one, other, allowed)
        if what:
            return Step(i, what, _text(i, what, names, digests), before, names)
        before = i
    return None


def _text(i: int, what: str, names: Sequence[str], digests: bool) -> str:
    if not digests:
        return f"step {i} is the first whose {what} differs (of losses and norms alone)"
    more = f" of {names[0]}" if names else ""
    more += f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"step {i} is the first that differs, in its {what}{more}"


def _log_differs(
    a: Mapping[str, Any], b: Mapping[str, Any], one: Lines, other: Lines, allowed: Allowed
) -> tuple[str, list[str]]:
    limit = 0.0 if allowed.exact else _limit(one, other)
    for key, what in (("loss", "loss"), ("grad_norm", "gradient norm"), ("lr", "learning rate")):
        if key in a and key in b and _apart(a[key], b[key]) > (0.0 if key == "lr" else limit):
            return what, []
    return "", []


def _digest_differs(
    a: Mapping[str, Any], b: Mapping[str, Any], one: Lines, other: Lines, allowed: Allowed
) -> tuple[str, list[str]]:
    """Return what differs first, in the order of a step, and the tensors of which."""
    limit = 0.0 if allowed.exact else _limit(one, other)
    if a["samples"] != b["samples"]:
        return "sample numbers", []
    if a["batch"] != b["batch"]:
        return "batch", []
    if _apart(a["loss"], b["loss"]) > limit:
        return "loss", []
    for kind in KINDS:
        if kind == "weight":
            if _apart(a["norm"], b["norm"]) > limit:
                return "gradient norm", []
            if _apart(a["lr"], b["lr"]):
                return "learning rate", []
        names = _tensors(a, b, kind, (one, other), limit if not allowed.exact else None)
        if names:
            return kind, names
    return "", []


def _tensors(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    kind: str,
    sides: tuple[Lines, Lines],
    limit: float | None,
) -> list[str]:
    """Return the tensors whose digests of a kind differ; limit None: exactly."""
    names = sides[0].head["names"]
    number = {name: i for i, name in enumerate(sides[1].head["names"])}
    found = [name for name in names if name not in number]
    largest = max((sketch[0] for sketch in a[f"{kind} sketch"]), default=0.0)
    for i, name in enumerate(names):
        if name not in number:
            continue
        j = number[name]
        if limit is None:
            if a[kind][i] != b[kind][j]:
                found.append(name)
            continue
        x, y = a[f"{kind} sketch"][i], b[f"{kind} sketch"][j]
        size = max(x[0], y[0], 1e-4 * largest)
        # a signed sum is as far as the tensors are, on average: 4 times as far is one in 10^4.
        # Adam's update has the sign of a gradient, however small: weights are further apart
        times = 4 if kind == "gradient" else 16
        if any(not _apart(p, q, size) <= times * limit for p, q in zip(x, y, strict=True)):
            found.append(name)
    return found


def _apart(a: float | None, b: float | None, size: float = 0.0) -> float:
    """Return how far two numbers are apart, of the larger one or of `size`; NaNs are equal."""
    if a is None or b is None or math.isnan(a) or math.isnan(b):
        nothing = [x is None or math.isnan(x) for x in (a, b)]
        return 0.0 if nothing[0] == nothing[1] else math.inf
    size = max(abs(a), abs(b)) if not size else size
    return abs(a - b) / size if size else 0.0


def _limit(one: Lines, other: Lines) -> float:
    dtypes = [str(side.config.get("run.dtype", "float32")) for side in (one, other)]
    return max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)


def same_machine(one: Lines, other: Lines) -> str:
    """Return why equal bits cannot be expected of equal layouts, or ""."""
    for key, what in (("torch", "torch"), ("machine", "machine, device or number of threads")):
        a, b = one.head.get(key), other.head.get(key)
        if a is not None and b is not None and a != b:
            return f"another {what}: {a} and {b}"
    return ""
