# SPDX-License-Identifier: Apache-2.0
"""Any layout, worker count and resume point sees the same global batches."""

import itertools
import os
import threading
import time

import numpy as np
import pytest
import torch

from training.data.batch import DocumentRules
from training.data.dataset import DataError
from training.data.loader import Loader
from training.data.mock import MockDataset
from training.data.watched import WatchedFile
from training.data.workers import wanted_workers

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
    ("size", "micro", "workers"),
    [(1, 1, 0), (1, 4, 2), (2, 1, 1), (2, 2, 2), (4, 2, 0), (8, 1, 1), (8, 2, 0)],
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


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [1, 2])
def test_a_global_batch_in_which_no_token_counts_is_told(size, workers):
    """A sample without one is nothing to tell, nor a rank's whole part."""

    class Masked(MockDataset):
        def sample(self, i):
            masked = i in (4, *range(8, 16), 20, 22, *range(24, 64))
            return np.full(13, 49) if masked else super().sample(i)

    said = [[] for _ in range(size)]
    for rank, lines in enumerate(said):
        each = Loader(
            Masked("train", 12, 3, 50, 49), 1, rank, size, vocab_size=50, workers=workers,
            rules=DocumentRules(49, eod_mask_loss=True), report=lines.append,
        )  # fmt: skip
        for first in range(0, 64, 4):
            counts = [batch.token_count for batch in each.next_global_batch(first, 4)]
            counted = first in (0, 4, 16) or first == 20 and (rank, size) != (0, 2)
            assert bool(sum(counts)) == counted
        each.close()
    firsts = [8, 12, 28, 44]  # the 1st, 2nd, 4th and 8th of 12
    for lines in said:
        assert [int(line.split("samples ")[1].split()[0]) for line in lines] == firsts
        assert "--eod-mask-loss leaves no token of samples 8 to 11 in the loss" in lines[0]


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


class Slow(MockDataset):
    """A dataset that notes how many threads ask for samples at once, and may hang."""

    def __init__(self):
        super().__init__("train", 12, 3, 50, 49)
        self.gate, self.hangs = threading.Event(), False

    def sample(self, i):
        if self.hangs:
            self.gate.wait(20)
        time.sleep(0.005)
        return super().sample(i)

    def under_way(self):
        return "/a/b.bin, byte 4096" if self.hangs else ""


@pytest.mark.parametrize("workers", [0, 2, None])
def test_a_read_that_hangs_is_named_within_the_deadline(workers):
    data, rules = Slow(), DocumentRules()
    each = Loader(
        data, 2, 0, 1, vocab_size=50, rules=rules, workers=workers, timeout=0.2 if workers else 0.1
    )
    each.next_global_batch(0, 4)
    each.close()
    data.hangs = True
    with pytest.raises(DataError, match=r"b.bin, byte 4096: not read within 0\.[12] seconds"):
        each.next_global_batch(4, 4)
    data.gate.set()


def test_threads_are_added_until_reads_keep_up():
    """A step of 4 reads of 5 ms each that takes 10 ms needs 2 threads, and some to spare."""
    assert wanted_workers(0.005, 4, 0.010) == 3 and wanted_workers(0.005, 4, 1.0) == 2
    assert wanted_workers(0.005, 64, 0.010) == wanted_workers(1, 1, 0) == 32
    said, data = [], Slow()
    each = Loader(
        data, 1, 0, 1, vocab_size=50, rules=DocumentRules(), workers=None, report=said.append
    )
    alone = Loader(data, 1, 0, 1, vocab_size=50, rules=DocumentRules())
    for step in range(4):
        ours, theirs = (one.next_global_batch(16 * step, 16) for one in (each, alone))
        assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(ours, theirs, strict=True))
        each._returned = time.perf_counter() - 0.008  # as if the step had taken 8 ms
    each.close()
    assert (
        each._workers >= 15 and said[0].startswith("data: ") and "not 2: a micro-batch" in said[0]
    )


def test_a_read_of_a_file_says_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(bytes(100))
    file, gate, inside = WatchedFile(str(tmp_path / "a.bin")), threading.Event(), threading.Event()
    pread = os.pread

    def hang(*where):
        inside.set()
        gate.wait(20)
        return pread(*where)

    monkeypatch.setattr(os, "pread", hang)
    assert file.under_way() == ""
    reader = threading.Thread(target=file.read, args=(64, 8))
    reader.start()
    inside.wait(20)
    assert file.under_way().startswith(f"{tmp_path}/a.bin, byte 64: a read has taken 0.")
    gate.set()
    reader.join()
    assert file.under_way() == ""
