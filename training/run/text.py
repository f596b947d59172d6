# SPDX-License-Identifier: Apache-2.0
"""Write numbers, tables and the line of a step for a terminal."""

import math
from collections.abc import Container, Sequence
from typing import Any

WIDTH = 100  # columns of a step's line


def in_units(value: float) -> str:
    """Return bytes as text in decimal units, as memory and networks are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.4g} {unit}"
        value /= 1000
    return f"{value:.4g} TB"


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Return the lines of a table with right-aligned columns; those in `left` are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if i in left else ">" for i in range(len(widths))]
    line = "  ".join(f"{{:{sign}{width}}}" for sign, width in zip(signs, widths, strict=True))
    return [line.format(*row).rstrip() for row in rows]


def step_line(record: dict[str, Any], total: int, left: float) -> str:
    """Return the line of one log step: mean loss of its steps, lr, norm, speed, time left.

    record: as `Log.step` makes it. left: seconds to the end. A run of five digits of iterations
    omits the word "iteration". A line that does not fit omits that word, then the bars, then MFU.
    """
    norm = f"norm {short(record['grad_norm'])}"
    if "params_norm" in record:
        norm += f" (params {short(record['params_norm'])})"
    loss = f"loss {_loss(record.get('mean_loss', record['loss']))}"
    if "auxiliary_loss" in record:
        loss += f" (auxiliary {short(record['auxiliary_loss'])})"
    loads = [f"load {short(record['expert_load'])}"] if "expert_load" in record else []
    if record.get("dropped_share"):
        loads = [f"{loads[0]}, {record['dropped_share']:.1%} dropped"]
    logits = []
    if (top := record.get("max_attention_logit")) is not None:
        clipped = f" ({record['qk_clipped']} clipped)" if record.get("qk_clipped") else ""
        logits = [f"logit {short(top)}{clipped}"]
    mfu = record["mfu"]
    parts = [
        f"iteration {record['iteration']:>{len(str(total))}}/{total}",
        loss,
        f"lr {record['lr']:.2e}".replace("e-0", "e-").replace("e+00", ""),
        norm,
        *loads,
        *logits,
        f"{rounded(record['tokens_per_second'])} tokens/s",
        f"MFU {mfu:.1%}" if mfu < 0.1 else f"MFU {mfu:.0%}",
        f"ETA {duration(left)}",
    ]
    bare = " | ".join(parts).removeprefix("iteration ")
    close = bare.replace(" | ", "  ")
    lines = [" | ".join(parts), bare, close, close.replace(f"  {parts[-2]}", "")]
    first = int(len(str(total)) > 4)
    return next((line for line in lines[first:] if len(line) <= WIDTH), lines[-1][:WIDTH])


def short(value: float) -> str:
    """Return a number in few digits: 0.012, 0.62, 1.23, 123, 12,345, 1.2e+06."""
    if not math.isfinite(value) or abs(value) >= 1e5:
        return f"{value:.1e}"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:#.2g}" if abs(value) < 0.995 else f"{value:#.3g}".rstrip(".")


def _loss(value: float) -> str:
    return f"{value:.4f}" if not abs(value) >= 1e3 else f"{value:.2e}"


def rounded(value: float) -> str:
    """Return a rate in three digits: 812, 12.3k, 1.23M."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * size:
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:#.3g}".rstrip(".")


def duration(seconds: float) -> str:
    """Return a time as 2:10, 1:02:10, or in days and hours from two days on."""
    seconds = round(min(seconds, 8e12))
    if seconds >= 2 * 86400:
        return f"{seconds // 86400} d {seconds % 86400 // 3600} h"
    hours, rest = divmod(seconds, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def flops(value: float) -> str:
    """Return FLOP/s as text, in TFLOP/s or GFLOP/s."""
    return f"{value / 1e12:,.1f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.1f} GFLOP/s"
