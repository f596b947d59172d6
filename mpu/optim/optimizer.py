# SPDX-License-Identifier: Apache-2.0
"""Update the weights in flat buckets, with global norm and clipping (docs/numerics.md).

Weights and gradients are in flat buckets (mpu/zero/bucket.py), so one fused kernel call updates
many parameters; bf16 weights have masters in the accumulation dtype. A rank holds masters and state
of the part of each bucket that it owns: all of it at stage 0, an equal share from stage 1 on. After
the update whole weights are gathered, with overlap_param_gather during the next forward; at stage 3
they are gathered when they are used.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpu.grid import DATA, Grid
from mpu.optim.interface import (
    Group,
    Matrix,
    Parts,
    StateHome,
    Updater,
    UpdateRule,
    full_matrix_groups,
    rate_of,
    rules_of,
)
from mpu.optim.offload import Offload
from mpu.optim.owners import Plan, members_of, plan_of
from mpu.optim.state_offload import StateOffload
from mpu.param import placement_of
from mpu.zero.bucket import ParamAndGradBucket
from mpu.zero.norm import GlobalNorm
from mpu.zero.param_and_grad_buffer import ParamAndGradBuffer


class Segment(NamedTuple):
    """A run of parameters of one group that this rank owns: elements [low, high) of a bucket.

    weights: its masters, a leaf tensor with `.grad`. updater: updates it and holds its state.
    """

    low: int
    high: int
    weights: nn.Parameter
    updater: Updater


class Optimizer:
    """Holds masters and state of the parts of `sink`'s buckets that this rank owns; updates them.

    groups: by the names that mpu.param.group_of returns. Groups of one rule are updated together.
    clip: the maximum global norm of a step; 0 turns clipping off. cpu_offload: keep masters and
    state in host memory, and update them there. state_offload: keep them there between steps.
    """

    def __init__(
        self,
        module: nn.Module,
        sink: ParamAndGradBuffer,
        grid: Grid,
        groups: Mapping[str, Group],
        *,
        clip: float = 1.0,
        cpu_offload: bool = False,
        state_offload: bool = False,
    ) -> None:
        assert not (cpu_offload and state_offload)
        self.sink, self.grid, self.clip = sink, grid, clip
        grads = [bucket.grad_shard for bucket in sink.buckets]
        weights = [bucket.param_shard for bucket in sink.buckets]
        self.home: StateHome
        if cpu_offload and grads:
            self.home = Offload(grads, weights)
        else:
            self.home = (StateOffload if state_offload else StateHome)(grads, weights, sink.dtype)
        self.segments: list[list[Segment]] = []  # of each bucket
        self.updaters: list[list[Updater]] = []  # for each of `home.together()`, one per rule
        # the number of updates for a stage without an updater, as nothing trains in it
        self._idle_steps = torch.zeros((), dtype=torch.float64, device=sink.device)
        self.plans = self._plans(groups)
        for buckets in self.home.together():
            self._add(buckets, groups)
        self.norm = GlobalNorm(module, sink.buckets, grid, sink.device)
        self._norm_of_weights = self.norm
        if sink.frozen.names:
            self._norm_of_weights = GlobalNorm(module, sink.weight_buckets, grid, sink.device)
        # of the last `step`, before scale and clipping: the parts of the norm, and the scale
        self.grad_squares = torch.zeros(())
        self.grad_scale: Tensor | None = None
        if isinstance(self.home, StateOffload):
            self.home.keep(
                [
                    [master, *(t for s in here for t in s.updater.state(s.weights).values())]
                    for master, here in zip(self.home.masters, self.segments, strict=True)
                ]
            )
            for bucket, state in zip(sink.buckets, self.home.buckets, strict=True):
                bucket.state = state

    @property
    def masters(self) -> list[Tensor]:
        """Return the masters of each bucket for reading, in host memory if they are there."""
        return self.home.masters_to_read()

    def _plans(self, groups: Mapping[str, Group]) -> dict[UpdateRule, Plan]:
        """Return the plan of matrix owners for each rule of full matrices."""
        plans: dict[UpdateRule, Plan] = {}
        params = [(name, param) for bucket in self.sink.buckets for name, param, _ in bucket.params]
        for rule in rules_of(groups):
            mine = {name for name, group in groups.items() if group.rule == rule}
            if rule.needs_full_matrices:
                layouts = [bucket.layout for bucket in self.sink.buckets]
                placements = {name: (placement_of(param), param.shape) for name, param in params}
                members = members_of(self.grid)
                if any(len(own) != self.grid.instance(cut).size for cut, own in members.items()):
                    raise ValueError(
                        f"{rule.name} updates whole matrices: make the Grid with "
                        "needs_full_matrices=True"
                    )
                plans[rule] = plan_of(layouts, placements, mine, rule.split, members)
        return plans

    def _add(self, buckets: list[int], groups: Mapping[str, Group]) -> None:
        """Make the updaters of some buckets, and their segments."""
        of_rule: dict[UpdateRule, dict[str, dict[str, Any]]] = {}
        matrices: dict[UpdateRule, list[Matrix]] = {}
        full_groups = full_matrix_groups(groups)
        cut: list[list[tuple[int, int, nn.Parameter, UpdateRule]]] = []
        for i in buckets:
            bucket, master = self.sink.buckets[i], self.home.masters[i]
            cut.append([])
            segment_at: dict[int, nn.Parameter] = {}
            for first, last, name in bucket.layout.runs(full_groups):
                low, high = max(first, bucket.low), min(last, bucket.high)
                if low >= high and name not in full_groups:
                    continue
                group = groups[name]
                found = of_rule.setdefault(group.rule, {}).setdefault(
                    name,
                    {
                        "name": name,
                        "params": [],
                        "weight_decay": group.weight_decay,
                        "decoupled": group.decoupled,
                        "divisor": group.divisor,
                        "lr_mult": group.lr_mult,
                    },
                )
                if low >= high:
                    continue
                own = slice(low - bucket.low, high - bucket.low)
                segment = segment_at[first] = nn.Parameter(master[own])
                segment.grad = self.home.gradients[i][own]
                found["params"].append(segment)
                cut[-1].append((low, high, segment, group.rule))
            for each in _matrices(bucket, full_groups, segment_at):
                matrices.setdefault(groups[each.group].rule, []).append(each)
        instances = {cut: self.grid.instance(cut) for cut in DATA}
        made = {
            rule: rule.updater(
                Parts(
                    [*found.values()], self.sink.dtype, matrices.get(rule, ()),
                    self.plans.get(rule), instances, self.home.masters[buckets[0]].device,
                )
            )
            for rule, found in of_rule.items()
        }  # fmt: skip
        self.updaters.append([made[rule] for rule in sorted(made, key=_exchanges_last)])
        self.segments += [
            [Segment(low, high, segment, made[rule]) for low, high, segment, rule in here]
            for here in cut
        ]

    def grad_norm(self) -> Tensor:
        """Return the global norm of the gradients: a scalar on the device, fp64.

        grad_squares then holds its parts: the squared norm of each parameter, in the order of
        norm.names.
        """
        self.grad_squares = self.norm.squares([bucket.grad_shard for bucket in self.sink.buckets])
        return self.grad_squares.sum().sqrt()

    def params_norm(self) -> Tensor:
        """Return the global norm of the (master) weights, frozen ones too: a scalar on the device,
        fp64.
        """
        frozen = [bucket.param_shard.to(self.sink.dtype) for bucket in self.sink.frozen_buckets]
        return self._norm_of_weights([*self.masters, *frozen])

    def step(
        self, lr: float, decoupled_lr: float | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Clip and update; return (norm, found_inf), both on the device, without waiting for it.

        decoupled_lr: for the groups that use it; None: lr. scale: multiplies the gradients first
        (tokens assumed / tokens counted). If the norm is not finite every rank skips the update,
        since all compute the same norm.
        """
        norm, self.grad_scale = self.grad_norm(), scale
        if scale is not None:
            norm = norm * scale
        factor = torch.ones_like(norm) if scale is None else scale.to(norm)
        if self.clip > 0:
            factor = factor * (self.clip / (norm + 1e-6)).clamp(max=1.0)
        found_inf = (~torch.isfinite(norm)).float()
        for state in self.sink.step_states:
            state.end_step(found_inf)
        for updater in (updater for some in self.updaters for updater in some):
            for group in updater.groups:
                group["lr"] = rate_of(group, lr, decoupled_lr)
        if not any(self.updaters):
            self._idle_steps += 1 - found_inf.double()
        self.home.update(self.updaters, factor, found_inf)
        self.home.round(self._multiply_rows())
        self.sink.gather_weights()
        self.home.leave()
        return norm, found_inf

    @torch.no_grad()
    def _multiply_rows(self) -> list[int]:
        """Multiply rows of this rank's masters by the step states' factors (QK-clip).

        Returns the buckets with such rows.
        """
        touched, rows = [], dict[nn.Parameter, Tensor]()
        for state in self.sink.step_states:
            rows.update(state.row_factors())
        for i, (bucket, master) in enumerate(
            zip(self.sink.buckets, self.home.masters, strict=True)
        ):
            for _, param, start in bucket.params if rows else ():
                low, high = max(start, bucket.low), min(start + param.numel(), bucket.high)
                if param not in rows or low >= high:
                    continue
                own = slice(low - bucket.low, high - bucket.low)
                factors = rows[param].to(master.device, master.dtype)
                multiply_rows(master[own], low - start, param.numel() // len(factors), factors)
                touched.append(i)
        return list(dict.fromkeys(touched))

    def weights_from_masters(self) -> None:
        """Round the masters into the weights, after an update or a load; gather the weights."""
        self.home.weights_from_masters()
        self.sink.gather_weights()

    def masters_from_weights(self) -> None:
        """Widen the weights into the masters, after only the weights were loaded."""
        self.home.masters_from_weights()

    @property
    def steps(self) -> int:
        """Return the number of updates, excluding skipped ones. Waits for the device."""
        idle = self._idle_steps
        return next((updater.steps for some in self.updaters for updater in some), int(idle))

    def loaded(self, steps: int) -> None:
        """Resume from loaded state after `steps` updates."""
        self._idle_steps.fill_(steps)
        for updater in (updater for some in self.updaters for updater in some):
            updater.set_steps(steps)
        self.home.loaded()
        for state in self.sink.step_states:
            state.loaded()

    def named_weights(self, gathered: bool = False) -> Iterator[tuple[str, str, int, Tensor]]:
        """Yield (parameter name, "", first, values) of the sharded weights, like `named_state`.

        gathered: also of weights that are stored unsharded and owned in parts (gather_weights).
        """
        for bucket in self.sink.weight_buckets:
            if bucket.sharded or gathered and bucket.shard is not None:
                own, first = bucket.param_shard, bucket.low
                for name, low, high, start in bucket.owned():
                    yield name, "", low - start, own[low - first : high - first]

    def named_state(self) -> Iterator[tuple[str, str, int, Tensor]]:
        """Yield (parameter name, kind, first, values); kind: "master", then the rule's kinds.

        values: the owned elements [first, first + n) of the flattened local parameter, as a view:
        writing to it loads the state. Masters are yielded only if the weights have another dtype.
        """
        self.home.rest()
        for bucket, master, segments in zip(
            self.sink.buckets, self.masters, self.segments, strict=True
        ):
            for name, low, high, start in bucket.owned():
                if master.dtype != bucket.param_shard.dtype:
                    yield name, "master", low - start, master[low - bucket.low : high - bucket.low]
                segment = next(s for s in segments if s.low <= low and high <= s.high)
                for kind, values in segment.updater.state(segment.weights).items():
                    values = self.home.at_rest(values)
                    yield name, kind, low - start, values[low - segment.low : high - segment.low]

    def tensors_by_kind(self) -> dict[str, list[Tensor | None]]:
        """Return the tensors that persist on this rank from step to step, by kind of memory."""
        buckets, every = self.sink.buckets, self.sink.weight_buckets
        segments = (segment for here in self.segments for segment in here)
        return {
            "parameters": [t for b in every for t in (b.param_shard, b.weights)],
            "gradients": [t for b in buckets for t in (b.grad_shard, b.grad)],
            "masters": [*self.home.masters],
            "moments": [t for s in segments for t in s.updater.state(s.weights).values()],
        }

    def memory(self) -> dict[str, int]:
        """Return the bytes of `tensors_by_kind`, counting each live storage once."""
        kinds, seen = self.tensors_by_kind(), set[int]()
        bytes_of = dict.fromkeys(kinds, 0)
        for kind, tensors in kinds.items():
            for storage in (t.untyped_storage() for t in tensors if t is not None):
                bytes_of[kind] += storage.nbytes() * (storage.data_ptr() not in seen)
                seen.add(storage.data_ptr())
        return bytes_of


def _matrices(
    bucket: ParamAndGradBucket, groups: Collection[str], segment_at: Mapping[int, Tensor]
) -> Iterator[Matrix]:
    """Yield the parameters of some groups, for a rule of full matrices.

    segment_at: this rank's slices, by the offset of the parameter in the bucket.
    """
    for (name, param, start), group in zip(bucket.params, bucket.layout.groups, strict=True):
        if group not in groups:
            continue
        yield Matrix(name, param, group, segment_at.get(start), max(bucket.low - start, 0))


def multiply_rows(values: Tensor, first: int, width: int, factors: Tensor) -> None:
    """Multiply elements [first, first + n) of a flattened matrix [rows, width], each by its row's
    factor, in place: values [n], factors [rows].
    """
    low, end = -(-first // width), (first + len(values)) // width  # the rows that are whole
    if low > end:  # inside one row
        values *= factors[end]
        return
    head, tail = low * width - first, end * width - first
    if head:
        values[:head] *= factors[low - 1]
    values[head:tail].view(-1, width).mul_(factors[low:end, None])
    if tail < len(values):
        values[tail:] *= factors[end]


def _exchanges_last(rule: UpdateRule) -> bool:
    """Return a sort key: full-matrix rules step last, so that others overlap their exchange."""
    return rule.needs_full_matrices
