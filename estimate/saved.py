# SPDX-License-Identifier: Apache-2.0
"""Count the storages that autograd, or a deferred weight gradient, keeps for a while."""

import torch
from torch import Tensor


class Saved:
    """The storages of tensors that are kept for a while, each counted once."""

    def __init__(self, others: "dict[int, _Storage] | None" = None) -> None:
        self.others = others or {}
        self.storages: dict[int, _Storage] = {}
        self.live = self.peak = 0

    def pack(self, tensor: Tensor) -> "_Kept":
        """Keep a tensor for as long as the object returned lives."""
        return _Kept(self, tensor)

    @staticmethod
    def unpack(kept: "_Kept") -> Tensor:
        """Return the tensor."""
        return kept.tensor

    def bytes(self, logits: torch.Size) -> tuple[int, int]:
        """Return the bytes kept now, and how many of them have a tensor of the logits' shape."""
        of_logits = [s.bytes for s in self.storages.values() if logits in s.shapes]
        return self.live, sum(of_logits) if logits else 0


class _Storage:
    """One storage: its bytes, the shapes of the tensors in it, and how many of them are kept."""

    def __init__(self, nbytes: int) -> None:
        self.bytes, self.users = nbytes, 0
        self.shapes: set[torch.Size] = set()


class _Kept:
    """One tensor that is kept; its storage is counted until this object dies."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.tensor, self.saved, self.key = tensor, saved, -1
        storage = tensor.untyped_storage()
        key = storage._cdata
        counts = tensor.is_floating_point() or tensor.dtype == torch.uint8  # rows of float8
        if counts and key not in saved.others:
            self.key = key
            if key not in saved.storages:
                saved.storages[key] = _Storage(storage.nbytes())
                saved.live += storage.nbytes()
                saved.peak = max(saved.peak, saved.live)
            found = saved.storages[key]
            found.users += 1
            found.shapes.add(tensor.shape)

    def __del__(self) -> None:
        if self.key >= 0:
            found = self.saved.storages[self.key]
            found.users -= 1
            if not found.users:
                self.saved.live -= self.saved.storages.pop(self.key).bytes
