# SPDX-License-Identifier: Apache-2.0
"""AdamW on a flat piece of weights in one pass, with the rounding into narrower weights in it.

Read: master, gradient, both moments; written: master, moments and the weight, 30 bytes a parameter
of bf16. What a step decides on the device is read there: the gradients' factor, the bias
corrections, and whether to change nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from mpu.kernels.declared import Cost, declared
from mpu.kernels.launch import cdiv

BLOCK, WARPS = 1024, 4


@dataclass(frozen=True)
class Rates:
    """The numbers of one update that the host knows."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float


def adamw(state: tuple[Tensor, ...], weight: Tensor | None, scalars: Tensor, rates: Rates) -> None:
    """Update state = (master, gradient, exp_avg, exp_avg_sq), each fp32 [n]; round into weight.

    scalars: fp32 [4] on the device: the gradients' factor, 1 - beta1^t, sqrt(1 - beta2^t), and 1
    where nothing is to change, else 0.
    """
    n, (beta1, beta2) = state[0].numel(), rates.betas
    adamw_kernel.launch(
        (cdiv(n, BLOCK),),
        *state, weight, scalars, n, rates.lr, rates.lr * rates.decay, beta1, 1 - beta1, beta2,
        1 - beta2, rates.eps, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


def cost(a: Mapping[str, Any]) -> Cost:
    """Four numbers are read and three written, and the weight where it is narrower."""
    narrow = 0 if a["weight"] is None else a["weight"].element_size()
    written = ("master", "exp_avg", "exp_avg_sq", "weight")
    return Cost(a["n"] * (7 * a["master"].element_size() + narrow), 0.0, written, written[:3])


@declared(
    cost, master="whole", grad="whole", exp_avg="whole", exp_avg_sq="whole", weight="whole",
    scalars="whole",
)  # fmt: skip
@triton.jit
def adamw_kernel(
    master, grad, exp_avg, exp_avg_sq, weight, scalars, n, lr, shrink, beta1, rest1, beta2, rest2,
    eps, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(scalars + 3) == 0.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        g = tl.load(grad + at, inside) * tl.load(scalars)
        first = beta1 * tl.load(exp_avg + at, inside) + rest1 * g
        second = beta2 * tl.load(exp_avg_sq + at, inside) + rest2 * g * g
        root = tl.div_rn(tl.sqrt_rn(second), tl.load(scalars + 2)) + eps
        old = tl.load(master + at, inside)
        size = lr / tl.load(scalars + 1)
        new = old - shrink * old - tl.div_rn(size * first, root)
        tl.store(master + at, new, inside)
        tl.store(exp_avg + at, first, inside)
        tl.store(exp_avg_sq + at, second, inside)
        if weight is not None:
            tl.store(weight + at, new.to(weight.dtype.element_ty), inside)
