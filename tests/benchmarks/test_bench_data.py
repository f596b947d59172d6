# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bench_data.py: a slow disk hides behind the step, and ranks of a large world start."""

import numpy as np
import pytest

from benchmarks.bench_data import SHARE, corpus, hollow, measure_start, waits
from training.data.indexed import IndexedTokens


def test_a_hollow_corpus_is_read_as_any_other(tmp_path):
    hollow(str(tmp_path / "corpus"), 1000, 70)
    tokens = IndexedTokens(str(tmp_path / "corpus"))
    assert len(tokens) == 1000 and tokens.count == 70_000
    assert np.array_equal(tokens.read(999, 10, 60), np.zeros(60))
    assert (tmp_path / "corpus.bin").stat().st_blocks == 0


@pytest.mark.prove
def test_five_ms_a_sample_cost_at_most_a_hundredth_of_a_step(tmp_path):
    """Read in the step itself they cost more."""
    path = ["--data-path", corpus(tmp_path / "corpus")]
    assert waits(path, 100, 0.005)[0] <= SHARE
    assert waits([*path, "--num-workers", "0"], 20, 0.005)[0] > SHARE


@pytest.mark.prove
def test_eight_ranks_of_four_thousand_start_in_ten_seconds_of_cpu(capsys):
    assert measure_start(10**8)
    assert "8 ranks together, once it is built" in capsys.readouterr().out
