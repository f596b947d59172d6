# SPDX-License-Identifier: Apache-2.0
"""muP, the maximal update parametrisation: the best learning rate transfers between widths.

    with m = width / base width               standard            muP
    initial spread of hidden matrices         std                 std / sqrt(m)
    AdamW's learning rate and eps of them     lr, eps             lr / m, eps / m
    attention                                 q k^T / sqrt(d)     q k^T sqrt(base d) / d
    logits                                    W h                 W h / m
    embedding, output layer, norms, biases    the same in both

(Yang et al. 2022, Tensor Programs V, table 8; the rules are Megatron-LM's,
megatron/core/optimizer/__init__.py.) A model file declares in `with_mup` which of its sizes are
widths; no other code depends on parameter names.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class MuP(NamedTuple):
    """The flags of muP, with Megatron-LM's names.

    output_mult: the factor of logits; 1: 1 / m. base_head_dim: the size of a head at the base
    width, at which attention is the standard one; 0: the factor of q k^T is 1 / d.
    """

    base_hidden_size: int
    embedding_mult: float = 1.0
    output_mult: float = 1.0
    base_head_dim: float = 0.0

    def width_mult(self, width: int) -> float:
        """Return m for a width."""
        return width / self.base_hidden_size

    def logits_divisor(self, width: int) -> float:
        """Return the divisor of the logits of a model of this width."""
        return self.width_mult(width) if self.output_mult == 1.0 else 1 / self.output_mult

    def softmax_scale(self, head_size: int) -> float:
        """Return the factor of q k^T for heads of this size."""
        return (self.base_head_dim or 1.0) ** 0.5 / head_size


class Widths(NamedTuple):
    """A model file's declarations for muP: its sizes, including the multipliers, and the divisors
    of AdamW's learning rate and eps by parameter group (mpu.param.GROUPS), where not 1.
    """

    sizes: Any
    divisors: Mapping[str, float]
