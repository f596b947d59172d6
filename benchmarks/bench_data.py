# SPDX-License-Identifier: Apache-2.0
"""Measure the cost of reading data in a step, and at the start of ranks.

    python benchmarks/bench_data.py            # waits for data, with and without a slow disk
    python benchmarks/bench_data.py --start    # 8 ranks of a world of 4,096
    python benchmarks/bench_data.py --read     # every rank reads, or one reads and sends
    python benchmarks/bench_data.py --preprocess [--against CHECKOUT]

The first trains a small Llama in this process: on mock tokens (--mock-data), on a file, and on that
file with a delay before each sample, as of a slow disk or network, with and without workers. It
prints the share of the time that steps wait for data (data_wait_seconds over step_seconds, of all
steps after the first tenth), and the gap: by how much a step on the file is longer than one on mock
tokens.

The second makes a corpus of a billion tokens as a sparse file, which needs no disk space, builds
its index on one rank, and then starts 8 of 4,096 data-parallel ranks one by one, each in a process
of its own. It prints the CPU seconds of the start of their data, and of the whole processes up to
then, most of which is the import of torch.

The third compares two ways for the ranks of a tensor-parallel group to get a sample: each reads it
from the page cache, in a thread beside the step, or one rank reads and broadcasts it (gloo, two
ranks), for which every step would wait.

The fourth runs tools/preprocess_data.py on a folder of 100 MB of .jsonl, with one worker and the
cheapest tokenizer (NullTokenizer), so that reading dominates. With --against it alternates with the
tool of another checkout, and the ratio of medians is printed.
"""

import argparse
import contextlib
import io
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the program is a file of the checkout

import pretrain_llama  # noqa: E402
from training.data import gpt  # noqa: E402
from training.data.cache import IndexCache  # noqa: E402
from training.data.indexed import HEADER, IndexedTokens, IndexedWriter  # noqa: E402

VOCABULARY = 1000
MODEL = """
    --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --lr 1e-3
    --micro-batch-size 2 --global-batch-size 8 --device cpu --log-interval 1
    --tokenizer-type NullTokenizer
"""
RANKS, WORLD = 8, 4096
SECONDS = 10.0  # most CPU seconds of RANKS ranks together
LENGTH = 8192  # tokens of the samples that are read or sent
SHARE = 0.01  # largest share of a step that may wait for data


def corpus(prefix: Path, documents: int = 400, length: int = 500) -> str:
    """Write a small corpus of random tokens; return its prefix."""
    rng = np.random.default_rng(0)
    with IndexedWriter(str(prefix), np.dtype(np.uint16)) as out:
        for _ in range(documents):
            out.add(rng.integers(0, VOCABULARY - 1, length))
    return str(prefix)


@contextlib.contextmanager
def slow_samples(seconds: float) -> Any:
    """Delay the reading of every sample of a file by `seconds`."""
    sample = gpt.GPTDataset.sample

    def later(self: Any, i: int) -> np.ndarray:
        time.sleep(seconds)
        return sample(self, i)

    gpt.GPTDataset.sample = later  # type: ignore[method-assign]
    try:
        yield
    finally:
        gpt.GPTDataset.sample = sample  # type: ignore[method-assign]


def waits(flags: list[str], steps: int, delay: float = 0.0) -> tuple[float, float]:
    """Train; return the share of the time spent waiting for data, and the median step in ms."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        argv = [*MODEL.split(), *flags, "--train-iters", str(steps), "--log-json", str(log)]
        argv += ["--vocab-size", str(VOCABULARY)]
        with slow_samples(delay), contextlib.redirect_stdout(io.StringIO()):
            if pretrain_llama.main(argv):
                raise SystemExit("bench_data.py: the run failed")
        rows = [json.loads(line) for line in log.read_text().splitlines()]
    rows = [row for row in rows if "step_seconds" in row][max(3, steps // 10) :]
    total = sum(row["step_seconds"] for row in rows)
    wait = sum(row["data_wait_seconds"] for row in rows)
    return wait / total, 1e3 * statistics.median(row["step_seconds"] for row in rows)


def measure_waits(steps: int, delay: float) -> bool:
    """Print the waits of runs on mock tokens, a file and a slow file; return if at most SHARE."""
    with tempfile.TemporaryDirectory() as folder:
        path = ["--data-path", corpus(Path(folder) / "corpus")]
        mock, mock_ms = waits(["--mock-data"], steps)
        fast, fast_ms = waits(path, steps)
        slow, slow_ms = waits(path, steps, delay)
        bare, bare_ms = waits([*path, "--num-workers", "0"], max(10, steps // 4), delay)
    print(f"--mock-data                     {mock:7.3%} of a step waits for data; {mock_ms:.1f} ms")
    print(f"a file                          {fast:7.3%}                           {fast_ms:.1f} ms")
    late = f"{delay * 1e3:g} ms more a sample"
    print(f"{late:<31} {slow:7.3%}                           {slow_ms:.1f} ms")
    print(f"the same, --num-workers 0       {bare:7.3%}                           {bare_ms:.1f} ms")
    gap, late_gap = fast_ms / mock_ms - 1, slow_ms / mock_ms - 1
    print(f"--mock-data gap: {gap:+.2%}, with the delay {late_gap:+.2%}")
    return max(fast, slow) <= SHARE


def hollow(prefix: str, documents: int, length: int) -> None:
    """Write a corpus whose tokens are in a sparse file: they are zeros and take no disk space."""
    lengths = np.full(documents, length, "<i4")
    starts = np.arange(documents, dtype="<i8") * (2 * length)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * documents * length)
    with IndexedWriter(f"{prefix}_one", np.dtype(np.uint16)) as out:
        out.add(np.zeros(length, np.uint16))
    head = Path(f"{prefix}_one.idx").read_bytes()[: HEADER.size]
    fields = list(HEADER.unpack(head))
    fields[-2:] = [documents, documents + 1]
    every = np.arange(documents + 1, dtype="<i8")
    body = lengths.tobytes() + starts.tobytes() + every.tobytes()
    Path(f"{prefix}.idx").write_bytes(HEADER.pack(*fields) + body)


START = """
import json, os, sys, time
import pretrain_llama
from mpu.launch import Launch
from training.data.build import build_loaders
from training.data.tokenizer import tokenizer_for
from training.flags.parse import parse
rank, world, argv = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
config = parse(argv, world)
tokenizer = tokenizer_for(config)
before = time.process_time()
loaders = build_loaders(config, tokenizer, rank, world, report=lambda line: None)
loaders.digest, loaders.train.dataset.corpus, loaders.train.dataset.sketch
loaders.train.next_global_batch(0, config.batch.global_batch_size)
print(json.dumps([time.process_time() - before, time.process_time()]))
sys.stdout.flush()
os._exit(0)
"""


def measure_start(tokens: int) -> bool:
    """Print the CPU seconds of the start of ranks of a large world; return if at most SECONDS."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/corpus"
        hollow(prefix, tokens // 1000, 1000)
        argv = [*MODEL.split(), "--data-path", prefix, "--train-iters", "10", "--vocab-size"]
        argv += [str(VOCABULARY), "--global-batch-size", str(2 * WORLD)]
        found = []
        for rank in [0, *range(RANKS)]:  # the first process builds the index
            command = [sys.executable, "-c", START, str(rank), str(WORLD), *argv]
            done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
            found.append(json.loads(done.stdout))
    data, whole = (sum(each) for each in zip(*found[1:], strict=True))
    print(f"{tokens:,} tokens in {tokens // 1000:,} documents, world {WORLD}; CPU seconds")
    first, process = found[0]
    print(f"one rank, which builds the index     data {first:6.2f}  process {process:6.2f}")
    print(f"{RANKS} ranks together, once it is built   data {data:6.2f}  process {whole:6.2f}")
    return data <= SECONDS


def _broadcasts(rank: int, port: int, count: int, out: Any) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    row, took = torch.zeros(LENGTH + 1, dtype=torch.int32), []
    for _ in range(count):
        torch.distributed.barrier()
        begin = time.perf_counter()
        torch.distributed.broadcast(row, 0)
        took.append(time.perf_counter() - begin)
    if rank:
        out.put(statistics.median(took[10:]))


def measure_read(count: int) -> bool:
    """Print the time to read a sample, and to send it to one other rank."""
    with tempfile.TemporaryDirectory() as folder:
        tokens = IndexedTokens(corpus(Path(folder) / "corpus", 4000, 1000))
        data = gpt.GPTDataset(tokens, "train", range(4000), LENGTH, 1, IndexCache(folder))
        took = []
        for i in range(count):
            begin = time.perf_counter()
            data.sample(i)
            took.append(time.perf_counter() - begin)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    context = torch.multiprocessing.get_context("spawn")
    out = context.SimpleQueue()
    ranks = [context.Process(target=_broadcasts, args=(r, port, count, out)) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    sent = out.get()
    for rank in ranks:
        rank.join()
    print(f"a sample of {LENGTH:,} tokens: read {1e6 * statistics.median(took):.0f} us beside the "
          f"step, broadcast to a second rank {1e6 * sent:.0f} us within it")  # fmt: skip
    return True


def measure_preprocess(other: Path | None, size: int = 100_000_000, times: int = 4) -> bool:
    """Print the time of preprocess_data.py; return whether it is at most 3 % above `other`'s."""
    trees = [ROOT] if other is None else [other.resolve(), ROOT]
    took: dict[Path, list[float]] = {tree: [] for tree in trees}
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "texts"
        for i in range(20):
            (texts / f"{i % 4}").mkdir(parents=True, exist_ok=True)
            with open(texts / f"{i % 4}" / f"{i}.jsonl", "w", encoding="utf-8") as file:
                while file.tell() < size / 20:
                    words = rng.integers(0, VOCABULARY - 1, rng.integers(1, 400))
                    file.write(json.dumps({"text": " ".join(map(str, words)), "n": 1}) + "\n")
        flags = ["--input", str(texts), "--tokenizer-type", "NullTokenizer", "--vocab-size"]
        flags += [str(VOCABULARY), "--output-prefix"]
        for i in range(times):
            for tree in trees if i % 2 else trees[::-1]:
                command = [sys.executable, str(tree / "tools" / "preprocess_data.py"), *flags]
                begin = time.perf_counter()
                subprocess.run(
                    [*command, f"{folder}/{i}"], cwd=tree, check=True, stdout=subprocess.DEVNULL
                )
                took[tree].append(time.perf_counter() - begin)
                for pair in Path(folder).glob(f"{i}*"):
                    pair.unlink()
    for tree, seconds in took.items():
        each = ", ".join(f"{second:.2f}" for second in seconds)
        print(f"{tree}: {size / 1e6:.0f} MB in {statistics.median(seconds):.2f} s ({each})")
    ratio = statistics.median(took[ROOT]) / statistics.median(took[trees[0]])
    print(f"time here / there: {ratio:.3f}")
    return ratio <= 1.03


def main() -> int:
    """Measure; return 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--start", action="store_true", help="measure the start of many ranks")
    parser.add_argument("--read", action="store_true", help="measure who should read")
    parser.add_argument("--preprocess", action="store_true", help="measure preprocess_data.py")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="of --preprocess")
    parser.add_argument("--steps", type=int, default=200, help="steps of each run (200)")
    parser.add_argument("--delay", type=float, default=5.0, help="ms more a sample (5)")
    parser.add_argument("--tokens", type=int, default=10**9, help="of the corpus of --start")
    args = parser.parse_args()
    if args.start:
        return 0 if measure_start(args.tokens) else 1
    if args.read:
        return 0 if measure_read(args.steps) else 1
    if args.preprocess:
        return 0 if measure_preprocess(args.against) else 1
    return 0 if measure_waits(args.steps, args.delay / 1e3) else 1


if __name__ == "__main__":
    sys.exit(main())
