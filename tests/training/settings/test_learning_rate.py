# SPDX-License-Identifier: Apache-2.0
"""The learning rate: golden points from the formulas, and properties of every curve."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.settings.arguments import BatchConfig, ModelConfig, OptimizerConfig
from training.settings.config import Config
from training.settings.learning_rate import (
    Curve,
    at,
    curve_of,
    decoupled_learning_rate,
    learning_rate,
)

STYLES = ("linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")


def config(batch=None, **optimizer):
    return Config(
        ModelConfig(2, 64, 4, 32),
        batch=batch or BatchConfig(global_batch_size=10, train_iters=100),
        optimizer=OptimizerConfig(**{"lr": 1e-3} | optimizer),
    )


GOLDEN = [
    # peak 1, floor 0.1, warm-up 100 of 1000 samples
    (
        Curve(1, 0.1, 0, 100, 1000, "linear"),
        {0: 0, 50: 0.5, 100: 1, 550: 0.55, 1000: 0.1, 1001: 0.1},
    ),
    (Curve(1, 0.1, 0.2, 100, 1000, "linear"), {0: 0.2, 50: 0.6, 100: 1}),
    (Curve(1, 0.1, 0, 100, 1000, "constant"), {50: 0.5, 100: 1, 1000: 1, 5000: 1}),
    (
        Curve(1, 0.1, 0, 100, 1000, "cosine"),
        {100: 1, 325: 0.1 + 0.45 * (1 + math.sqrt(0.5)), 550: 0.55, 1000: 0.1},
    ),
    (Curve(1, 0.1, 0, 100, 1000, "inverse-square-root"), {100: 1, 400: 0.5, 900: 1 / 3, 2000: 0.1}),
    (Curve(1, 0.4, 0, 100, 1000, "inverse-square-root"), {400: 0.5, 900: 0.4}),
    (Curve(1, 0, 0, 0, 1000, "inverse-square-root"), {0: 1, 1: 1, 4: 0.5, 100: 0.1}),
    (Curve(1, 0.1, 0, 100, 1000, "WSD", 400, "linear"), {101: 1, 600: 1, 800: 0.55, 1000: 0.1}),
    (Curve(1, 0.1, 0, 100, 1000, "WSD", 400, "cosine"), {600: 1, 800: 0.55, 1000: 0.1}),
    (
        Curve(1, 0.1, 0, 100, 1000, "WSD", 400, "exponential"),
        {600: 1, 800: 0.1 + 0.9 * (math.sqrt(2) - 1), 1000: 0.1},
    ),
    (Curve(1, 0.1, 0, 100, 1000, "WSD", 400, "minus_sqrt"), {600: 1, 700: 0.55, 1000: 0.1}),
]


@pytest.mark.parametrize(
    "curve,points", GOLDEN, ids=lambda v: v.style if hasattr(v, "style") else ""
)
def test_golden_points(curve, points):
    for consumed, expected in points.items():
        assert at(curve, consumed) == pytest.approx(expected, rel=1e-12, abs=1e-15), consumed


curves = st.builds(
    lambda peak, floor, init, warmup, length, style, last, last_style: Curve(
        peak,
        floor * peak,
        init * peak,
        warmup,
        warmup + length,
        style,
        max(1, round(last * length)),
        last_style,
    ),
    st.floats(1e-6, 1.0),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 10**9),
    st.integers(1, 10**9),
    st.sampled_from(STYLES),
    st.floats(0.01, 1.0),
    st.sampled_from(WSD_STYLES),
)


@given(curves, st.floats(0, 1.5))
def test_stays_between_its_bounds(curve, where):
    value = at(curve, int(where * curve.decay))
    assert min(curve.init, curve.floor) * (1 - 1e-9) <= value <= curve.peak * (1 + 1e-9)


@given(curves, st.floats(0, 1), st.floats(0, 1))
def test_never_rises_after_warm_up(curve, one, other):
    span = curve.decay - curve.warmup
    early, late = sorted(int(curve.warmup + 1 + x * span) for x in (one, other))
    assert at(curve, late) <= at(curve, early) * (1 + 1e-12)


@given(curves)
def test_ends_at_the_floor_and_stays_there(curve):
    assert at(curve, curve.decay + 1) == curve.floor
    if curve.style in ("linear", "cosine", "WSD"):
        assert at(curve, curve.decay) == pytest.approx(curve.floor, abs=1e-12)


def test_steps_and_samples_are_one_clock():
    by_steps = config(lr_warmup_iters=10, lr_decay_iters=80, lr_decay_style="cosine")
    by_samples = config(
        BatchConfig(global_batch_size=10, train_samples=1000),
        lr_warmup_samples=100,
        lr_decay_samples=800,
        lr_decay_style="cosine",
    )
    assert curve_of(by_steps) == curve_of(by_samples)
    assert learning_rate(by_steps, 440) == learning_rate(by_samples, 440)


def test_decay_follows_the_length_of_the_run_unless_told():
    assert curve_of(config()).decay == 1000
    assert curve_of(config(BatchConfig(train_samples=777))).decay == 777


def test_warmup_fraction_is_of_the_decay():
    curve = curve_of(config(lr_warmup_fraction=0.25, lr_decay_iters=40))
    assert (curve.warmup, curve.decay) == (100, 400)
    assert learning_rate(config(lr_warmup_fraction=0.25, lr_decay_iters=40), 50) == 5e-4


def test_the_first_step_of_a_warm_up_has_its_initial_rate():
    assert learning_rate(config(lr_warmup_iters=10), 0) == 0
    assert learning_rate(config(lr_warmup_iters=10, lr_warmup_init=1e-5), 0) == 1e-5


def test_steps_follow_a_batch_size_schedule():
    # 5 steps of 10 samples reach 50; from there on 20 a step
    batch = BatchConfig(
        global_batch_size=10, step_batch_size_schedule=((0, 10), (50, 20)), train_iters=10
    )
    curve = curve_of(config(batch, lr_warmup_iters=6, lr_decay_style="WSD", lr_wsd_decay_iters=2))
    assert (curve.warmup, curve.decay, curve.last) == (70, 150, 40)


def test_decoupled_rate():
    plain = config(lr_decay_style="cosine", min_lr=1e-4)
    assert decoupled_learning_rate(plain, 300) == learning_rate(plain, 300)
    own = config(lr_decay_style="linear", min_lr=1e-4, decoupled_lr=5e-3, decoupled_min_lr=1e-3)
    assert decoupled_learning_rate(own, 500) == pytest.approx(3e-3)
    assert learning_rate(own, 500) == pytest.approx(5.5e-4)
    floor = config(lr_decay_style="linear", min_lr=1e-4, decoupled_lr=5e-3)
    assert decoupled_learning_rate(floor, 1001) == 1e-4
