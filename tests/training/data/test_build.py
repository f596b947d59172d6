# SPDX-License-Identifier: Apache-2.0
"""From flags to loaders: splits, blends, caches, and messages to the user."""

import threading
from types import SimpleNamespace

import pytest

from training.data.build import build_datasets, build_loaders
from training.data.indexed import IndexedWriter, token_dtype
from training.data.loader import Loader
from training.flags.parse import parse
from training.settings.arguments import BatchConfig, DataConfig, ModelConfig, RunConfig
from training.settings.config import Config

TOKENIZER = SimpleNamespace(vocab_size=1000, bos=None, eod=999, texts=lambda: [b""] * 1000)


@pytest.fixture
def prefixes(tmp_path):
    """Write two files of 100 and 50 documents of 20 tokens; each token names its document."""
    names = []
    for name, base, count in (("a", 0, 100), ("b", 500, 50)):
        names.append(str(tmp_path / name))
        with IndexedWriter(names[-1], token_dtype(1000)) as writer:
            for document in range(count):
                writer.add([base + document] * 20)
    return names


def config(seed=1, seq_length=10, eval_interval=None, **data):
    return Config(
        model=ModelConfig(1, 8, 1, seq_length),
        batch=BatchConfig(micro_batch_size=2, global_batch_size=2),
        data=DataConfig(num_workers=0, **data),
        run=RunConfig(seed=seed, eval_interval=eval_interval),
    )


def documents(dataset, count=100):
    return {int(token) for i in range(count) for token in dataset.sample(i)[:-1]}


def test_split_of_one_file(prefixes):
    found = build_datasets(config(data_path=(prefixes[0],), split="8,1,1"), TOKENIZER)
    assert documents(found["train"], 160) == set(range(80))
    assert documents(found["valid"]) == set(range(80, 90))
    assert documents(found["test"]) == set(range(90, 100))


def test_default_split_is_megatrons(prefixes):
    found = build_datasets(config(data_path=(prefixes[0],)), TOKENIZER)
    assert documents(found["train"], 194) == set(range(97))
    assert documents(found["valid"]) == set(range(97, 100)) and found["test"] is None


def test_own_files_for_each_split(prefixes):
    found = build_datasets(
        config(train_data_path=(prefixes[0],), valid_data_path=(prefixes[1],)), TOKENIZER
    )
    assert documents(found["train"], 200) == set(range(100))
    assert documents(found["valid"]) == set(range(500, 550)) and found["test"] is None


def test_blends_with_and_without_weights(prefixes):
    a, b = prefixes
    weighted = build_datasets(config(data_path=("3", a, "1", b), split="1"), TOKENIZER)["train"]
    assert weighted.weights == [3, 1]
    assert sum(weighted.sample(i)[0] < 500 for i in range(400)) == 300
    by_size = build_datasets(config(data_path=(a, b), split="1"), TOKENIZER)["train"]
    assert by_size.weights == [2000, 1000]
    only = build_datasets(config(data_path=("1", a, "0", b), split="1"), TOKENIZER)["train"]
    assert documents(only, 200) == set(range(100))


def test_the_order_has_a_name(prefixes, tmp_path):
    """One digest for every rank and cache; another one for whatever changes the order."""
    a, b = prefixes
    plain = config(data_path=(a, b), split="8,1,1")
    digest = build_loaders(plain, TOKENIZER, 0, 1).digest
    cached = config(data_path=(a, b), split="'8,1,1'", data_cache_path=str(tmp_path / "cache"))
    assert build_loaders(cached, TOKENIZER, 1, 2).digest == digest
    others = [
        config(data_path=(a, b), split="7,2,1"),
        config(data_path=(b, a), split="8,1,1"),
        config(data_path=("1", a, "1", b), split="8,1,1"),
        config(data_path=(a, b), split="8,1,1", seed=2),
        config(data_path=(a, b), split="8,1,1", seq_length=9),
        config(mock_data=True),
    ]
    digests = {build_loaders(other, TOKENIZER, 0, 1).digest for other in others}
    assert len(digests) == len(others) and digest not in digests


def test_loaders_hand_out_batches_with_the_rules(prefixes):
    loaders = build_loaders(
        config(data_path=(prefixes[0],), split="8,1,1", eod_mask_loss=True), TOKENIZER, 0, 1
    )
    (batch,) = loaders.train.next_global_batch(0, 2)
    assert batch.tokens.shape == (2, 10) and batch.loss_mask is not None
    assert batch.position_ids is None and batch.packed_seq_params is None
    assert len(list(loaders.valid[""].global_batches(2, 2))) == 2
    mock = build_loaders(config(mock_data=True), TOKENIZER, 0, 1)
    assert mock.test.next_global_batch(0, 2)[0].token_count == 20


def test_index_cache_goes_where_it_is_told(prefixes, tmp_path):
    for name, data in (("cache", {}), ("own", {"data_cache_path": str(tmp_path / "own")})):
        found = build_datasets(config(data_path=(prefixes[0],), seq_length=1, **data), TOKENIZER)
        found["train"].sample(0)
        assert len(list((tmp_path / name).glob("*.npy"))) == 1


def test_what_a_user_is_told(prefixes, tmp_path):
    a, b = prefixes

    def refused(match, **data):
        with pytest.raises(ValueError, match=match):
            build_loaders(config(**data), TOKENIZER, 0, 1)

    refused("either by --data-path")
    refused("either by --data-path", data_path=(a,), train_data_path=(b,))
    refused("--split nonsense: give up to three numbers", data_path=(a,), split="nonsense")
    refused("the train split has no documents", data_path=(a,), split="0,1")
    refused("the train split has no documents", valid_data_path=(a,))
    with IndexedWriter(str(tmp_path / "c"), token_dtype(1000)) as writer:
        writer.add([1] * 50)
    asked = {"eval_interval": 5, "split": "98,1,1"}
    few = "--eval-interval 5 has nothing to evaluate on: --split 98,1,1 assigns whole documents"
    refused(few, data_path=(str(tmp_path / "c"),), **asked)
    none = "--eval-interval 5 has nothing to evaluate on: --valid-data-path has no token"
    refused(none, eval_interval=5, train_data_path=(a,))
    lost = ("1", a, "0.5", str(tmp_path / "c"))
    refused("--data-path: .*c has weight 0.5 but no train tokens", data_path=lost, split="1,9")
    refused("nothing.idx: cannot be read: No such file", data_path=(str(tmp_path / "nothing"),))
    with pytest.raises(ValueError, match="--reset-position-ids needs an end-of-document token"):
        build_loaders(
            config(data_path=(a,), reset_position_ids=True),
            SimpleNamespace(vocab_size=1000, eod=None),
            0,
            1,
        )
    small = SimpleNamespace(vocab_size=50, eod=49)
    with pytest.raises(ValueError, match=f"{a}.bin: tokens: ids from 0 to 99 are not those of a"):
        build_loaders(config(data_path=(a,)), small, 0, 1)


def test_cyclic_reads_each_sample_once_an_epoch_in_a_new_order(prefixes):
    """By the flag's own config, over the batches of two data-parallel ranks; resumed in between."""
    words = "--num-layers 1 --hidden-size 64 --num-attention-heads 1 --seq-length 20 --lr 1e-3 "
    words += "--train-iters 9 --tokenizer-type NullTokenizer --vocab-size 1000 "
    words += f"--data-path {prefixes[0]} --split 1,0,0 "
    words += "--num-workers 0 --micro-batch-size 5 --global-batch-size 10 --dataloader-type "
    of = {kind: parse(f"{words} {kind}".split(), 2) for kind in ("single", "cyclic")}
    assert any("the order is ours" in note for note in of["cyclic"].notes)
    assert build_loaders(of["cyclic"], TOKENIZER, 0, 2).digest == (
        build_loaders(of["single"], TOKENIZER, 0, 2).digest
    )
    epochs = []
    for epoch in range(3):  # 100 samples, one for each document
        read = []
        for rank in range(2):
            loader = build_loaders(of["cyclic"], TOKENIZER, rank, 2).train
            for consumed in range(epoch * 100, epoch * 100 + 100, 10):
                batches = loader.next_global_batch(consumed, 10)
                read += [int(row[0]) for batch in batches for row in batch.tokens]
        epochs.append(read)
    assert [sorted(read) for read in epochs] == [list(range(100))] * 3
    assert len({tuple(read) for read in epochs}) == 3 and epochs[0] != sorted(epochs[0])


def test_only_reads_of_files_have_a_thread_without_workers(prefixes, monkeypatch):
    """It waits for a read that hangs; made-up samples are made by the rank's own thread."""
    names = []
    make = Loader._make

    def noted(loader, start):
        names.append(threading.current_thread().name)
        return make(loader, start)

    monkeypatch.setattr(Loader, "_make", noted)
    for data in (dict(mock_data=True), dict(data_path=(prefixes[0],))):
        train = build_loaders(config(**data), TOKENIZER, 0, 1).train
        train.next_global_batch(0, 2)
        train.close()
    assert names == ["MainThread", "weft-loader"]


@pytest.fixture
def ends(tmp_path):
    """Write documents that are nothing but ends of documents; in "ends" one of 50 has a token."""
    for name in ("ends", "cut"):
        with IndexedWriter(str(tmp_path / name), token_dtype(1000)) as writer:
            for document in range(50):
                writer.add([999, 7, 999] if document == 47 and name == "ends" else [999] * 99)
    return str(tmp_path / "ends"), str(tmp_path / "cut")


def test_data_in_which_no_token_counts(prefixes, ends):
    """They are found before the first step: Megatron trains on with a loss of 0."""
    a, said, (ends, cut) = prefixes[0], [], ends

    def built(**data):
        said.clear()
        return build_loaders(config(eod_mask_loss=True, **data), TOKENIZER, 0, 1, report=heard)

    def heard(line):
        if "which tokenizer made the pair" not in line:  # these have no record
            said.append(line)

    nothing = "ends hold only the end-of-document token 999, which --eod-mask-loss leaves out of"
    with pytest.raises(ValueError, match=f"--data-path: the train documents of .*{nothing}"):
        built(data_path=(ends,), split="8,1,1")
    assert built(data_path=(ends,), split="1").test is None and not said  # the token 7 counts
    found = built(data_path=("1", a, "9", ends), split="8,1,1")
    assert len(said) == 2 and all(nothing in line for line in said)  # training and validation
    assert found.valid and found.test
    assert built(data_path=("1", a, "0", ends), split="8,1,1") and not said
    with pytest.raises(ValueError, match="--valid-data-path has no token in the loss"):
        built(train_data_path=(a,), valid_data_path=(cut,), eval_interval=5)
    with pytest.raises(ValueError, match="--multiple-validation-sets: the set cut has no token"):
        paths = (prefixes[1], cut)
        built(train_data_path=(a,), valid_data_path=paths, multiple_validation_sets=True)
    found = built(train_data_path=(a,), test_data_path=(cut,))
    assert found.test is None and nothing.replace("ends", "cut") in said[0]
    plain = config(data_path=(ends,), split="8,1,1")
    assert build_loaders(plain, TOKENIZER, 0, 1).train.next_global_batch(0, 2)[0].token_count == 20
