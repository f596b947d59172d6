# SPDX-License-Identifier: Apache-2.0
"""muP, the maximal update parametrisation: a learning rate found at one width is best at others.

    with m = width / base width               standard            muP
    initial spread of hidden matrices         std                 std / sqrt(m)
    AdamW's learning rate and eps of them     lr, eps             lr / m, eps / m
    attention                                 q k^T / sqrt(d)     q k^T sqrt(base d) / d
    logits                                    W h                 W h / m
    embedding, output layer, norms, biases    the same in both

(Yang et al. 2022, Tensor Programs V, table 8; the rules are Megatron-LM's,
megatron/core/optimizer/__init__.py.) A model says which of its sizes are widths, in `with_mup` of
its file; nothing else knows a parameter's name.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class MuP(NamedTuple):
    """What the flags of muP say, by the names of Megatron-LM's.

    output_mult: what logits are multiplied by; 1: 1 / m. base_head_dim: the size of a head at the
    base width, for which attention is the standard one; 0: its factor is 1 / d.
    """

    base_hidden_size: int
    embedding_mult: float = 1.0
    output_mult: float = 1.0
    base_head_dim: float = 0.0

    def width_mult(self, width: int) -> float:
        """Return m of a width."""
        return width / self.base_hidden_size

    def logits_divisor(self, width: int) -> float:
        """Return what the logits of a model of this width are divided by."""
        return self.width_mult(width) if self.output_mult == 1.0 else 1 / self.output_mult

    def softmax_scale(self, head_size: int) -> float:
        """Return what q k^T of heads of this size is multiplied by."""
        return (self.base_head_dim or 1.0) ** 0.5 / head_size


class Widths(NamedTuple):
    """What a model's file says of muP: its sizes with the multipliers in them, and by group of
    parameters (mpu.param.GROUPS) what AdamW's learning rate and eps are divided by, where not by 1.
    """

    sizes: Any
    divisors: Mapping[str, float]
