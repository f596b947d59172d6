# SPDX-License-Identifier: Apache-2.0
"""Rotate queries and keys by their position (Su et al. 2021), with Llama 3.1's stretched
frequencies.

Pairs are (i, i + d/2), the layout of Hugging Face's Llama, so weights need no permutation.
"""

import math
from typing import Any

import torch
from torch import Tensor

from mpu import native


def rope_frequencies(
    head_size: int, base: float, scaling_factor: float = 0.0, original_length: int = 8192
) -> Tensor:
    """Return the d/2 angular frequencies base^(-2i/d), in fp64.

    scaling_factor > 0 applies Llama 3.1's rule: wavelengths above original_length are stretched by
    the factor, those under original_length / 4 kept, those between blended linearly in
    1/wavelength.
    """
    inverse = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    if not scaling_factor:
        return inverse
    low, high = 1.0, 4.0
    wavelength = 2 * math.pi / inverse
    blend = ((original_length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inverse / scaling_factor + blend * inverse


def rope_table(
    frequencies: Tensor, length: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [length, 1, 1, d/2] of position x frequency, rounded from fp64 once."""
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)[:, None, None]
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)


def apply_rope(qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Rotate the first `heads` heads of qkv [s, b, n, d] (q and k), leave the rest (v).

    cos, sin: [s, 1 or b, 1, d/2]. The rotation is done in their dtype, the result is in qkv's.
    """
    return _Rope.apply(qkv, cos, sin, heads)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, heads: int, sign: float) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    if native.fits(x, accumulate=cos.dtype) and native.fits(cos, sin):
        s, b, n, d = x.shape
        share = s * b // (cos.numel() // (d // 2))  # b where the batch shares its positions
        native.call("rope", x.dtype, x, cos, sin, out, s * b, n, heads, d, share, float(sign))
        return out
    out[:, :, heads:].copy_(x[:, :, heads:])
    half = x.shape[-1] // 2
    turned, target = x[:, :, :heads], out[:, :, :heads]
    if x.dtype != cos.dtype:
        turned, target = turned.to(cos.dtype), torch.empty_like(turned, dtype=cos.dtype)
    first, second = turned[..., :half], turned[..., half:]
    torch.mul(first, cos, out=target[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=target[..., half:]).addcmul_(first, sin, value=sign)
    if x.dtype != cos.dtype:
        out[:, :, :heads].copy_(target)
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(f: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
        f.cos, f.sin, f.heads = cos, sin, heads
        return _rotate(qkv, cos, sin, heads, 1.0)

    @staticmethod
    def backward(f: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        # a rotation's transpose is the rotation by the opposite angle
        return _rotate(dy, f.cos, f.sin, f.heads, -1.0), None, None, None
