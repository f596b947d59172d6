# SPDX-License-Identifier: Apache-2.0
"""Save a run and take it up again: what stands in a checkpoint beside the tensors, and what is
asked of one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from mpu.context import LayerContext
from mpu.param import unique_parameters
from mpu.zero.optimizer import Optimizer
from training import checkpoint
from training.config import Config, UsageError
from training.lr import learning_rate


@dataclass(frozen=True)
class Saver:
    """Knows how a run's model and optimizer are called in a checkpoint.

    names: the model's table of canonical names. hf_config: its sizes in Hugging Face's terms.
    digests: hashes of the tokenizer and of the data, kept with the state.
    """

    config: Config
    ctx: LayerContext
    model: nn.Module
    optimizer: Optimizer
    names: Mapping[str, Sequence[str]]
    hf_config: Mapping[str, Any]
    digests: Mapping[str, str]
    note: Callable[[str], None]

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

    def check_writable(self) -> None:
        """Find out before the first step whether --save could be written. Raises SaveError."""
        checkpoint.check_writable(
            self.config.checkpoint.save, self.ctx.grid, self.pieces(), self.ctx.device
        )

    def save(self, iteration: int, consumed: int, must: bool) -> None:
        """Save; a failure is told and training goes on, unless this is the last one (`must`)."""
        config = self.config
        state = {
            "iteration": iteration,
            "consumed_samples": consumed,
            "consumed_tokens": consumed * config.model.seq_length,
            "optimizer_steps": self.optimizer.steps,
            "lr": learning_rate(config, consumed),
            "seed": config.run.seed,
            "ddp_bucket_size": self.optimizer.sink.bucket_size,  # in use: asked for or chosen
            "tp_comm_overlap": {"tp": self.ctx.grid.tp.size, "choices": self.ctx.overlap.choices},
            "tokenizer_type": config.data.tokenizer_type,
            "tokenizer_model": config.data.tokenizer_model,
            **self.digests,
            "config": config.flat(),
            "config_digest": config.digest(),
            "hf_config": dict(self.hf_config),
        }
        attach, tokenizer = {}, Path(config.data.tokenizer_model or "")
        if tokenizer.is_file():  # kept inside, so that the checkpoint can be moved
            attach[tokenizer.name] = tokenizer.read_bytes()
            state["tokenizer_model"] = tokenizer.name
        try:
            path = checkpoint.save(
                config.checkpoint.save,
                step=iteration,
                pieces=self.pieces(),
                state=state,
                grid=self.ctx.grid,
                device=self.ctx.device,
                attach=attach,
            )
            self.note(f"saved {path}")
        except checkpoint.SaveError as error:
            if must:
                raise
            self.note(f"{error}; training goes on")

    def load(self) -> tuple[int, int]:
        """Resume from --load, or take its weights only (--finetune); return (iteration, samples).

        Raises CheckpointError, or UsageError where nothing is there and that was not allowed.
        """
        c = self.config.checkpoint
        weights_only = c.finetune or c.no_load_optim
        pieces = self.pieces(with_state=not weights_only)
        found = checkpoint.find_latest(
            c.load,
            self.ctx.grid,
            pieces=pieces,
            expect=self.hf_config,
            step=c.ckpt_step,
            cast=c.finetune,
            note=self.note,
            device=self.ctx.device,
        )
        if found is None:
            if c.exit_on_missing_checkpoint:
                raise UsageError(
                    f"--load {c.load}: no checkpoint there, and --exit-on-missing-checkpoint is set"
                )
            self.note(f"--load {c.load}: no checkpoint there; starting fresh")
            return 0, 0
        checkpoint.load(found, pieces, self.ctx.grid, self.ctx.device)
        if weights_only:
            self.optimizer.masters_from_weights()
        else:
            self.optimizer.loaded(found.state["optimizer_steps"])
        fresh = c.finetune
        plan, chosen = self.ctx.overlap, found.state.get("tp_comm_overlap", {})
        if plan.mode == "auto" and chosen.get("tp") == self.ctx.tp.size and not fresh:
            plan.choices |= chosen["choices"]
        iteration = 0 if fresh else found.state["iteration"]
        consumed = 0 if fresh else found.state["consumed_samples"]
        self.note(
            f"loaded {found.directory}: at iteration {iteration}, {consumed} samples consumed"
        )
        return iteration, consumed
