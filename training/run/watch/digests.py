# SPDX-License-Identifier: Apache-2.0
"""Write a line of digests every --log-digests steps, by which tools/bisect_runs.py compares runs.

The file is digests.jsonl in --save, else next to --log-json, else here (docs/bisect.md has its
format). Each start of the run writes a line about itself, then one for each digested step: samples,
loss, norm, learning rate, and for each tensor of the model digests of its gradient and weight,
exact ones and sketches (mpu/zero/digest.py).
"""

import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpu.comm.collectives import all_reduce
from mpu.comm.transport import Label
from mpu.zero.digest import KINDS, StateDigest, keys
from training.data.batch import Batch
from training.data.context_part import places_of
from training.run.log import Log
from training.run.output import open_json, write_line
from training.run.state import Run
from training.run.step import CONTINUE, Decision, Step
from training.run.watch.intervals import due
from training.settings.config import Config

FORMAT = "weft digests 1"
FILE = "digests.jsonl"
LABEL = Label("digests", "digests")
MASK = (1 << 64) - 1


def file_of(config: Config) -> Path:
    """Return the path of a run's digests."""
    folder = config.checkpoint.save or Path(config.log.log_json or "").parent
    return Path(folder) / FILE


class Digests:
    """Digests a run's steps.

    names: the model's table of canonical names. about: hashes of its data and its tokenizer.
    Raises ValueError if the file cannot be written.
    """

    def __init__(
        self, run: Run, names: Mapping[str, Sequence[str]], about: Mapping[str, str], log: Log
    ) -> None:
        self.run, self.log, self.every = run, log, run.config.log.log_digests
        self._state = StateDigest(run.grid, run.optimizer, names)
        self._file: Any = None
        if run.grid.rank == 0:
            self._file = open_json(file_of(run.config), "--log-digests")
            self._write(self._head(about))

    def _head(self, about: Mapping[str, str]) -> dict[str, Any]:
        run = self.run
        return {
            "format": FORMAT,
            "iteration": run.iteration,
            "world": run.grid.world_size,
            "torch": torch.__version__,
            "machine": [platform.machine(), str(run.device.type), torch.get_num_threads()],
            "config": run.config.flat(),
            "command_line": list(run.config.command_line),
            "digests": dict(about),
            "names": self._state.names,
        }

    def after_step(self, step: Step) -> Decision:
        """Write a line if one is due."""
        if due(self.every, step.iteration):
            self.run.monitor.action = f"the digests of iteration {step.iteration}"
            self.digest(step)
        return CONTINUE

    def digest(self, step: Step) -> None:
        """Digest a step that was just made, on all ranks, and write its line on rank 0."""
        tokens = batch_digest(self.run, step.micro_batches)
        exact, sketch = self._state.run()
        all_reduce(tokens, self.run.grid.world, label=LABEL)
        if self._file is None:
            return
        line: dict[str, Any] = {
            "iteration": step.iteration,
            "samples": [step.consumed, step.size],
            "batch": _hex(int(tokens)),
            "loss": step.loss.item(),
            "norm": step.norm.item(),
            "lr": step.lr,
        }
        numbers = [[[_short(x) for x in each] for each in kinds] for kinds in sketch.tolist()]
        for i, kind in enumerate(KINDS):
            line[kind] = [_hex(kinds[i]) for kinds in exact.tolist()]
            line[f"{kind} sketch"] = [kinds[i] for kinds in numbers]
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        try:
            write_line(self._file, json.dumps(line, separators=(",", ":")))
        except OSError as error:
            self._file = None
            self.log.note(
                f"--log-digests: {error.strerror or error}; nothing more is written to it"
            )


def batch_digest(run: Run, batches: Sequence[Batch]) -> Tensor:
    """Return the sum of token x sample key x position key over this rank's part of the batch.

    The sum over all ranks is the batch's digest, modulo 2^64. It is 0 on all but the first of the
    ranks with the same tokens.
    """
    grid, device = run.grid, run.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    if grid.tp.rank or grid.pp.rank:
        return total
    for batch in batches:
        rows = keys("sample", batch.first_sample, len(batch.tokens), device)
        at = places_of(batch, grid.cp.rank, grid.cp.size).to(device)
        columns = keys("position", 0, batch.tokens.shape[1] * grid.cp.size, device)[at]
        labels = batch.labels + (batch.tokens << 32)
        total += ((labels * columns).sum(1) * rows).sum()
    return total


def _hex(value: int) -> str:
    return f"{value & MASK:016x}"


def _short(value: float) -> float:
    return float(f"{value:.13g}")
