# SPDX-License-Identifier: Apache-2.0
"""Stand in for the way to host memory and back, where a model is planned on meta tensors."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from mpu.activation_offload import Carrier, Event, Offload, Stored


class MetaCarrier(Carrier):
    """Copy nothing; note how many bytes each unit sends."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.units: list[int] = []

    def down(self, stored: Sequence[Stored]) -> Event:
        self.units.append(sum(each.nbytes for each in stored))
        return None

    def up(self, stored: Sequence[Stored]) -> Event:
        for each in stored:
            each.flat = torch.empty(each.size, dtype=each.dtype, device=self.device)
        return None


class MetaOffload(Offload):
    """Let what stays on the device be counted by `saved`, as what no unit offloads."""

    carrier: MetaCarrier
    saved: Any = None  # has pack and unpack

    def keep(self, tensor: Tensor) -> Any:
        return self.saved.pack(tensor)

    def kept(self, kept: Any) -> Tensor:
        tensor: Tensor = self.saved.unpack(kept)
        return tensor

    def begin(self, saved: Any) -> None:
        """Begin a chunk's forward."""
        self.saved, self.carrier.units = saved, []

    def bytes(self) -> tuple[int, int]:
        """Return what the last chunk's forward sent, and the most of two units in a row."""
        units = self.carrier.units
        return sum(units), max(map(sum, pairwise(units)), default=sum(units))
