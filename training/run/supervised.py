# SPDX-License-Identifier: Apache-2.0
"""Save and resume under a launcher that restarts ranks: tools/supervise.py, or torchrun.

A restart has the flags of the first start. It begins at the newest sound checkpoint of this run: of
--load, of --save, or of the copies that the supervisor keeps in the host's memory
(--peer-checkpoint N). These have the format of a checkpoint, but each host holds the files of its
own ranks, and of whatever other ranks' files its supervisor fetched. Beside each copy stands
needs_STEP.json: {rank: the files that this rank would load}.
"""

import os
import secrets
import shutil
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training import checkpoint
from training.checkpoint.files import write_json
from training.checkpoint.load import Checkpoint
from training.checkpoint.manifest import STEP
from training.checkpoint.stage import Staging
from training.config import UsageError
from training.run.saver import Saver

PROGRESS = struct.Struct("=qdqdq")  # first iteration, when; iteration, when; SOURCES' place
SOURCES = ("nothing", "disk", "memory")
MOST = 3  # copies that may wait in memory for the supervisor to remove them


class SupervisedSaver(Saver):
    """A Saver that also tells the supervisor how far the run is, and keeps copies in its memory.

    Without a supervisor it is a Saver, whose restarts begin at the newest of --load and --save.
    """

    def begin(self) -> tuple[int, int]:
        """Do what Saver.begin() does. Raises UsageError for --peer-checkpoint and no supervisor."""
        launch, every = self.ctx.grid.launch, self.config.fault.peer_checkpoint
        if every and not launch.supervisor:
            raise UsageError(
                f"--peer-checkpoint {every} needs tools/supervise.py, whose memory keeps the copies"
            )
        self._source, self._needs = 0, list[str]()
        self._memory = Path(launch.supervisor) / "memory" if launch.supervisor else None
        iteration, consumed = super().begin()
        if every and self._staging is None:
            self._staging = Staging(self.pieces())
        self._progress = -1
        if self._memory is not None and self.ctx.grid.rank == 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW
            self._progress = os.open(self._memory.parent / "progress", flags, 0o600)
        self._first = (iteration, time.monotonic())
        self.reached(iteration)
        return iteration, consumed

    def reached(self, iteration: int) -> None:
        """Tell the supervisor that this step is done."""
        if self._progress >= 0:
            record = PROGRESS.pack(*self._first, iteration, time.monotonic(), self._source)
            os.pwrite(self._progress, record, 0)

    def load(self) -> tuple[int, int]:
        """Resume a restarted run where it was; the first start does what Saver.load() does."""
        c, grid = self.config.checkpoint, self.ctx.grid
        # torchrun's agents may count differently: rank 0's count holds
        attempts = checkpoint.together(lambda: grid.launch.attempt, grid.world, self.ctx.device)
        if attempts[0].value == 0:
            return super().load()
        paths = [path for path in dict.fromkeys((c.load, c.save)) if path is not None]
        fresh = c.finetune or c.ckpt_step is not None or c.load is None
        if fresh or checkpoint.is_hugging_face(paths[0], grid, self.ctx.device):
            fresh, paths = True, paths[c.load is not None and c.load != c.save :]
        after = (c.ckpt_step or 0) if fresh else -1  # what --save has later is this run's
        found = self._find("--load", checkpoint.Roots(paths, self._memory, after), False)
        return super().load() if found is None else found

    def _check_resume(self, found: Checkpoint) -> None:
        super()._check_resume(found)
        self._source = 2 if found.directory.parent == self._memory else 1

    def rewind(self) -> tuple[int, int] | None:
        """Do what Saver.rewind() does, and forget the copies of what is made undone."""
        found = super().rewind()
        memory, launch = self._memory, self.ctx.grid.launch
        if found is not None and memory is not None and launch.local_rank == 0:
            for path in memory.glob("step_*"):
                shutil.rmtree(path, ignore_errors=True)
        return found

    def keep(self, iteration: int, consumed: int) -> None:
        """Copy this step's state into the supervisor's memory, in the background.

        Where it fails, training goes on with a line about it.
        """
        assert self._staging is not None and self._memory is not None
        self._settle(self._background.wait)
        pieces, state = self.pieces(), self._state(iteration, consumed)
        staged = self._staging.copy(pieces)
        self._background.start(lambda: self._keep(iteration, pieces, staged, state))

    def _keep(
        self,
        iteration: int,
        pieces: Sequence[checkpoint.NamedPiece],
        staged: Sequence[checkpoint.NamedPiece],
        state: Mapping[str, Any],
    ) -> None:
        grid, memory = self.ctx.grid, self._memory
        assert memory is not None

        def count() -> int:
            return sum(bool(STEP.fullmatch(name)) for name in os.listdir(memory))

        def needs() -> list[str]:
            return self._needs or Checkpoint(path).files_of(pieces)

        try:
            if max(self._told(count)) >= MOST:
                raise checkpoint.SaveError(
                    f"step {iteration} is not copied to memory: the supervisors still work on the "
                    f"{MOST} copies before"
                )
            path = checkpoint.save(
                memory, step=iteration, pieces=staged, state=state, grid=grid,
                world=grid.background, attach=self._attach, local=True,
            )  # fmt: skip
            told = self._told(needs)
            self._needs = told[grid.rank]
            if grid.launch.local_rank == 0:
                aside = memory / f".needs-{secrets.token_hex(8)}"
                write_json(aside, {str(rank): names for rank, names in enumerate(told)})
                os.replace(aside, memory / f"needs_{iteration:08d}.json")
        except (checkpoint.SaveError, OSError) as error:
            self.note(f"{error}; training goes on")

    def _told(self, work: Callable[[], Any]) -> list[Any]:
        """Return what work() is on each rank. Raises SaveError, on every rank, if one fails."""
        outcomes = checkpoint.together(work, self.ctx.grid.background)
        if (failed := checkpoint.first_error(outcomes)) is not None:
            raise checkpoint.SaveError(f"no copy in memory: rank {failed.rank}: {failed.error}")
        return [outcome.value for outcome in outcomes]
