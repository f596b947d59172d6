#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""One rank of gpu-check's row ep-overlap: the program, and a note of what it started and built.

    torchrun --nproc-per-node=2 tests/gpu/moe_rank.py NOTE --flags...

writes NOTE.RANK, of JSON: after each step the threads of the process, the threads of Python that it
has started so far, and the attention plans that cuDNN has built so far; at the end the memory in
use on the rank's GPU, and on rank 0 the processes on each GPU, as nvidia-smi lists them.

Plans: with TORCH_CUDNN_SDPA_CACHE_DEBUG=1 torch warns at each look-up but the first of a cache, and
a thread has two caches, of forward and of backward (aten/src/ATen/native/cudnn/MHA.cpp). All
layers here have one shape, so a cache that is looked up twice has one plan.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # as a script, find the program

from tests.gpu.row import Absent  # noqa: E402

SECOND = "SDPA Cache Called 1 times"  # what a cache says at its second look-up


class Noted:
    """What a rank notes after each step."""

    def __init__(self) -> None:
        self.threads, self.started, self.plans = list[int](), list[int](), list[int]()
        self.starts, self.caches = 0, 0

    def starting(self, start: Callable[[threading.Thread], None]) -> Callable[..., None]:
        """Return what takes the place of Thread.start: it counts."""

        def counted(thread: threading.Thread) -> None:
            self.starts += 1
            start(thread)

        return counted

    def warned(self, message: Warning | str, *about: Any, **more: Any) -> None:
        """Count a cache of plans; take the place of warnings.showwarning."""
        text = str(message)
        self.caches += SECOND in text
        if "SDPA Cache" not in text:
            print(text, file=sys.stderr)

    def after_step(self) -> None:
        """Note the counts so far."""
        tasks = Path("/proc/self/task")
        self.threads += [len(list(tasks.iterdir()))] if tasks.is_dir() else []
        self.started.append(self.starts)
        self.plans.append(self.caches)


def processes() -> dict[str, int]:
    """Return how many processes have memory on each GPU, as nvidia-smi lists them."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return {}
    words = [tool, "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=False)
    lines = {line.strip() for line in done.stdout.splitlines() if "," in line}
    return dict(Counter(line.split(",")[0] for line in lines))


def main(note: Path, words: list[str]) -> int:
    """Run the program; write the note."""
    import torch

    import pretrain_llama

    noted, train_step = Noted(), pretrain_llama.train_step
    gpus = dict[str, int]()
    threading.Thread.start = noted.starting(threading.Thread.start)
    warnings.simplefilter("always")
    warnings.showwarning = noted.warned

    def step(run: Any, *args: Any) -> Any:
        found = train_step(run, *args)
        noted.after_step()
        if run.iteration + 1 == run.config.batch.train_iters and run.grid.rank == 0:
            gpus.update(processes())
        return found

    pretrain_llama.train_step = step
    code = pretrain_llama.main(words)
    said = {"threads": noted.threads, "started": noted.started, "plans": noted.plans}
    said["processes_on_gpus"] = gpus
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        said |= {"gpu_bytes_used": total - free, "peak_bytes": torch.cuda.max_memory_allocated()}
    else:
        said["plans"] = []  # cuDNN has none here
    note.with_suffix("." + os.environ.get("RANK", "0")).write_text(json.dumps(said))
    return code


if __name__ == "__main__":
    sys.meta_path.append(Absent())
    from training.run.process import as_process

    as_process(lambda: main(Path(sys.argv[1]), sys.argv[2:]), None)
