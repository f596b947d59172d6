# SPDX-License-Identifier: Apache-2.0
"""Decide, before the first step, which projections multiply in float8: --fp8-auto.

The decisions come from the checkpoint that a run goes on from, else from a measurement
(training/run/autotune/measure.py). All ranks reach the same ones. See docs/float8.md.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from mpu.comm.collectives import gather_bytes
from mpu.context import LayerContext
from mpu.layers.float8.recipe import Float8
from mpu.layers.linear import Recipe
from training.config import Config
from training.run.autotune.measure import ARITHMETICS, Measure, Times, choose, compare
from training.run.autotune.overlap import Note, device_name, projections, starred


def settle(
    model: nn.Module,
    ctx: LayerContext,
    config: Config,
    note: Note,
    recorded: Mapping[str, Any],
    measure: Measure | None = None,
) -> dict[str, Any]:
    """Take layers out of float8 that are not faster in it; return what a checkpoint keeps of it.

    That is {"device": what was measured, "choices": {layer: bf16 or float8}}; {} without the flag.
    recorded: the same of the checkpoint that the run resumes. measure: instead of the clock's.
    Prints one table. All ranks call this.
    """
    if not config.float8.fp8_auto:
        return {}
    tokens = config.batch.micro_batch_size * config.model.seq_length
    layers = projections(model, tokens)
    layers = {name: p for name, p in layers.items() if isinstance(p.recipe, Float8)}
    names = {(starred(name), p.layer): None for name, p in layers.items()}
    here = json.dumps({"names": list(names), "device": device_name(ctx.device)}).encode()
    ranks = [json.loads(each) for each in gather_bytes(here, ctx.grid.world, ctx.device)]
    names = {(name, layer): None for rank in ranks for name, layer in rank["names"]}
    device = " + ".join(sorted({rank["device"] for rank in ranks}))
    choices, times = dict(recorded.get("choices", {})), Times()
    unfit = [layer for _, layer in names if choices.get(layer) not in ARITHMETICS]
    if recorded and not unfit:
        was = recorded.get("device")
        note("float8: as in the checkpoint, which the run goes on from")
        if was != device:
            note(f"float8: that was measured on {was}, and this is {device}: drop --fp8-auto, or "
                 "begin from weights alone (--finetune), to choose anew")  # fmt: skip
            device = str(was)
    else:
        if recorded:
            note(f"float8: the checkpoint does not fit, it says nothing of {unfit[0]}")
        note(f"float8: measuring on {device}")
        times = compare(layers.values(), ctx, *([measure] if measure else []))
        choices = choose(times, plain="bf16")
    choices = {layer: choices[layer] for _, layer in names}
    for line in table(names, choices, times):
        note(f"float8: {line}")
    for name, p in layers.items():
        if choices[p.layer] == "bf16":
            layer: Any = model.get_submodule(name)
            layer.recipe = Recipe()
    return {"device": device, "choices": choices}


def table(
    names: Mapping[tuple[str, str], None], choices: Mapping[str, str], times: Times
) -> Iterator[str]:
    """Yield a row for each projection: what was measured, or "-" where it was recorded."""
    rows = [("projection", "shape", "recipe", "bf16 ms", "float8 ms", "choice")]
    for name, layer in names:
        shape, _, recipe = layer.partition(", ")
        spent = times.get(layer)
        ms = [f"{spent[how] * 1e3:.3f}" if spent else "-" for how in ARITHMETICS]
        rows.append((name, shape, recipe, ms[0], ms[1], choices[layer]))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(n) for cell, n in zip(row, widths, strict=True)).rstrip()
