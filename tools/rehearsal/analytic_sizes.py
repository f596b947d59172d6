# SPDX-License-Identifier: Apache-2.0
"""What an analytic record is written from: a model's sizes, a layout, and a framework's recipe.

h hidden, f ffn, t tp ranks, T tokens of a micro-batch
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer. gated: the MLP has a gate beside its first matmul."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool
    tied: bool = False

    @property
    def qkv(self) -> int:
        """Return the outputs of the fused QKV projection."""
        return self.hidden + 2 * self.kv_heads * (self.hidden // self.heads)

    @property
    def up(self) -> int:
        return self.ffn * (2 if self.gated else 1)

    @property
    def layer_parameters(self) -> int:
        return self.hidden * (self.qkv + self.hidden + self.up + self.ffn)


@dataclass(frozen=True)
class Layout:
    """How a run is cut: ranks with tp fastest, then dp, then pp. recompute: "none" or "full"."""

    tp: int
    dp: int
    pp: int
    micro_batch: int
    micro_batches: int
    zero: int = 0
    virtual: int = 1
    schedule: str = "1f1b"
    recompute: str = "none"
    sequence_parallel: bool = True
    dtype: str = "bfloat16"

    @property
    def tp_group(self) -> tuple[int, ...]:
        return tuple(range(self.tp))

    @property
    def dp_group(self) -> tuple[int, ...]:
        return tuple(range(0, self.tp * self.dp, self.tp))


class Passes(NamedTuple):
    """Kernels that only move memory: launches, and bytes for each token.

    hidden: in units of 2 h bytes, of the rank's tokens (T / t under sequence parallelism). inner:
    of 2 (h / t). ffn: of 2 (f / t). scores: of 2 (heads / t) sequence, unfused attention's.
    """

    launches: int
    hidden: float = 0.0
    inner: float = 0.0
    ffn: float = 0.0
    scores: float = 0.0


@dataclass(frozen=True)
class Recipe:
    """What a framework does around the matmuls: data about it, the same for all of its runs.

    attention: "flash", "cudnn" or "unfused". causal: its fused attention skips what is masked.
    logit_bytes: forward and backward traffic of each logit after its matmul; logit_launches: of
    both. accumulate_bytes: a parameter and micro-batch, to add its gradient to the main one;
    update_bytes: a parameter, clip and optimizer. update_launches: for each weight tensor.
    gradient_bytes, parameter_bytes: of a number sent. overlap_gradients: under the last backward.
    overlap_tp: a backward's reduce-scatter runs under its weight gradient. message_syncs: times
    that the host waits for each message. host_seconds: of a layer's forward, and of its backward,
    beside its launches. float8_bytes: of casts and transposes, an element of an operand.
    """

    name: str
    forward: Passes
    backward: Passes
    attention: str = "flash"
    causal: bool = True
    logit_bytes: tuple[float, float] = (24.0, 16.0)
    logit_launches: int = 20
    accumulate_bytes: float = 0.0
    update_bytes: float = 30.0
    update_launches: float = 1.0
    gradient_bytes: int = 4
    parameter_bytes: int = 2
    overlap_gradients: bool = True
    overlap_tp: bool = False
    message_syncs: int = 0
    host_seconds: float = 0.0
    float8_bytes: float = 0.0
