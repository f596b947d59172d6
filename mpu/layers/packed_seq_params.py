# SPDX-License-Identifier: Apache-2.0
"""The document boundaries of a micro-batch, like Megatron's PackedSeqParams at cp 1.

Several documents share one row of tokens, and a token attends only within its own document.
Attention takes the lengths of the documents instead of a mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class PackedSeqParams:
    """The documents of a micro-batch [b, s], row after row; no document crosses the end of a row.

    lengths: tokens of each document; their sum is b s. cu_seqlens: int32 [documents + 1], the
    first token of each document and b s at the end, on the device. max_seqlen: the length of the
    longest document. The host values are computed on the host, so nothing waits for the device.
    sharded: the lengths by which context-parallel ranks share the tokens, if not `lengths`.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    max_seqlen: int
    sharded: tuple[int, ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "PackedSeqParams":
        """Return the documents of these lengths, on the CPU.

        Raises ValueError if a document has no tokens.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"the lengths of documents are {lengths}: each must be at least 1")
        ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), ends, max(lengths))

    def to(self, device: torch.device | str) -> "PackedSeqParams":
        """Return the same with cu_seqlens on a device; a copy to CUDA is asynchronous."""
        ends = self.cu_seqlens
        if torch.device(device).type == "cuda" and ends.is_cpu:
            ends = ends.pin_memory()
        return replace(self, cu_seqlens=ends.to(device, non_blocking=True))

    def chunked(self, size: int) -> "PackedSeqParams":
        """Return the same with each document cut into chunks of at most `size` tokens, from its
        first token on: a token attends within its own chunk only (Llama 4's chunked attention).
        """
        cut = [min(size, n - i) for n in self.lengths for i in range(0, n, size)]
        chunks = PackedSeqParams.of(cut).to(self.cu_seqlens.device)
        return replace(chunks, sharded=self.sharded or self.lengths)
