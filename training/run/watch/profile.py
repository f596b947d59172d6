# SPDX-License-Identifier: Apache-2.0
"""Write the output of --profile: torch's trace, and a timeline of each pipeline rank's actions.

--record-memory-history writes the history of CUDA's allocator, for torch's viewer,
https://pytorch.org/memory_viz.
"""

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from mpu.comm.transport import Axis
from mpu.grid import Grid
from mpu.pipeline.engine import Engine
from mpu.torch_private import memory_history
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer
from training.data.files import write_text
from training.files.owned import check, json_with
from training.files.untrusted import open_plain
from training.run.output import say
from training.run.step import CONTINUE, Decision, Step
from training.run.stop import Agreement
from training.settings.config import Config

EVENTS = 100_000  # newest events of the allocator that are kept, as in Megatron
VIEWER = "https://pytorch.org/memory_viz"


def folder_of(config: Config) -> Path:
    """Return the folder of a run's profile: --tensorboard-dir, or one with the run's own files.

    The latter is `profile` in --save, else next to --log-json, else here.
    """
    if config.log.tensorboard_dir:
        return Path(config.log.tensorboard_dir)
    if config.checkpoint.save:
        return Path(config.checkpoint.save) / "profile"
    return Path(config.log.log_json or "").parent / "profile"


def _is_snapshot(path: Path) -> bool:
    """Return whether a file is empty or a memory snapshot of torch, a pickle of known keys."""
    with suppress(OSError), open_plain(path) as file:
        head = file.read(256)
        return not head or b"segments" in head or b"device_traces" in head
    return False


def snapshot_of(config: Config, rank: int) -> Path | None:
    """Return the path of a rank's --record-memory-history, None if it writes none."""
    if not config.log.record_memory_history or rank not in config.log.profile_ranks:
        return None
    path = Path(config.log.memory_snapshot_path or folder_of(config) / "memory.pickle")
    return path.with_name(f"{path.stem}_rank{rank}{path.suffix}")


class Profile:
    """Trace steps [--profile-step-start, --profile-step-end), counted from 0 at the run's start.

    The ranks of --profile-ranks write torch's trace; the ranks of the first pipeline write
    pipeline_rank<r>.json, the spans of these steps in seconds of the wall clock. Both go to
    `folder_of` the run. note: called on rank 0 with a line that names the folder. A context
    manager; without its flags it does nothing.

    torch's profiler frees its events when it stops. A gloo collective that ends later would still
    write into its event, in memory that may be reused by then. So the collectives in flight between
    two steps (the weights of `sink`, the flags of `agreement`) are waited for before the trace
    stops. After an error, when waiting may hang, the trace is neither stopped nor written.
    """

    def __init__(
        self,
        config: Config,
        grid: Grid,
        engine: Engine,
        sink: ParamAndGradBuffer,
        agreement: Agreement,
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        log = config.log
        self._folder, self._steps, self._note_line = folder_of(config), 0, note
        self._reported = not log.profile or grid.rank != 0  # rank 0 prints for all
        self._ranks = ", ".join(map(str, log.profile_ranks))
        self._snapshot = snapshot_of(config, grid.rank)
        self._first, self._end = log.profile_step_start, log.profile_step_end
        first_pipeline = grid.pp.size > 1 and grid.tp.rank == grid.dp_cp.rank == 0
        self._engine = engine if log.profile and first_pipeline else None
        self._pp: Axis = grid.pp
        self._in_flight = (sink.wait_for_weights, agreement.wait)
        self._trace: torch.profiler.profile | None = None
        self._recorded: list[dict[str, Any]] = []
        if log.profile and grid.rank in log.profile_ranks:
            self._trace = torch.profiler.profile(
                schedule=torch.profiler.schedule(
                    wait=max(0, self._first - 1),
                    warmup=int(self._first > 0),
                    active=self._end - self._first,
                    repeat=1,
                ),
                on_trace_ready=torch.profiler.tensorboard_trace_handler(
                    str(self._folder), f"rank{grid.rank}"
                ),
            )

    def __enter__(self) -> "Profile":
        if self._snapshot is not None:
            memory_history()[0](max_entries=EVENTS)
        self._measure()
        if self._trace is not None:
            self._trace.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._trace is not None and error[0] is None:
            self._drain()
            self._trace.__exit__(*error)
        if self._recorded:  # also where the run ended before --profile-step-end
            self._write()
        if error[0] is None and self._steps > self._first:
            self._report()
        if self._snapshot is not None:  # also after an error, such as out of memory
            self._snapshot.parent.mkdir(parents=True, exist_ok=True)
            check(self._snapshot, _is_snapshot)
            record, write = memory_history()
            write(str(self._snapshot))
            record(enabled=None)
            say(f"memory history: {self._snapshot}; open it at {VIEWER}")

    def after_step(self, step: Step) -> Decision:
        """Count the step."""
        self.step()
        return CONTINUE

    def step(self) -> None:
        """Count one training step."""
        if self._trace is not None:
            if self._trace.current_action is torch.profiler.ProfilerAction.RECORD_AND_SAVE:
                self._drain()  # the trace stops now
            self._trace.step()
        self._steps += 1
        if self._engine is not None and self._engine.spans is not None:
            self._note(self._engine)
        self._measure()

        if self._steps == self._end:
            self._report()

    def _report(self) -> None:
        """Print once where the profile is."""
        if not self._reported:
            self._reported, last = True, min(self._steps, self._end) - 1
            self._note_line(
                f"profile of steps {self._first} to {last} of this start: {self._folder} (open "
                f"torch's traces of rank {self._ranks} with `tensorboard --logdir` or "
                "ui.perfetto.dev)"
            )

    def _drain(self) -> None:
        for wait in self._in_flight:
            wait()

    def _measure(self) -> None:
        if self._engine is not None:
            self._engine.spans = [] if self._first <= self._steps < self._end else None

    def _note(self, engine: Engine) -> None:
        schedule, to_wall = engine.schedule, time.time() - time.perf_counter()
        assert schedule is not None and engine.spans is not None
        spans = [[*span[:3], span[3] + to_wall, span[4] + to_wall] for span in engine.spans]
        self._recorded.append({"iteration": self._steps, "spans": spans})

    def _write(self) -> None:
        assert self._engine is not None and self._engine.schedule is not None
        schedule = self._engine.schedule
        record = {
            "schedule": schedule.name,
            "chunks": schedule.chunks,
            "v_shape": schedule.v_shape,
            "split": schedule.split,
            "pp_rank": self._pp.rank,
            "pp_size": self._pp.size,
            "steps": self._recorded,
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"pipeline_rank{self._pp.rank}.json"
        write_text(path, json.dumps(record) + "\n", json_with("schedule", "pp_rank"))
