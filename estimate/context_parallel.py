# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: a rank's part of a sequence, and a check that attention reaches the rest."""

from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from estimate.meta import META, MetaOperations
from estimate.model_profile import ModelProvider, plannable, rank_model
from mpu.comm.transport import Axis
from mpu.layers.attention.shards import balance
from mpu.layers.context_attention import ContextAttention
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.pipeline.stage_layout import Stage
from training.config import Config


def comm_type_of(config: Config, layer: int) -> str:
    """Return a layer's --cp-comm-type."""
    kinds = config.parallel.cp_comm_type
    return kinds[layer] if len(kinds) > 1 else kinds[0]


def rank_batch(config: Config) -> tuple[tuple[int, int], Tensor | None, PackedSeqParams | None]:
    """Return a rank's part of a micro-batch as the plan runs it: (rows, tokens), its position_ids
    on the meta device and its documents, as training/data/context_part.py gives them.
    """
    rows, length = config.batch.micro_batch_size, config.model.seq_length
    cp = config.parallel.context_parallel_size
    if cp == 1:
        return (rows, length), None, None
    positions = torch.empty((rows, length // cp), dtype=torch.long, device="meta")
    return (rows, length // cp), positions, PackedSeqParams.of((length,) * rows)


def lines(config: Config) -> list[str]:
    """Return a line: tokens of a rank, how keys and values travel, the balance of attention; at
    --context-parallel-size 1 there is none.

    The balance is the FLOPs of the busiest rank's core attention over the mean of all, for a sample
    of one document, and for one of four whose lengths divide by nothing.
    """
    cp, s = config.parallel.context_parallel_size, config.model.seq_length
    if cp == 1:
        return []
    kinds = [comm_type_of(config, i) for i in range(config.model.num_layers)]
    runs = [(kind, len([*same])) for kind, same in groupby(kinds)]
    how = runs[0][0] if len(runs) == 1 else ", ".join(f"{kind} x {n}" for kind, n in runs)
    text = f"context parallelism: {s // cp:,} of a sample's {s:,} tokens on each of {cp} ranks, "
    text += f"--cp-comm-type {how}; attention's busiest rank over the mean: {balance(cp, (s,)):.3f}"
    if config.data.reset_attention_mask and (uneven := _uneven(s)):
        text += f" for one document, {balance(cp, uneven):.3f} for documents of " + ", ".join(
            map(str, uneven)
        )
    return [text]


def _uneven(length: int) -> tuple[int, ...]:
    """Return four lengths that fill a sample, each about twice the one before; () if it is short.

    They are odd where the sample allows it.
    """
    if length < 60:
        return ()
    first, second, third = (length // part | 1 for part in (15, 8, 4))
    return first, second, third, length - first - second - third


def check_attention(config: Config, provider: ModelProvider) -> None:
    """Run each layer's forward on meta tensors; every one must send over the cp axis.

    Its queries need keys that other ranks hold. A --model-file with an attention of its own may not
    know that, and would train on rows cut into pieces. Raises ValueError naming the layer.
    """
    if config.parallel.context_parallel_size == 1:
        return
    size, positions, documents = rank_batch(config)
    stages = [Stage(i, i + 1) for i in range(config.model.num_layers)]
    listener = _Listener()
    model = rank_model(plannable(config), provider, stages, 0, trace=listener)
    tokens = torch.empty(size, dtype=torch.long, device=META)
    shape = model.hidden_shape(*size)
    with torch.no_grad(), MetaOperations():
        for chunk, stage in enumerate(stages):
            listener.over_cp = False
            hidden = torch.empty(shape, dtype=config.run.dtype, device=META)
            model(tokens, None, positions, documents, hidden=hidden, chunk=chunk)
            if not listener.over_cp:
                line = ContextAttention.compute.__code__.co_firstlineno
                raise ValueError(
                    f"--context-parallel-size {config.parallel.context_parallel_size}: layer "
                    f"{stage.first} of --model-file {config.model.model_file} sends nothing to the "
                    "other ranks, so its tokens would not see theirs. Its attention must be "
                    f"core_attention_of(ctx) (mpu/layers/context_attention.py:{line}), or exchange "
                    "keys over ctx.grid.cp itself"
                )


class _Listener:
    """A trace: whether anything was sent over context-parallel ranks."""

    over_cp = False

    def issued(self, verb: str, axis: Axis, tensor: Tensor, *rest: Any) -> None:
        self.over_cp = self.over_cp or axis.name in ("cp", "cp_a2a", "cp_p2p")
