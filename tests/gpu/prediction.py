# SPDX-License-Identifier: Apache-2.0
"""Read the prediction of `make gpu-check` and print measured / predicted (docs/gpu-results.md)."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# the operation that launches the kernel, where another calls it
LAUNCHED_BY = dict.fromkeys(("_to_copy", "clone", "contiguous"), "copy_")
LAUNCHED_BY |= dict.fromkeys(
    ("ones", "ones_like", "full", "zeros", "zeros_like", "new_full", "new_zeros", "zero_"), "fill_"
)
LAUNCHED_BY |= {
    "_scaled_dot_product_flash_attention": "_flash_attention_forward",
    "_scaled_dot_product_flash_attention_backward": "_flash_attention_backward",
    "masked_fill": "masked_fill_", "embedding": "index_select", "mv": "addmv_", "stack": "cat",
    "index_put_": "_index_put_impl_",
}  # fmt: skip


def load(path: Path) -> dict[str, Any]:
    """Read a prediction. Raises ValueError where it is not one."""
    try:
        found = json.loads(path.read_text())
        found["launches"], found["memory"]["peak_bytes"]
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is no prediction ({type(error).__name__}: {error})") from None
    return dict(found)


def launches_by_op(prediction: Mapping[str, Any]) -> Counter[str]:
    """Return the predicted launches of a step, by operation."""
    found: Counter[str] = Counter()
    for row in prediction["launches"]:
        found[launcher(row["op"])] += row["count"]
    return found


def launcher(op: str) -> str:
    """Return the operation that launches an operation's kernel: aten::clone calls aten::copy_."""
    space, _, name = op.rpartition("::")
    return f"{space}::{LAUNCHED_BY[name]}" if name in LAUNCHED_BY else op


def ratio(measured: float, predicted: float) -> str:
    """Return measured / predicted as text."""
    return f"{measured / predicted:.3f}" if predicted else "-"


def compare(prediction: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    """Return the lines of measured / predicted: memory, time, and launches by operation.

    measured: peak_bytes, reserved_bytes, step_seconds and launches {op: count}; what was not
    measured may be left out.
    """
    lines = ["                                    measured       predicted   measured / predicted"]

    def line(name: str, seen: float, said: float, form: str) -> None:
        lines.append(f"  {name:<30} {seen:>13{form}} {said:>15{form}}   {ratio(seen, said)}")

    memory, time = prediction["memory"], prediction.get("time") or {}
    if "peak_bytes" in measured:
        line("peak memory, bytes", measured["peak_bytes"], memory["peak_bytes"], ",")
        rounded = memory["peak_bytes"] + memory.get("allocator_rounding_bytes", 0)
        line("  with the allocator's rounding", measured["peak_bytes"], rounded, ",")
    if "reserved_bytes" in measured:
        line("reserved / peak", measured["reserved_bytes"] / measured["peak_bytes"], 1.05, ".3f")
    if "step_seconds" in measured and "step_seconds" in time:
        line("step, seconds", measured["step_seconds"], time["step_seconds"], ".4f")
    said = launches_by_op(prediction)
    seen: Counter[str] = Counter()
    for op, count in measured.get("launches", {}).items():
        seen[launcher(op)] += count
    if seen:
        line("launches", seen.total(), said.total(), ",")
    for op in sorted(said | seen, key=lambda op: (seen[op] == said[op], -max(seen[op], said[op]))):
        if seen:
            line(op[:30], seen[op], said[op], ",")
    return lines
