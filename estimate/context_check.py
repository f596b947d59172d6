# SPDX-License-Identifier: Apache-2.0
"""Refuse a model whose attention does not reach the tokens of other context-parallel ranks."""

from typing import Any

import torch
from torch import Tensor

from estimate.context import rank_batch
from estimate.meta import META, MetaAttention, MetaOperations, flash_attention
from estimate.model_profile import ModelProvider, plannable, rank_model
from mpu.comm.transport import Axis
from mpu.pipeline.layout import Stage
from training.config import Config


def check_attention(config: Config, provider: ModelProvider) -> None:
    """Run each layer's forward on meta tensors; every one must send over the cp axis.

    Its queries need keys that other ranks hold. A --model-file with an attention of its own may not
    know that, and would train on rows cut into pieces. Raises ValueError naming the layer.
    """
    if config.parallel.context_parallel_size == 1:
        return
    size, positions, documents = rank_batch(config)
    stages = [Stage(i, i + 1) for i in range(config.model.num_layers)]
    heard = _Heard()
    model = rank_model(plannable(config), provider, stages, 0, trace=heard)
    tokens = torch.empty(size, dtype=torch.long, device=META)
    shape = model.hidden_shape(*size)
    with torch.no_grad(), MetaAttention(flash_attention), MetaOperations():
        for chunk, stage in enumerate(stages):
            heard.over_cp = False
            hidden = torch.empty(shape, dtype=config.run.dtype, device=META)
            model(tokens, None, positions, documents, hidden=hidden, chunk=chunk)
            if not heard.over_cp:
                raise ValueError(
                    f"--context-parallel-size {config.parallel.context_parallel_size}: layer "
                    f"{stage.first} of --model-file {config.model.model_file} sends nothing to the "
                    "other ranks, so its tokens would not see theirs. Its attention must be "
                    "core_attention_of(ctx) (mpu/layers/context_attention.py), or exchange keys "
                    "over ctx.grid.cp itself"
                )


class _Heard:
    """A trace: whether anything was sent over context-parallel ranks."""

    over_cp = False

    def issued(self, verb: str, axis: Axis, tensor: Tensor, *rest: Any) -> None:
        self.over_cp = self.over_cp or axis.name in ("cp", "cp_a2a", "cp_p2p")
