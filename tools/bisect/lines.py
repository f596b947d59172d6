# SPDX-License-Identifier: Apache-2.0
"""Read the logs of two runs, and find the first step at which they differ.

Digests (--log-digests) cover every tensor; without them the log (--log-json) covers losses and
gradient norms. A folder may be damaged or untrusted: an incomplete line, as a killed run leaves
one, is skipped, and an invalid line raises an error that names it.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.compare.first_difference import GROWS, GROWS_ALL, TOLERANCE, Allowed, after_rounding
from training.files.untrusted import open_plain, parse_json, read_json

DIGESTS, FORMAT = "digests.jsonl", "weft digests 1"
CHANCE = 4  # signed sums are, on average, as far apart as tensors; 4 times as far: one in 10^4
LINE, STATES = 1 << 26, 1 << 28  # most bytes of a line, and of a checkpoint's state.json
STEP = re.compile(r"step_[0-9]{8,18}")  # a checkpoint's directory
BLIND = 0.5  # a tolerance, relative to the norm, that hides all differences


@dataclass
class Lines:
    """The logs of one run. head: the line of its last start; steps: digests by iteration."""

    head: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    log: dict[int, dict[str, Any]] = field(default_factory=dict)
    saves: dict[int, Path] = field(default_factory=dict)  # by iteration
    state: dict[str, Any] = field(default_factory=dict)  # of the newest checkpoint

    @property
    def config(self) -> dict[str, Any]:
        """Return all settings by dotted name, {} if they are not recorded."""
        return dict(self.head.get("config") or self.state.get("config") or {})

    @property
    def command_line(self) -> list[str] | None:
        """Return the flags of the run, None if they are not recorded."""
        found = self.head.get("command_line") or self.state.get("command_line")
        return None if found is None else list(found)


@dataclass
class Step:
    """The first step that differs."""

    iteration: int
    what: str  # batch, loss, ...
    text: str  # the names, in words
    between: int  # the last earlier step that is known to be equal
    names: list[str] = field(default_factory=list)  # of tensors
    # {name: relative distance that its initial weights may have by rounding}; "": any other name
    distances: dict[str, float] = field(default_factory=dict)


Sketch = Sequence[float]


@dataclass
class Grown:
    """The distance by rounding of two sides that began alike, estimated from their sketches.

    before: the last line of the first side. every: the relative distance of all weights after it;
    each: of single ones. gradient: of all gradients.
    """

    before: Mapping[str, Any] | None = None
    every: float = 0.0
    each: dict[str, float] = field(default_factory=dict)
    gradient: float = 0.0


@dataclass
class Limits:
    """The tolerances of a step of two sides that differ by rounding (docs/numerics.md).

    base: of the dtype. begin: the relative distance of the weights with which the step begins;
    each: of single weights. gradient: the relative distance of the gradients. moved: {name: how far
    the weight has moved since the line before}.
    """

    base: float
    begin: float = 0.0
    gradient: float = 0.0
    each: Mapping[str, float] = field(default_factory=dict)
    moved: Mapping[str, float] | None = None

    @property
    def number(self) -> float:
        """Return the tolerance of the loss and of the gradient norm."""
        return self.base + GROWS_ALL * self.begin

    def tensor(self, kind: str, name: str) -> float:
        """Return the tolerance of a gradient's or a weight's sketch, relative to its norm."""
        if kind == "gradient":
            return CHANCE * self.base + GROWS * self.begin
        moved = 1.0 if self.moved is None else self.moved[name]
        begin = max(self.begin, self.each.get(name, 0.0))
        return CHANCE * (self.base + begin + after_rounding(self.gradient) * moved)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or the null of one that is not finite."""
    return value is None or type(value) in (int, float)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(is_one: Callable[[Any], bool], count: int | None = None) -> Callable[[Any], bool]:
    """Return the rule of a list of `count` values."""

    def is_list(value: Any) -> bool:
        return isinstance(value, list) and count in (None, len(value)) and all(map(is_one, value))

    return is_list


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_sketch(value: Any) -> bool:
    return (
        isinstance(value, list) and len(value) == 3 and all(type(x) in (int, float) for x in value)
    )


Rules = Mapping[str, Callable[[Any], bool]]
FLAGS: Rules = {"command_line": _list_of(_is_text), "config": _is_mapping}
HEAD: Rules = {"iteration": _is_count, "names": _list_of(_is_text)}
HEAD_MAY: Rules = {**FLAGS, "torch": _is_text, "digests": _is_mapping}
DIGEST: Rules = {
    "samples": _list_of(_is_count, 2), "batch": _is_text, "loss": _is_number, "norm": _is_number,
    "lr": _is_number, "gradient": _list_of(_is_text), "weight": _list_of(_is_text),
    "gradient sketch": _list_of(_is_sketch), "weight sketch": _list_of(_is_sketch),
}  # fmt: skip
LOG_MAY: Rules = {"loss": _is_number, "grad_norm": _is_number, "lr": _is_number}
LISTS = ("gradient", "weight", "gradient sketch", "weight sketch")  # one for each tensor
# settings used in computations, with a check of each
SETTINGS: Rules = {
    "parallel.world_size": lambda n: _is_count(n) and n > 0,
    "parallel.pipeline_model_parallel_size": lambda n: _is_count(n) and n > 0,
}


def _check(where: str, row: Mapping[str, Any], must: Rules, may: Rules) -> None:
    """Raise ValueError if a row lacks a value, or has an invalid one."""
    for key, is_right in {**must, **may}.items():
        if key not in row and key in must:
            raise ValueError(f"{where}: {key} is missing")
        if (key in must or row.get(key) is not None) and not is_right(row[key]):
            raise ValueError(f"{where}: {key} is not what a run writes")


def read(folder: Path) -> Lines:
    """Read the files of a run's folder.

    Raises OSError for a file that is not plain, ValueError for digests of another format and for
    invalid contents.
    """
    found = Lines()
    for path in sorted(folder.rglob("*.jsonl")):
        for number, row in _rows(path):
            where = f"{path}, line {number}"
            if path.name == DIGESTS and "format" in row:
                if row["format"] != FORMAT:
                    raise ValueError(
                        f"{path}: its format is {str(row['format'])[:80]!r}, not {FORMAT!r}"
                    )
                _check(where, row, HEAD, HEAD_MAY)
                found.head = row
                later = [i for i in found.steps if i > row["iteration"]]
                for i in later:  # the run continued from an earlier step
                    del found.steps[i]
            elif path.name == DIGESTS and "iteration" in row:
                _check(where, row, {"iteration": _is_count, **DIGEST}, {})
                names = found.head.get("names", [])
                if any(len(row[key]) != len(names) for key in LISTS):
                    raise ValueError(f"{where}: lacks a digest of one of {len(names)} names")
                found.steps[row["iteration"]] = row
            elif "loss" in row and "iteration" in row:
                _check(where, row, {"iteration": _is_count}, LOG_MAY)
                found.log[row["iteration"]] = row
                for pair in row.get("step_losses") or []:
                    if not isinstance(pair, list) or len(pair) != 2 or not _is_count(pair[0]):
                        raise ValueError(f"{where}: step_losses is not what a run writes")
                    _check(where, {"loss": pair[1]}, {}, LOG_MAY)
                    found.log.setdefault(pair[0], {"iteration": pair[0], "loss": pair[1]})
    count = len(found.head.get("names", []))
    if any(len(row[key]) != count for row in found.steps.values() for key in LISTS):
        raise ValueError(f"{folder}: {DIGESTS} has steps of models with different tensors")
    for path in sorted(folder.rglob("step_*/state.json")):
        if not STEP.fullmatch(path.parent.name):
            continue
        state = read_json(path, STATES)
        if not isinstance(state, dict) or state.get("iteration") != int(path.parent.name[5:]):
            raise ValueError(f"{path}: it is not the state of {path.parent.name}")
        _check(str(path), state, {}, FLAGS)
        found.saves[state["iteration"]] = path.parent
        found.state = state
    _check(str(folder), found.config, {}, SETTINGS)
    return found


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object) for each JSON object of a file."""
    with open_plain(path) as file:
        number = 0
        while line := file.readline(LINE + 1):
            number += 1
            if len(line) > LINE:
                raise ValueError(f"{path}, line {number}: it has more than {LINE:,} bytes")
            try:
                row = parse_json(line, "", infinite=True)
            except ValueError:
                continue  # a killed run's last line
            if isinstance(row, dict):
                yield number, row


def first_step(
    one: Lines, other: Lines, allowed: Allowed, notes: list[str] | None = None
) -> Step | None:
    """Return the first step that differs, None if no step does.

    notes: gets a line if rounding hides later differences. Raises ValueError if the runs have no
    step in common.
    """
    before, base = 0, _base(one, other)
    limits, grown = Limits(0.0 if allowed.exact else base), Grown()
    blind = 0
    for i, digests in compared(one, other, allowed):
        ours, theirs = (one.steps, other.steps) if digests else (one.log, other.log)
        a, b = ours[i], theirs[i]
        if digests and not allowed.exact:
            limits = _limits(a, b, (one, other), base, grown, begins=i == _start(one, other) + 1)
            blind = blind or i * (limits.tensor("gradient", "") > BLIND)
        if digests:
            what, names = _digest_differs(a, b, (one, other), limits, allowed.exact)
        else:
            what, names = _log_differs(a, b, limits), []
        if what:
            each = {n: CHANCE * max(v, limits.begin) for n, v in limits.each.items()}
            distances = {"": CHANCE * limits.begin, **each}
            if not digests:  # the distance of the weights is unknown
                distances = {"": after_rounding(base)}
            return Step(i, what, _text(i, what, names, digests), before, names, distances)
        if digests and not allowed.exact:
            far, each = different_sketches(a, b, "weight", (one, other))
            grown = Grown(a, far, each, limits.gradient)
        before = i
    if blind and notes is not None:
        notes.append(
            f"from step {blind} on rounding has grown so much that gradients of these two layouts "
            "cannot be compared: compare from a common checkpoint"
        )
    return None


def compared(one: Lines, other: Lines, allowed: Allowed) -> list[tuple[int, bool]]:
    """Return the steps of both sides that are compared, and whether each is by its digests.

    Logged losses count where there are no digests: after the last ones only if equal bits are
    expected, as the distance by rounding is not known there. Raises ValueError if there is none.
    """
    steps = sorted(one.steps.keys() & other.steps.keys())
    log = sorted(one.log.keys() & other.log.keys())
    if one.steps and other.steps:
        log = [i for i in log if steps and i > steps[-1] and allowed.exact]
    if not steps and not log:
        raise ValueError("the two runs have no step in common: no digests and no log of it")
    return [*((i, True) for i in steps), *((i, False) for i in log)]


def _start(one: Lines, other: Lines) -> int:
    """Return the iteration at which both runs began alike, -1 if they began elsewhere."""
    starts = [side.head.get("iteration", 0) for side in (one, other)]
    return int(starts[0]) if starts[0] == starts[1] else -1


def _limits(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    sides: tuple[Lines, Lines],
    base: float,
    grown: Grown,
    begins: bool,
) -> Limits:
    """Return the tolerances of a line of digests. begins: the step is the first of both runs."""
    gradient, _ = different_sketches(a, b, "gradient", sides)
    gradient = max(gradient, grown.gradient)
    last, moved, far = grown.before, None, 1.0
    if last is not None:
        far, some = different_sketches(last, a, "weight", (sides[0], sides[0]))
        moved = {name: max(far, value) for name, value in some.items()}
    begin = grown.every
    if not begins and (last is None or last["iteration"] + 1 != a["iteration"]):
        now, _ = different_sketches(a, b, "weight", sides)
        begin = min(begin + after_rounding(gradient) * far, max(now, begin))
    return Limits(base, begin, gradient, grown.each, moved)


def _pairs(
    a: Mapping[str, Any], b: Mapping[str, Any], kind: str, sides: tuple[Lines, Lines]
) -> Iterator[tuple[str, Sketch, Sketch]]:
    """Yield (name, sketch, sketch) of the tensors that two lines have."""
    number = {name: i for i, name in enumerate(sides[1].head["names"])}
    for i, name in enumerate(sides[0].head["names"]):
        if name in number:
            yield name, a[f"{kind} sketch"][i], b[f"{kind} sketch"][number[name]]


def different_sketches(
    a: Mapping[str, Any], b: Mapping[str, Any], kind: str, sides: tuple[Lines, Lines]
) -> tuple[float, dict[str, float]]:
    """Return the approximate relative distance of all tensors of a kind together, and of each."""
    each, total, size = {}, 0.0, 0.0
    for name, x, y in _pairs(a, b, kind, sides):
        off = [p - q for p, q in zip(x[1:], y[1:], strict=True)]
        total += (off[0] * off[0] + off[1] * off[1]) / 2
        size += x[0] * x[0]
        each[name] = max(abs(off[0]), abs(off[1])) / x[0] if x[0] else 0.0
    far = math.sqrt(total / size) if size else 0.0
    return (far if math.isfinite(far) else 1.0), each


def _text(i: int, what: str, names: Sequence[str], digests: bool) -> str:
    if not digests:
        return f"step {i} is the first whose {what} differs (of losses and norms alone)"
    more = f" of {names[0]}" if names else ""
    more += f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"step {i} is the first that differs, in its {what}{more}"


def _log_differs(a: Mapping[str, Any], b: Mapping[str, Any], limits: Limits) -> str:
    for key, what in (("loss", "loss"), ("grad_norm", "gradient norm"), ("lr", "learning rate")):
        limit = 0.0 if key == "lr" else limits.number
        if key in a and key in b and _relative_difference(a[key], b[key]) > limit:
            return what
    return ""


def _digest_differs(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    sides: tuple[Lines, Lines],
    limits: Limits,
    exact: bool,
) -> tuple[str, list[str]]:
    """Return what differs first, in the order of a step, and the names of the tensors."""
    limit = limits.number
    if a["samples"] != b["samples"]:
        return "sample numbers", []
    if a["batch"] != b["batch"]:
        return "batch", []
    if _relative_difference(a["loss"], b["loss"]) > limit:
        return "loss", []
    for kind in ("gradient", "weight"):
        if kind == "weight":
            if _relative_difference(a["norm"], b["norm"]) > limit:
                return "gradient norm", []
            if _relative_difference(a["lr"], b["lr"]):
                return "learning rate", []
        names = _tensors(a, b, kind, sides, None if exact else limits)
        if names:
            return kind, names
    return "", []


def _tensors(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    kind: str,
    sides: tuple[Lines, Lines],
    limits: Limits | None,
) -> list[str]:
    """Return the tensors whose digests of a kind differ; limits None: compare exactly."""
    ours, theirs = ({name: i for i, name in enumerate(side.head["names"])} for side in sides)
    found = [*(name for name in ours if name not in theirs),
             *(name for name in theirs if name not in ours)]  # fmt: skip
    if limits is None:
        both = [name for name in ours if name in theirs]
        return found + [n for n in both if a[kind][ours[n]] != b[kind][theirs[n]]]
    largest = max((sketch[0] for sketch in a[f"{kind} sketch"]), default=0.0)
    for name, x, y in _pairs(a, b, kind, sides):
        size, limit = max(x[0], y[0], 1e-4 * largest), limits.tensor(kind, name)
        if any(not _relative_difference(p, q, size) <= limit for p, q in zip(x, y, strict=True)):
            found.append(name)
    return found


def _relative_difference(a: float | None, b: float | None, size: float = 0.0) -> float:
    """Return the difference relative to the larger number or to `size`; NaNs are equal."""
    if a is None or b is None or math.isnan(a) or math.isnan(b):
        nothing = [x is None or math.isnan(x) for x in (a, b)]
        return 0.0 if nothing[0] == nothing[1] else math.inf
    size = max(abs(a), abs(b)) if not size else size
    return abs(a - b) / size if size else 0.0


def _base(one: Lines, other: Lines) -> float:
    """Return the tolerance of a step that two layouts begin with the same weights."""
    dtypes = [str(side.config.get("run.dtype", "float32")) for side in (one, other)]
    return max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)


def same_machine(one: Lines, other: Lines) -> str:
    """Return why equal bits cannot be expected of equal layouts, or ""."""
    for key, what in (("torch", "torch"), ("machine", "machine, device or number of threads")):
        a, b = one.head.get(key), other.head.get(key)
        if a is not None and b is not None and a != b:
            return f"another {what}: {a} and {b}"
    return ""
