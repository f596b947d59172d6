# SPDX-License-Identifier: Apache-2.0
"""Any layout, worker count and resume point sees the same global batches."""

import itertools

import numpy as np
import pytest
import torch

from training.data.batch import DocumentRules
from training.data.loader import Loader
from training.data.mock import MockDataset

SIZES = [8, 8, 16, 8, 24]  # a batch size that changes over time


def loader(rank, size, micro=1, workers=0, dataset=None, vocab_size=50):
    dataset = dataset or MockDataset("train", 12, 3, 50, 49)
    rules = DocumentRules(49, True, True, True)
    return Loader(dataset, micro, rank, size, vocab_size=vocab_size, rules=rules, workers=workers)


def run(size, micro, workers, sizes=SIZES, consumed=0):
    """Return each global batch as {sample: (tokens, labels, positions)} over all ranks."""
    loaders = [loader(rank, size, micro, workers) for rank in range(size)]
    batches = []
    for count in sizes:
        rows = {}
        for each in loaders:
            parts = each.next_global_batch(consumed, count)
            assert len(parts) == count // (micro * size)
            for part in parts:
                for i in range(micro):
                    row = torch.stack([part.tokens[i], part.labels[i], part.position_ids[i]])
                    assert part.first_sample + i not in rows
                    rows[part.first_sample + i] = row.tolist()
        assert sorted(rows) == list(range(consumed, consumed + count))
        batches.append(rows)
        consumed += count
    for each in loaders:
        each.close()
    return batches


@pytest.fixture(scope="module")
def serial():
    return run(1, 1, 0)


@pytest.mark.parametrize(
    ("size", "micro", "workers"), list(itertools.product([1, 2, 4, 8], [1, 2, 4], [0, 1, 2]))
)
def test_global_batches_do_not_depend_on_the_layout(serial, size, micro, workers):
    if size * micro > 8:
        with pytest.raises(ValueError, match="--global-batch-size 8 is not a multiple of"):
            run(size, micro, workers)
    else:
        assert run(size, micro, workers) == serial


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("done", [1, 3])
def test_resume_continues_the_order(serial, workers, done):
    assert run(2, 2, workers, SIZES[done:], sum(SIZES[:done])) == serial[done:]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_evaluation_is_the_same_every_time(workers):
    valid = loader(1, 2, micro=2, workers=workers)
    first = [[b.first_sample for b in batches] for batches in valid.global_batches(3, 8)]
    assert first == [[2, 6], [10, 14], [18, 22]]
    valid.next_global_batch(40, 8)
    assert [[b.first_sample for b in batches] for batches in valid.global_batches(3, 8)] == first
    valid.close()


class Faulty(MockDataset):
    """A dataset whose sample 5 cannot be read the first time."""

    def __init__(self):
        super().__init__("train", 12, 3, 50, 49)
        self.tries = 0

    def sample(self, i):
        if i == 5:
            self.tries += 1
            if self.tries == 1:
                raise OSError("the disk is gone")
        return super().sample(i)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_failing_worker_raises_where_its_batch_was_due(serial, workers):
    each = loader(0, 1, workers=workers, dataset=Faulty())
    assert len(each.next_global_batch(0, 4)) == 4
    with pytest.raises(OSError, match="the disk is gone"):
        each.next_global_batch(4, 4)
    again = each.next_global_batch(4, 4)
    assert [b.tokens[0].tolist() for b in again] == [serial[0][i][0] for i in range(4, 8)]
    each.close()


def test_closing_stops_the_workers():
    each = loader(0, 1, workers=2)
    each.next_global_batch(0, 4)
    threads = list(each._pool._threads)
    assert threads and all(thread.is_alive() for thread in threads)
    each.close()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


def test_a_token_outside_of_the_vocabulary_is_named():
    each = loader(0, 1, vocab_size=49)
    bad = next(i for i in itertools.count() if 49 in each.dataset.sample(i))
    with pytest.raises(ValueError, match=f"sample {bad}: token id 49 is outside of the vocabulary"):
        each.next_global_batch(bad, 1)

    class Negative(MockDataset):
        def sample(self, i):
            return np.array([1, -2, 3])

    with pytest.raises(ValueError, match="token id -2 is outside"):
        loader(0, 1, dataset=Negative("train", 2, 1, 50, 49)).next_global_batch(0, 1)
