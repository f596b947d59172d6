# SPDX-License-Identifier: Apache-2.0
"""Time steps of ranks with few layers and few micro-batches, for a program that extrapolates them.

    python -m forecast.rehearsal.worker

reads lines, each a JSON list of jobs, and writes one line of JSON for each job, in order. A job is
{"argv", "world", "few", "node", "levels"}: flags of pretrain_llama.py, number of ranks, arguments
of forecast.like_ranks.shortened, number of ranks on a node, and levels of links as in
forecast.device_file.Level. An answer is {"points":
[[micro-batches, numbers], ...]}, with the numbers of forecast/rehearsal/few_layers.py, or {"error":
text}. Each job runs in a process forked from this one, since a rehearsal replaces functions of
torch. AT_ONCE jobs run at a time.
"""

import gc
import json
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any

from forecast.rehearsal import guard

AT_ONCE = 2
ONE = Lock()


def points(job: dict[str, Any], config: Any) -> list[tuple[int, dict[str, float]]]:
    """Return the numbers of a job's step for few and for all micro-batches, if these differ."""
    import pretrain_llama
    from forecast.device_file import Level
    from forecast.fit import gpu_of
    from forecast.rehearsal import main as rehearsal
    from forecast.rehearsal.few_layers import numbers

    device = replace(gpu_of(config), levels=tuple(Level(*level) for level in job["levels"]))
    seen = rehearsal.run(pretrain_llama, config, node=job["node"], tries=False)
    if seen.failure is not None:
        raise RuntimeError(f"{seen.failure.place}: {seen.failure.what}")
    counts = sorted({seen.few, seen.micro_batches})
    return [(count, numbers(seen, device, count)) for count in counts]


def answer(job: dict[str, Any]) -> str:
    """Run a job in a process of its own and return its answer."""
    import pretrain_llama
    from forecast.like_ranks import shortened
    from forecast.rehearsal import main as rehearsal

    with ONE:  # no thread reads flags while another forks; later jobs share what is cached here
        try:
            whole = rehearsal.read(pretrain_llama, job["argv"], job["world"])
            config = shortened(whole, **job["few"])
        except Exception as error:
            return failed(error)
        read, write = os.pipe()
        child = os.fork()
    if not child:
        code = 1
        try:
            os.close(read)
            try:
                text = json.dumps({"points": points(job, config)})
            except Exception as error:
                text = failed(error)
            with os.fdopen(write, "w") as out:
                out.write(text)
            code = 0
        finally:
            os._exit(code)  # at once, as threads of the trainer may still be waiting
    os.close(write)
    with os.fdopen(read) as received:
        text = received.read()
    os.waitpid(child, 0)
    return text or json.dumps({"error": "the rehearsal process ended without a result"})


def failed(error: Exception) -> str:
    """Return the answer for a job that raised an error."""
    return json.dumps({"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Answer jobs until the input ends."""
    guard.load()
    import torch

    guard.check(torch)
    torch.set_num_threads(1)
    import pretrain_llama  # noqa: F401  # once, for all processes
    from forecast.rehearsal import few_layers  # noqa: F401
    from forecast.rehearsal import main as rehearsal  # noqa: F401
    from forecast.rehearsal.fakes import fake_tensor_mode

    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    fake_tensor_mode()  # the first call imports many modules
    gc.freeze()  # objects made so far are no garbage; forked processes do not scan them
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for line in sys.stdin:
            for text in pool.map(answer, json.loads(line)):
                print(text, flush=True)


if __name__ == "__main__":
    main()
