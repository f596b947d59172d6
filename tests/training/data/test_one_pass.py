# SPDX-License-Identifier: Apache-2.0
"""--full-validation reads each token once, in the order of the files, and fills up the rest."""

import numpy as np
import pytest

from training.data.batch import PAD, DocumentRules, make_batch
from training.data.cache import IndexCache
from training.data.dataset import DataError
from training.data.gpt import GPTDataset
from training.data.indexed import IndexedTokens, IndexedWriter, token_dtype
from training.data.loader import Loader
from training.data.one_pass import OnePass

FILES = [[5, 0, 17, 1], [1], [0, 30], [14, 1]]  # lengths of documents; one token is no label
SEQ = 7


def file(tmp_path, name, documents, dtype=None):
    with IndexedWriter(str(tmp_path / name), dtype or token_dtype(1000)) as writer:
        for document in documents:
            writer.add(document)
    data = IndexedTokens(str(tmp_path / name))
    cache = IndexCache(str(tmp_path / "cache"))
    return GPTDataset(data, "valid", range(len(documents)), SEQ, 1, cache)


@pytest.fixture
def files(tmp_path):
    numbers = iter(range(1, 1000))
    return [
        file(tmp_path, f"f{i}", [[next(numbers) for _ in range(n)] for n in lengths])
        for i, lengths in enumerate(FILES)
    ]


def test_every_token_is_a_label_once_but_the_first_of_each_file(files):
    data = OnePass(files)
    labels = [int(t) for i in range(data.length + 3) for t in data.sample(i)[1:] if t != PAD]
    firsts, token = [], 1
    for lengths in FILES:
        firsts.append(token)
        token += sum(lengths)
    assert labels == [t for t in range(1, token) if t not in firsts]
    inputs = [data.sample(i) for i in range(data.length)]
    assert all(row[k + 1] == row[k] + 1 for row in inputs for k in range(SEQ) if row[k + 1] != PAD)
    assert data.length == 4 + 0 + 5 + 2 and (data.sample(data.length) == PAD).all()
    assert data.origin(4) == (1, 1, 0) and data.describe(4).endswith("document 1, from token 0 on")


@pytest.mark.parametrize("size, ranks, micro", [(4, 1, 4), (4, 2, 1), (6, 1, 2), (16, 2, 4)])
def test_global_batches_of_any_size_and_layout_hold_the_same_tokens(files, size, ranks, micro):
    data, rules = OnePass(files), DocumentRules(30, True, True, True)
    found, counts = [], 0
    for rank in range(ranks):
        loader = Loader(data, micro, rank, ranks, vocab_size=1000, rules=rules)
        batches = list(loader.global_batches(1, size))  # all of them, not 1
        assert len(batches) == -(-data.length // size)
        for batch in (each for group in batches for each in group):
            mask = batch.loss_mask.bool() if batch.loss_mask is not None else batch.labels >= 0
            found += batch.labels[mask].tolist()
            counts += batch.token_count
            assert batch.tokens.min() >= 0 and batch.labels.min() >= 0
    every = [int(t) for i in range(data.length) for t in data.sample(i)]
    wanted = [t for i in range(data.length) for t in data.sample(i)[1:] if t not in (PAD, 31)]
    assert 30 in every  # it ends a document
    assert sorted(found) == sorted(int(t) for t in wanted)
    assert counts == len(found)


def test_padding_has_no_loss_and_a_batch_without_it_has_no_mask():
    row = np.arange(1, SEQ + 2)
    assert make_batch(row[None], DocumentRules(), 0).loss_mask is None
    short = row.copy()
    short[4:] = PAD
    batch = make_batch(np.stack([row, short]), DocumentRules(), 0)
    assert batch.loss_mask.tolist() == [[1.0] * 7, [1.0] * 3 + [0.0] * 4]
    assert batch.token_count == 10 and batch.labels[1].tolist() == [2, 3, 4, 0, 0, 0, 0]


def test_a_negative_token_is_no_padding(tmp_path):
    data = OnePass([file(tmp_path, "bad", [[1, 2, -1, 4]], np.dtype("int32"))])
    with pytest.raises(DataError, match="document 0 holds a negative token"):
        data.sample(0)
