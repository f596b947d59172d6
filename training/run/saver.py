# SPDX-License-Identifier: Apache-2.0
"""Save and resume a run: what a checkpoint holds besides tensors, and which one may be loaded.

A restart by torchrun has the flags of the first start. It begins at the newest sound checkpoint of
this run, of --load or of --save.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from mpu.context import LayerContext
from mpu.optim.optimizer import Optimizer
from mpu.param import unique_parameters
from training import checkpoint
from training.checkpoint.huggingface import HuggingFaceDirectory
from training.checkpoint.load import COUNTS, Checkpoint
from training.checkpoint.lock import PATIENCE, DirectoryLock
from training.checkpoint.manifest import STATE, step_name
from training.checkpoint.retain import prune, step_directories
from training.checkpoint.stage import Background, Staging
from training.faults.activity import Activity
from training.run import resumable, same_run
from training.run.best import Best
from training.run.export import HuggingFaceSaves
from training.settings.config import Config, UsageError
from training.settings.stages import waits_for


class Saver:
    """Write a run's model and optimizer to checkpoints, and read them back.

    names: the model's table of canonical names. hf_config(model.config, dtype): its sizes in
    Hugging Face's terms; from_hf_config: the inverse. digests: hashes of the tokenizer and of the
    data, kept with the state. activity: prints what takes long at a start. evaluated_on: {set of
    held-out data: hash of what an evaluation reads of it}, for --keep-best. As a context manager it
    waits for the save under way, except after an error that other ranks may not share.
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
        self.config, self.ctx, self.model, self.optimizer = config, ctx, model, optimizer
        dtype = str(config.run.dtype).removeprefix("torch.")
        self.names, self.hf_config = names, resumable.spelled(hf_config, model.config, dtype)
        self.from_hf = lambda foreign: resumable.spelled(hf_config, from_hf_config(foreign), dtype)
        self.digests, self.note = digests, note
        self._frozen = list(optimizer.sink.frozen.names)
        self.failed: checkpoint.SaveError | None = None  # the failure that is to end the run
        self._good: set[str] = set()  # directories known to be whole
        self._later: Sequence[str] = ()  # directories under --load that were passed over
        self._from: Path | None = None  # the directory of the run that it was loaded from
        self.passed_over: set[int] = set()  # iterations whose samples nothing is trained on
        self._before = (0, 0)  # samples and tokens that earlier runs consumed
        self._branch: dict[str, Any] | None = None  # where --branch-from branched off
        self._background, self._pruning = Background(), Background()
        self._staging: Staging | None = None
        c = config.checkpoint
        self._hf = HuggingFaceSaves(c, ctx.grid, note) if c.save and c.save_hf else None
        self._lock: DirectoryLock | None = None
        self.best: Best | None = None
        if c.save and c.keep_best is not None:
            self.best = Best(c.keep_best, evaluated_on or {}, self._wait)
        self.overlap_choices: Mapping[str, str] = {}  # {matmul: method}: loaded, then in use
        self._hurry = False  # a signal ends the run: leave as soon as it is saved
        self._attach = same_run.tokenizer_files(config.data)

    def pieces(self, with_state: bool = True, to_load: bool = False) -> list[checkpoint.NamedPiece]:
        """List this rank's rectangles of the weights, and of the state: the optimizer's, which
        --skip-train does without, and what float8 and a router have noted.

        to_load: of weights that are gathered after each update only the part that is gathered from
        here; gather_weights() must follow. So a data-parallel group reads them once together.
        """
        optimizer, sink = self.optimizer, self.optimizer.sink
        sink.wait_for_weights()
        parameters = list(unique_parameters(self.model))
        parts = list(optimizer.named_weights(gathered=to_load))
        unsharded = sink.unsharded_names(gathered=not to_load)
        unsharded_params = [p for p in parameters if p[0] in unsharded]
        pieces = checkpoint.parameter_pieces(unsharded_params, self.names, self.ctx.grid)
        pieces += checkpoint.buffer_pieces(self.model, self.names, self.ctx.grid)
        if with_state and not self.config.run.skip_train:
            parts += optimizer.named_state()
        if with_state and sink.amaxes is not None:
            amaxes = zip(sink.amaxes.names, sink.amaxes.history, strict=True)
            pieces += checkpoint.amax_pieces(amaxes, self.names, self.ctx.grid)
        if with_state and sink.loads is not None:
            name_of = {param: name for name, param in parameters}
            loads = ((name_of[weight], counts) for weight, counts in sink.loads.state())
            pieces += checkpoint.load_pieces(loads, self.names, self.ctx.grid)
        return pieces + checkpoint.state_pieces(parts, parameters, self.names, sink.holders)

    def begin(self) -> tuple[int, int]:
        """Check that --save can be written, take its lock, load; return (iteration, samples).

        Raises what load() does, and SaveError. That includes a --save with complete checkpoints of
        steps after this run begins at: a resume would load one of those.
        """
        save = self.config.checkpoint.save
        return self.load() if save is None else self._lock_and_load(Path(save))

    def _lock_and_load(self, root: Path) -> tuple[int, int]:
        """Load under the lock of --save: another run that had it may have been saving."""
        c, world, device = self.config.checkpoint, self.ctx.grid.world, self.ctx.device
        pieces = self.pieces()
        with self.activity.doing(f"checking whether --save {root} can be written"):
            made = checkpoint.check_writable(root, self.ctx.grid, pieces, device)
        patience = min(PATIENCE, 30.0 * self.config.parallel.distributed_timeout_minutes)

        def claim() -> None:
            if world.rank == 0:
                with self.activity.waiting(
                    "the lock of --save",
                    lambda: f"waiting for the lock of --save {root}, which another run holds",
                    limit=patience,
                    over=lambda: f"the other run that held the lock of --save {root} has ended",
                ):
                    self._lock = DirectoryLock(root, self.note, patience)
                if self._hf is not None:
                    self._hf.begin()

        self._together(claim)
        try:
            iteration, consumed = self.load()
            self._together(lambda: self._refuse_later(root, iteration))
            self._together(lambda: self._refuse_to_prune(root))
            if self._hf is not None:
                hf, flag = self._hf, f"--save-hf {c.save_hf}"
                self._together(lambda: hf.refuse_others(iteration), flag)
        except ValueError:  # a mistake leaves nothing behind
            if self._lock is not None:
                self._lock.close(undo=True)
            for path in made:
                with suppress(OSError):
                    path.rmdir()
            raise
        self._find_best(iteration)
        if c.async_save:
            self._staging = Staging(pieces)
        if self._hf is not None and iteration and not self._later:
            self._background.start(lambda: self._export(root / step_name(iteration), False))
        return iteration, consumed

    def _find_best(self, iteration: int) -> None:
        """Learn which checkpoint of --save, up to a step, is the best one so far."""
        if (best := self.best) is None:
            return
        root, rank = Path(self.config.checkpoint.save or ""), self.ctx.grid.rank
        if not iteration and self._from != root.resolve():  # the run begins here
            best.begin(None)
            return
        found, line = self._together(lambda: None if rank else best.find(root, iteration))[0]
        best.begin(found)
        if line:
            self.note(line)
        if best.saved is not None:
            self.note(f"--keep-best: {self.best_line()}")

    def best_line(self) -> str:
        """Return which checkpoint is the best one so far, "" where there is none."""
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
                f"it has {', '.join(foreign)}, which no save wrote as it is now, and a save of "
                "that step would replace it: use another --save, or move it away"
            )
        if later := checkpoint.later_steps(root, iteration, self._later):
            raise checkpoint.SaveError(
                f"it has checkpoints of steps after {iteration}, where this run begins "
                f"({', '.join(later)}), and a resume would take the newest: use another --save, "
                "move them away, or resume from them with --load"
            )

    def _refuse_to_prune(self, root: Path) -> None:
        """Raise SaveError where the flags that remove checkpoints would meet another run's."""
        c = self.config.checkpoint
        flags = {
            "--keep-last-k": c.keep_last_k,
            "--save-retain-interval": c.save_retain_interval,
            "--keep-best": c.keep_best is not None,
        }
        flag = next((flag for flag, given in flags.items() if given), None)
        if flag is None or self.ctx.grid.launch.attempt:
            return
        # of step 0 that is evaluated: it is made again, with its loss
        begun = c.keep_best is not None and self.config.run.eval_at_start
        found = [name for step, _, name in step_directories(root) if step or not begun]
        if found and self._from != root.resolve() and not self.ctx.grid.rank:
            raise checkpoint.SaveError(
                f"it has checkpoints ({', '.join(found[:3])}) of another run than the one that is "
                f"continued, and {flag} would remove them: use another --save, or move them away"
            )

    def _together(self, work: Callable[[], Any], flag: str = "") -> list[Any]:
        """Return what work() is on each rank. Raises SaveError, on every rank, if one fails."""
        world, device = self.ctx.grid.world, self.ctx.device
        outcomes = checkpoint.together(work, world, device)
        failed = checkpoint.first_error(outcomes)
        if failed is not None:
            flag = flag or f"--save {self.config.checkpoint.save}"
            raise checkpoint.SaveError(f"{flag}: {failed.error}")
        return [outcome.value for outcome in outcomes]

    def evaluated(self, iteration: int, losses: Mapping[str, float]) -> bool:
        """Take the losses after this step, by the names of the validation sets; return whether the
        step is to be saved for them (--keep-best). On every rank.
        """
        return self.best is not None and self.best.evaluated(iteration, losses)

    def _wait(self) -> None:
        """Wait for the save under way; print its failure."""
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
        One save is under way at a time: this waits for the one before. hurry: prune nothing
        afterwards, as a signal's grace may be short. only_best: evaluated() alone asks for it.
        """
        self._hurry = hurry
        self._wait()
        pieces, state = self.pieces(), self._state(iteration, consumed)
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
                self.note(f"--save-hf: the next start writes the folder of {written[0].name}")
            elif self._hf is not None and written:
                self._background.start(lambda: self._export(written[0]))

    def _export(self, saved: Path, again: bool = True) -> None:
        """Write the Hugging Face folder of a checkpoint of --save, from the background thread.

        again: also where there is one. Nothing is done where the checkpoint is not there.
        """
        assert self._hf is not None
        hf, world = self._hf, self.ctx.grid.background

        def needed() -> bool:
            return saved.is_dir() and (again or not hf.has(saved.name))

        if checkpoint.together(needed, world)[0].value:
            hf.write(saved, world, self.best.names if self.best else ())

    def poll(self) -> None:
        """Print the failure of a background save that has ended; never wait for one."""
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
            attach=self._attach,
        )
        self.note(f"saved {path}")
        self._good.add(path.name)
        if self.best is not None:
            self.best.written = iteration
        return path

    def _prune(self) -> None:
        """Remove the checkpoints that need not stay, in a thread: there may be much to hash first.

        No save waits for it, and a later save's checkpoint does not count in it, as that may be one
        that removes nothing. It is left out in a hurry.
        """
        if self.ctx.grid.rank or self._hurry:
            return
        c = self.config.checkpoint
        assert c.save is not None, "there is no --save"
        root = Path(c.save)
        try:
            now = frozenset(os.listdir(root))
        except OSError as error:
            self.note(f"no checkpoint was removed: {error.strerror}: {error.filename}")
            return

        def work() -> None:
            removed = prune(
                root, c.keep_last_k, c.save_retain_interval, self._good, self.note, among=now,
                outdone=self.best is not None,
            )  # fmt: skip
            if removed:
                self.note(f"removed {', '.join(removed)}")

        self._pruning.poll()
        self._pruning.start(work)

    def _state(self, iteration: int, consumed: int) -> dict[str, Any]:
        optimizer, choices = self.optimizer, dict(self.overlap_choices)
        return {
            **same_run.progress(self.config, iteration, consumed, self._before, self.digests),
            **({"branched_from": self._branch} if self._branch else {}),
            "passed_over": sorted(self.passed_over),
            **({"frozen_parameters": frozen} if (frozen := self._frozen) else {}),
            "optimizer_steps": optimizer.steps,
            "ddp_bucket_size": optimizer.sink.bucket_size,  # in use: NCCL's sums depend on it
            "tp_comm_overlap": {"tp": self.ctx.grid.tp.size, "choices": choices},
            "tokenizer_model": next(iter(self._attach), self.config.data.tokenizer_model),
            **self.digests,
            "hf_config": dict(self.hf_config),
        }

    def load(self) -> tuple[int, int]:
        """Resume a restarted run where it was; else do what load_first() does."""
        c, grid = self.config.checkpoint, self.ctx.grid
        # torchrun's agents may count differently: rank 0's count holds
        attempts = checkpoint.together(lambda: grid.launch.attempt, grid.world, self.ctx.device)
        if attempts[0].value == 0:
            return self.load_first()
        paths = [path for path in dict.fromkeys((c.load, c.save)) if path is not None]
        chosen = c.ckpt_step is not None and c.branch_from is None
        fresh = c.finetune or chosen or c.load is None
        if fresh or checkpoint.is_hugging_face(paths[0], grid, self.ctx.device):
            fresh, paths = True, paths[c.load is not None and c.load != c.save :]
        after = (c.ckpt_step or 0) if fresh else -1  # what --save has later is this run's
        found = self._find("--load", checkpoint.Roots(paths, after), False)
        return self.load_first() if found is None else found

    def load_first(self) -> tuple[int, int]:
        """Resume from --load, or take weights only; return (iteration, samples).

        Weights only, from sample 0: --finetune, a Hugging Face directory, or
        --pretrained-checkpoint while --load has no checkpoint. Raises CheckpointError; UsageError
        where a checkpoint is required and there is none.
        """
        c = self.config.checkpoint
        found = self._find("--load", c.load, c.finetune, c.no_load_optim) if c.load else None
        if found is None and c.branch_from:
            found = self._find("--branch-from", c.branch_from, False, c.no_load_optim)
            if found is None:
                raise UsageError(f"--branch-from {c.branch_from}: no checkpoint there")
        if found is None and c.pretrained_checkpoint:
            found = self._find("--pretrained-checkpoint", c.pretrained_checkpoint, True)
            if found is None:
                place = c.pretrained_checkpoint
                why = checkpoint.why_none(place)
                raise UsageError(f"--pretrained-checkpoint {place}: no checkpoint there ({why})")
        if found is None:
            if c.load and c.exit_on_missing_checkpoint:
                missing = "no checkpoint there, and --exit-on-missing-checkpoint is set"
                raise UsageError(f"--load {c.load}: {missing}")
            if c.load:
                why = f" ({checkpoint.why_none(c.load)})" if checkpoint.below(c.load) else ""
                self.note(f"--load {c.load}: no checkpoint there{why}; starting fresh")
            return 0, 0
        return found

    def rewind(self) -> tuple[int, int] | None:
        """Load the newest sound checkpoint of --save again, in the middle of a run.

        Return (iteration, samples), or None where there is none. Raises CheckpointError.
        """
        c = self.config.checkpoint
        assert c.save is not None, "there is no --save"
        self._wait()
        found = self._find("--save", c.save, fresh=False)
        if found is not None:
            self._find_best(found[0])
        return found

    def _find(
        self, flag: str, root: str | checkpoint.Roots, fresh: bool, no_optim: bool = False
    ) -> tuple[int, int] | None:
        """Load a checkpoint at `root`; return (iteration, samples), (0, 0) if `fresh`, or None."""
        c, grid, device = self.config.checkpoint, self.ctx.grid, self.ctx.device
        if checkpoint.is_hugging_face(root, grid, device) and not fresh:
            fresh = True
            self.note(
                f"{flag} {root} is a Hugging Face directory: loading its weights, starting "
                "at sample 0"
            )
        weights_only = fresh or no_optim
        pieces = self.pieces(with_state=not weights_only, to_load=True)
        resumes = "--branch-from" if c.branch_from else "--load"
        with self.activity.doing(f"checking the checkpoints of {flag} {root}"):
            found = checkpoint.find_latest(
                root,
                grid,
                flag=flag,
                pieces=pieces,
                expect=same_run.expected(self.config, self.hf_config),
                suits=(lambda found: None) if fresh else self._check_resume,
                from_hf=self.from_hf,
                step=c.ckpt_step if flag == resumes else None,
                cast=fresh,
                note=self.note,
                device=device,
            )
        if found is None:
            return None
        if self.optimizer.sink.amaxes is not None:  # what the checkpoint lacks begins anew
            self.optimizer.sink.amaxes.history.zero_()
        if self.optimizer.sink.loads is not None:
            for _, counts in self.optimizer.sink.loads.state():
                counts.zero_()
        with self.activity.doing(f"reading {found.directory}"):
            checkpoint.load(found, pieces, grid, device)
        self.optimizer.sink.gather_weights()
        self.optimizer.sink.wait_for_weights()
        for line in same_run.of_model(found, self.config, self.hf_config):
            self.note(line)
        if weights_only:
            self.optimizer.masters_from_weights()
        else:
            self.optimizer.loaded(found.state["optimizer_steps"])
        here = c.save and found.directory.resolve().parent == Path(c.save).resolve()
        if here and not weights_only:  # then every file was hashed
            self._good.add(found.directory.name)
        self._later = found.passed_over
        self._from = found.directory.resolve().parent
        if found.left_out:
            self.note(f"{found.directory}: {found.left_out}")
        if fresh:
            self.note(f"loaded the weights of {found.directory}; starting at sample 0")
            return 0, 0
        recorded = found.state.get("tp_comm_overlap", {})
        auto = self.config.parallel.tp_comm_overlap == "auto"
        if auto and recorded.get("tp") == self.ctx.tp.size:
            self.overlap_choices = recorded["choices"]
        if not self.config.run.skip_train:
            for line in same_run.lines(found, self.config, self.digests):
                self.note(line)
        if no_optim:
            line = same_run.other_frozen(found, self._frozen)
            self.note(f"{line or found.directory}: --no-load-optim begins the optimizer anew")
        self.passed_over.update(i for i in found.state.get("passed_over", ()) if type(i) is int)
        iteration, consumed = found.state["iteration"], found.state["consumed_samples"]
        self._before = (consumed, found.state["consumed_tokens"])
        self._branch = found.state.get("branched_from")
        if flag == "--branch-from":
            self._branch = same_run.branch(found)
            self.note(f"branching off from {found.directory}")
        at = f"at iteration {iteration}, {consumed} samples consumed"
        self.note(f"loaded {found.directory}: {at}")
        return iteration, consumed

    def _check_resume(self, found: Checkpoint) -> None:
        """Raise MismatchError where the checkpoint is of another run, unless --allow-change names
        the difference, and CheckpointError where its state lacks a count to resume from.

        With --skip-train no run goes on, so any run's will do."""
        if isinstance(found, HuggingFaceDirectory):
            raise checkpoint.MismatchError(
                f"{found.directory} is a Hugging Face directory: it has weights, and nothing to "
                f"resume from; --load {found.directory} or --finetune begins with them at sample 0"
            )
        missing = [name for name in COUNTS if name not in found.state]
        if missing:
            raise checkpoint.CheckpointError(f"{STATE} has no {', '.join(missing)}")
        if self.config.run.skip_train:
            return
        line = same_run.other_frozen(found, self._frozen)
        if line and not self.config.checkpoint.no_load_optim:
            raise checkpoint.MismatchError(
                f"{line}: freeze the same parameters, or give --no-load-optim, which begins the "
                "optimizer anew, or --finetune, which also begins at sample 0"
            )
        for what, line in same_run.changes(found, self.config, self.digests):
            if what not in self.config.checkpoint.allow_change:
                raise checkpoint.MismatchError(
                    f"{line}: use the value of the checkpoint, --finetune to begin at sample 0, or "
                    f"--allow-change {what} to continue anyway"
                )
        if stage := waits_for(self.config, found.state["consumed_samples"]):
            raise checkpoint.MismatchError(
                f"{found.directory} continues with stage {stage.name}, and this process began with "
                "the settings of another, where a newer checkpoint is: remove that, or see why it "
                "cannot be loaded"
            )

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None or issubclass(kind, FloatingPointError):  # every rank comes here
            self._wait()
            if not self._hurry:  # else it dies with the process, which harms nothing
                self._pruning.wait()
            if self._lock is not None:  # on other ways out the threads may still write
                self._lock.close()
        if kind is None and self.failed is not None:
            raise self.failed
