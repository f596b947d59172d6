# SPDX-License-Identifier: Apache-2.0
"""Build one micro-batch: the model's input, and the tokens that count in the loss."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from mpu.layers.packed_seq_params import PackedSeqParams

PAD = -1  # Megatron's: a position of a sample that has no token


@dataclass(frozen=True)
class DocumentRules:
    """The effect of an end-of-document token; the fields are the flags of the same names.

    `reset_position_ids` restarts positions after it, `reset_attention_mask` keeps attention within
    a document, `eod_mask_loss` ignores the loss where it is the input token. As in Megatron, the
    token belongs to the document that it ends.
    """

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self) -> None:
        flags = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
        for flag in flags:
            if getattr(self, flag) and self.eod is None:
                raise ValueError(
                    f"--{flag.replace('_', '-')} needs an end-of-document token, "
                    "and this tokenizer has none"
                )


@dataclass(frozen=True)
class Batch:
    """A micro-batch of `b` rows of `s` tokens; every tensor is [b, s]."""

    tokens: Tensor  # int64
    labels: Tensor  # int64; labels[:, i] follows tokens[:, i]
    loss_mask: Tensor | None  # float32, 0 where the loss is ignored; None: nowhere
    position_ids: Tensor | None  # int64; None: 0 to s-1
    # documents of the rows; a token attends only to its own. None: to every earlier token
    packed_seq_params: PackedSeqParams | None
    first_sample: int  # number of row 0 in the global order
    token_count: int  # tokens whose loss counts
    text_bytes: int = 0  # bytes of text of the whole rows, for evaluations; 0: not counted

    def to(self, device: torch.device | str) -> "Batch":
        """Return the same batch with its tensors on a device; a copy to CUDA is asynchronous."""
        names = ("tokens", "labels", "loss_mask", "position_ids")
        tensors = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if torch.device(device).type == "cuda":
            tensors = {k: v.pin_memory() if v.is_cpu else v for k, v in tensors.items()}
        moved = {k: v.to(device, non_blocking=True) for k, v in tensors.items()}
        packed = self.packed_seq_params and self.packed_seq_params.to(device)
        return replace(self, packed_seq_params=packed, **moved)


def make_batch(
    rows: np.ndarray, rules: DocumentRules, first_sample: int, counted: np.ndarray | None = None
) -> Batch:
    """Return the batch of these samples, int64 [b, s + 1].

    counted: bool [b, s + 1], whether a token counts as a label (None: all do). The loss of a label
    that does not count, or is PAD, is ignored; the model reads token 0 in place of PAD.
    """
    padded = rows[:, 1:] == PAD
    rows = np.maximum(rows, 0) if padded.any() else rows
    tokens = rows[:, :-1]
    loss_mask = position_ids = packed = None
    token_count = tokens.size
    if rules.reset_position_ids or rules.reset_attention_mask:
        begins = np.zeros(tokens.shape, bool)  # a document begins after each end
        begins[:, 1:] = tokens[:, :-1] == rules.eod
    if rules.reset_position_ids:
        places = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        position_ids = torch.from_numpy(places - starts)
    if rules.reset_attention_mask:
        begins[:, 0] = True
        packed = PackedSeqParams.of(np.diff(np.flatnonzero(begins), append=tokens.size).tolist())
    if rules.eod_mask_loss or padded.any() or counted is not None:
        counts = ~padded & (tokens != rules.eod) if rules.eod_mask_loss else ~padded
        if counted is not None:
            counts &= counted[:, 1:]
        loss_mask = torch.from_numpy(counts.astype(np.float32))
        token_count = int(counts.sum())
    return Batch(
        tokens=torch.from_numpy(tokens.copy()),
        labels=torch.from_numpy(rows[:, 1:].copy()),
        loss_mask=loss_mask,
        position_ids=position_ids,
        packed_seq_params=packed,
        first_sample=first_sample,
        token_count=token_count,
    )
