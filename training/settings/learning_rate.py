# SPDX-License-Identifier: Apache-2.0
"""Compute the learning rate, a pure function of the samples consumed so far.

A resumed run, or one with another layout, follows the same curve. The formulas are Megatron-LM's,
so the first step of a run with warm-up uses --lr-warmup-init (0).

    W warm-up, D end of the decay, A length of WSD's last part, all in samples; n samples consumed
    n <= W (W > 0)   init + (peak - init) n/W
    constant         peak
    n > D            floor
    else, with r = (n - W)/(D - W) and u = (n - (D - A))/A
    linear           floor + (peak - floor) (1 - r)
    cosine           floor + (peak - floor) (1 + cos(pi r))/2
    inverse-square-root   max(floor, peak sqrt(max(W, 1)/max(n, 1)))
    WSD              floor + (peak - floor) c, where c = 1 for u <= 0, and then
                     1 - u (linear), (1 + cos(pi u))/2 (cosine), 2^(1-u) - 1 (exponential),
                     1 - sqrt(u) (minus_sqrt)
"""

import math
from dataclasses import dataclass, replace

from training.settings import batch_size
from training.settings.config import Config


@dataclass(frozen=True)
class Curve:
    """The parameters of a learning-rate curve, lengths in samples."""

    peak: float
    floor: float = 0.0
    init: float = 0.0
    warmup: float = 0.0
    decay: float = 1.0
    style: str = "linear"
    last: float = 0.0  # WSD's last part
    last_style: str = "exponential"


def at(curve: Curve, consumed: float) -> float:
    """Return the learning rate of the step that starts after `consumed` samples."""
    c, n = curve, consumed
    if c.warmup > 0 and n <= c.warmup:
        return c.init + (c.peak - c.init) * n / c.warmup
    if c.style == "constant":
        return c.peak
    if n > c.decay:
        return c.floor
    if c.style == "inverse-square-root":
        return max(c.floor, c.peak * math.sqrt(max(c.warmup, 1) / max(n, 1)))
    if c.style == "WSD":
        share = _fall(c.last_style, max(0.0, n - (c.decay - c.last)) / c.last)
    else:
        share = _fall(c.style, (n - c.warmup) / (c.decay - c.warmup))
    return c.floor + (c.peak - c.floor) * share


def _fall(style: str, done: float) -> float:
    """Return the factor of (peak - floor): from 1 at done = 0 to 0 at done = 1."""
    if style == "linear":
        return 1.0 - done
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * done) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**done - 1.0
    assert style == "minus_sqrt", style
    return 1.0 - math.sqrt(done)


def curve_of(config: Config) -> Curve:
    """Return the run's curve in samples; a step counts the samples that it consumes."""
    o, batch = config.optimizer, config.batch
    decay: float
    warmup: float
    if batch.train_iters is not None:

        def samples(steps: int) -> int:
            return batch_size.samples_after(config, steps)

        end = o.lr_decay_iters or batch.train_iters
        decay, warmup = samples(end), samples(o.lr_warmup_iters)
        # The last part ends with the decay, so it is counted back from there.
        last = decay - samples(end - o.lr_wsd_decay_iters) if o.lr_wsd_decay_iters else 0
    else:
        decay = o.lr_decay_samples or batch.train_samples or math.inf  # a run without an end
        warmup, last = o.lr_warmup_samples, o.lr_wsd_decay_samples or 0
    if o.lr_warmup_fraction is not None:
        warmup = o.lr_warmup_fraction * decay
    return Curve(
        peak=o.lr,
        floor=o.min_lr,
        init=o.lr_warmup_init,
        warmup=warmup,
        decay=decay,
        style=o.lr_decay_style,
        last=last,
        last_style=o.lr_wsd_decay_style,
    )


def learning_rate(config: Config, consumed: int) -> float:
    """Return the learning rate of the step that starts after `consumed` samples."""
    return at(curve_of(config), consumed)


def decoupled_curve_of(config: Config) -> Curve:
    """Return the curve of embedding and output layer: --decoupled-lr's, if given."""
    o, curve = config.optimizer, curve_of(config)
    if o.decoupled_lr is None:
        return curve
    floor = o.min_lr if o.decoupled_min_lr is None else o.decoupled_min_lr
    return replace(curve, peak=o.decoupled_lr, floor=floor)


def decoupled_learning_rate(config: Config, consumed: int) -> float:
    """Return the learning rate of embedding and output layer."""
    return at(decoupled_curve_of(config), consumed)
