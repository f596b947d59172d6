# SPDX-License-Identifier: Apache-2.0
"""Describe in one sentence which tensor of a step differs first, where, how far, and how."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from tools.compare.first_difference import Allowed, Comparison, Difference, compare
from tools.compare.join import Key, Side
from tools.compare.kinds import kind_of
from training.run.watch.recorder import PLACES

PHASES = {"forward": "forward", "recompute": "recomputation", "backward": "backward", "wgrad": "W"}


@dataclass
class Verdict:
    """The verdict on a step. sentence: for people; the rest for programs.

    name: of the module or the canonical tensor. error: the norm of the difference over the norm.
    """

    sentence: str
    same: bool
    name: str = ""
    module: str = ""
    what: str = ""
    phase: str = ""
    kind: str = ""
    site: str = ""
    error: float = 0.0
    compared: int = 0
    left_out: list[str] = field(default_factory=list)
    begins: bool = False  # it is a tensor with which the step begins, and not the batch

    def json(self) -> dict[str, Any]:
        """Return the verdict as types of JSON."""
        return asdict(self)


def verdict_of(
    one: Side, other: Side, allowed: Allowed, names: tuple[str, str] = ("A", "B")
) -> Verdict:
    """Compare two recorded steps and return the verdict. names: of the sides."""
    return conclude(compare(one, other, allowed), one, other, allowed, names)


def conclude(
    found: Comparison,
    one: Side,
    other: Side,
    allowed: Allowed,
    names: tuple[str, str] = ("A", "B"),
) -> Verdict:
    """Return the verdict on a comparison. names: of the sides."""
    left = sorted({f"{key.kind} {key.name}".strip() for key in found.left_out})
    if found.first is None:
        far = max(found.errors.values(), default=0.0)
        worst = f", at most {far:.2g} of a norm apart" if far else ""
        how = "have equal bits" if allowed.exact else f"agree{worst}"
        text = f"all {found.compared:,} tensors of the step {how}"
        return Verdict(text, True, compared=found.compared, left_out=left)
    first = found.first
    kind = kind_of(first, one, other, names)
    what, name, module = _tensor(first, one, other)
    phase = _phase(first.key)
    text = f"in {phase}, {what} differs first" if phase else f"{what} differs first"
    if isinstance(first.one, bool):
        text += f": only {names[0] if first.one else names[1]} has it"
        text += f", and the other never calls {module}" if first.key.group == "activation" else ""
    else:
        text += f", by {_far(first)}"
    text += f": {kind.text}" if kind else ""
    text += f" ({place})" if (place := _place(first, module, one)) else ""
    return Verdict(
        text, False, name=name, module=module, what=first.key.kind or first.key.group,
        phase=phase, kind=kind.name if kind else "", site=place, error=first.error,
        compared=found.compared, left_out=left, begins=first.key.phase == "before",
    )  # fmt: skip


def _tensor(found: Difference, one: Side, other: Side) -> tuple[str, str, str]:
    """Return the difference in words, the tensor's name, and the module that it belongs to."""
    key = found.key
    of = next((p.entry.get("of", "") for parts in found.parts for p in parts), "")
    if key.group == "batch":
        return f"the batch ({key.name})", key.name, ""
    if key.group == "number":
        return f"the {key.name}", key.name, ""
    if key.group == "collective":
        verb = f"what {key.more} of {key.name or 'the model'} "
        return verb + ("returns" if key.kind == "returned" else "takes"), key.name, key.name
    if key.group == "parameter":
        modules = one.modules | other.modules
        module = modules[key.name].rpartition(".")[0]
        return _of_parameter(found, module), found.tensor or key.name, module
    stage = next((p.entry["stage"] for parts in found.parts[::-1] for p in parts), 0)
    scope = f"stage {stage} of the model" if other.sizes["pp"] > 1 else "the model"
    name = f"{key.name or scope} ({of})"
    number = f", tensor {key.item}" if key.item else ""
    number += f", call {key.call}" if key.call > 1 else ""
    return PLACES[key.kind].format(name) + number, key.name, key.name


def _of_parameter(found: Difference, module: str) -> str:
    key, name = found.key, f"{found.tensor} (in {module})"
    if key.kind == "own gradient":
        return f"the gradient of {name}, before it is summed over data-parallel ranks,"
    if key.kind == "gradient":
        return f"the summed gradient of {name}"
    what = "weight" if key.kind in ("weight", "master") else f"optimizer's {key.kind} of"
    return f"the {what} {name} {key.phase} the step"


def _phase(key: Key) -> str:
    if key.group == "parameter" and key.kind == "own gradient":
        return "backward"
    if key.group == "parameter" and key.kind == "gradient":
        return "the sum over ranks"
    if key.group == "parameter" and key.phase == "after":
        return "the update"
    return PHASES.get(key.phase, "")


def _far(found: Difference) -> str:
    if isinstance(found.one, Tensor):
        if found.error == float("inf"):
            return "all of it"
        return f"{found.error:.2g} of its norm" if found.error > 1e-200 else "bits alone"
    return f"{found.one!r} against {found.other!r}"


def _place(found: Difference, module: str, one: Side) -> str:
    """Return the line of the program; for a gradient or a weight, that of its module's forward."""
    if found.key.group in ("batch", "number"):
        return ""
    file, _, line = (found.site or one.sites.get(module, "")).rpartition(":")
    return f"{Path(file).name if Path(file).is_absolute() else file}:{line}" if file else ""
