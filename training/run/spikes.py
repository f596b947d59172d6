# SPDX-License-Identifier: Apache-2.0
"""Find steps whose loss or gradient norm is far above those of the recent steps.

    z = (x - median) / max(1.4826 x median of |x - median|, floor)

over the last WINDOW finite steps; x is the loss and the logarithm of the gradient norm. Median and
median deviation are not moved by a few outliers, as mean and standard deviation are. All of it
stays on the device: no step waits for the answer, which travels with the ranks' other flags.
"""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

WINDOW, LEAST = 128, 32  # steps that are compared with; so many are needed
FLOOR = (0.01, 0.05)  # of the deviation: of the loss, a share of its median; of log(norm)
NAMES = ("loss", "gradient norm")


class Seen(NamedTuple):
    """One step: its iteration, (loss, norm) and their z-scores, on the device."""

    iteration: int
    values: Tensor
    scores: Tensor


class Spikes:
    """Judge each step by the steps before it. threshold: the z-score from which it is a spike."""

    def __init__(self, threshold: float, device: torch.device | str) -> None:
        self.threshold = threshold
        self._window = torch.full((2, WINDOW), torch.nan, dtype=torch.float64, device=device)
        self._seen: deque[Seen] = deque(maxlen=2)

    @torch.no_grad()
    def judge(self, iteration: int, loss: Tensor, norm: Tensor) -> Tensor:
        """Return 1 where the step is a spike, else 0: a scalar on the device. NaN is none."""
        values = torch.stack([loss.double(), norm.double()])
        x = torch.stack([values[0], values[1].log()])
        middle = self._window.nanmedian(dim=1, keepdim=True).values
        deviation = 1.4826 * (self._window - middle).abs().nanmedian(dim=1).values
        middle = middle[:, 0]
        floor = torch.stack([FLOOR[0] * middle[0].abs(), torch.full_like(middle[1], FLOOR[1])])
        scores = (x - middle) / torch.maximum(deviation, floor)
        enough = self._window[0].isfinite().sum() >= LEAST
        spike = (scores > self.threshold).any() & enough
        moved = torch.cat([self._window[:, 1:], x[:, None]], dim=1)
        self._window = torch.where(x.isfinite().all(), moved, self._window)
        self._seen.append(Seen(iteration, values, scores))
        return spike.double()

    def describe(self, iteration: int) -> str:
        """Return what was seen at one of the last two steps, as text. Waits for the device."""
        found = next((seen for seen in self._seen if seen.iteration == iteration), None)
        if found is None:
            return ""
        values, scores = found.values.tolist(), found.scores.tolist()
        return ", ".join(
            f"{name} {value:.4g} (z-score {score:.1f})"
            for name, value, score in zip(NAMES, values, scores, strict=True)
        )
