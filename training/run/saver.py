# SPDX-License-Identifier: Apache-2.0
"""Save a run to --save, under its lock; remove checkpoints that are not to be kept."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from mpu.context import LayerContext
from mpu.optim.optimizer import Optimizer
from training import checkpoint
from training.checkpoint.lock import PATIENCE, DirectoryLock
from training.checkpoint.manifest import step_name
from training.checkpoint.pieces import share
from training.checkpoint.retain import clear_rubbish, prune, step_directories
from training.checkpoint.save import check_room
from training.checkpoint.stage import Background, Staging
from training.faults.activity import Activity
from training.run import resumable
from training.run.best import Best
from training.run.export import HuggingFaceSaves
from training.run.resume import Resume
from training.run.saved_state import SavedState
from training.settings.config import Config


class Saver:
    """Writes a run's checkpoints; `resume` reads them, `saved` has their contents.

    names: the model's table of canonical names. hf_config(model.config, dtype): its sizes in
    Hugging Face's terms; from_hf_config: the inverse. digests: hashes of the tokenizer and of the
    data, stored with the state. activity: prints slow operations of the start. evaluated_on: {set
    of held-out data: hash of the part that an evaluation reads}, for --keep-best. As a context
    manager it waits for the save in progress, except after an error that other ranks may not share.
    """

    def __init__(
        self,
        config: Config,
        ctx: LayerContext,
        model: nn.Module,
        optimizer: Optimizer,
        names: Mapping[str, Sequence[str]],
        hf_config: Callable[[Any, str], dict[str, Any]],
        from_hf_config: Callable[[dict[str, Any]], Any],
        digests: Mapping[str, str],
        note: Callable[[str], None],
        activity: Activity | None = None,
        evaluated_on: Mapping[str, str] | None = None,
    ) -> None:
        self.activity = activity or Activity(ctx.grid.launch, note)
        dtype = str(config.run.dtype).removeprefix("torch.")
        sizes = resumable.spelled(hf_config, model.config, dtype)
        self.config, self.ctx, self.note = config, ctx, note
        self.saved = SavedState(
            config, ctx, model, optimizer, names=names, hf_config=sizes, digests=digests
        )
        self.resume = Resume(
            config, self.saved,
            lambda foreign: resumable.spelled(hf_config, from_hf_config(foreign), dtype),
            note, self.activity,
        )  # fmt: skip
        self.failed: checkpoint.SaveError | None = None  # the failure that is to end the run
        self._background, self._pruning = Background(), Background()
        self._staging: Staging | None = None
        c = config.checkpoint
        self._hf = HuggingFaceSaves(c, ctx.grid, note) if c.save and c.save_hf else None
        self._lock: DirectoryLock | None = None
        self.best: Best | None = None
        if c.save and c.keep_best is not None:
            self.best = Best(c.keep_best, evaluated_on or {}, self._wait)
        self._hurry = False  # a signal ends the run: leave as soon as it is saved

    def begin(self) -> tuple[int, int]:
        """Check that --save can be written, take its lock, load; return (iteration, samples).

        Raises the errors of load(), and SaveError, also where --save has complete checkpoints of
        steps after the one at which this run begins: a resume would load one of those.
        """
        save = self.config.checkpoint.save
        return self.resume.load() if save is None else self._lock_and_load(Path(save))

    def _lock_and_load(self, root: Path) -> tuple[int, int]:
        """Load under the lock of --save: another run that had it may have been saving."""
        c, world, device = self.config.checkpoint, self.ctx.grid.world, self.ctx.device
        pieces = self.saved.pieces()
        with self.activity.doing(f"checking whether --save {root} can be written"):
            made = checkpoint.check_writable(root, self.ctx.grid, device)
        patience = min(PATIENCE, 30.0 * self.config.parallel.distributed_timeout_minutes)

        def claim() -> None:
            if world.rank == 0:
                with self.activity.doing(f"taking the lock of --save {root}"):
                    self._lock = DirectoryLock(root, self.note, patience)
                if self._hf is not None:
                    self._hf.begin()

        self._together(claim)
        try:
            iteration, consumed = self.resume.load()
            self._together(lambda: self._refuse_later(root, iteration))
            self._together(lambda: self._refuse_to_prune(root))
            if self._hf is not None:
                hf, flag = self._hf, f"--save-hf {c.save_hf}"
                self._together(lambda: hf.refuse_others(iteration), flag)
            sizes = self._together(lambda: sum(p.nbytes for p in share(pieces)))
            self._together(lambda: self._make_room(root, sum(sizes)))
        except ValueError:  # a mistake leaves nothing behind
            if self._lock is not None:
                self._lock.close(undo=True)
            for path in made:
                with suppress(OSError):
                    path.rmdir()
            raise
        self._find_best(iteration)

        def clear() -> None:  # finish a prune that was killed
            prune(root, None, None, set(), self.note)

        if not self.ctx.grid.rank:
            self._pruning.start(clear)
        if c.async_save:
            self._staging = Staging(pieces)
        if self._hf is not None and iteration and not self.resume.later:
            self._background.start(lambda: self._export(root / step_name(iteration), False))
        return iteration, consumed

    def _make_room(self, root: Path, need: int) -> None:
        """Raise OSError unless a checkpoint fits, after the removals that a save would make."""
        if self.ctx.grid.rank:
            return
        clear_rubbish(root, self.resume.whole, self.note)
        try:
            check_room(root, need)
        except OSError:  # the save for a signal prunes nothing
            self._remove_old(root, None)
            check_room(root, need)

    def _find_best(self, iteration: int) -> None:
        """Find the best checkpoint of --save so far, up to an iteration."""
        if (best := self.best) is None:
            return
        root, rank = Path(self.config.checkpoint.save or ""), self.ctx.grid.rank
        if not iteration and self.resume.folder != root.resolve():  # the run begins here
            best.begin(None)
            return
        found, line = self._together(lambda: None if rank else best.find(root, iteration))[0]
        best.begin(found)
        if line:
            self.note(line)
        if best.saved is not None:
            self.note(f"--keep-best: {self.best_line()}")

    def best_line(self) -> str:
        """Return which checkpoint is the best one so far, "" if there is none."""
        if self.best is None or (found := self.best.saved) is None:
            return ""
        of, root = self.best.set and f"-{self.best.set}", self.config.checkpoint.save
        where = Path(root or "") / step_name(found.step)
        return f"lowest validation{of} loss {found.loss:.4f}, of iteration {found.step}: {where}"

    def _refuse_later(self, root: Path, iteration: int) -> None:
        if self.ctx.grid.rank:
            return
        if foreign := checkpoint.not_saved(root, iteration):
            raise checkpoint.SaveError(
                f"it has {', '.join(foreign)}, which is not a checkpoint of Weft, and a save of "
                "that step would replace it: use another --save, or move it away"
            )
        if later := checkpoint.later_steps(root, iteration, self.resume.later):
            raise checkpoint.SaveError(
                f"this run begins at step {iteration}, but it has checkpoints of later steps "
                f"({', '.join(later)}), and a resume would load the newest: use another --save, "
                "move them away, or resume from them with --load"
            )

    def _refuse_to_prune(self, root: Path) -> None:
        """Raise SaveError if a flag that removes checkpoints would remove another run's."""
        c = self.config.checkpoint
        flags = {
            "--keep-last-k": c.keep_last_k,
            "--save-retain-interval": c.save_retain_interval,
            "--keep-best": c.keep_best is not None,
        }
        flag = next((flag for flag, given in flags.items() if given), None)
        if flag is None or self.ctx.grid.launch.attempt:
            return
        # a checkpoint of step 0 that is evaluated does not count: it is saved again, with its loss
        begun = c.keep_best is not None and self.config.run.eval_at_start
        found = [name for step, _, name in step_directories(root) if step or not begun]
        if found and self.resume.folder != root.resolve() and not self.ctx.grid.rank:
            raise checkpoint.SaveError(
                f"it has checkpoints of another run ({', '.join(found[:3])}), which {flag} would "
                "remove: use another --save, or move them away"
            )

    def _together(self, work: Callable[[], Any], flag: str = "") -> list[Any]:
        """Return work() of all ranks. Raises SaveError, on every rank, if one fails."""
        world, device = self.ctx.grid.world, self.ctx.device
        outcomes = checkpoint.together(work, world, device)
        failed = checkpoint.first_error(outcomes)
        if failed is not None:
            flag = flag or f"--save {self.config.checkpoint.save}"
            raise checkpoint.SaveError(f"{flag}: {failed.error}")
        return [outcome.value for outcome in outcomes]

    def evaluated(self, iteration: int, losses: Mapping[str, float]) -> bool:
        """Record the losses after this step, by the names of the validation sets; return whether
        the step is to be saved for them (--keep-best). All ranks call it.
        """
        return self.best is not None and self.best.evaluated(iteration, losses)

    def _wait(self) -> None:
        """Wait for the save in progress; print its failure."""
        self._report_failure(self._background.wait)

    def save(
        self,
        iteration: int,
        consumed: int,
        must: bool,
        hurry: bool = False,
        only_best: bool = False,
    ) -> None:
        """Save, in the background with --async-save unless it is the last one (`must`).

        A failure is printed and training continues, unless --on-save-failure or `must` forbids it.
        Only one save is in progress at a time: this waits for the previous one. hurry: prune
        nothing afterwards, as a signal's grace period may be short. only_best: only evaluated()
        asks for this save.
        """
        self._hurry = hurry
        self._wait()
        pieces, state = self.saved.pieces(), self.saved.record(iteration, consumed)
        if self.best is not None:
            self.best.settle()
            there = (Path(self.config.checkpoint.save or "") / step_name(iteration)).is_dir()
            state |= self.best.saving(iteration, only_best and not there)
        if self._staging is not None and self.config.checkpoint.async_save and not must:
            staged = self._staging.copy(pieces)

            def behind() -> None:
                path = self._write(iteration, staged, state, True)
                if self._hf is not None:
                    self._export(path)
                self._prune()

            self._background.start(behind)
        else:
            written: list[Path] = []
            self._report_failure(
                lambda: written.append(self._write(iteration, pieces, state, False)), must
            )
            if self.best is not None:
                self.best.settle()
            self._prune()
            if self._hf is not None and written and hurry:
                self.note(f"--save-hf: {written[0].name} will be written by the next start")
            elif self._hf is not None and written:
                self._background.start(lambda: self._export(written[0]))

    def _export(self, saved: Path, again: bool = True) -> None:
        """Write the Hugging Face folder of a checkpoint of --save, from the background thread.

        again: also if the folder exists. Does nothing if the checkpoint does not exist.
        """
        assert self._hf is not None
        hf, world = self._hf, self.ctx.grid.background

        def needed() -> bool:
            return saved.is_dir() and (again or not hf.has(saved.name))

        if checkpoint.together(needed, world)[0].value:
            hf.write(saved, world, self.best.names if self.best else ())

    def poll(self) -> None:
        """Print the failure of a background save that has ended; never wait for one."""
        if self._staging is not None or self._hf is not None:  # else no save runs in the background
            self._report_failure(self._background.poll)

    def _report_failure(self, work: Callable[[], None], must: bool = False) -> None:
        try:
            work()
        except checkpoint.SaveError as error:
            if must:
                raise
            stop = self.config.checkpoint.on_save_failure == "stop"
            self.failed = self.failed or (error if stop else None)
            self.note(f"{error}; training {'stops' if stop else 'continues'}")

    def _write(
        self,
        iteration: int,
        pieces: Sequence[checkpoint.NamedPiece],
        state: Mapping[str, Any],
        behind: bool,
    ) -> Path:
        """Write a checkpoint. behind: from the background thread, over its own process group."""
        c, grid = self.config.checkpoint, self.ctx.grid
        assert c.save is not None, "there is no --save"
        path = checkpoint.save(
            c.save,
            step=iteration,
            pieces=pieces,
            state=state,
            grid=grid,
            device=None if behind else self.ctx.device,
            world=grid.background if behind else grid.world,
            attach=self.saved.attach,
        )
        self.note(f"saved {path}")
        self.resume.whole.add(path.name)
        if self.best is not None:
            self.best.written = iteration
        return path

    def _prune(self) -> None:
        """Remove checkpoints that are not to be kept, in a thread, as hashing them may take long.

        No save waits for it. It considers only the checkpoints that exist now: a later one may be
        of a save that must not prune. In a hurry nothing is removed.
        """
        if self.ctx.grid.rank or self._hurry:
            return
        assert self.config.checkpoint.save is not None, "there is no --save"
        root = Path(self.config.checkpoint.save)
        try:
            now = frozenset(os.listdir(root))
        except OSError as error:
            self.note(f"no checkpoint was removed: {error.strerror}: {error.filename}")
            return

        self._pruning.poll()
        self._pruning.start(lambda: self._remove_old(root, now))

    def _remove_old(self, root: Path, among: Collection[str] | None) -> None:
        """Remove the checkpoints that the flags do not keep. among: as in prune()."""
        c = self.config.checkpoint
        removed = prune(
            root, c.keep_last_k, c.save_retain_interval, self.resume.whole, self.note,
            among=among, outdone=self.best is not None,
        )  # fmt: skip
        if removed:
            self.note(f"removed {', '.join(removed)}")

    def rewind(self) -> tuple[int, int] | None:
        """Load the newest sound checkpoint of --save again, in the middle of a run.

        Return (iteration, samples), or None if there is none. Raises CheckpointError.
        """
        c = self.config.checkpoint
        assert c.save is not None, "there is no --save"
        self._wait()
        found = self.resume.find("--save", c.save, fresh=False)
        if found is not None:
            self._find_best(found[0])
        return found

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None or issubclass(kind, FloatingPointError):  # every rank comes here
            self._wait()
            if not self._hurry:  # else it dies with the process, which harms nothing
                self._pruning.wait()
                # a launcher may give ranks little time after the first has ended
                if kind is None and self.config.checkpoint.save:
                    checkpoint.together(lambda: None, self.ctx.grid.world, self.ctx.device)
            if self._lock is not None:  # on other ways out the threads may still write
                self._lock.close()
        if kind is None and self.failed is not None:
            raise self.failed
