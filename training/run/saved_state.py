# SPDX-License-Identifier: Apache-2.0
"""The contents of a run's checkpoint: pieces of tensors, and the state that is saved with them.

resume.py reads them, saver.py writes them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from mpu.context import LayerContext
from mpu.layers.expert_load import ExpertLoads
from mpu.layers.float8.delayed import AmaxHistory
from mpu.optim.optimizer import Optimizer
from mpu.param import unique_parameters
from training import checkpoint
from training.checkpoint.load import Checkpoint
from training.run import same_run
from training.settings.config import Config


class SavedState:
    """A run's tensors by their names in a checkpoint, and its progress.

    names: the model's table of canonical names. hf_config: the model's sizes in Hugging Face's
    terms. digests: hashes of the tokenizer and of the data.
    """

    def __init__(
        self,
        config: Config,
        ctx: LayerContext,
        model: nn.Module,
        optimizer: Optimizer,
        names: Mapping[str, Sequence[str]],
        hf_config: Mapping[str, Any],
        digests: Mapping[str, str],
    ) -> None:
        self.config, self.ctx, self.model, self.optimizer = config, ctx, model, optimizer
        self.names, self.hf_config, self.digests = names, hf_config, digests
        self.frozen = list(optimizer.sink.frozen.names)
        self.passed_over: set[int] = set()  # iterations that are counted but not trained on
        self.before = (0, 0)  # samples and tokens that earlier runs consumed
        self.branch: dict[str, Any] | None = None  # where --branch-from branched off
        self.overlap_choices: Mapping[str, str] = {}  # {matmul: method}: as loaded, then as in use
        self.attach = same_run.tokenizer_files(config.data)

    def pieces(self, with_state: bool = True, to_load: bool = False) -> list[checkpoint.NamedPiece]:
        """List this rank's pieces of the weights, and of the state: the optimizer's (not with
        --skip-train), float8's amax histories and the loads of experts.

        to_load: of weights that are gathered after each update, list only the part that this rank
        owns; gather_weights() must follow. So a data-parallel group reads each of them only once.
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
        if with_state and (noted := sink.state_of(AmaxHistory)) is not None:
            amaxes = zip(noted.names, noted.history, strict=True)
            pieces += checkpoint.amax_pieces(amaxes, self.names, self.ctx.grid)
        if with_state and (experts := sink.state_of(ExpertLoads)) is not None:
            name_of = {param: name for name, param in parameters}
            loads = ((name_of[weight], counts) for weight, counts in experts.state())
            pieces += checkpoint.load_pieces(loads, self.names, self.ctx.grid)
        return pieces + checkpoint.state_pieces(parts, parameters, self.names, sink.holders)

    def record(self, iteration: int, consumed: int) -> dict[str, Any]:
        """Return the state that is saved with the pieces after an iteration."""
        optimizer, choices = self.optimizer, dict(self.overlap_choices)
        return {
            **same_run.progress(self.config, iteration, consumed, self.before, self.digests),
            **({"branched_from": self.branch} if self.branch else {}),
            "passed_over": sorted(self.passed_over),
            **({"frozen_parameters": frozen} if (frozen := self.frozen) else {}),
            "optimizer_steps": optimizer.steps,
            "ddp_bucket_size": optimizer.sink.bucket_size,  # in use: NCCL's sums depend on it
            "tp_comm_overlap": {"tp": self.ctx.grid.tp.size, "choices": choices},
            "tokenizer_model": next(iter(self.attach), self.config.data.tokenizer_model),
            **self.digests,
            "hf_config": dict(self.hf_config),
        }

    def forget_noted(self) -> None:
        """Reset the amax histories and the loads of experts, which a checkpoint may lack."""
        sink = self.optimizer.sink
        if (amaxes := sink.state_of(AmaxHistory)) is not None:
            amaxes.history.zero_()
        if (loads := sink.state_of(ExpertLoads)) is not None:
            for _, counts in loads.state():
                counts.zero_()

    def go_on(self, found: Checkpoint) -> tuple[int, int]:
        """Continue with the state of the loaded checkpoint; return (iteration, samples)."""
        recorded = found.state.get("tp_comm_overlap", {})
        auto = self.config.parallel.tp_comm_overlap == "auto"
        if auto and recorded.get("tp") == self.ctx.tp.size:
            self.overlap_choices = recorded["choices"]
        self.passed_over.update(i for i in found.state.get("passed_over", ()) if type(i) is int)
        iteration, consumed = found.state["iteration"], found.state["consumed_samples"]
        self.before = (consumed, found.state["consumed_tokens"])
        self.branch = found.state.get("branched_from")
        return iteration, consumed
