#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One real training step on a GPU: does it wait, which attention, how much memory, which kernels.

    python tests/gpu/measure_step.py OUT.json [PREDICTION.json] [-- FLAG...]

What torch calls a synchronisation is an error in the third step. The fourth is profiled, the next
ones are timed.
"""

import json
import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # as a script, find mpu

import os  # noqa: E402

from mpu.launch import Launch, environment_defaults  # noqa: E402

os.environ.update(environment_defaults(os.environ))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import pretrain_llama  # noqa: E402
from estimate.model_profile import make_grid  # noqa: E402
from model.load import of_checkpoint  # noqa: E402
from tests.gpu.prediction import compare, load  # noqa: E402
from tools.gpu_check import STEP  # noqa: E402
from training.data.batch import DocumentRules, make_batch  # noqa: E402
from training.data.tokenizer import tokenizer_for  # noqa: E402
from training.faults.monitor import FailureMonitor  # noqa: E402
from training.flags.parse import parse  # noqa: E402
from training.run.device import choose_device  # noqa: E402

BACKENDS = {
    "aten::_scaled_dot_product_flash_attention": "flash attention",
    "aten::_scaled_dot_product_efficient_attention": "memory-efficient attention",
    "aten::_scaled_dot_product_cudnn_attention": "cuDNN's attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash attention of the CPU",
    "aten::_scaled_dot_product_attention_math": "torch's plain attention (s x s products)",
}


def build(flags: list[str]) -> tuple[Any, list[Any]]:
    """Return the program's Run of one rank, and the micro-batches of a step on its device."""
    config = parse(flags, 1, None, of_checkpoint)
    config = config.with_vocab(tokenizer_for(config).vocab_size)
    device = choose_device(config, Launch(), False, print)
    grid = make_grid(config, Launch())
    run = pretrain_llama.build(config, grid, device, FailureMonitor())
    b, count = config.batch.micro_batch_size, config.batch.global_batch_size
    shape = (count // b, b, config.model.seq_length + 1)
    rows = np.random.default_rng(1).integers(0, config.model.vocab_size or 0, shape)
    batches = [make_batch(each, DocumentRules(), i * b).to(device) for i, each in enumerate(rows)]
    return run, batches


def step(run: Any, batches: list[Any]) -> None:
    """Train one step, without reading its results."""
    pretrain_llama.train_step(run, batches, 1e-4)
    run.iteration += 1


def launches(events: Any, cuda: bool) -> Counter[str]:
    """Count the operations that launched a kernel; on a CPU, those that call no other.

    events: of torch.profiler. A Triton kernel is counted by its own name.
    """
    found: Counter[str] = Counter()
    for event in events:
        if cuda and event.kernels:
            found[event.name] += len(event.kernels)
        elif not cuda and event.name.startswith("aten::") and not event.cpu_children:
            found[event.name] += 1
    return found


def measure(run: Any, batches: list[Any], timed: int = 5) -> dict[str, Any]:
    """Run the steps and return what was seen of them."""
    cuda, seen = run.device.type == "cuda", dict[str, Any]()
    for _ in range(2):  # makes buffers, loads kernels
        step(run, batches)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(run, batches)
            seen["waits"] = ""
        except RuntimeError as error:
            seen["waits"] = str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        seen["peak_bytes"] = torch.cuda.max_memory_allocated()
        seen["reserved_bytes"] = torch.cuda.max_memory_reserved()
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
    with torch.profiler.profile(activities=kinds) as profile:
        step(run, batches)
        if cuda:
            torch.cuda.synchronize()
    events = profile.events()
    seen["launches"] = dict(launches(events, cuda))
    names = {event.name for event in events}
    seen["attention"] = [text for name, text in BACKENDS.items() if name in names]
    table = profile.key_averages()
    seen["table"] = table.table(sort_by="self_device_time_total" if cuda else "count", row_limit=30)
    spent = []
    for _ in range(timed):
        begin = time.perf_counter()
        step(run, batches)
        if cuda:
            torch.cuda.synchronize()
        spent.append(time.perf_counter() - begin)
    seen["step_seconds"] = statistics.median(spent)
    return seen


def main(argv: list[str]) -> int:
    """Measure, print, write; return 1 where a step waited for the device."""
    at = argv.index("--") if "--" in argv else len(argv)
    files, flags = argv[:at], argv[at + 1 :]
    run, batches = build(flags or STEP)
    seen = measure(run, batches)
    Path(files[0]).write_text(json.dumps(seen, indent=1))
    print(f"device: {_name(run.device)}; torch {torch.__version__}")
    print(f"attention: {', '.join(seen['attention']) or 'none of those known'}")
    if "waits" in seen:
        print(f"waits in a step: {seen['waits'] or 'none'}")
    if files[1:]:
        print("\n".join(compare(load(Path(files[1])), seen)))
    else:
        print("no prediction was given; measured alone:")
        print("\n".join(f"  {op:<50} {n:>7,}" for op, n in Counter(seen["launches"]).most_common()))
    print(seen["table"])
    return int(bool(seen.get("waits")))


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
