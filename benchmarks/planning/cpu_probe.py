# SPDX-License-Identifier: Apache-2.0
"""Measure what a host's cores do, for benchmarks/planning/cpu_host.py, inside a world of ranks.

All ranks measure the same at the same time, as ranks of a run do. A matmul, a kernel of csrc, a
collective and a message are measured alone; Python's seconds are steps of models whose numbers are
too few to take time; the update and what is left are those of one model of a size of its own.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.planning.cpu_host import Host, Product, Rates
from benchmarks.planning.cpu_time import Rank, parts, told
from forecast.rehearsal.patches import Patches
from mpu.comm.collectives import all_gather, all_reduce, all_to_all, barrier, reduce_scatter
from mpu.comm.p2p import receive, send
from mpu.comm.transport import Axis
from mpu.launch import Launch
from mpu.layers import fused
from mpu.layers.linear import Recipe
from pretrain_llama import LlamaRun, build, train_step
from training.data.batch import Batch, DocumentRules, make_batch
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse
from training.run.model_profile import make_grid
from training.settings.config import Config

CPU = torch.device("cpu")
REPEATS = 5
TRIALS = 9  # steps of a model
BYTES = (64, 4096, 65_536, 1 << 20, 1 << 22, 1 << 24)  # of a transfer
BASE = (
    "--mock-data --lr 1e-3 --train-iters 1 --device cpu --untie-embeddings-and-output-weights "
    "--micro-batch-size 2"
)
LITTLE = "--hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 8"
LITTLE += " --vocab-size 128"
OWN = (
    "--hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --seq-length 384 --vocab-size 2048 --num-layers 3"
)  # neither tiny's nor small's
CONTEXT = tuple((comm, b) for comm in ("p2p", "all_gather", "a2a") for b in (1, 4))


def timed(run: Callable[[], Any], repeats: int = REPEATS, before: Any = lambda: None) -> float:
    """Return the fastest seconds of a call, after one that warms up.

    Other programs slow a call down and never speed it up.
    """
    run()
    found = []
    for _ in range(repeats):
        before()
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def product_seconds(asked: Product) -> float:
    """Return the seconds of a matmul, as the product's layers do it."""
    recipe, kind = Recipe(), getattr(torch, asked.dtype)
    if asked.kind == "wgrad":
        x, dy = torch.randn(asked.k, asked.n, dtype=kind), torch.randn(asked.k, asked.m, dtype=kind)
        slot = torch.zeros(asked.m, asked.n)
        call: Callable[[], Any] = partial(recipe.accumulate, slot, False, x, dy)
    else:
        x = torch.randn(asked.m, asked.k, dtype=kind)
        w = torch.randn(asked.n, asked.k, dtype=kind)
        if asked.kind == "dgrad":
            w = torch.randn(asked.k, asked.n, dtype=kind).t()
        call = partial(recipe.product, x, w)
    with torch.no_grad():
        return timed(call)


class Kernels:
    """Times csrc's kernels while steps run: seconds of each number of the first tensor."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._call = fused.call

    def call(self, name: str, dtype: torch.dtype, *args: Tensor | int | float | None) -> None:
        began = time.perf_counter()
        self._call(name, dtype, *args)
        seconds = time.perf_counter() - began
        first = args[0]
        assert isinstance(first, Tensor)
        numbers = first.numel()
        if name.startswith("swiglu_backward"):
            numbers = max(a.numel() for a in args if isinstance(a, Tensor))
        if name.startswith("attention"):
            numbers *= first.shape[0]  # q [s, b, a, d]: each number meets s keys
        self.seconds[f"{name} {str(dtype).removeprefix('torch.')}"].append(seconds / numbers)


def batches_of(config: Config, count: int) -> list[Batch]:
    m, b = config.model, config.batch.micro_batch_size
    assert m.vocab_size is not None
    rows = np.random.default_rng(0).integers(0, m.vocab_size - 1, (b, m.seq_length + 1))
    return [make_batch(rows, DocumentRules(), 0)] * count


def alone(flags: str) -> LlamaRun:
    """Build a run of one rank."""
    config = parse([*BASE.split(), *flags.split()], 1)
    return build(config, make_grid(config, Launch()), CPU, FailureMonitor())


def step_seconds(run: LlamaRun, count: int) -> float:
    """Return the seconds of a step of so many micro-batches."""
    batches = batches_of(run.config, count)
    return timed(lambda: train_step(run, batches, 1e-3)[0].item(), TRIALS)


def python_seconds() -> dict[str, float]:
    """Return Rates' layer, micro_batch, step and step_layer: of models of few numbers."""
    found = {}
    for layers in (2, 8):
        run = alone(f"{LITTLE} --num-layers {layers} --global-batch-size 8")
        for count in (1, 4):
            found[layers, count] = step_seconds(run, count)
    slope = {layers: (found[layers, 4] - found[layers, 1]) / 3 for layers in (2, 8)}
    layer = (slope[8] - slope[2]) / 6
    base = {layers: found[layers, 1] - slope[layers] for layers in (2, 8)}
    step_layer = max(0.0, (base[8] - base[2]) / 6)
    return {
        "layer": layer, "micro_batch": max(0.0, slope[2] - 2 * layer),
        "step": max(0.0, base[2] - 2 * step_layer), "step_layer": step_layer,
    }  # fmt: skip


def rates(products: Iterable[Product]) -> dict[str, Any]:
    """Return Rates' fields, for as many threads as this rank has."""
    products, python = list(products), python_seconds()
    found = {each.key: product_seconds(each) for each in products}
    calls = dict[str, float]()
    for kind in sorted({each.dtype for each in products}):
        run = alone(f"{OWN} --global-batch-size 2" + " --bf16" * (kind == "bfloat16"))
        numbers = sum(p.numel() for p in run.model.parameters())
        update = timed(partial(run.optimizer.step, 1e-3), TRIALS)
        own = Rank.of(run.config)
        found |= {p.key: product_seconds(p) for p in (*own.of_layer, *own.of_head)}
        kernels, patches = Kernels(), Patches()
        with patches:
            patches.everywhere(fused.call, kernels.call)
            step = step_seconds(run, 1)
        calls |= {name: median(each) for name, each in kernels.seconds.items()}
        layers = run.config.model.num_layers
        fixed = python["step"] + python["step_layer"] * layers
        calls[f"update {kind}"] = max(0.0, update - fixed) / numbers
        made = Rates(**{"products": found, "calls": calls | {f"glue {kind}": 0.0}, **python})
        layer, _, head = parts(made, own)
        known = layers * sum(layer) + sum(head) + update + python["micro_batch"]
        calls[f"glue {kind}"] = max(0.0, step - known) / ((layers + 1) * own.own * own.hidden)
    return {"products": found, "calls": calls, **python}


def together_seconds(axis: Axis) -> float:
    """Return the seconds of a step that each rank of an axis takes alone, all at the same time."""
    run, found = alone(f"{OWN} --global-batch-size 2"), []
    batches = batches_of(run.config, 1)
    for _ in range(TRIALS):
        barrier(axis)
        began = time.perf_counter()
        train_step(run, batches, 1e-3)[0].item()
        seconds = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        found.append(float(all_gather(seconds, axis)[0].max()))
    return min(found)


def context_config(comm: str, b: int) -> Config:
    """Return the run of two context-parallel ranks that is timed for one of CONTEXT."""
    words = f"{BASE.replace('size 2', f'size {b}')} {OWN} --global-batch-size {b}"
    return parse(f"{words} --context-parallel-size 2 --cp-comm-type {comm}".split(), 2)


def context_of(host: Host, seconds: Mapping[str, float]) -> dict[str, list[float]]:
    """Return Host.context. seconds: of context_config's steps, by "comm b"."""
    found = {}
    for comm in dict.fromkeys(comm for comm, _ in CONTEXT):
        at, rest = [], []
        for b in (1, 4):
            config = context_config(comm, b)
            more = seconds[f"{comm} {b}"] - told(host, config).step
            at.append(Rank.of(config).pairs)
            rest.append(more / config.model.num_layers)
        each = max(0.0, (rest[1] - rest[0]) / (at[1] - at[0]))
        found[comm] = [max(0.0, rest[0] - each * at[0]), each]
    return found


def transfer_seconds(axis: Axis) -> dict[str, list[tuple[float, float]]]:
    """Return (bytes that a rank sends, seconds) of each verb among the ranks of an axis."""
    n, found = axis.size, defaultdict[str, list[tuple[float, float]]](list)
    for count in BYTES:
        x = torch.ones(max(n, count // 4 // n * n))

        shared = x.nbytes * (n - 1) / n
        verbs: dict[str, tuple[Callable[..., Any], float]] = {
            "all_gather": (partial(all_gather, x[: len(x) // n], axis), shared),
            "reduce_scatter": (partial(reduce_scatter, x, axis), shared),
            "all_reduce": (partial(all_reduce, x, axis), 2 * shared),
            "all_to_all": (partial(all_to_all, x, axis), shared),
        }
        if n == 2:
            verbs["send"] = (partial(_exchange, x, axis), x.nbytes)
        for verb, (call, sent) in verbs.items():
            seconds = timed(call, 11, partial(barrier, axis))
            found[verb].append((float(sent), seconds))
    return found


def _exchange(x: Tensor, axis: Axis) -> None:
    """Send to the other rank and receive from it."""
    out, arriving = receive(tuple(x.shape), x.dtype, CPU, axis, 1 - axis.rank)
    leaving = send(x, axis, 1 - axis.rank)
    arriving.wait()
    leaving.wait()
