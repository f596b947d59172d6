# SPDX-License-Identifier: Apache-2.0
"""The global norm of the gradients, or of other flat tensors with the layout of the buckets.

Norms of fixed-size blocks are gathered from their owners; their squares are added in order, which
gives one number per parameter. These are summed in rank order over the axis that cuts the
parameters, then over the whole model's parameters by name. As no block contains two parameters, the
bits do not depend on how buckets are cut or shared, nor on the pipeline.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, nn

from mpu.comm.collectives import all_gather, gather_bytes, sum_in_order
from mpu.comm.transport import Axis, Label
from mpu.grid import Grid
from mpu.param import placement_of
from mpu.zero.bucket import ParamBucket
from mpu.zero.bucket_layout import BLOCK, Sharing

NORM = Label("optimizer", "norm")


class GlobalNorm:
    """Computes the 2-norm of flat tensors, one per bucket: the part of it that this rank owns.

    Each element of the model counts once: replicas are counted by the first rank that holds them.
    buckets: of the parameters to include; a stage of the pipeline may have none. names: of all
    stages' parameters, sorted. numels: the number of elements of each, over all ranks and without
    padding.
    """

    def __init__(
        self,
        module: nn.Module,
        buckets: Sequence[ParamBucket],
        grid: Grid,
        device: torch.device,
    ) -> None:
        self.pp, self._device = grid.pp, device
        ways = dict.fromkeys(bucket.layout.sharing for bucket in buckets)
        parts = [_Part(module, buckets, how, grid.data(how.cut).cut) for how in ways]
        self._parts = [part for part in parts if part.names]  # tied weights count on the first end
        # names are the same in every layout
        numels = {name: prod(placement_of(p).shape) for name, p in module.named_parameters()}
        text = "\n".join(f"{name} {numels[name]}" for part in self._parts for name in part.names)
        lists = gather_bytes(text.encode(), grid.pp, device)
        every = dict(line.split() for text in lists for line in text.decode().splitlines())
        self.names = sorted(every)
        self.numels = [int(every[name]) for name in self.names]
        at = {name: i for i, name in enumerate(self.names)}
        rows = [[at[name] for name in part.names] for part in self._parts]
        self._rows = [torch.tensor(row, device=device) for row in rows]

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the norm, in fp64, on the weights' device."""
        return self.squares(tensors).sum().sqrt()

    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the square of each parameter's norm, in fp64, in the order of `names`."""
        every = torch.zeros(len(self.names), dtype=torch.float64, device=self._device)
        for part, row in zip(self._parts, self._rows, strict=True):
            every[row] = part.squares(tensors)
        return sum_in_order(every, self.pp, NORM)


class _Part:
    """The parameters that one axis cuts, in the buckets that the same ranks share."""

    def __init__(
        self, module: nn.Module, buckets: Sequence[ParamBucket], how: Sharing, cut: Axis
    ) -> None:
        self.cut = cut
        self._at = [i for i, bucket in enumerate(buckets) if bucket.layout.sharing == how]
        mine = [buckets[i] for i in self._at]
        self._shard = mine[0].shard
        device = mine[0].param_shard.device
        home = device if device.type == "meta" else torch.device("cpu")  # where to make the index
        where: dict[nn.Parameter, Tensor] = {}  # its blocks' indices among all gathered: int64 [n]
        total = sum(bucket.high - bucket.low for bucket in mine) // BLOCK
        base = 0
        for bucket in mine:
            part = (bucket.high - bucket.low) // BLOCK
            for _, param, start in bucket.params:
                end = -(-(start + param.numel()) // BLOCK)
                blocks = torch.arange(start // BLOCK, end, device=home)
                where[param] = blocks // part * total + base + blocks % part
            base += part
        self.names: list[str] = []
        order: list[Tensor] = []
        counted: list[bool] = []  # for each parameter: whether this rank counts it
        lengths: list[int] = []
        for name, param in module.named_parameters():
            placement = placement_of(param)
            if param not in where or any(axis.rank for axis in placement.copies):
                continue  # only the first rank of such an axis counts its copy
            order.append(where[param])
            counted.append(placement.first_holder)
            lengths.append(len(where[param]))
            self.names.append(name)
        each = torch.tensor(lengths, dtype=torch.int64, device=home)
        none = torch.empty(0, dtype=torch.int64, device=home)
        self._order = torch.cat([none, *order]).to(device)
        first = torch.tensor(counted, dtype=torch.bool, device=home)
        every = first.repeat_interleave(each, output_size=sum(lengths))
        self._counted = every.to(device)
        self._lengths = each.to(device)

    def squares(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the square of each parameter's norm, over all ranks that hold a part of it."""
        flat = [tensors[i].view(-1, BLOCK) for i in self._at]
        blocks = [torch.linalg.vector_norm(t, dim=1).double() for t in flat]
        # masters may be in host memory, beside frozen weights
        every = torch.cat([each.to(self._order.device) for each in blocks])
        if self._shard is not None:
            every = all_gather(every, self._shard, label=NORM)[0]
        squares = every[self._order].square_().mul_(self._counted)
        own = torch.segment_reduce(squares, "sum", lengths=self._lengths, unsafe=True)
        return sum_in_order(own, self.cut, NORM)
