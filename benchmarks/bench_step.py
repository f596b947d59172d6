# SPDX-License-Identifier: Apache-2.0
"""Compare a training step with that of a peer built from PyTorch's own parallel stack, in one run.

    python benchmarks/bench_step.py [--peer PATH] [--compile] [--cases tiny-fp32-1 ...]

Weft runs as users run it: pretrain_llama.py under torchrun, whose log is read. The peer is a script
that takes --size, --dtype, --tp, --warmup and --steps, and prints `JSON {...}` with the times of
its steps. The default is a torchtitan-style trainer (DTensor TP with SP, loss parallel, fused
AdamW, clipping). Both have the same sizes, global batch of 4 sequences and number of threads.
Launches alternate, so that drifts of the machine's speed affect all equally; a figure is the median
over all timed steps of all launches. With --compile the peer is also measured under torch.compile,
with its tokens/s and the ratio to it in two more columns; it compiles in the warm-up. The bound is
only the same step's matmuls and attention, each by the fastest available kernel, on the same number
of processes and threads.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mpu.layers.attention.core import core_attention, dot_product_attention  # noqa: E402
from mpu.layers.linear import Recipe  # noqa: E402

PEER = ROOT / "benchmarks" / "peers" / "native.py"
SIZES = {  # h, layers, heads, groups, ffn, vocabulary, sequence
    "tiny": (256, 4, 8, 4, 768, 4096, 256),
    "small": (768, 12, 12, 4, 2048, 8192, 512),
}
BATCH = 4
CASES = [f"{s}-{d}-{t}" for s in SIZES for d in ("fp32", "bf16") for t in (1, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, default=PEER, help="the peer's script")
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES, metavar="SIZE-DTYPE-TP")
    parser.add_argument("--compile", action="store_true", help="measure the peer compiled, too")
    parser.add_argument("--launches", type=int, default=3, help="of each, taken in turn")
    parser.add_argument(
        "--steps", type=int, default=0, help="timed steps a launch (0: 10 tiny, 2 small)"
    )
    parser.add_argument("--bound", help=argparse.SUPPRESS)  # of a bound's process
    args = parser.parse_args()
    if args.bound:
        print(bound_of_this_process(*args.bound.split("-")))
        return
    if not args.peer.exists():
        parser.error(f"--peer {args.peer}: no such file")
    cores = len(os.sched_getaffinity(0))
    print(f"torch {torch.__version__}, {cores} cores; tokens/s, medians of interleaved launches")
    columns = f"{'compiled':>10}{'ratio':>8}" * args.compile
    print(f"{'case':<15}{'Weft':>10}{'peer':>10}{'ratio':>8}{columns}{'bound':>10}{'of bound':>10}"
          f"{'peak MB: Weft':>16}{'peer':>7}")  # fmt: skip
    for case in args.cases:
        size, _, tp = case.split("-")
        steps = args.steps or (10 if size == "tiny" else 2)
        ours, theirs, compiled, bounds = Side(), Side(), Side(), []
        for _ in range(args.launches):
            ours.add(*run_weft(case, steps))
            theirs.add(*run_peer(args.peer, case, steps))
            if args.compile:
                compiled.add(*run_peer(args.peer, case, steps, "--compile"))
            bounds.append(run_bound(case))
        tokens = BATCH * SIZES[size][-1]
        mine, limit = tokens / ours.median(), tokens / min(bounds)
        line = f"{case:<15}{mine:>10.0f}"
        for side in (theirs, compiled)[: 1 + args.compile]:
            line += f"{tokens / side.median():>10.0f}{side.median() / ours.median():>8.2f}"
        line += f"{limit:>10.0f}{mine / limit:>10.0%}{ours.peak:>16.0f}{theirs.peak:>7.0f}"
        print(line, flush=True)


class Side:
    """The timed steps of all launches of one side, and the largest peak memory of a rank."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.peak = 0.0

    def add(self, seconds: list[float], peak: float) -> None:
        self.seconds += seconds
        self.peak = max(self.peak, peak)

    def median(self) -> float:
        return statistics.median(self.seconds)


def command(ranks: int, python: str = sys.executable) -> list[str]:
    """Return the command that starts ranks: one process directly, several by torchrun."""
    if ranks == 1:
        return [python]
    return [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def environment(tp: int) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // tp)
    return {**os.environ, "OMP_NUM_THREADS": str(threads)}


def output(words: list[str], tp: int, cwd: Path = ROOT) -> str:
    done = subprocess.run(words, capture_output=True, text=True, env=environment(tp), cwd=cwd)
    if done.returncode and "JSON {" not in done.stdout:  # gloo may abort a peer after its output
        sys.exit(f"{' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def model_flags(size: str) -> list[str]:
    """Return the flags of pretrain_llama.py that all cases of a size have."""
    h, layers, heads, groups, ffn, vocab, s = SIZES[size]
    return f"""
        --num-layers {layers} --hidden-size {h} --num-attention-heads {heads}
        --group-query-attention --num-query-groups {groups} --ffn-hidden-size {ffn}
        --seq-length {s} --swiglu --max-position-embeddings {s}
        --untie-embeddings-and-output-weights --rotary-base 500000
        --mock-data --tokenizer-type NullTokenizer --vocab-size {vocab} --num-workers 0
        --lr 3e-4 --lr-decay-style constant --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
        --log-interval 1 --device cpu
    """.split()


def run_weft(
    case: str, steps: int, more: str = "", program: Path = ROOT / "pretrain_llama.py"
) -> tuple[list[float], float]:
    """Run pretrain_llama.py; return seconds of the timed steps and rank 0's peak megabytes."""
    size, dtype, tp = case.split("-")
    warm = 2
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.json"
        flags = (
            model_flags(size)
            + f"""
            --micro-batch-size {BATCH} --global-batch-size {BATCH} --train-iters {warm + steps}
            --log-json {log} --tensor-model-parallel-size {tp}
        """.split()
        )
        flags += ["--bf16"] if dtype == "bf16" else []
        flags += ["--sequence-parallel"] if tp != "1" else []
        words = [*command(int(tp)), str(program), *flags, *more.split()]
        output(words, int(tp), cwd=program.parent)  # so that it finds its checkout's model file
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [row for row in rows if "step_seconds" in row][warm:]
    return [r["step_seconds"] for r in rows], max(r["peak_memory_bytes"] for r in rows) / 2**20


def run_peer(peer: Path, case: str, steps: int, more: str = "") -> tuple[list[float], float]:
    """Run the peer; return seconds of the timed steps and its largest peak in megabytes."""
    size, dtype, tp = case.split("-")
    flags = f"--size {size} --dtype {dtype} --tp {tp} --warmup 2 --steps {2 + steps} {more}".split()
    found = report([*command(int(tp)), str(peer), *flags], int(tp))
    return found["times"], max(found["peak_rss_mb"])


def report(words: list[str], ranks: int) -> dict[str, Any]:
    """Run a peer; return the object that it prints after `JSON `."""
    text = output(words, ranks)
    return json.loads(text[text.index("JSON ") + 5 :].splitlines()[0])


def run_bound(case: str, dp: int = 1) -> float:
    """Return the seconds of only a step's matmuls and attention, on all ranks at once.

    If there are more ranks than cores, one process runs on each core, and its time is multiplied by
    the number of ranks per core.
    """
    ranks = int(case.split("-")[2]) * dp
    at_once = min(ranks, len(os.sched_getaffinity(0)))
    words = [sys.executable, __file__, "--bound", f"{case}-{dp}"]
    running = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment(ranks))
        for _ in range(at_once)
    ]
    return max(float(each.communicate()[0]) for each in running) * ranks / at_once


def bound_of_this_process(size: str, dtype: str, tp: str, dp: str) -> float:
    """Return the seconds of one rank's matmuls and attention in a step."""
    layer, head = products(size, dtype, int(tp), BATCH // int(dp))
    return SIZES[size][1] * layer + head


def products(size: str, dtype: str, t: int, batch: int) -> tuple[float, float]:
    """Return one rank's seconds of a layer's and of the head's matmuls, for `batch` sequences.

    These are forward, dgrad and wgrad matmuls, and attention with its backward. Each is timed with
    every kernel that a step could call, also ours, and the best of five of the fastest one counts,
    so that no step can be faster than the sum.
    """
    h, _, heads, groups, ffn, vocab, s = SIZES[size]
    d, n = h // heads, batch * s
    kind = torch.float32 if dtype == "fp32" else torch.bfloat16
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    wide = (heads + 2 * groups) * d // t
    layer = [(h, wide), (heads * d // t, h), (h, 2 * ffn // t), (ffn // t, h)]
    seconds = []
    for i, o in [*layer, (h, vocab // t)]:
        x, w, dy = (torch.randn(*z, dtype=kind) for z in ((n, i), (o, i), (n, o)))
        y, dx, dw = (torch.empty(*z, dtype=kind) for z in ((n, o), (n, i), (o, i)))
        by = partial(Recipe().product, x, w), partial(torch.mm, x, w.t(), out=y)
        seconds.append(fastest(*by))
        by = partial(Recipe().dgrad, dy, w.t()), partial(torch.mm, dy, w, out=dx)
        seconds[-1] += fastest(*by)
        by = partial(Recipe().accumulate, dw, True, x, dy), partial(torch.mm, dy.t(), x, out=dw)
        seconds[-1] += fastest(*by)
    qkv = torch.randn(s, batch, (heads + 2 * groups) // t * d, dtype=kind, requires_grad=True)
    sizes = [heads // t * d, groups // t * d, groups // t * d]
    q, k, v = (part.unflatten(-1, (-1, d)) for part in qkv.split(sizes, -1))  # [s, b, n, d]

    def attend(attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        out = attention(q, k, v)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    kernels = (core_attention.attend, sdpa)
    attention = fastest(*(partial(attend, kernel) for kernel in kernels))
    return sum(seconds[:-1]) + attention, seconds[-1]


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return torch's own causal attention: each [s, b, n, d] -> [s, b, heads d]."""
    return dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)))


def fastest(*kernels: Callable[[], object]) -> float:
    """Return the seconds of the fastest kernel, the best of five calls of each."""
    best = float("inf")
    for _ in range(5):
        for kernel in kernels:
            begin = time.perf_counter()
            kernel()
            best = min(best, time.perf_counter() - begin)
    return best


if __name__ == "__main__":
    main()
