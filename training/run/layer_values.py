# SPDX-License-Identifier: Apache-2.0
"""The log's values of the layers: attention logits, RMS, experts.

max_attention_logit       with --log-max-attention-logit or --qk-clip: the largest of the step
qk_clipped                with --qk-clip: key/value groups that were clipped, over all layers
layer_I/activation_rms    with --log-layer-rms-interval: root mean square of the output of block I,
                          over all tokens of the global batch
layer_I/grad_rms          with that flag: RMS of the gradients of block I, summed over ranks and not
                          yet clipped; embedding/grad_rms and so on: of modules outside of blocks
expert_load, ...          of a mixture of experts (expert_values.py)

The values are of the step itself, and the same for every layout.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from mpu.comm.collectives import MAX, all_reduce, sum_in_order
from mpu.comm.transport import Label
from mpu.gradients import StepState
from mpu.host_memory import read_values
from mpu.layers.attention.max_logits import MaxLogits
from mpu.zero.bucket_layout import block_of
from training.run.expert_values import expert_values
from training.run.state import Run
from training.settings.config import Config

LABEL = Label("layers", "log")


def asked(config: Config) -> bool:
    """Return whether the log has values of the layers."""
    some = config.optimizer.qk_clip or config.log.log_max_attention_logit or config.moe.experts
    return bool(some or config.log.log_layer_rms_interval)


class LayerValues(StepState):
    """Collect the layers' values of each logged step. All ranks make and call it.

    With --log-layer-rms-interval, forward hooks measure the blocks' outputs in those steps only.
    """

    def __init__(self, run: Run) -> None:
        self.run, self.interval = run, run.config.log.log_layer_rms_interval
        self.squares: dict[str, Tensor] = {}  # sum of squares of each block's outputs in this step
        self.counts: dict[str, int] = {}
        if self.interval:
            run.sink.step_states.append(self)
            for name, module in run.module.named_modules():
                if name and block_of(f"{name}.weight") == name and name[-1].isdigit():
                    module.register_forward_hook(self._hook(name))

    def begin_step(self) -> None:
        """Clear the values of the last step."""
        self.squares.clear()
        self.counts.clear()

    def _at_interval(self, iteration: int) -> bool:
        return bool(self.interval) and iteration % int(self.interval or 1) == 0

    def _hook(self, name: str) -> Any:
        def see(module: nn.Module, given: Any, out: Any) -> None:
            # a recomputed forward counts once, an evaluation never
            if not torch.is_grad_enabled() or not self._at_interval(self.run.iteration + 1):
                return
            out = out[0] if isinstance(out, tuple) else out
            kind = torch.promote_types(out.dtype, torch.float32)
            square = torch.linalg.vector_norm(out.detach(), dtype=kind).double().square()
            self.squares[name] = self.squares[name] + square if name in self.squares else square
            self.counts[name] = self.counts.get(name, 0) + out.numel()

        return see

    def __call__(self, tokens: int) -> dict[str, Any]:
        """Return the values of the last step; waits for the device where there are some.

        tokens: of its global batch. Collective: it reduces over the stages of a pipeline.
        """
        values = logit_values(self.run)
        if self._at_interval(self.run.iteration):
            values |= self.activation_rms() | self.gradient_rms()
        return values | expert_values(self.run, tokens)

    def activation_rms(self) -> dict[str, float]:
        """Return the RMS of each block's outputs."""
        run, names = self.run, list(self.squares)
        rows = torch.zeros((run.config.model.num_layers, 2), dtype=torch.float64, device=run.device)
        for name in names:
            number = int(name.rpartition(".")[2])
            rows[number, 0] = self.squares[name]
            rows[number, 1].fill_(self.counts[name])  # no copy from the host
        ctx = run.model.ctx
        for axis in (ctx.tp,) * ctx.sp + (run.grid.dp_cp, run.grid.pp):
            rows = sum_in_order(rows, axis, LABEL)
        return {
            f"layer_{i}/activation_rms": math.sqrt(square / count)
            for i, (square, count) in enumerate(read_values(rows))
            if count
        }

    def gradient_rms(self) -> dict[str, float]:
        """Return the RMS of the gradients of each block, and of each module outside of blocks."""
        optimizer = self.run.optimizer
        norm, squares = optimizer.norm, optimizer.grad_squares
        if optimizer.grad_scale is not None:
            squares = squares * optimizer.grad_scale**2
        found: dict[str, list[float]] = {}
        for name, numel, square in zip(norm.names, norm.numels, read_values(squares), strict=True):
            block = block_of(name)
            own = found.setdefault(
                f"layer_{block.rpartition('.')[2]}" if block else name.split(".")[0], [0.0, 0.0]
            )
            own[0] += square
            own[1] += numel
        return {f"{at}/grad_rms": math.sqrt(total / count) for at, (total, count) in found.items()}


def logit_values(run: Run) -> dict[str, Any]:
    """Return the largest attention logit and the groups QK-clip clipped; {} without the flags."""
    clips = run.config.optimizer.qk_clip
    if not clips and not run.config.log.log_max_attention_logit:
        return {}
    top = torch.full((1,), -torch.inf, dtype=torch.float64, device=run.device)
    clipped = torch.zeros(1, dtype=torch.float64, device=run.device)
    logits = run.sink.state_of(MaxLogits)  # None on a stage without layers
    if logits is not None and logits.largest is not None:
        top.copy_(logits.largest.max()[None])
        if logits.clipped is not None:  # each rank of tp_kv has counted the groups they share
            clipped += logits.clipped.double() / run.grid.tp_kv.size
    for axis in (run.grid.tp, run.grid.pp):
        if axis.size > 1:
            top = all_reduce(top, axis, op=MAX, label=LABEL)[0]
            clipped = sum_in_order(clipped, axis, LABEL)
    values = {"max_attention_logit": read_values(top)[0]}
    return values | ({"qk_clipped": round(read_values(clipped)[0])} if clips else {})
