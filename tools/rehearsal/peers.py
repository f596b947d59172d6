# SPDX-License-Identifier: Apache-2.0
"""Answer for the ranks that a rehearsal does not have: what their models would say of themselves.

Pipeline ranks hold different layers. Two start-up gathers over them depend on that: how many
elements a rank holds, and the names of its parameters.
"""

from mpu.comm.transport import Axis
from training.config import Config
from training.plan import rank_memory
from training.plan.model_profile import ModelProvider


class Peers:
    """The other ranks of a pipeline, by the model as it is built on meta tensors."""

    def __init__(self, config: Config, provider: ModelProvider) -> None:
        self.config, self.provider = config, provider

    def say(self, data: bytes, axis: Axis) -> list[bytes]:
        """Return what each rank of the axis answers, of which this one answers `data`."""
        every = [data] * axis.size
        if not axis.name.startswith("pp"):
            return every
        own = rank_memory.parameters(self.config, self.provider, axis.rank)
        for rank in range(axis.size):
            held = rank_memory.parameters(self.config, self.provider, rank)
            if data == str(sum(p.entry.numel for p in own.values())).encode():
                every[rank] = str(sum(p.entry.numel for p in held.values())).encode()
            elif rank != axis.rank and set(data.decode().split("\n")) <= own.keys():
                names = [name for name, p in held.items() if p.holders == 1 or rank == 0]
                every[rank] = "\n".join(names).encode()  # of copies only the first counts
        return every
