# SPDX-License-Identifier: Apache-2.0
"""Save a run and take it up again: what stands in a checkpoint beside the tensors, and what is
asked of one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mpu.context import LayerContext
from mpu.param import unique_parameters
from mpu.zero.optimizer import Optimizer
from training import checkpoint
from training.checkpoint.lock import DirectoryLock
from training.checkpoint.retain import prune
from training.checkpoint.stage import Background, Staging
from training.config import Config, UsageError
from training.lr import learning_rate

# What a resumed run must share with its checkpoint, by the word that --allow-change takes: settings
# of the config, and hashes kept in the state.
SHARED = {
    "seed": ("run.seed",),
    "tokenizer": ("tokenizer_digest",),
    "data": (
        *("model.seq_length", "data.reset_position_ids", "data.reset_attention_mask"),
        *("data.eod_mask_loss", "train_data_digest"),
    ),
    "batch": ("batch.global_batch_size", "batch.step_batch_size_schedule"),
}


class Saver:
    """Knows how a run's model and optimizer are called in a checkpoint; writes and reads them.

    names: the model's table of canonical names. hf_config(model.config, dtype): its sizes in
    Hugging Face's terms; from_hf_config: the way back. digests: hashes of the tokenizer and of the
    data, kept with the state. As a context manager it ends with no save under way.
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
    ) -> None:
        self.config, self.ctx, self.model, self.optimizer = config, ctx, model, optimizer
        dtype = str(config.run.dtype).removeprefix("torch.")
        self.names, self.hf_config = names, hf_config(model.config, dtype)
        self.from_hf = lambda foreign: hf_config(from_hf_config(foreign), dtype)
        self.digests, self.note = digests, note
        self.failed: checkpoint.SaveError | None = None  # and the run is to end for it
        self._good: set[str] = set()  # directories known to be whole
        self._later: list[str] = []  # directories under --load that were passed over
        self._background, self._staging = Background(), None
        self._lock: DirectoryLock | None = None
        tokenizer = Path(config.data.tokenizer_model or "")
        self._attach = {tokenizer.name: tokenizer.read_bytes()} if tokenizer.is_file() else {}

    def pieces(self, with_state: bool = True) -> list[checkpoint.NamedPiece]:
        """List this rank's rectangles of the weights, and of the optimizer's state."""
        optimizer, sink = self.optimizer, self.optimizer.sink
        sink.wait_for_weights()
        parameters = list(unique_parameters(self.model))
        parts = list(optimizer.named_weights())
        kept_whole = [p for p in parameters if p[0] in sink.whole_names()]
        pieces = checkpoint.parameter_pieces(kept_whole, self.names, self.ctx.grid)
        if with_state:
            parts += optimizer.named_state()
        holders = self.ctx.grid.replica if sink.level else self.ctx.grid.data
        return pieces + checkpoint.state_pieces(
            parts, parameters, self.names, self.ctx.grid, holders
        )

    def open(self, iteration: int) -> None:
        """Find out, before step `iteration` + 1, whether --save can be written, and take its lock.

        Raises SaveError, also where the directory holds whole checkpoints of later steps: a resume
        would take one of those for this run's.
        """
        c, grid = self.config.checkpoint, self.ctx.grid
        if c.save is None:
            return
        pieces = self.pieces()
        checkpoint.check_writable(c.save, grid, pieces, self.ctx.device)

        def check() -> None:
            if grid.rank == 0:
                self._lock = DirectoryLock(Path(c.save), self.note)
                later = checkpoint.later_steps(Path(c.save), iteration, self._later)
                if later:
                    raise checkpoint.SaveError(
                        f"it holds checkpoints of later steps than {iteration}, where this run "
                        f"begins ({', '.join(later)}), and a resume would take the newest: name "
                        "another --save, or move them away"
                    )

        failed = checkpoint.first_error(checkpoint.together(check, grid.world, self.ctx.device))
        if failed is not None:
            raise checkpoint.SaveError(f"--save {c.save}: {failed.error}")
        if c.async_save:
            self._staging = Staging(pieces)

    def save(self, iteration: int, consumed: int, must: bool) -> None:
        """Save, in the background with --async-save unless it is the last one (`must`).

        A failure is told and training goes on, unless --on-save-failure or `must` say otherwise.
        One save is under way at a time: this waits for the one before.
        """
        self._settle(self._background.wait)
        pieces, state = self.pieces(), self._state(iteration, consumed)
        if self._staging is not None and not must:
            staged = self._staging.copy(pieces)

            def behind() -> None:
                self._write(iteration, staged, state, True)
                self._prune()

            self._background.start(behind)
        else:
            self._settle(lambda: self._write(iteration, pieces, state, False), must)
            self._background.start(self._prune)  # it may have much to hash and to remove

    def poll(self) -> None:
        """Learn whether the save under way has failed; never wait for it."""
        self._settle(self._background.poll)

    def _settle(self, work: Callable[[], None], must: bool = False) -> None:
        try:
            work()
        except checkpoint.SaveError as error:
            if must:
                raise
            stop = self.config.checkpoint.on_save_failure == "stop"
            self.failed = self.failed or (error if stop else None)
            self.note(f"{error}; training {'stops' if stop else 'goes on'}")

    def _write(
        self,
        iteration: int,
        pieces: Sequence[checkpoint.NamedPiece],
        state: Mapping[str, Any],
        behind: bool,
    ) -> None:
        """Write a checkpoint, in whichever thread."""
        c, grid = self.config.checkpoint, self.ctx.grid
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

    def _prune(self) -> None:
        """Remove the checkpoints that need not stay."""
        c = self.config.checkpoint
        if self.ctx.grid.rank == 0:
            root = Path(c.save)
            gone = prune(root, c.keep_last_k, c.save_retain_interval, self._good, self.note)
            if gone:
                self.note(f"removed {', '.join(gone)}")

    def _state(self, iteration: int, consumed: int) -> dict[str, Any]:
        config, plan = self.config, self.ctx.overlap
        return {
            "iteration": iteration,
            "consumed_samples": consumed,
            "consumed_tokens": consumed * config.model.seq_length,
            "optimizer_steps": self.optimizer.steps,
            "lr": learning_rate(config, consumed),
            "seed": config.run.seed,
            "ddp_bucket_size": self.optimizer.sink.bucket_size,  # in use: asked for or chosen
            "tp_comm_overlap": {"tp": self.ctx.grid.tp.size, "choices": dict(plan.choices)},
            "tokenizer_type": config.data.tokenizer_type,
            # kept inside, so that the checkpoint can be moved
            "tokenizer_model": next(iter(self._attach), config.data.tokenizer_model),
            **self.digests,
            "config": config.flat(),
            "config_digest": config.digest(),
            "hf_config": dict(self.hf_config),
        }

    def load(self) -> tuple[int, int]:
        """Resume from --load, or take weights only; return (iteration, samples).

        Weights only: --finetune, a Hugging Face directory, or --pretrained-checkpoint while --load
        holds none. Raises CheckpointError, or UsageError where nothing is there and that was not
        allowed.
        """
        c = self.config.checkpoint
        found = self._find("--load", c.load, c.finetune) if c.load else None
        if found is None and c.pretrained_checkpoint:
            found = self._find("--pretrained-checkpoint", c.pretrained_checkpoint, True)
            if found is None:
                raise UsageError(
                    f"--pretrained-checkpoint {c.pretrained_checkpoint}: no checkpoint there"
                )
        if found is None:
            if c.exit_on_missing_checkpoint:
                raise UsageError(
                    f"--load {c.load}: no checkpoint there, and --exit-on-missing-checkpoint is set"
                )
            if c.load:
                self.note(f"--load {c.load}: no checkpoint there; starting fresh")
            return 0, 0
        return found

    def _find(self, flag: str, root: str, fresh: bool) -> tuple[int, int] | None:
        """Load what stands at `root`; return (iteration, samples), None where nothing does."""
        c, grid, device = self.config.checkpoint, self.ctx.grid, self.ctx.device
        if checkpoint.is_hugging_face(root, grid, device) and not fresh:
            fresh = True
            self.note(f"{flag} {root} is a Hugging Face directory: its weights, from sample 0 on")
        weights_only = fresh or c.no_load_optim
        pieces = self.pieces(with_state=not weights_only)
        found = checkpoint.find_latest(
            root,
            grid,
            flag=flag,
            pieces=pieces,
            expect=self.hf_config,
            suits=(lambda found: None) if fresh else self._check_resume,
            from_hf=self.from_hf,
            step=c.ckpt_step if flag == "--load" else None,
            cast=fresh,
            note=self.note,
            device=device,
        )
        if found is None:
            return None
        checkpoint.load(found, pieces, grid, device)
        if weights_only:
            self.optimizer.masters_from_weights()
        else:
            self.optimizer.loaded(found.state["optimizer_steps"])
        if c.save and found.directory.parent == Path(c.save).resolve():
            self._good.add(found.directory.name)
        self._later = found.passed_over
        if fresh:
            self.note(f"loaded the weights of {found.directory}; starting at sample 0")
            return 0, 0
        plan, chosen = self.ctx.overlap, found.state.get("tp_comm_overlap", {})
        if plan.mode == "auto" and chosen.get("tp") == self.ctx.tp.size:
            plan.choices |= chosen["choices"]
        for _, line in self._changes(found):
            self.note(f"{line}; going on as --allow-change says")
        iteration, consumed = found.state["iteration"], found.state["consumed_samples"]
        self.note(
            f"loaded {found.directory}: at iteration {iteration}, {consumed} samples consumed"
        )
        return iteration, consumed

    def _check_resume(self, found: checkpoint.Checkpoint) -> None:
        """Raise MismatchError where going on would not be the same run, unless that was allowed."""
        for what, line in self._changes(found):
            if what not in self.config.checkpoint.allow_change:
                raise checkpoint.MismatchError(
                    f"{line}: give what the checkpoint has, --finetune to begin at sample 0, or "
                    f"--allow-change {what} to go on all the same"
                )

    def _changes(self, found: checkpoint.Checkpoint) -> Iterator[tuple[str, str]]:
        """Yield (what changed, a sentence about it); a new seed or tokenizer moves all samples."""
        there = {**found.state.get("config", {}), **found.state}
        here = {**self.config.flat(), **self.digests}
        moved = False
        for what, keys in SHARED.items():
            for key in keys:
                if key not in there or key not in here or there[key] == here[key]:
                    continue
                if key == "train_data_digest" and moved:
                    continue
                moved |= what in ("seed", "tokenizer")
                yield what, f"{found.directory} {_told(key, there[key], here[key])}"

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None or issubclass(kind, FloatingPointError):  # every rank comes here
            self._settle(self._background.wait)
        if self._lock is not None:
            self._lock.close()
        if kind is None and self.failed is not None:
            raise self.failed


def _told(key: str, there: Any, here: Any) -> str:
    """Say how a checkpoint differs from this run."""
    if key == "tokenizer_digest":
        return "was made with another tokenizer (--tokenizer-type, --tokenizer-model)"
    if key == "train_data_digest":
        return "was made with other samples or another order of them (--data-path, --split)"
    flag = "--" + key.rpartition(".")[2].replace("_", "-")
    return f"was made with {flag} {there!r} and this run has {here!r}"
