# SPDX-License-Identifier: Apache-2.0
"""The interface of an optimizer: its declared properties, and the update of a rank's parts.

    UpdateRule   its name, its kinds of state, whether it needs full matrices, its constants
    Parts        a rank's parts of the weights: segments of flat buckets, slices of matrices
    Updater      applies the rule to these parts, and holds their state
    Group        the settings of a group of parameters: the rule, weight decay, learning rate
    StateHome    where masters and state are stored, and which device updates them

Masters, offload, checkpoints, replica checks, memory and traffic depend only on the UpdateRule, so
another optimizer is another UpdateRule (docs/optimizers.md, "How to add an optimizer"), such as
that of mpu/optim/adam.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from mpu.comm.transport import Axis
from mpu.optim.owners import Plan, Split


class StateKind(NamedTuple):
    """One kind of state: an element for each element of a parameter, sharded like the parameter.

    name: a checkpoint appends it to the parameter's (`model.norm.weight.exp_avg`), so it has no
    dot. dtype: None is the dtype of sums and masters: fp32, or fp64 under --fp64.
    """

    name: str
    dtype: torch.dtype | None = None


class Matrix(NamedTuple):
    """A parameter, for a rule of full matrices. Every rank that shares its bucket lists it.

    group: as in Parts.groups. segment: this rank's slice of the masters, which begins at element
    `low` of the flattened parameter; None if the slice is empty.
    """

    name: str
    param: nn.Parameter
    group: str
    segment: Tensor | None
    low: int


@dataclass
class Parts:
    """The input of an updater: a rank's parts of the weights.

    A segment is a flat leaf tensor with `.grad`, a view of the masters: adjacent parameters of one
    group or, for an optimizer of full matrices, the slice of one parameter.
    """

    # dicts with "name"; "params", the segments; "weight_decay"; "decoupled", whether the decoupled
    # learning rate applies
    groups: list[dict[str, Any]]
    master: torch.dtype = torch.float32  # dtype of the masters
    # for full matrices: the parameters that are updated together, in the same order on every rank
    # that shares them
    matrices: Sequence[Matrix] = ()
    plan: Plan | None = None  # for full matrices: the owners of all of them
    # for full matrices: the ranks that may own one (Grid.instance), by the axis that cuts it
    instances: Mapping[str, Axis] = field(default_factory=dict)
    # where masters are, which a rank may have no slice of, and the scalars of Updater.step
    device: torch.device = torch.device("cpu")

    @property
    def segments(self) -> list[Tensor]:
        """Return the segments of all groups."""
        return [segment for group in self.groups for segment in group["params"]]


class Updater(ABC):
    """Applies an update rule to this rank's parts.

    groups: dicts as in Parts, with "lr", which is read at every step.
    """

    groups: list[dict[str, Any]]

    def start(self, factor: Tensor, found_inf: Tensor) -> None:  # noqa: B027
        """Start work that may overlap the steps of other rules; `step` follows, with the same
        arguments.
        """

    @abstractmethod
    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        """Update with gradients times `factor`; if found_inf is 1, change neither weights nor
        state.

        Both are scalars on the masters' device, found_inf in fp32: the host does not wait for
        them. The gradients are undefined afterwards: they may be scaled in place.
        """

    @abstractmethod
    def state(self, segment: Tensor) -> dict[str, Tensor]:
        """Return a segment's state by the names of the rule's kinds; zeros before the first step.

        The tensors are not copies: loading a checkpoint writes into them.
        """

    @property
    @abstractmethod
    def steps(self) -> int:
        """Return the number of updates, excluding skipped ones. Waits for the device."""

    @abstractmethod
    def set_steps(self, steps: int) -> None:
        """Set the number of updates, which a bias correction uses."""


@dataclass(frozen=True)
class UpdateRule(ABC):
    """The declaration of an optimizer. Its own constants are the fields of the dataclass.

    name: for reports. kinds: its state, besides the master that every narrower weight has.
    needs_full_matrices: it updates whole matrices, which are assembled for it
    (mpu/optim/matrix_exchange.py); vectors and embeddings go to AdamW in the same step. split: for
    such a rule, which sections are matrices of their own.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[StateKind, ...]]
    needs_full_matrices: ClassVar[bool] = False
    split = Split()

    @abstractmethod
    def updater(self, parts: Parts) -> Updater:
        """Return an Updater that applies the rule to a rank's parts."""

    def wire(self, master: torch.dtype) -> torch.dtype:
        """Return the dtype in which matrices are sent to their owners, and updates back."""
        return master

    def state_bytes(self, master: torch.dtype) -> int:
        """Return the bytes of state per element of a parameter; master: the masters' dtype."""
        return sum((kind.dtype or master).itemsize for kind in self.kinds)


class SegmentUpdater(Updater):
    """Holds the state that the rule declares, and updates one segment after another.

    A new rule only implements `update`, which may allocate a few tensors of a segment's size.
    """

    def __init__(self, rule: UpdateRule, parts: Parts) -> None:
        self.rule = rule
        self.groups = [{**group, "lr": 0.0} for group in parts.groups]
        self._state = {
            segment: {
                kind.name: torch.zeros_like(segment, dtype=kind.dtype, requires_grad=False)
                for kind in rule.kinds
            }
            for segment in parts.segments
        }
        self._steps = torch.zeros((), dtype=torch.float64, device=parts.device)

    def update(
        self, weight: Tensor, grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a segment's new values and its new state; change nothing in place.

        group: as in Parts, with "lr".
        """
        raise NotImplementedError

    def count(self, found_inf: Tensor) -> None:
        """Count an update, unless it is skipped."""
        self._steps += 1 - found_inf.double()

    def scaled(self, segment: Tensor, factor: Tensor) -> Tensor:
        """Return a segment's gradient times `factor`."""
        assert segment.grad is not None
        return segment.grad * factor.to(segment.dtype)

    @torch.no_grad()
    def step(self, factor: Tensor, found_inf: Tensor) -> None:
        self.count(found_inf)
        skip = found_inf == 1
        for group in self.groups:
            for segment in group["params"]:
                state = self._state[segment]
                grad = self.scaled(segment, factor)
                weight, new = self.update(segment, grad, state, group)
                segment.copy_(torch.where(skip, segment, weight))
                for name, values in state.items():
                    values.copy_(torch.where(skip, values, new[name]))

    def state(self, segment: Tensor) -> dict[str, Tensor]:
        return self._state[segment]

    @property
    def steps(self) -> int:
        return int(self._steps)

    def set_steps(self, steps: int) -> None:
        self._steps.fill_(steps)


@dataclass(frozen=True)
class Group:
    """The settings of a group of parameters, from the flags.

    decoupled: it uses the decoupled learning rate, if a run has one. divisor: divides its learning
    rate and AdamW's eps (mpu/mup.py). lr_mult: multiplies its learning rate only.
    """

    rule: UpdateRule
    weight_decay: float = 0.0
    decoupled: bool = False
    divisor: float = 1.0
    lr_mult: float = 1.0


class StateHome:
    """Where masters and state are stored, and what updates them: here the device for both.

    Offload (mpu/optim/offload.py) keeps them in host memory and updates them on the host.
    StateOffload (mpu/optim/state_offload.py) keeps them in host memory between steps.

    gradients, weights: the owned part of each bucket on the device, the same tensors at every step.
    dtype: of masters. The updaters work on the attributes `gradients` and `masters`.
    """

    def __init__(
        self, gradients: Sequence[Tensor], weights: Sequence[Tensor], dtype: torch.dtype
    ) -> None:
        self.gradients, self.weights = list(gradients), list(weights)
        self.masters = [w if w.dtype == dtype else w.to(dtype) for w in weights]

    def together(self) -> list[list[int]]:
        """Return the groups of buckets that are updated together: here one group of all."""
        return [[*range(len(self.gradients))]]

    def update(
        self, updaters: Sequence[Sequence[Updater]], factor: Tensor, found_inf: Tensor
    ) -> None:
        """Step updaters[i] on the i-th group of `together`. factor, found_inf: those of
        Updater.step, on the device.
        """
        for here in updaters:
            for updater in here:
                updater.start(factor, found_inf)
            for updater in here:
                updater.step(factor, found_inf)

    def round(self, changed: Sequence[int]) -> None:
        """Round the masters into the weights, after `update`. changed: the buckets in which rows of
        masters were multiplied since.
        """
        self.weights_from_masters()

    def leave(self) -> None:
        """Release masters and state, which are not needed until the next update."""

    def rest(self) -> None:
        """Move masters and state to where `at_rest` reads and writes them."""

    def at_rest(self, x: Tensor) -> Tensor:
        """Return the storage of a master or a state between steps, as a view."""
        return x

    def masters_to_read(self) -> list[Tensor]:
        """Return the masters of each bucket, wherever their current values are."""
        return self.masters

    def weights_from_masters(self) -> None:
        """Round the masters into the weights, after an update or after masters were loaded."""
        for master, weight in zip(self.masters_to_read(), self.weights, strict=True):
            if master.dtype != weight.dtype:
                weight.copy_(master)

    def masters_from_weights(self) -> None:
        """Widen the weights into the masters, after only the weights were loaded."""
        self.rest()
        for master, weight in zip(self.masters_to_read(), self.weights, strict=True):
            if master is not weight:
                master.copy_(weight)

    def loaded(self) -> None:
        """Resume from a loaded checkpoint, which has masters if the weights are narrower."""


def divided(rate: float, group: Mapping[str, Any]) -> float:
    """Return a learning rate or eps, divided by the divisor of a group of Parts, if any."""
    return rate / float(group.get("divisor", 1.0))


def rate_of(group: Mapping[str, Any], lr: float, decoupled_lr: float | None = None) -> float:
    """Return the learning rate of a group of Parts. decoupled_lr: None if a run has none."""
    rate = decoupled_lr if group["decoupled"] and decoupled_lr is not None else lr
    return divided(rate, group) * float(group.get("lr_mult", 1.0))


def state_bytes(groups: Mapping[str, Group], master: torch.dtype) -> dict[str, int]:
    """Return the bytes of state per element of a parameter, by group."""
    return {name: group.rule.state_bytes(master) for name, group in groups.items()}


def full_matrix_groups(groups: Mapping[str, Group]) -> set[str]:
    """Return the names of the groups whose rule needs full matrices."""
    return {name for name, group in groups.items() if group.rule.needs_full_matrices}


def rules_of(groups: Mapping[str, Group]) -> Sequence[UpdateRule]:
    """Return the rules of the groups, each once."""
    return list(dict.fromkeys(group.rule for group in groups.values()))
