# SPDX-License-Identifier: Apache-2.0
"""Steps of a Llama: seconds, MFU, memory, what a layer, the head and the update cost, losses.

    step-2, step-6   the program's own step of 2 and 6 layers, in this process, and one profiled
    step-6-NAME      the same with the flags of VARIANTS, step-2-NAME of a model of MODELS
    run-NAME         pretrain_llama.py as a user starts it, with the flags of VARIANTS
    losses           300 steps beside the same steps on the CPU, from the same weights
    sync             a step in which torch raises where the host waits for the device

With t(L, m) the seconds of a step of L layers and m micro-batches, c(L) = (t(L, 4) - t(L, 1)) / 3
are those of a micro-batch. A layer takes (c(6) - c(2)) / 4, embedding and head c(2) - 2 layers, the
update of L layers t(L, 1) - c(L). tests/gpu/check.py subtracts, since each is a process of its own.
"""

import statistics
import time
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch

import pretrain_llama
from model.load import of_checkpoint
from mpu.launch import Launch
from tests.gpu.launched import KERNELS
from tests.gpu.logged import logged
from tests.gpu.row import Row, Sizes, Skip, Watch, synchronize
from training.data.batch import DocumentRules, make_batch
from training.data.tokenizer import tokenizer_for
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse
from training.run.device import choose_device
from training.run.model_profile import make_grid, model_profile
from training.run.peak_flops import peak_flops

MICRO_BATCHES = 4  # of a step
# flags beside those of `flags`, of six layers
VARIANTS = {
    "bf16": "",
    "fp8-rowwise": "--fp8-format hybrid --fp8-recipe rowwise",
    "fp8-rowwise-wgrad-bf16": "--fp8-format hybrid --fp8-recipe rowwise --fp8-wgrad-bf16",
    "fp8-tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "fp8-blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "fused-linear-loss": "--fused-linear-cross-entropy",
    "documents": "--reset-attention-mask --reset-position-ids --eod-mask-loss",
    "attention-flash": "--attention-backend flash",
    "attention-fused": "--attention-backend fused",
    "attention-unfused": "--attention-backend unfused",
    "muon": "--optimizer muon",
    "max-logits": "--log-max-attention-logit",
}


class Model(NamedTuple):
    """A model with experts: its sizes and further flags, and those that a CPU computes."""

    sizes: Sizes
    flags: str
    tiny: str

    def words(self, row: Row, layers: int, micro_batches: int) -> list[str]:
        """Return the trainer's flags."""
        z, more = (row.sizes, self.tiny) if row.tiny else (self.sizes, self.flags)
        return [*flags(z, layers, micro_batches), *more.split()]


MODELS = {
    "qwen3-30b-a3b": Model(
        Sizes(2048, 6144, 32, 4, 8192, 151936),
        "--kv-channels 128 --qk-layernorm --num-experts 128 --moe-router-topk 8 "
        "--moe-ffn-hidden-size 768",
        "--kv-channels 32 --qk-layernorm --num-experts 8 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 64",
    ),
    "mixtral": Model(
        Sizes(4096, 14336, 32, 8, 8192, 32000),
        "--num-experts 8 --moe-router-topk 2", "--num-experts 4 --moe-router-topk 2",
    ),
}  # fmt: skip
# what a CPU adds to Muon's flags: it multiplies bf16 slowly
MUON_ON_A_CPU = "--muon-num-ns-steps 1 --muon-fp32-matmul-prec highest"
# the most that a loss may differ from the CPU's: at any step, and in the mean of the last 50
TOLERANCE = {"fp32": (4e-3, 1e-3), "bf16": (1e-1, 3e-2)}


def flags(z: Sizes, layers: int, micro_batches: int = MICRO_BATCHES) -> list[str]:
    """Return the trainer's flags of a Llama of these sizes, with some layers, in bf16."""
    return f"""
        --mock-data --tokenizer-type NullTokenizer --vocab-size {z.vocab} --num-layers {layers}
        --hidden-size {z.hidden} --ffn-hidden-size {z.ffn} --num-attention-heads {z.heads}
        --group-query-attention --num-query-groups {z.groups} --seq-length {z.seq}
        --max-position-embeddings {z.seq} --swiglu --untie-embeddings-and-output-weights
        --micro-batch-size 1 --global-batch-size {micro_batches} --train-iters 12 --lr 1e-4
        --clip-grad 1.0 --bf16
    """.split()


def build(words: list[str], kind: str) -> Any:
    """Return the program's Run of one rank on a device of a kind, "cuda" or "cpu"."""
    config = parse([*words, "--device", kind], 1, None, of_checkpoint)
    config = config.with_vocab(tokenizer_for(config).vocab_size)
    device = choose_device(config, Launch(), False, print)
    grid = make_grid(config, Launch())
    return pretrain_llama.build(config, grid, device, FailureMonitor())


def drawn(run: Any, count: int, seed: int = 1) -> list[Any]:
    """Return micro-batches of random tokens, on the run's device."""
    m = run.config.model
    shape = count, run.config.batch.micro_batch_size, m.seq_length + 1
    rows = np.random.default_rng(seed).integers(0, m.vocab_size or 0, shape)
    return [make_batch(each, DocumentRules(), i).to(run.device) for i, each in enumerate(rows)]


def step(run: Any, batches: list[Any], lr: float = 1e-4) -> torch.Tensor:
    """Train one step; return the loss, which is not read."""
    loss = pretrain_llama.train_step(run, batches, lr)[0]
    run.iteration += 1
    return loss


# ---- steps in this process ----


def words_of(row: Row, name: str) -> list[str]:
    """Return the flags of a row step-LAYERS, step-LAYERS-NAME or run-NAME."""
    kind, *rest = name.split("-", 1 if name.startswith("run-") else 2)
    layers, name = (6, rest[0]) if kind == "run" else (int(rest[0]), "".join(rest[1:]))
    if name in MODELS:
        return MODELS[name].words(row, layers, MICRO_BATCHES)
    return [*flags(row.sizes, layers), *words_here(row, VARIANTS[name] if name else "")]


def words_here(row: Row, words: str) -> list[str]:
    """Return the words of flags, with those that a CPU adds."""
    return f"{words} {MUON_ON_A_CPU}".split() if row.tiny and "muon" in words else words.split()


def steps(row: Row) -> None:
    """Steps, and the kernels of one."""
    run = _steps(row)
    row.part("profile", lambda: profile(row, run))


def _steps(row: Row) -> Any:
    begin = time.perf_counter()
    words = words_of(row, row.name)
    run = build(words, row.device.type)
    batches = drawn(run, MICRO_BATCHES)
    row.say("built", seconds=time.perf_counter() - begin, flags=" ".join(words))
    begin = time.perf_counter()
    for _ in range(1 if row.tiny else 3):  # makes buffers, loads kernels
        first = float(step(run, batches))
    row.say("first steps", seconds=time.perf_counter() - begin, loss=first)
    if row.cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = dict[int, float]()
    for count in (1, MICRO_BATCHES):
        with Watch(row) as watch:
            seconds[count] = in_a_row(row, run, batches[:count], 2 if row.tiny else 10)
        row.say(f"a step of {count} micro-batches", seconds=seconds[count])
    row.say("power and clocks", **watch.numbers())  # of the steps of all micro-batches
    alone = []
    for _ in range(1 if row.tiny else 5):
        alone.append(in_a_row(row, run, batches, 1))
    peak, source = peak_flops(row.device, torch.bfloat16)
    tokens = MICRO_BATCHES * run.config.model.seq_length
    flops = model_profile(run.config, pretrain_llama.model_provider).flops * tokens
    row.say(
        "steps", seconds=seconds[MICRO_BATCHES], layers=run.config.model.num_layers,
        seconds_apart=statistics.median(alone), tokens_per_second=tokens / seconds[MICRO_BATCHES],
        mfu=flops / seconds[MICRO_BATCHES] / peak, peak_flops=source,
        micro_batch=(seconds[MICRO_BATCHES] - seconds[1]) / (MICRO_BATCHES - 1),
        peak_bytes=torch.cuda.max_memory_allocated() if row.cuda else None,
        reserved_bytes=torch.cuda.max_memory_reserved() if row.cuda else None,
    )  # fmt: skip
    last = float(step(run, batches))
    row.check("the loss of repeated batches, last over first", last / first, 1.0)
    return run


def in_a_row(row: Row, run: Any, batches: list[Any], count: int) -> float:
    """Return the seconds of a step, of some that the host does not wait between."""
    synchronize(row)
    begin = time.perf_counter()
    for _ in range(count):
        step(run, batches)
    synchronize(row)
    return (time.perf_counter() - begin) / count


def profiled(row: Row, run: Any, batches: list[Any]) -> Any:
    """Return the profiler's events of a step."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if row.cuda else []
    with torch.profiler.profile(activities=kinds) as seen:
        step(run, batches)
        synchronize(row)
    return seen.events()


def profile(row: Row, run: Any) -> None:
    """Write the launches and the device time of a step of one micro-batch, by kernel."""
    events = profiled(row, run, drawn(run, MICRO_BATCHES))
    count, spent = by_kernel(events, row.cuda)
    rows = sorted(spent, key=lambda name: -spent[name])
    table = [f"{spent[name] / 1e3:>10.3f} ms {count[name]:>6,} x {name}" for name in rows]
    with (row.path.parent / "profiles.txt").open("a") as file:
        file.write("\n".join([f"==== {row.name}, {time.ctime()}", *table]) + "\n\n")
    row.say("kernels of a step", ms=sum(spent.values()) / 1e3, launches=sum(count.values()))
    for name in rows[:20]:
        row.say(f"kernel {name[:80]}", ms=spent[name] / 1e3, count=count[name])
    row.say("launches", by_operation=dict(launches(events, row.cuda)))


CUDA = torch.autograd.DeviceType.CUDA


def by_kernel(events: Any, cuda: bool) -> tuple[Counter[str], Counter[str]]:
    """Return (launches, microseconds) by kernel; on a CPU by the operations that call no other."""
    count, spent = Counter[str](), Counter[str]()
    for event in events:
        if cuda and event.device_type == CUDA and not event.is_user_annotation:
            count[event.name] += 1
            spent[event.name] += event.time_range.elapsed_us()
        elif not cuda and event.name.startswith("aten::") and not event.cpu_children:
            count[event.name] += 1
            spent[event.name] += event.cpu_time_total
    return count, spent


OURS = tuple(name for names in KERNELS.values() for name in names)


def launches(events: Any, cuda: bool) -> Counter[str]:
    """Count launches by the operation that made them; a Triton kernel of ours by its own name.

    The profiler gives a kernel to the innermost range, which of a Triton launch is an autograd
    function. Triton may append to a kernel's name. On a CPU operations that call no other count.
    """
    found, seen = Counter[str](), set[int]()
    for event in events:  # torch 2.11 gives a call's kernels again to each event of the same number
        again, _ = event.id in seen, seen.add(event.id)
        for kernel in event.kernels if cuda and not again else ():
            ours = next((name for name in OURS if kernel.name.startswith(name)), None)
            found[f"triton::{ours}" if ours else event.name] += 1
        if not cuda and event.name.startswith("aten::") and not event.cpu_children:
            found[event.name] += 1
    return found


# ---- runs of the program ----


def program(row: Row) -> None:
    """Run pretrain_llama.py with the flags of a variant; write the seconds of its steps."""
    words = words_of(row, row.name)
    started(row, words)


def started(row: Row, words: list[str], ranks: int = 1) -> None:
    """Run the program with some flags, on some ranks; write what its log says of the steps."""
    more = ["--log-interval", "1", *(["--train-iters", "4"] if row.tiny else [])]
    found = [each for each in logged(row, [*words, *more], ranks) if "step_seconds" in each]
    if not found:
        raise RuntimeError("the program's log has no step")
    steady = found[1 if row.tiny else 5 :]
    seconds = statistics.median(each["step_seconds"] for each in steady)
    rate = statistics.median(each["tokens_per_second"] for each in steady)
    row.say(
        "a run of the program", seconds=seconds, tokens_per_second=rate,
        mfu=statistics.median(each["mfu"] for each in steady), loss=found[-1]["loss"],
        peak_bytes=found[-1].get("peak_memory_bytes"), steps=len(steady), ranks=ranks,
        flags=" ".join(words),
    )  # fmt: skip
    row.check("the loss is finite: 0 where it is", float(not np.isfinite(found[-1]["loss"])), 0)


# ---- losses, and waits ----

LOSSES = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --num-layers 4 --hidden-size 128
    --num-attention-heads 8 --group-query-attention --num-query-groups 4 --ffn-hidden-size 352
    --seq-length 128 --max-position-embeddings 128 --swiglu --micro-batch-size 4
    --global-batch-size 8 --lr 1e-3 --train-iters 300 --clip-grad 1.0
    --untie-embeddings-and-output-weights
""".split()


def progressions(run: Any, seed: int) -> list[Any]:
    """Return a step's batches: rows of tokens that go up by a random stride, which is learned."""
    m, b = run.config.model, run.config.batch
    chance, count = np.random.default_rng(seed), b.global_batch_size // b.micro_batch_size
    size = (count, b.micro_batch_size, 1)
    begin, stride = chance.integers(0, m.vocab_size, size), chance.integers(1, 8, size)
    rows = (begin + stride * np.arange(m.seq_length + 1)) % m.vocab_size
    return [make_batch(each, DocumentRules(), i).to(run.device) for i, each in enumerate(rows)]


def copy_weights(source: Any, target: Any) -> None:
    """Give a run another's weights: initial weights are drawn on the device, so they differ."""
    for mine, theirs in zip(target.sink.buckets, source.sink.buckets, strict=True):
        mine.param_shard.copy_(theirs.param_shard)
    for mine, theirs in zip(target.optimizer.masters, source.optimizer.masters, strict=True):
        mine.copy_(theirs)


def losses(row: Row) -> None:
    """Train a small model here and on the CPU, with one seed and the same weights."""
    steps = 6 if row.tiny else 300
    for dtype, limits in TOLERANCE.items():
        words = [*LOSSES, *([] if dtype == "fp32" else [f"--{dtype}"])]
        runs = [build(words, kind) for kind in ("cpu", row.device.type)]
        copy_weights(*runs)
        found: list[list[float]] = [[], []]
        for run, values in zip(runs, found, strict=True):
            kept = [step(run, progressions(run, i), 1e-3) for i in range(steps)]
            values += [float(value) for value in kept]
        apart = [abs(a - b) for a, b in zip(*found, strict=True)]
        tail = [statistics.mean(values[-50:]) for values in found]
        row.say(
            f"losses, {dtype}", first=[values[0] for values in found],
            every_50=[values[49::50] for values in found], last_50=tail,
        )  # fmt: skip
        row.check(f"{dtype}: most of any step", max(apart), limits[0])
        row.check(f"{dtype}: mean of the last 50", abs(tail[0] - tail[1]), limits[1])
        row.check(f"{dtype}: the first step", apart[0], 1e-5 if dtype == "fp32" else 2e-2)


def waits(row: Row) -> None:
    """Train a step of 2 layers in which torch raises where the host waits for the device."""
    if not row.cuda:
        raise Skip("a CPU waits for nothing")
    run = build(flags(row.sizes, 2), row.device.type)
    batches = drawn(run, 2)
    for _ in range(2):
        step(run, batches)
    synchronize(row)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(run, batches)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronize(row)
    row.say("a step waits for the device", waits=False)
