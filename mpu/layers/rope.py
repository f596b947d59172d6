# SPDX-License-Identifier: Apache-2.0
"""The angles of rotary positions (Su et al. 2021), with Llama 3.1's stretched frequencies.

Pairs are elements i and i + d/2, as in Hugging Face's Llama, so weights need no permutation.
"""

import math

import torch
from torch import Tensor


def rope_frequencies(
    head_size: int, base: float, scaling_factor: float = 0.0, original_length: int = 8192
) -> Tensor:
    """Return the d/2 angular frequencies base^(-2i/d), in fp64.

    scaling_factor > 0 applies Llama 3.1's rule: wavelengths above original_length are stretched by
    the factor, those under a quarter of it kept, those between blended linearly in 1/wavelength.
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
    """Return cos and sin [length, 1, 1, d/2] of position x frequency, rounded once, from fp64."""
    angle = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)[:, None, None]
    return angle.cos().to(device, dtype), angle.sin().to(device, dtype)
