# SPDX-License-Identifier: Apache-2.0
"""Count the bytes that live at once while a model runs on meta tensors."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Count every storage that an operation makes, until its last reference is gone.

    now: bytes that live. peak: the most since `begin`. recent: since `most_since`, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.recent = 0
        self._references: dict[int, Any] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler

    def begin(self) -> int:
        """Forget the peak; return the bytes that live."""
        self.peak = self.recent = self.now
        return self.now

    def most_since(self) -> int:
        """Return the most bytes that lived since the last call, or since `begin`."""
        most, self.recent = self.recent, self.now
        return most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*_tensors(args), *_tensors(kwargs.values())]  # out= is one of these
        before = {t.untyped_storage()._cdata for t in given}
        out = func(*args, **kwargs)
        for tensor in _tensors((out,)):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if tensor.is_meta and key not in before and key not in self._references:
                self._add(key, storage)
        return out

    def _add(self, key: int, storage: Any) -> None:
        nbytes = storage.nbytes()
        self.now += nbytes
        self.peak, self.recent = max(self.peak, self.now), max(self.recent, self.now)
        self._references[key] = weakref.ref(storage, lambda _: self._gone(key, nbytes))

    def _gone(self, key: int, nbytes: int) -> None:
        del self._references[key]
        self.now -= nbytes


def _tensors(values: Any) -> list[Tensor]:
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += _tensors(value)
    return found
