# SPDX-License-Identifier: Apache-2.0
"""Mock data counts, ends documents, and is the same every time."""

import numpy as np
import pytest

from training.data.mock import MockDataset


@pytest.mark.parametrize("eod", [0, 5, 9])
def test_documents_count_upwards_and_end(eod):
    data = MockDataset("train", 64, seed=1, vocab_size=10, eod=eod)
    rest = [token for token in range(10) if token != eod]
    ends = 0
    for i in range(50):
        sample = data.sample(i)
        assert sample.dtype == np.int64 and sample.shape == (65,)
        assert set(sample) <= set(range(10))
        ends += int((sample == eod).sum())
        for now, then in zip(sample, sample[1:], strict=False):
            if eod not in (now, then):
                assert rest.index(then) == (rest.index(now) + 1) % 9
    assert 100 < ends < 300  # four a sample on average


def test_same_again_and_different_elsewhere():
    def samples(*facts):
        return [tuple(MockDataset(*facts).sample(i)) for i in (0, 1, 0)]

    first = samples("train", 16, 1, 100, None)
    assert first == samples("train", 16, 1, 100, None) and first[0] == first[2] != first[1]
    assert first != samples("valid", 16, 1, 100, None) and first != samples(
        "train", 16, 2, 100, None
    )
    assert all((np.diff(sample) % 100 == 1).mean() > 0.5 for sample in first)


def test_digest_origin_and_refusal():
    data = MockDataset("train", 16, 1, 100, None)
    assert data.digest == MockDataset("train", 16, 1, 100, None).digest
    assert data.digest != MockDataset("train", 16, 1, 100, 99).digest
    assert data.origin(3) == (0, 3, 0) and data.describe(3) == "mock data, sample 3"
    with pytest.raises(ValueError, match="--mock-data needs a vocabulary of >= 2 tokens, not 1"):
        MockDataset("train", 16, 1, 1, None)
