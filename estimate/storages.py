# SPDX-License-Identifier: Apache-2.0
"""Count storages while a model runs on meta tensors.

`LiveStorages` counts those that live at once, `Saved` those that autograd or a deferred weight
gradient stores for a while.
"""

import weakref
from typing import Any

import torch
from torch import Tensor

from mpu.module_tracker import tensors_of
from mpu.torch_private import DispatchMode


class LiveStorages(DispatchMode):
    """Count every storage that an operation makes, until its last reference is gone.

    now: bytes that live. peak: the most since `begin`. recent, part: since `most_since` and
    `most_of_part` too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.recent = self.part = 0
        self._references: dict[int, Any] = {}

    def begin(self) -> int:
        """Forget the peak; return the bytes that live."""
        self.peak = self.recent = self.part = self.now
        return self.now

    def most_since(self) -> int:
        """Return the most bytes that lived since the last call, or since `begin`."""
        most, self.recent = self.recent, self.now
        return most

    def most_of_part(self) -> int:
        """Return the same since the last call of this."""
        most, self.part = self.part, self.now
        return most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        made = (out,) if isinstance(out, Tensor) else tensors_of((out,))
        new = [t for t in made if t.is_meta and id(t.untyped_storage()) not in self._references]
        if new:
            given = tensors_of((*args, *(kwargs or {}).values()))  # out= is one of these
            before = {id(t.untyped_storage()) for t in given}
            for tensor in new:
                storage = tensor.untyped_storage()
                if id(storage) not in before and id(storage) not in self._references:
                    self._add(id(storage), storage)
        return out

    def _add(self, key: int, storage: Any) -> None:
        nbytes = storage.nbytes()
        self.now += nbytes
        self.peak, self.recent = max(self.peak, self.now), max(self.recent, self.now)
        self.part = max(self.part, self.now)
        self._references[key] = weakref.ref(storage, lambda _: self._freed(key, nbytes))

    def _freed(self, key: int, nbytes: int) -> None:
        del self._references[key]
        self.now -= nbytes


class Saved:
    """The storages of tensors that are saved for a while, each counted once."""

    def __init__(self, others: "dict[int, _Storage] | None" = None) -> None:
        self.others = others or {}
        self.storages: dict[int, _Storage] = {}
        self.live = self.peak = 0

    def pack(self, tensor: Tensor) -> "_SavedTensor":
        """Keep a tensor for as long as the object returned lives."""
        return _SavedTensor(self, tensor)

    @staticmethod
    def unpack(saved: "_SavedTensor") -> Tensor:
        """Return the tensor."""
        return saved.tensor

    def bytes(self, logits: torch.Size) -> tuple[int, int]:
        """Return the bytes stored now, and how many of them have a tensor of the logits' shape."""
        of_logits = [s.bytes for s in self.storages.values() if logits in s.shapes]
        return self.live, sum(of_logits) if logits else 0


class _Storage:
    """One storage: its bytes, the shapes of the tensors in it, and how many of them are stored."""

    def __init__(self, nbytes: int) -> None:
        self.bytes, self.users = nbytes, 0
        self.shapes: set[torch.Size] = set()


class _SavedTensor:
    """One saved tensor; its storage is counted until this object dies."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.tensor, self.saved, self.key = tensor, saved, -1
        storage = tensor.untyped_storage()
        key = id(storage)
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
