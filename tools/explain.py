#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Run one tiny training step and print every collective of it, in order: who, where, how much, why.

    python tools/explain.py --tp 2            (make explain TP=2)
    python tools/explain.py --tp 2 --dp 2 --recompute-granularity full --micro-batches 2

It starts tp x dp processes on this machine, builds a small Llama with pretrain_llama.build and runs
pretrain_llama.train_step once. What is printed is seen, not worked out: the trace of the grid hears
of each collective and looks up the Python stack; a TorchDispatchMode sees the operations around it.
At the end, the totals stand beside the formulas of docs/parallelism.md.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from textwrap import wrap
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find pretrain_llama

from mpu.comm.watch import Watch
from mpu.grid import Grid, Launch
from pretrain_llama import Run, build, make_grid, train_step
from tools.explain_formulas import Applied, Totals, add_up, apply, read_formulas, symbols
from tools.explain_trace import Explainer, Operations, Seen
from training.arguments import parse
from training.config import Config
from training.control import Agreement
from training.data.batch import Batch, DocumentRules, make_batch
from training.data.mock import MockDataset

MOST_RANKS = 16


class Explained(NamedTuple):
    """What one step sent, what the document says it sends, and the text that shows both."""

    counted: Totals
    stated: Totals
    text: str


def tiny(
    tp: int,
    dp: int,
    *,
    layers: int = 2,
    micro_batches: int = 1,
    sequence_parallel: bool = True,
    more: Sequence[str] = (),
) -> Config:
    """Return a small Llama 3 in the given layout, small gradient buckets that leave early.

    Raises UsageError where the layout does not work. `more` adds flags of pretrain_llama.py.
    """
    groups = -(-2 // tp) * tp
    sizes = {
        "--num-layers": layers,
        "--hidden-size": 32 * groups,
        "--ffn-hidden-size": 80 * groups,
        "--num-attention-heads": 2 * groups,
        "--num-query-groups": groups,
        "--seq-length": -(-16 // tp) * tp,
        "--vocab-size": 500,
        "--micro-batch-size": 2,
        "--global-batch-size": 2 * dp * micro_batches,
        "--tensor-model-parallel-size": tp,
        "--ddp-bucket-size": 16384,
        "--train-iters": 1,
        "--lr": 1e-3,
        "--device": "cpu",
    }
    switches = ["--mock-data", "--group-query-attention", "--overlap-grad-reduce"]
    switches += ["--untie-embeddings-and-output-weights"]
    if sequence_parallel:
        switches.append("--sequence-parallel")
    values = [str(word) for pair in sizes.items() for word in pair]
    return parse([*values, *switches, *more], tp * dp)


def micro_batches(config: Config, dp_rank: int) -> list[Batch]:
    """Return this rank's made-up micro-batches."""
    m, b = config.model, config.batch.micro_batch_size
    data = MockDataset("train", m.seq_length, config.run.seed, m.vocab_size, None)
    count = symbols(config)["m"]
    firsts = range(dp_rank * count * b, (dp_rank + 1) * count * b, b)
    rows = [np.stack([data.sample(first + i) for i in range(b)]) for first in firsts]
    return [
        make_batch(each, DocumentRules(), first) for each, first in zip(rows, firsts, strict=True)
    ]


def explain(config: Config, grid: Grid) -> Explained:
    """Run one step over a connected grid and tell of its collectives. Every rank calls it."""
    explainer = Explainer(grid)
    grid.traced(explainer)
    try:
        run = build(config, grid, torch.device("cpu"), Watch())
        explainer.know(run)
        batches = micro_batches(config, grid.dp.rank)
        with Operations(explainer):
            _, _, found_inf = train_step(run, batches, config.optimizer.lr)
            run.watch.action = "the end of iteration 1"
            agreement = Agreement(grid.world)
            agreement.ask(False, found_inf)
            agreement.close()
    finally:
        grid.traced(None)
    applied = apply(config, read_formulas())
    stated = add_up([(a.row.axis, a.row.verb, a.count, a.sent) for a in applied])
    counted = add_up([(e.axis, e.verb, 1, e.sent) for e in explainer.events])
    lines = [*_head(config, run), *_story(explainer.events)]
    if explainer.events:
        lines += sums(counted, stated, applied)
    return Explained(counted, stated, "\n".join(lines))


def _head(config: Config, run: Run) -> list[str]:
    """Say what was run, what the words mean, and what each gradient bucket holds."""
    n = symbols(config)
    lines = [
        f"One step of a tiny Llama on {n['t'] * n['D']} ranks, as rank 0 sees it: tensor parallel "
        f"{n['t']}, data parallel {n['D']}, sequence parallelism {'on' if n['sp'] else 'off'}, "
        f"recomputed: {config.parallel.recompute_granularity or 'nothing'}",
        "",
        "  s sequence {s}, b micro-batch {b}, h hidden {h}, L layers {L}, R of them run again {R}, "
        "m micro-batches {m}".format(**n),
        "  e bytes of a number {e}, g bytes of a gradient {g}, B gradient buckets {B}, "
        "G numbers in them {G:,}, N in that of the norms {N:,}".format(**n),
        "  hidden states are [s/t, b, h] between the layers, [s, b, h] inside attention and MLP"
        if n["sp"]
        else "  hidden states are [s, b, h], the same on every rank of tp",
        "",
        "  axis    tp: the parts of a layer; data (dp x cp): copies of the model; model (pp x tp): "
        "all of one copy; world: everybody",
        "  sends   bytes that leave this rank, by the best algorithm",
        "  how     blocks: the rank stands still; async: it computes on, and waits when it needs "
        "the result",
        "  needs   the operation that made the tensor that is sent (dgrad, wgrad: the gradient of "
        "a layer's input, of its weight)",
        "",
    ]
    for i, bucket in enumerate(run.sink.buckets):
        if n["D"] == 1 and not bucket.reduce_axes:
            continue  # never sent
        held = [name.removesuffix(".weight") for name, _, _ in bucket.params]
        some = ", ".join(held if len(held) <= 5 else [*held[:2], "...", *held[-2:]])
        lines += wrap(f"  bucket {i} holds the gradients of {some}", WIDTH)
    return lines


_ROW = "{:>3}  {:<9} {:<23} {:<14} {:<10} {:<26} {:>8}  {:<6}  {}"
WIDTH = 150


def _story(events: list[Seen]) -> list[str]:
    """Write each collective: one line of facts, then what it needs and what hides it."""
    title = _ROW.format(
        "#", "phase", "layer", "verb", "axis", "shape in -> out", "sends", "how", "called at"
    )
    lines, section, group = [], "", ""
    for event in events:
        place = event.place
        if event.section != section:
            section, group = event.section, ""
            lines += ["", f"--- {section} ".ljust(WIDTH, "-"), title]
        block = ".".join(place.layer.split(".")[:2])
        if block != group:
            group = block
            lines.append("")
        lines.append(
            _ROW.format(
                event.number,
                place.phase,
                place.layer,
                event.verb,
                f"{event.axis} of {event.size}",
                f"{list(event.shape)} -> {_shape_out(event)}",
                f"{event.sent:,}",
                "async" if event.is_async else "blocks",
                place.site,
            )
        )
        told = [f"needs {event.needs or 'nothing that was computed in this step'}"]
        if event.is_async:
            told.append(_hidden(event))
        for text in told:
            lines += wrap(text, WIDTH, initial_indent=" " * 14, subsequent_indent=" " * 18)
    return lines or ["", "One rank: every collective is the identity, and nothing is sent."]


def _shape_out(event: Seen) -> list[int]:
    first, *rest = event.shape
    if event.verb == "all_gather":
        return [first * event.size, *rest]
    return [first // event.size, *rest] if event.verb == "reduce_scatter" else [first, *rest]


def _hidden(event: Seen) -> str:
    """Say who waited, and what ran between the start of a collective and the wait."""
    stories = list(dict.fromkeys(event.meanwhile))
    matmuls = [story for story in stories if "matmul of" in story]
    told = matmuls or stories
    if len(told) > 2:
        what = "matmuls" if matmuls else "operations"
        hidden = f"hidden under {len(told)} {what}, {told[0]} to {told[-1]}"
    else:
        hidden = f"hidden under: {' and '.join(told)}" if told else "nothing ran meanwhile"
    return f"waited for at {event.waited_at}; {hidden}"


def sums(counted: Totals, stated: Totals, applied: list[Applied]) -> list[str]:
    """Set the totals of the trace beside the formulas that make them up."""
    lines = [
        "",
        "--- what rank 0 sent in this step, and the formulas of docs/parallelism.md ".ljust(
            150, "-"
        ),
    ]
    differ = []
    for key in dict.fromkeys([*counted, *stated]):
        (count, sent), (times, size) = counted.get(key, (0, 0)), stated.get(key, (0, 0))
        verdict = "equal"
        if (count, sent) != (times, size):
            verdict = f"DIFFERS: the document says {times:,} and {size:,} bytes"
            differ.append(" ".join(key))
        lines += ["", f"{key[0]:<6} {key[1]:<15} {count:>4,} x {sent:>12,} bytes   {verdict}"]
        for row, n, size in applied:
            if (row.axis, row.verb) == key:
                lines.append(f"    {row.what:<36} {row.count:<14} = {n:<4,} {row.bytes} = {size:,}")
    lines += ["", f"DIFFERENT: {', '.join(differ)}" if differ else "All equal."]
    return lines


def _rank(rank: int, config: Config, port: int) -> None:
    """Be one rank, in a process of its own; rank 0 leaves the text in the store."""
    torch.set_num_threads(1)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    world, timeout = config.parallel.world_size, timedelta(seconds=120)
    grid = make_grid(config, Launch(rank, world, rank, world))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    grid.connect(torch.device("cpu"), dist.PrefixStore("weft", store), timeout)
    found = explain(config, grid)
    if rank == 0:
        store.set("equal", str(int(found.counted == found.stated)))
        store.set("text", found.text)
    grid.close()
    os._exit(0)  # not by the interpreter's teardown; see training/failure.py, as_process


def read_arguments(argv: Sequence[str] | None) -> Config:
    """Turn the command line into the config of the step. Raises ValueError with one sentence."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--dp", type=int, default=1, help="data-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages: 1 in this version")
    parser.add_argument("--zero", type=int, default=0, help="ZeRO level: 0 in this version")
    parser.add_argument("--layers", type=int, default=2, help="transformer layers")
    parser.add_argument("--micro-batches", type=int, default=1, help="of a step, on each rank")
    parser.add_argument("--no-sequence-parallel", action="store_true")
    parser.add_argument("--recompute-granularity", choices=("selective", "full"))
    a = parser.parse_args(argv)
    for flag in ("tp", "dp", "pp", "layers", "micro_batches"):
        if getattr(a, flag) < 1:
            raise ValueError(f"--{flag.replace('_', '-')} {getattr(a, flag)} must be at least 1")
    if a.pp > 1:
        raise ValueError(f"--pp {a.pp}: this version has no pipeline parallelism; leave --pp at 1")
    if a.zero:
        raise ValueError(f"--zero {a.zero}: this version has ZeRO level 0 only; leave --zero at 0")
    if a.tp * a.dp > MOST_RANKS:
        raise ValueError(
            f"--tp {a.tp} x --dp {a.dp} is {a.tp * a.dp} processes on this machine: at most "
            f"{MOST_RANKS}; the order of the collectives is the same with 2 a side"
        )
    more = []
    if a.recompute_granularity:
        more = ["--recompute-granularity", a.recompute_granularity]
    return tiny(
        a.tp,
        a.dp,
        layers=a.layers,
        micro_batches=a.micro_batches,
        sequence_parallel=not a.no_sequence_parallel,
        more=more,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Explain; return 0 where the document is right, 1 where it differs, 2 for a mistake."""
    try:
        config = read_arguments(argv)
    except ValueError as error:
        print(f"tools/explain.py: {error}", file=sys.stderr)
        return 2
    world = config.parallel.world_size
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_rank, (config, store.port), nprocs=world)
    print(store.get("text").decode())
    return 0 if store.get("equal") == b"1" else 1


if __name__ == "__main__":
    sys.exit(main())
