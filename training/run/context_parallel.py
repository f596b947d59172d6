# SPDX-License-Identifier: Apache-2.0
"""Context parallelism: a rank's part of a sequence, and the balance of attention."""

import torch
from torch import Tensor

from mpu.layers.attention.shards import balance
from mpu.layers.packed_seq_params import PackedSeqParams
from training.settings.config import Config


def rank_batch(config: Config) -> tuple[tuple[int, int], Tensor | None, PackedSeqParams | None]:
    """Return a rank's part of a micro-batch for the planner: (rows, tokens), its position_ids on
    the meta device and its documents, as in training/data/context_part.py.
    """
    rows, length = config.batch.micro_batch_size, config.model.seq_length
    cp = config.parallel.context_parallel_size
    if cp == 1:
        return (rows, length), None, None
    positions = torch.empty((rows, length // cp), dtype=torch.long, device="meta")
    return (rows, length // cp), positions, PackedSeqParams.of((length,) * rows)


def lines(config: Config) -> list[str]:
    """Return a line with the tokens of a rank, --cp-comm-type and the balance of attention; [] at
    --context-parallel-size 1.

    The balance is the FLOPs of the busiest rank's core attention over the mean of all ranks, for a
    sample of one document and for one of four documents of uneven lengths.
    """
    cp, s = config.parallel.context_parallel_size, config.model.seq_length
    if cp == 1:
        return []
    how = config.parallel.cp_comm_type
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
