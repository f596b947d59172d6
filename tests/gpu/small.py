# SPDX-License-Identifier: Apache-2.0
"""A Llama of 160 million parameters, whose kernels are as short as launches.

    step-160m   a step of four micro-batches of 4,096 tokens, and what the host launches in it

Its vocabulary is bytes (tests/gpu/curves.py).
"""

import statistics
from collections import Counter
from typing import Any

import torch

from tests.gpu.row import Row, Sizes, synchronize
from tests.gpu.steps import build, by_kernel, drawn, flags, in_a_row, profiled, step

LAYERS, MICRO_BATCHES, SEQUENCES = 12, 4, 4  # sequences of a micro-batch
SMALL = Sizes(hidden=1024, ffn=2944, heads=8, groups=8, seq=1024, vocab=257)
TINY = Sizes(hidden=128, ffn=128, heads=2, groups=2, seq=16, vocab=257)
LAUNCH = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


def small_flags(tiny: bool, layers: int = LAYERS) -> list[str]:
    """Return the flags of the model; later flags override those of a batch."""
    z = TINY if tiny else SMALL
    return flags(z, 2 if tiny else layers)


def batch_flags(sequences: int, micro_batches: int) -> list[str]:
    """Return the flags of a step's batch."""
    words = f"--micro-batch-size {sequences} --global-batch-size {sequences * micro_batches}"
    return words.split()


def built(row: Row, *more: str) -> Any:
    """Return a run of the model, warmed up."""
    words = [*small_flags(row.tiny), *batch_flags(SEQUENCES, MICRO_BATCHES), *more]
    run = build(words, row.device.type)
    batches = drawn(run, MICRO_BATCHES)
    for _ in range(1 if row.tiny else 5):
        step(run, batches)
    synchronize(row)
    return run


def in_turns(row: Row, runs: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a step of each run: medians of ten turns, of five steps in a row."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    batches = {name: drawn(run, MICRO_BATCHES) for name, run in runs.items()}
    count = 1 if row.tiny else 5
    for turn in range(1 if row.tiny else 10):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            spent[name].append(in_a_row(row, runs[name], batches[name], count))
    return {name: statistics.median(found) for name, found in spent.items()}


def launched(row: Row, run: Any) -> dict[str, Any]:
    """Return what a step launches: kernels and their time, and the calls of the host."""
    events = profiled(row, run, drawn(run, MICRO_BATCHES))
    count, spent = by_kernel(events, row.cuda)
    calls = Counter(event.name for event in events if event.name.startswith(LAUNCH))
    return {
        "kernels": sum(count.values()), "kernel_seconds": sum(spent.values()) / 1e6,
        "host_calls": sum(calls.values()), "by_call": dict(calls),
    }  # fmt: skip


def say(row: Row, name: str, run: Any, seconds: float) -> None:
    """Write the numbers of a run."""
    tokens = MICRO_BATCHES * SEQUENCES * run.config.model.seq_length
    numbers = {"parameters": sum(p.numel() for p in run.model.parameters()), **launched(row, run)}
    row.say(name, seconds=seconds, tokens_per_second=tokens / seconds, **numbers)


def eager(row: Row) -> None:
    """Write the seconds of a step and its launches."""
    run = built(row)
    say(row, "a step", run, in_turns(row, {"": run})[""])
    if row.cuda:
        row.say("memory", peak_bytes=torch.cuda.max_memory_allocated())
