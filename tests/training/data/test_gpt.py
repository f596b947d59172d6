# SPDX-License-Identifier: Apache-2.0
"""Samples cut out of documents, against a slow list of tokens."""

import numpy as np
import pytest

from mpu import native
from training.data.cache import IndexCache
from training.data.gpt import GPTDataset, stable_rng
from training.data.indexed import IndexedTokens, IndexedWriter, token_dtype

LENGTHS = [5, 0, 17, 1, 30, 2, 9, 11, 3, 40]


@pytest.fixture
def prefix(tmp_path):
    """Write documents whose tokens are numbered through: 0, 1, 2, ..."""
    with IndexedWriter(str(tmp_path / "data"), token_dtype(1000)) as writer:
        token = 0
        for length in LENGTHS:
            writer.add(range(token, token + length))
            token += length
    return str(tmp_path / "data")


def dataset(prefix, seq_length=7, seed=1, documents=range(10), split="train", library=None):
    cache = IndexCache(prefix + ".cache")
    return GPTDataset(
        IndexedTokens(prefix), split, documents, seq_length, seed, cache, library=library
    )


def stream(data, epochs):
    """List the tokens of the first epochs in the order in which they are read."""
    orders = [data._epoch(epoch).documents for epoch in range(epochs)]
    return [
        token
        for order in orders
        for document in order
        for token in data._data.read(document, 0, LENGTHS[document])
    ]


@pytest.mark.parametrize("seq_length", [1, 7, 59, 118, 119, 500])
def test_samples_are_consecutive_cuts_of_an_endless_stream(prefix, seq_length):
    """Every sample that starts in three epochs, in stream order, against the slow list."""
    data = dataset(prefix, seq_length)
    assert data.tokens == sum(LENGTHS) == 118
    ahead = 4 + seq_length // 118
    tokens = stream(data, ahead)
    count = -(-3 * 118 // seq_length)
    expected = {tuple(tokens[i * seq_length : (i + 1) * seq_length + 1]) for i in range(count)}
    found = [tuple(data.sample(i)) for i in range(count)]
    assert set(found) == expected and all(len(sample) == seq_length + 1 for sample in found)


def test_every_token_of_an_epoch_is_read_before_the_next(prefix):
    data = dataset(prefix, seq_length=59)
    for epoch in range(3):
        inputs = np.concatenate([data.sample(2 * epoch + i)[:-1] for i in range(2)])
        assert sorted(inputs) == list(range(118))


def test_epochs_and_samples_are_shuffled(prefix):
    data = dataset(prefix, seq_length=2)
    orders = [data._epoch(epoch) for epoch in range(2)]
    assert list(orders[0].documents) != list(orders[1].documents) != sorted(orders[1].documents)
    assert list(orders[0].shuffle) != list(orders[1].shuffle) != sorted(orders[1].shuffle)


def test_order_depends_on_seed_and_split_and_nothing_else(prefix):
    first = [tuple(dataset(prefix).sample(i)) for i in range(40)]
    again = dataset(prefix)
    assert [tuple(again.sample(i)) for i in reversed(range(40))][::-1] == first
    for other in (dataset(prefix, seed=2), dataset(prefix, split="valid")):
        assert [tuple(other.sample(i)) for i in range(40)] != first
        assert other.digest != again.digest
    assert dataset(prefix).digest == again.digest != dataset(prefix, seq_length=8).digest


def test_the_order_is_frozen(prefix):
    """Fix the order of version 1: a change would make every saved run resume into other data."""
    data = dataset(prefix)
    assert [int(data.sample(i)[0]) for i in range(8)] == [22, 1, 37, 53, 23, 104, 44, 58]
    assert stable_rng(1, "train").randint(0, 1000, 3).tolist() == [984, 916, 469]


def test_origin_names_the_first_token(prefix):
    data = dataset(prefix)
    starts = np.cumsum([0, *LENGTHS])
    for i in range(40):
        number, document, offset = data.origin(i)
        assert number == 0 and starts[document] + offset == data.sample(i)[0]
    assert data.describe(0).startswith(f"{prefix}: document {data.origin(0)[1]}, from token ")


def test_a_split_reads_its_own_documents_only(prefix):
    data = dataset(prefix, documents=range(4, 7))
    seen = {int(token) for i in range(20) for token in data.sample(i)}
    assert seen == set(range(23, 23 + 41))
    with pytest.raises(ValueError, match="data: the test split has no tokens"):
        dataset(prefix, documents=range(1, 2), split="test")


def test_a_large_index_is_cached_and_the_same_with_the_compiled_builder(tmp_path, monkeypatch):
    prefix = str(tmp_path / "many")
    with IndexedWriter(prefix, token_dtype(1000)) as writer:
        for length in stable_rng("lengths").randint(1, 20, 3000):
            writer.add(range(length))
    built = dataset(prefix, documents=range(3000))
    first = [tuple(built.sample(i)) for i in range(50)]
    assert len(list((tmp_path / "many.cache").glob("*.npy"))) == 1
    cached = dataset(prefix, documents=range(3000))
    with monkeypatch.context() as patch:
        patch.setattr(cached, "_build", None)
        assert [tuple(cached.sample(i)) for i in range(50)] == first
    for path in (tmp_path / "many.cache").glob("*.npy"):
        path.unlink()
    compiled = dataset(prefix, documents=range(3000), library=native.load())
    assert [tuple(compiled.sample(i)) for i in range(50)] == first


def test_many_epochs_are_not_kept(prefix):
    data = dataset(prefix, seq_length=59)
    for i in range(40):
        data.sample(i)
    assert len(data._epochs) <= 4
    assert tuple(data.sample(0)) == tuple(dataset(prefix, seq_length=59).sample(0))
