# SPDX-License-Identifier: Apache-2.0
"""A blend keeps to its weights in every prefix and draws each dataset in order."""

import numpy as np
import pytest

from training.data.blend import Blend, parse_blend


class Fake:
    """A dataset that says who it is."""

    seq_length, masked = 1, False

    def __init__(self, name):
        self.name = self.digest = name

    def sample(self, i):
        return np.array([self.name, i])

    def origin(self, i):
        return 0, 7, i

    def describe(self, i):
        return f"dataset {self.name} sample {i}"


def blend(weights):
    return Blend([Fake(i) for i in range(len(weights))], weights)


def weight_lists():
    rng = np.random.RandomState(0)
    yield [1.0]
    yield [0.3, 0.7]
    yield [1, 1, 1]
    yield [0.9] + [0.1 / 99] * 99
    yield [2.0**-k for k in range(30)]
    for size in (3, 10, 50):
        yield rng.dirichlet([0.3] * size).tolist()


@pytest.mark.parametrize("weights", list(weight_lists()), ids=len)
def test_every_prefix_keeps_to_the_weights(weights):
    n = 20_000
    datasets, inner = blend(weights).locate_all(np.arange(n))
    drawn = (datasets[:, None] == np.arange(len(weights))).cumsum(axis=0)
    wanted = np.arange(1, n + 1)[:, None] * (np.array(weights) / sum(weights))
    assert np.abs(drawn - wanted).max() < 2
    for i in range(len(weights)):
        assert np.array_equal(inner[datasets == i], np.arange(drawn[-1, i]))


def test_no_table_is_needed_far_into_a_run():
    """Random access at 10^12 continues the counts: 1e-9 of the samples come from the second."""
    mixture = blend([1.0, 1e-9, 0.0])
    datasets, inner = mixture.locate_all(np.arange(10**12, 10**12 + 5))
    assert set(datasets) == {0} and inner[0] == 10**12 - 1000
    assert np.array_equal(np.diff(inner), [1, 1, 1, 1])
    turn = int(0.5e9)
    datasets, _ = mixture.locate_all(np.arange(turn - 3, turn + 3))
    assert list(datasets).count(1) == 1
    datasets, _ = mixture.locate_all(np.arange(10**6))
    assert not datasets.any()


def test_weights_that_all_but_vanish():
    datasets, _ = blend([1.0, 5e-324, 1e-300, 1.0]).locate_all(np.arange(1000))
    assert (datasets == 0).sum() == (datasets == 3).sum() == 500


def test_sample_origin_and_digest():
    mixture = blend([1, 3])
    datasets, inner = mixture.locate_all(np.arange(20))
    for i in range(20):
        assert tuple(mixture.sample(i)) == (datasets[i], inner[i])
        assert mixture.origin(i) == (datasets[i], 7, inner[i])
        assert mixture.describe(i) == f"dataset {datasets[i]} sample {inner[i]}"
    assert mixture.digest == blend([1, 3]).digest != blend([3, 1]).digest


def test_parse():
    assert parse_blend(["a"]) == (["a"], None)
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend(["0.3", "a", "7e-1", "b"]) == (["a", "b"], [0.3, 0.7])


@pytest.mark.parametrize(
    "paths", [[], ["1", "a", "b"], ["a", "1", "b", "2"], ["1", "a", "x", "b"], ["1"]]
)
def test_a_list_that_is_neither_is_refused(paths):
    with pytest.raises(ValueError, match="^--data-path"):
        parse_blend(paths)


@pytest.mark.parametrize("weight", ["-1", "nan", "inf"])
def test_bad_weights_are_refused(weight):
    with pytest.raises(ValueError, match="--valid-data-path: weights"):
        parse_blend([weight, "a", "1", "b"], "--valid-data-path")
    with pytest.raises(ValueError, match="not all 0"):
        parse_blend(["0", "a"])
