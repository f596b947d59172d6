# SPDX-License-Identifier: Apache-2.0
"""The angles of rotary positions (Su et al. 2021), optionally stretched by Llama 3.1's rule, by
YaRN, or uniformly, which is linear interpolation of the positions (Chen et al. 2023).

Pairs are elements i and i + d/2, as in Hugging Face's Llama, so weights need no permutation.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LINEAR = 1  # an original_length for rope_frequencies below every wavelength, which is >= 2 pi


@dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al. 2023, section 3): `factor` times as many positions as original_length.

    A frequency that turns more than beta_fast times within original_length is kept, one that turns
    less than beta_slow times is divided by the factor, and those between are blended linearly in
    their index. truncate: round the ends of that range to integers. attention_factor: the factor of
    cos and sin, sqrt(1/t) in the paper; 0: the paper's 0.1 ln(factor) + 1.
    """

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if not self.attention_factor:
            object.__setattr__(self, "attention_factor", self.suggested(self.factor))

    @staticmethod
    def suggested(factor: float, mscale: float = 1.0, mscale_all_dim: float = 0.0) -> float:
        """Return the attention factor by DeepSeek's formula; by default it equals the paper's."""
        log = 0.1 * math.log(max(factor, 1.0))
        return (mscale * log + 1.0) / (mscale_all_dim * log + 1.0)

    def frequencies(self, head_size: int, base: float) -> Tensor:
        """Return the d/2 angular frequencies, in fp64."""
        inverse = rope_frequencies(head_size, base)

        def index(turns: float) -> float:  # of the frequency with that number of turns
            length = self.original_length / (2 * math.pi * turns)
            return head_size * math.log(length) / (2 * math.log(base))

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_size - 1)
        at = torch.arange(head_size // 2, dtype=torch.float64)
        ramp = ((at - low) / (high - low if high != low else 1e-3)).clamp(0.0, 1.0)
        return ramp * inverse / self.factor + (1 - ramp) * inverse


def rope_frequencies(
    head_size: int, base: float, scaling_factor: float = 0.0, original_length: int = 8192
) -> Tensor:
    """Return the d/2 angular frequencies base^(-2i/d), in fp64.

    scaling_factor > 0 applies Llama 3.1's rule: wavelengths above original_length are stretched by
    the factor, those below a quarter of it are kept, and those between are blended linearly in
    1/wavelength. With original_length LINEAR all are stretched: positions are divided by the
    factor.
    """
    inverse = base ** (-torch.arange(0, head_size, 2, dtype=torch.float64) / head_size)
    if not scaling_factor:
        return inverse
    low, high = 1.0, 4.0
    wavelength = 2 * math.pi / inverse
    blend = ((original_length / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * inverse / scaling_factor + blend * inverse


def rope_table(
    frequencies: Tensor,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return factor x cos and factor x sin [length, 1, 1, d/2] of position x frequency; the angles
    are computed in fp64.
    """
    at = torch.arange(length, dtype=torch.float64)
    if device.type == "meta":  # for a plan: shapes only
        at, frequencies = at.to(device), frequencies.to(device)
    angle = torch.outer(at, frequencies)[:, None, None]
    return (factor * angle.cos()).to(device, dtype), (factor * angle.sin()).to(device, dtype)
