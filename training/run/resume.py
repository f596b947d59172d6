# SPDX-License-Identifier: Apache-2.0
"""Resume a run: which checkpoint it begins at, what is loaded from it, and what is refused.

A restart by torchrun has the flags of the first start. It begins at the newest sound checkpoint of
this run, in --load or in --save.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from training import checkpoint
from training.checkpoint.find import newest, nothing_at
from training.checkpoint.huggingface import HuggingFaceDirectory
from training.checkpoint.load import COUNTS, Checkpoint
from training.checkpoint.manifest import STATE
from training.faults.activity import Activity
from training.run import same_run
from training.run.saved_state import SavedState
from training.settings.config import Config, UsageError
from training.settings.stages import waits_for


class Resume:
    """Reads checkpoints into a run, on every rank.

    from_hf: converts the fields of a config.json to those of this model's hf_config. activity:
    prints slow operations.
    """

    def __init__(
        self,
        config: Config,
        saved: SavedState,
        from_hf: Callable[[dict[str, Any]], Any],
        note: Callable[[str], None],
        activity: Activity,
    ) -> None:
        self.config, self.saved, self.from_hf = config, saved, from_hf
        self.note, self.activity = note, activity
        self.whole: set[str] = set()  # directories of --save whose files were all hashed or written
        self.later: Sequence[str] = ()  # directories under --load that were passed over
        self.folder: Path | None = None  # the directory that holds the loaded checkpoint

    def load(self) -> tuple[int, int]:
        """Resume a restarted run from its newest checkpoint; otherwise call load_first()."""
        c, grid = self.config.checkpoint, self.saved.ctx.grid
        # torchrun's agents may count differently: rank 0's count is used
        attempts = checkpoint.together(
            lambda: grid.launch.attempt, grid.world, self.saved.ctx.device
        )
        if attempts[0].value == 0:
            return self.load_first()
        paths = [path for path in dict.fromkeys((c.load, c.save)) if path is not None]
        chosen = c.ckpt_step is not None and c.branch_from is None
        fresh = c.finetune or chosen or c.load is None
        if fresh or checkpoint.is_hugging_face(paths[0], grid, self.saved.ctx.device):
            fresh, paths = True, paths[c.load is not None and c.load != c.save :]
        # later steps in --save are this run's
        after = -1 if not fresh else 0 if c.finetune or not chosen else c.ckpt_step or 0
        if not fresh and c.no_load_optim and c.load != c.save:  # of --load, the weights alone
            began = newest("--load", Path(paths[0]), None)
            paths, after = paths[1:], began.step if began else -1
        found = self.find("--load", checkpoint.Roots(paths, after), False)
        return self.load_first() if found is None else found

    def load_first(self) -> tuple[int, int]:
        """Resume from --load, or take weights only; return (iteration, samples).

        Weights only, from sample 0: --finetune, a Hugging Face directory, or
        --pretrained-checkpoint while --load has no checkpoint. Raises CheckpointError; UsageError
        if a checkpoint is required and there is none.
        """
        c = self.config.checkpoint
        found = self.find("--load", c.load, c.finetune, c.no_load_optim) if c.load else None
        if found is None and c.branch_from:
            found = self.find("--branch-from", c.branch_from, False, c.no_load_optim)
            if found is None:
                raise nothing_at("--branch-from", c.branch_from)
        if found is None and c.pretrained_checkpoint:
            found = self.find("--pretrained-checkpoint", c.pretrained_checkpoint, True)
            if found is None:
                raise nothing_at("--pretrained-checkpoint", c.pretrained_checkpoint)
        if found is None:
            if c.load and c.exit_on_missing_checkpoint:
                missing = "no checkpoint there, and --exit-on-missing-checkpoint is set"
                raise UsageError(f"--load {c.load}: {missing}")
            if c.load:
                why = f" ({checkpoint.why_none(c.load)})" if checkpoint.below(c.load) else ""
                self.note(f"--load {c.load}: no checkpoint there{why}; starting fresh")
            return 0, 0
        return found

    def find(
        self, flag: str, root: str | checkpoint.Roots, fresh: bool, no_optim: bool = False
    ) -> tuple[int, int] | None:
        """Load a checkpoint at `root`; return (iteration, samples), (0, 0) if `fresh`, or None."""
        saved, c = self.saved, self.config.checkpoint
        grid, device, optimizer = saved.ctx.grid, saved.ctx.device, saved.optimizer
        if checkpoint.is_hugging_face(root, grid, device) and not fresh:
            fresh = True
            self.note(
                f"{flag} {root} is a Hugging Face directory: loading its weights, starting "
                "at sample 0"
            )
        weights_only = fresh or no_optim
        pieces = saved.pieces(with_state=not weights_only, to_load=True)
        resumes = "--branch-from" if c.branch_from else "--load"
        with self.activity.doing(f"checking the checkpoints of {flag} {root}"):
            found = checkpoint.find_latest(
                root,
                grid,
                flag=flag,
                pieces=pieces,
                expect=same_run.expected(self.config, saved.hf_config),
                suits=(lambda found: None) if fresh else self._check_resume,
                from_hf=self.from_hf,
                step=c.ckpt_step if flag == resumes and isinstance(root, str) else None,
                cast=fresh,
                note=self.note,
                device=device,
            )
        if found is None:
            return None
        saved.forget_noted()
        with self.activity.doing(f"reading {found.directory}"):
            checkpoint.load(found, pieces, grid, device)
        optimizer.sink.gather_weights()
        optimizer.sink.wait_for_weights()
        for line in same_run.of_model(found, self.config, saved.hf_config):
            self.note(line)
        if weights_only:
            optimizer.masters_from_weights()
        else:
            optimizer.loaded(found.state["optimizer_steps"])
        here = c.save and found.directory.resolve().parent == Path(c.save).resolve()
        if here and not weights_only:  # then every file was hashed
            self.whole.add(found.directory.name)
        self.later = found.passed_over
        self.folder = found.directory.resolve().parent
        if found.left_out:
            self.note(f"{found.directory}: {found.left_out}")
        if fresh:
            self.note(f"loaded the weights of {found.directory}; starting at sample 0")
            return 0, 0
        if not self.config.run.skip_train:
            for line in same_run.lines(found, self.config, saved.digests):
                self.note(line)
        if no_optim:
            line = same_run.other_frozen(found, saved.frozen)
            self.note(f"{line or found.directory}: --no-load-optim resets the optimizer's state")
        iteration, consumed = saved.go_on(found)
        if flag == "--branch-from":
            saved.branch = same_run.branch(found)
            self.note(f"branching off from {found.directory}")
        at = f"at iteration {iteration}, {consumed} samples consumed"
        self.note(f"loaded {found.directory}: {at}")
        return iteration, consumed

    def _check_resume(self, found: Checkpoint) -> None:
        """Raise MismatchError if the checkpoint is of another run, unless --allow-change names
        the difference, and CheckpointError if its state lacks a count to resume from.

        With --skip-train no training follows, so any run's checkpoint is accepted."""
        if isinstance(found, HuggingFaceDirectory):
            raise checkpoint.MismatchError(
                f"{found.directory} is a Hugging Face directory, which has weights but no state to "
                f"resume from: --load {found.directory} or --finetune trains them from sample 0 on"
            )
        missing = [name for name in COUNTS if name not in found.state]
        if missing:
            raise checkpoint.CheckpointError(f"{STATE} has no {', '.join(missing)}")
        if self.config.run.skip_train:
            return
        line = same_run.other_frozen(found, self.saved.frozen)
        if line and not self.config.checkpoint.no_load_optim:
            raise checkpoint.MismatchError(
                f"{line}: freeze the same parameters, or give --no-load-optim, which resets the "
                "optimizer's state, or --finetune, which also begins at sample 0"
            )
        for what, line in same_run.changes(found, self.config, self.saved.digests):
            if what not in self.config.checkpoint.allow_change:
                raise checkpoint.MismatchError(
                    f"{line}: use the value of the checkpoint, --finetune to begin at sample 0, or "
                    f"--allow-change {what} to continue anyway"
                )
        if stage := waits_for(self.config, found.state["consumed_samples"]):
            raise checkpoint.MismatchError(
                f"{found.directory} continues with stage {stage.name}, but this process started "
                "with the settings of the stage of a newer checkpoint, which cannot be loaded: "
                "remove that checkpoint or repair it"
            )
