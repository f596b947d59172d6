#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure context parallelism: steps at cp 2 against one process, attention at cp 4 against ideal.

    python benchmarks/bench_context.py [--launches 3] [--steps 4] [--tokens 4096]
    sudo python benchmarks/bench_context.py --link 1gbit [--tokens 16384] [--calls 9]

step        tokens per second of pretrain_llama.py, model `tiny`, one row of --tokens: a process
            with all cores, and two context-parallel ranks that share them, for each --cp-comm-type
attention   forward and backward of core attention in one thread, without communication: the slowest
            of 4 ranks against a quarter of one rank's time, for one document and for several

Launches alternate; a figure is the median over the timed steps of all launches.

--link RATE (Linux, root, iproute2) instead measures the share of p2p messages that is hidden, in
steps of model `tiny` at cp 2. The two ranks, of one thread each, are in two network namespaces
joined by a link of that rate. transfer: a step's messages of attention alone, in sequence. exposed:
the ranks' waits for them in a step. The rank that reaches a message last waits only for its bytes,
the other one also for that rank, so the shorter wait counts. A figure is the median of --calls
steps.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pretrain_llama  # noqa: E402
from benchmarks.bench_pipeline import Link  # noqa: E402
from benchmarks.bench_step import command, model_flags, output  # noqa: E402
from forecast.rehearsal.run import loader  # noqa: E402
from mpu.comm.p2p import exchange  # noqa: E402
from mpu.comm.transport import Axis, Label  # noqa: E402
from mpu.launch import Launch  # noqa: E402
from mpu.layers.attention.block_attention import attend, attend_backward, outputs  # noqa: E402
from mpu.layers.attention.blocks import Block, blocks  # noqa: E402
from mpu.layers.attention.shards import gather_blocks, shards  # noqa: E402
from training.faults.monitor import FailureMonitor  # noqa: E402
from training.flags.parse import parse  # noqa: E402
from training.run.model_profile import make_grid  # noqa: E402
from training.run.rendezvous import meet  # noqa: E402

KINDS = ("p2p", "all_gather", "a2a")
WARM = 2  # steps before the timed ones
CP = 4  # ranks of `attention`
HEADS, GROUPS, SIZE = 8, 4, 32  # of `tiny`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="timed steps a launch")
    parser.add_argument("--tokens", type=int, help="of a row (4096; with --link 16384)")
    parser.add_argument("--calls", type=int, default=9, help="timed calls of attention")
    parser.add_argument("--link", metavar="RATE", help="as tc writes it: 1gbit, 200mbit")
    parser.add_argument("--end", type=Path, help=argparse.SUPPRESS)  # a rank of --link
    args = parser.parse_args()
    args.tokens = args.tokens or (16384 if args.link or args.end else 4096)
    if args.end:
        args.end.write_text(json.dumps(end_of_link(args.tokens, args.calls)))
        return
    if args.link:
        over_a_link(args.link, args.tokens, args.calls)
        return
    print(f"torch {torch.__version__}; medians of {args.launches} launches")
    for dtype in ("fp32", "bf16"):
        found: dict[str, list[float]] = {}
        for _ in range(args.launches):
            for kind in ("one process", *KINDS):
                found.setdefault(kind, []).extend(step(kind, dtype, args.tokens, args.steps))
        rates = {kind: args.tokens / statistics.median(times) for kind, times in found.items()}
        for kind, rate in rates.items():
            share = rate / rates["one process"]
            print(f"step, {dtype}, {kind:<12}{rate:>8.0f} tokens/s {share:>6.2f}", flush=True)
    torch.set_num_threads(1)
    many = (args.tokens // 2, args.tokens // 4 + 1, 1, args.tokens - 3 * (args.tokens // 4) - 2)
    for documents in ((args.tokens,), many):
        ideal, slowest = attention(documents, args.calls)
        text = f"slowest {slowest * 1e3:.1f} ms, ideal {ideal * 1e3:.1f} ms, {slowest / ideal:.2f}"
        print(f"attention, {len(documents)} documents over {CP} ranks: {text}")


def step(kind: str, dtype: str, tokens: int, steps: int) -> list[float]:
    """Return the seconds of the timed steps of a launch."""
    ranks = 1 if kind == "one process" else 2
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.json"
        flags = [*model_flags("tiny"), "--seq-length", str(tokens), "--log-json", str(log)]
        flags += ["--max-position-embeddings", str(tokens), "--train-iters", str(WARM + steps)]
        flags += ["--micro-batch-size", "1", "--global-batch-size", "1"]
        flags += ["--bf16"] if dtype == "bf16" else []
        if ranks > 1:
            flags += ["--context-parallel-size", str(ranks), "--cp-comm-type", kind]
        output([*command(ranks), str(ROOT / "pretrain_llama.py"), *flags], ranks)
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    return [row["step_seconds"] for row in rows if "step_seconds" in row][WARM:]


def over_a_link(rate: str, tokens: int, calls: int) -> None:
    """Print the exposed share of p2p's messages over a link."""
    with Link(rate) as link, tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, __file__, "--end", f"{folder}/{{end}}", "--tokens", str(tokens)]
        link.run([*words, "--calls", str(calls)])
        ends = [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(2)]
    alone = statistics.median(max(pair) for pair in zip(*(e["alone"] for e in ends), strict=True))
    steps = zip(*(end["waits"] for end in ends), strict=True)
    exposed = statistics.median(sum(map(min, *both)) for both in steps)
    seconds = [statistics.median(map(sum, end["waits"])) for end in ends]
    step = statistics.median(ends[0]["steps"])
    print(f"p2p at cp 2 over {rate}, {tokens} tokens, {calls} steps of {step:.2f} s: "
          f"transfer {alone * 1e3:.1f} ms, exposed {exposed * 1e3:.1f} ms, {exposed / alone:.1%}; "
          f"ranks wait {seconds[0] * 1e3:.1f} and {seconds[1] * 1e3:.1f} ms a step")  # fmt: skip


class Message:
    """A message of attention, and the seconds for which this rank waited for it."""

    def __init__(self, sent: torch.Tensor) -> None:
        self.shape, self.dtype = sent.shape, sent.dtype

    def waiting(self) -> None:
        self.began = time.perf_counter()

    def waited(self) -> None:
        self.seconds = time.perf_counter() - self.began


class Messages:
    """A trace that stores the messages of attention."""

    def __init__(self) -> None:
        self.found: list[Message] = []

    def issued(
        self, verb: str, axis: Axis, tensor: Tensor, sent: int, is_async: bool, label: Label | None
    ) -> Message | None:
        if verb != "send":
            return None
        self.found.append(Message(tensor))
        return self.found[-1]


def end_of_link(tokens: int, calls: int) -> dict[str, Any]:
    """Run one of two ranks; return the seconds of steps, of their waits, of messages alone."""
    torch.set_num_threads(1)
    flags = [*model_flags("tiny"), "--seq-length", str(tokens), "--train-iters", "1"]
    flags += ["--max-position-embeddings", str(tokens), "--context-parallel-size", "2"]
    config = parse([*flags, "--micro-batch-size", "1", "--global-batch-size", "1"], 2)
    launch, timeout = Launch.from_env(), timedelta(minutes=5)
    grid, trace = make_grid(config, launch), Messages()
    grid.connect(torch.device("cpu"), meet(timeout, launch), timeout)
    grid.traced(trace)
    run = pretrain_llama.build(config, grid, torch.device("cpu"), FailureMonitor())
    batches = loader(config, grid).next_global_batch(0, config.batch.global_batch_size)
    steps, waits = list[float](), list[list[float]]()
    for _ in range(WARM + calls):
        trace.found, begin = [], time.perf_counter()
        pretrain_llama.train_step(run, batches, config.optimizer.lr)
        steps.append(time.perf_counter() - begin)
        waits.append([message.seconds for message in trace.found])
    sent = [torch.zeros(message.shape, dtype=message.dtype) for message in trace.found]

    def alone() -> None:
        other = 1 - grid.cp.rank
        for x in sent:
            exchange(x, grid.cp, other, other, torch.empty_like(x)).wait()

    alone_seconds = timed(alone, calls)
    grid.close()
    return {"steps": steps[WARM:], "waits": waits[WARM:], "alone": alone_seconds}


def attention(documents: tuple[int, ...], calls: int) -> tuple[float, float]:
    """Return a quarter of one rank's seconds, and the seconds of the slowest of 4."""
    size, held = sum(documents), shards(CP, documents)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, size, SIZE) for n in (HEADS, GROUPS, GROUPS))
    whole = seconds(worker(q, k, v, (), blocks(range(size), documents)), calls) / CP
    ranks = []
    for rank in range(CP):
        todo = gather_blocks(rank, held, documents)
        at = torch.cat([torch.arange(r.start, r.stop) for r in held[rank]])
        own = [x[:, :, at].contiguous() for x in (q, k, v)]
        near = worker(own[0], own[1], own[2], todo.near, ())
        both = worker(own[0], k, v, (), todo.far, near)
        ranks.append(seconds(both, calls))
    return whole, max(ranks)


def worker(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    near: tuple[Block, ...],
    far: tuple[Block, ...],
    first: Callable[[], tuple[Tensor, Tensor]] | None = None,
) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a function that runs forward and backward of blocks; it calls `first` before."""
    todo, dy = (*near, *far), torch.randn_like(q)
    sums = tuple(torch.zeros_like(x) for x in (q, k, v))

    def work() -> tuple[Tensor, Tensor]:
        out, lse = outputs(q, torch.float32) if first is None else first()
        attend(todo, q, k, v, out, lse, kernel="cpu")
        attend_backward(todo, dy, (q, k, v, out, lse), sums, "cpu")
        return out, lse

    return work


def seconds(work: Callable[[], object], calls: int) -> float:
    """Return the median seconds of a call."""
    return statistics.median(timed(work, calls))


def timed(work: Callable[[], object], calls: int) -> list[float]:
    """Return the seconds of each call."""
    times = []
    for _ in range(WARM + calls):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return times[WARM:]


if __name__ == "__main__":
    main()
