# SPDX-License-Identifier: Apache-2.0
"""Check a run's first gradients against the parameters' placements.

Several ranks hold a replicated weight: those of tp, of ep or, if it is tied, those of embd.

    Placement               the ranks' gradients    result
    whole on each rank      agree                   correct
    whole on each rank      differ                  PlacementError: a sum is missing
    partial over the axis   differ                  correct
    partial over the axis   agree                   warning: they may have been summed before

Ranks compare a sketch of each gradient, 65 numbers, not the gradient (Charikar et al. 2002). This
takes one collective over each such axis and one over all ranks, once. A weight whose gradient is
still zero is checked again in the next steps. No gradient is changed.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mpu.comm.collectives import all_gather, gather_bytes
from mpu.comm.transport import Axis, Label
from mpu.gradients import TOLERANCE, sketch
from mpu.grid import DATA, Grid
from mpu.param import PlacementError, placement_of
from mpu.zero.bucket import ParamAndGradBucket

STEPS = 10  # the most steps in which a weight with a zero gradient is checked again
REMEDY = (
    "give the region where it is used, as RMSNorm(d, ctx=ctx, region=...): Region.TENSOR_PARALLEL "
    "on a shard of heads or features, Region.SEQUENCE_PARALLEL on hidden states (docs/forking.md)"
)


class GradientCheck:
    """Compares the gradients of replicated weights over the ranks that hold them; see above.

    grid: of the run. warn: called on rank 0 with a line for each warning.
    """

    def __init__(self, grid: Grid, warn: Callable[[str], None] = print) -> None:
        self.grid, self.warn, self.steps = grid, warn, 0
        self.unwritten: set[str] = set()  # parameters without a gradient
        self._decided: set[tuple[str, str]] = set()  # (axis, parameter)
        self._partial: dict[str, Tensor] = {}  # sketches from before the sums

    def before_sum(self, bucket: ParamAndGradBucket) -> None:
        """Keep sketches of gradients that are about to be summed over an extra axis."""
        if bucket.reduce_axes and bucket.grad is not None:
            for name, param, start in bucket.params:
                self._partial[name] = sketch(bucket.grad[start : start + param.numel()])

    def finish(self, buckets: Sequence[ParamAndGradBucket], device: torch.device) -> bool:
        """Compare, after all sums. Return whether the check is complete.

        Raises PlacementError, on every rank, for gradients that should agree and do not.
        """
        self.steps += 1
        errors: list[str] = []
        warnings, pending = self._unwritten_lines(), False
        for axis in (*(self.grid.data(cut).cut for cut in DATA), self.grid.embd):
            entries = [
                e for e in self._sketches(buckets, axis) if (axis.name, e[0]) not in self._decided
            ]
            if axis.size == 1 or not entries:
                continue
            own = torch.stack([values for _, _, values in entries])
            every = all_gather(own[None], axis, label=Label(self, "gradient check"))[0]
            distance = (every[..., :-1] - own[:, :-1]).norm(dim=-1).amax(0)
            largest = every[..., -1].amax(0)
            for (name, param, _), far, norm in zip(
                entries, distance.tolist(), largest.tolist(), strict=True
            ):
                if not 0 < norm < math.inf:
                    pending = True
                    continue
                self._decided.add((axis.name, name))
                partial = axis.name in (a.name for a in placement_of(param).reduce_axes)
                agree = far <= TOLERANCE.get(param.dtype, TOLERANCE[torch.float32]) * norm
                if not agree and not partial:
                    errors.append(
                        f"{name}: its gradient differs among the ranks of {axis.name}, by "
                        f"{far / norm:.2g} of its norm, though it should be the same on each of "
                        f"them: {REMEDY}"
                    )
                elif agree and partial:
                    warnings.append(
                        f"{name}: its gradients are summed over {axis.name}, whose ranks all have "
                        "the same ones; if they were summed before, this counts them twice: run "
                        "make fork-check (docs/forking.md)"
                    )
        self._partial.clear()
        self.unwritten.clear()
        return self._report(errors, warnings, pending, device)

    def _sketches(
        self, buckets: Sequence[ParamAndGradBucket], axis: Axis
    ) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        """Yield (name, parameter, sketch) of the weights that all ranks of the axis hold."""
        for bucket in buckets:
            owned = {name: (low, high) for name, low, high, _ in bucket.owned()}
            for name, param, _ in bucket.params:
                if axis.name not in (a.name for a in placement_of(param).holders):
                    continue
                if name in self._partial:
                    yield name, param, self._partial[name]
                elif name in owned:  # by the same ranks of the axis
                    low, high = (at - bucket.low for at in owned[name])
                    yield name, param, sketch(bucket.grad_shard[low:high])

    def _unwritten_lines(self) -> list[str]:
        """Return warnings about parameters without a gradient in the first step."""
        if self.steps > 1:
            return []
        return [
            f"{name} got no gradient in the first step: autograd has no path from the loss to it "
            "(docs/forking.md)"
            for name in sorted(self.unwritten)
        ]

    def _report(
        self, errors: list[str], warnings: list[str], pending: bool, device: torch.device
    ) -> bool:
        """Exchange the findings of all ranks: raise, warn, and return whether all is decided."""
        own = json.dumps([errors, warnings, pending]).encode()
        every = [json.loads(text) for text in gather_bytes(own, self.grid.world, device)]
        wrong = sorted({line for found, _, _ in every for line in found})
        if wrong:
            more = f" (and {len(wrong) - 1} more parameters)" if len(wrong) > 1 else ""
            raise PlacementError(wrong[0] + more)
        if self.grid.rank == 0:
            for line in sorted({line for _, found, _ in every for line in found}):
                self.warn(line)
        return self.steps >= STEPS or not any(waiting for _, _, waiting in every)


def check_registered(module: nn.Module) -> None:
    """Raise PlacementError if a module holds a tensor that requires a gradient but is not one of
    its parameters.
    """
    if hidden := unregistered(module):
        raise PlacementError(
            f"{hidden}: a tensor there requires a gradient and is not a parameter of the module, "
            "so it would be neither trained nor saved; make it an attribute of the module, or put "
            "it into nn.ParameterList, nn.ParameterDict or nn.ModuleList"
        )


def unregistered(module: nn.Module) -> str:
    """Return the name of an attribute that holds a tensor that requires a gradient but is not a
    parameter, or "".
    """
    known = set(module.parameters())

    def inside(value: object) -> bool:
        if isinstance(value, Tensor):
            return value.is_leaf and value.requires_grad and value not in known
        if isinstance(value, nn.Module):
            return any(inside(param) for param in value.parameters())
        if isinstance(value, dict):
            return any(map(inside, value.values()))
        return isinstance(value, (list, tuple)) and any(map(inside, value))

    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if not attribute.startswith("_") and inside(value):
                return f"{name}.{attribute}" if name else attribute
    return ""
