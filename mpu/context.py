# SPDX-License-Identifier: Apache-2.0
"""LayerContext: the one frozen object that gives a layer its ranks, device and dtypes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpu.auxiliary_loss import AuxiliaryLoss, AuxiliaryLosses
from mpu.comm.transport import Axis
from mpu.gradients import GradientSink, WeightGradientQueue
from mpu.grid import Grid
from mpu.interleave import Interleaver
from mpu.param import Placement, Region, parameter


class ExpertOptions(NamedTuple):
    """Training options of a mixture of experts: all its flags besides sizes."""

    dispatcher: str = "allgather"  # "allgather", "alltoall" or "auto" (mpu/layers/dispatch.py)
    # "aux_loss", "seq_aux_loss" or "lagged_global_aux_loss", each with its coefficient
    balance: tuple[tuple[str, float], ...] = ()
    z_coefficient: float = 0.0  # of the router's z-loss
    force_balance: bool = False  # every expert gets equally many tokens, ignoring the router
    # for a plan, where tokens have no values: rows of the first rank of ep, over the mean
    skew: float = 1.0
    bias_update_rate: float = 1e-3  # step of the expert bias (mpu/layers/expert_load.py)
    # of an expert (Capacity in mpu/layers/dispatch.py); None: unlimited
    capacity_factor: float | None = None
    pad_to_capacity: bool = False  # pad every expert to its capacity

    @property
    def drop_policy(self) -> str:
        """Return how a full expert chooses; read by copies of an older model/moe.py."""
        return "probs"


class QKClip(NamedTuple):
    """--qk-clip: bound the largest attention logit (mpu/layers/attention/max_logits.py).

    alpha: the queries' share of the factor, as a power of it.
    """

    threshold: float = 100.0
    alpha: float = 0.5


@dataclass(frozen=True)
class LayerContext:
    """The environment of a layer: axes, sequence parallelism, dtypes, device, gradient sink."""

    grid: Grid = field(default_factory=Grid)
    # activations are cut along s outside of tensor-parallel regions
    sequence_parallel: bool = False
    dtype: torch.dtype = torch.float32  # of parameters and activations
    # of gradients, norms, RoPE tables, softmax and loss: fp32, or fp64 for proofs
    accumulate: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    sink: GradientSink = field(default_factory=GradientSink)
    queue: WeightGradientQueue = field(default_factory=WeightGradientQueue)
    # of two interleaved micro-batches
    interleaver: Interleaver = field(default_factory=Interleaver)
    # linear_cross_entropy (mpu/layers), with --fused-linear-cross-entropy
    loss_in_chunks: Callable[..., Tensor] | None = None
    cp_comm_type: str = "p2p"  # exchange of keys and values (mpu/layers/context_attention.py)
    norm_backend: str = "weft"  # as --norm-backend
    attention_backend: str = "auto"  # as --attention-backend
    # losses added by `auxiliary_loss`
    auxiliary_losses: AuxiliaryLosses = field(default_factory=AuxiliaryLosses)
    experts: ExpertOptions = ExpertOptions()  # how a mixture of experts is trained
    log_max_attention_logit: bool = False  # record the largest logit of each head
    qk_clip: QKClip | None = None  # clip by the largest logit of each head
    # coefficient of the output layer's z-loss (mpu/layers/cross_entropy.py)
    output_z_loss: float = 0.0
    # `device` is a GPU, or meta while a GPU's step is recorded on it (forecast/recording.py)
    on_gpu: bool = None  # type: ignore[assignment]  # None: as `device` says

    tp: Axis = field(init=False)  # the grid's tensor-parallel axis
    sp: bool = field(init=False)  # whether sequence parallelism has an effect

    def __post_init__(self) -> None:
        if self.on_gpu is None:
            object.__setattr__(self, "on_gpu", self.device.type == "cuda")
        object.__setattr__(self, "tp", self.grid.tp)
        object.__setattr__(self, "sp", self.sequence_parallel and self.grid.tp.size > 1)

    def of_layer(self, number: int) -> "LayerContext":
        """Return this context; called by copies of an older model/llama.py."""
        return self

    def reduce_axes(self, region: Region) -> tuple[Axis, ...]:
        """Return the axes over which a replicated weight's gradient is partial in a region."""
        partial = {
            Region.REPLICATED: False,
            Region.SEQUENCE_PARALLEL: self.sp,
            Region.TENSOR_PARALLEL: True,
        }
        return (self.tp,) if partial[region] else ()

    def replicated_parameter(self, shape: tuple[int, ...], region: Region) -> nn.Parameter:
        """Return an uninitialised weight that is replicated over tp and used in `region`.

        Its gradient is summed over the axes over which it is partial there.
        """
        place = Placement(shape, axis=self.tp, reduce_axes=self.reduce_axes(region))
        return parameter(place, self.dtype, self.device, self.sink)

    def replicated(self, module: nn.Module, region: Region) -> nn.Module:
        """Declare the parameters of a torch module as replicated over tp and used in `region`, as
        `replicated_parameter` does; return the module.

        For ParamGrad (docs/library.md), whose gradients are autograd's own.
        """
        for param in module.parameters():
            if getattr(param, "placement", None) is None:
                axes = self.reduce_axes(region)
                place = Placement(tuple(param.shape), axis=self.tp, reduce_axes=axes)
                param.placement = place  # type: ignore[attr-defined]
        return module

    def auxiliary_loss(
        self, x: Tensor, loss: Tensor, region: Region = Region.SEQUENCE_PARALLEL
    ) -> Tensor:
        """Return x, with which the block must continue; add `loss` to the training loss.

        loss: a scalar, the sum over this rank's tokens of the micro-batch; it is divided by all
        tokens of the global batch, including those that a mask leaves out of the main loss. region:
        where it was computed; the loss is partial over tensor-parallel ranks if a weight's gradient
        in that region would be.
        """
        if loss.dim():
            raise RuntimeError(f"auxiliary loss of shape {tuple(loss.shape)}: it must be a scalar")
        axes = tuple(axis for axis in self.reduce_axes(region) if axis.size > 1)
        loss = loss.to(self.accumulate)
        frozen = torch.is_grad_enabled() and not (x.requires_grad or loss.requires_grad)
        if frozen or self.auxiliary_losses.in_forward:  # no backward
            self.auxiliary_losses.add_of_all(loss, axes)
        y: Tensor = AuxiliaryLoss.apply(x, loss, self.auxiliary_losses, axes)
        return y
