# SPDX-License-Identifier: Apache-2.0
"""The index benchmark compares results before it compares times."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.bench_index import compare, draw_lengths, load_megatron
from mpu import native


def test_lengths_sum_to_what_is_asked():
    lengths = draw_lengths(100_000, 100)
    assert lengths.sum() == 100_000 and lengths.dtype == np.int32 and lengths.min() >= 0
    assert 70 < lengths.mean() < 140


def test_compares_equal_results_and_refuses_others():
    def right(lengths, order, seq_length, epochs, tokens, drop_last, extra):
        places = [(p, offset) for p, d in enumerate(order) for offset in range(lengths[d])]
        count = (tokens - extra) // seq_length + 1
        return np.array(places[::seq_length][:count], np.int32)

    def wrong(*given):
        return right(*given) + 1

    medians = compare(SimpleNamespace(build_sample_idx_int32=right), 20_000, 100, 64, repeats=1)
    expected = {"megatron-core", "numpy"} | ({"weft"} if native.load() else set())
    assert medians.keys() == expected and min(medians.values()) > 0
    with pytest.raises(SystemExit, match="disagree"):
        compare(SimpleNamespace(build_sample_idx_int32=wrong), 20_000, 100, 64, repeats=1)


def test_missing_megatron_is_one_hint(tmp_path):
    with pytest.raises(SystemExit, match="holds no megatron-core; get it with\n.*pip install"):
        load_megatron(tmp_path)
