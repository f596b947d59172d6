# SPDX-License-Identifier: Apache-2.0
"""Select one context-parallel rank's tokens of a micro-batch (mpu/layers/attention/shards.py)."""

from dataclasses import replace

import torch
from torch import Tensor

from mpu.layers.attention.shards import batch_shards, documents_of_rows
from mpu.layers.packed_seq_params import PackedSeqParams
from training.data.batch import Batch


def context_part(batch: Batch, rank: int, size: int) -> Batch:
    """Return a rank's part [b, s / size] of a micro-batch [b, s]; all of it if size is 1.

    Each row is cut separately, by its own documents; a rank's tokens are in ascending order. Its
    position_ids are always set, as they have gaps. packed_seq_params has the documents of the whole
    rows: of length s if the batch has none. token_count is that of this part.
    """
    if size == 1:
        return batch
    b, s = batch.tokens.shape
    packed = batch.packed_seq_params or PackedSeqParams.of((s,) * b)
    at = _places(packed, b, rank, size)

    def part(full: Tensor) -> Tensor:
        return full.flatten()[at].view(b, s // size)

    positions = torch.arange(s).expand(b, s) if batch.position_ids is None else batch.position_ids
    mask = None if batch.loss_mask is None else part(batch.loss_mask)
    return replace(
        batch,
        tokens=part(batch.tokens),
        labels=part(batch.labels),
        loss_mask=mask,
        position_ids=part(positions),
        packed_seq_params=packed,
        token_count=at.numel() if mask is None else int(mask.sum()),
    )


def places_of(batch: Batch, rank: int, size: int) -> Tensor:
    """Return the positions in whole rows of a rank's part of a micro-batch: [b, s / size]."""
    b, s = batch.tokens.shape
    if size == 1:
        return torch.arange(s).expand(b, s)
    assert batch.packed_seq_params is not None, "context_part gives the documents of whole rows"
    return (_places(batch.packed_seq_params, b, rank, size) % (s * size)).view(b, s)


def _places(packed: PackedSeqParams, rows: int, rank: int, size: int) -> Tensor:
    """Return the indices of a rank's tokens in the concatenated rows."""
    ranges = batch_shards(size, documents_of_rows(packed.lengths, rows))[rank]
    return torch.cat([torch.arange(r.start, r.stop) for r in ranges])
