# SPDX-License-Identifier: Apache-2.0
"""The mask beside a pair decides which labels count, in every kind of data set.

Masks here mark the tokens from 100 on, so that a sample's tokens say what its mask must be.
"""

import json
import os
import random
import shutil

import numpy as np
import pytest

from tests.training.small_llama import SMALL, read
from training.data.batch import DocumentRules, make_batch
from training.data.build import build_datasets, build_loaders
from training.data.bytes_per_token import TextBytes
from training.data.dataset import DataError
from training.data.indexed import IndexedTokens, IndexedWriter
from training.data.loss_mask import SUFFIX
from training.data.made_with import record_of
from training.data.tokenizer import NullTokenizer, build_tokenizer
from training.settings.config import UsageError

TOKENIZER, EOD, FIRST = NullTokenizer(200), 199, 100  # ids from FIRST on count
BASE = SMALL.replace("--mock-data --dry-run", "").replace("--vocab-size 300", "--device cpu")
BASE += " --tokenizer-type NullTokenizer --vocab-size 200 --seq-length 24 --eval-iters 1"


def write(prefix, seed, masked=True, documents=60, marks=lambda tokens: tokens >= FIRST):
    """Write a pair with its record, and its mask on request."""
    draw = random.Random(seed)
    rows = [
        [draw.randrange(FIRST) for _ in range(draw.randint(1, 30))]
        + [draw.randrange(FIRST, EOD) for _ in range(draw.randint(0, 9))]
        + [EOD]
        for _ in range(documents)
    ]
    record = record_of(TOKENIZER, EOD)
    if masked:
        with IndexedWriter(prefix + SUFFIX, np.dtype(np.uint8)) as out:
            for row in rows:
                out.add(marks(np.array(row)).astype(np.uint8))
        record |= {"loss_mask": IndexedTokens(prefix + SUFFIX).digest, "loss_on": ["answer"]}
    with IndexedWriter(prefix, np.dtype(np.uint16), record) as out:
        for row in rows:
            out.add(row)
    return prefix


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write("a", 1)
    write("b", 2)
    write("plain", 3, masked=False)


def data_of(words, said=lambda line: None):
    return build_datasets(read(words, base=BASE), TOKENIZER, said)


def stages(*names):
    rows = [
        {"name": f"s{i}", "start_tokens": 480 * i, "train_data_path": name.split()}
        for i, name in enumerate(names)
    ]
    with open("stages.json", "w") as file:
        json.dump({"stages": rows}, file)


@pytest.mark.parametrize(
    "words",
    [
        "--data-path a --split 1,1,1",
        "--data-path 0.3 a 0.7 plain --split 8,2,0",
        "--data-path 0.3 a 0.7 b --split 8,1,1 --data-order megatron",
        "--data-path a --split 8,1,1 --data-order megatron",
        "--data-path a b plain --split 8,2,0 --full-validation",
        "--train-data-path plain --valid-data-path a b --multiple-validation-sets",
        "--data-stages stages.json --valid-data-path b",
    ],
)
def test_the_mask_is_that_of_the_tokens(words):
    stages("0.5 plain 0.5 a", "a plain")
    seen = {True: 0, False: 0}
    for dataset in filter(None, data_of(words).values()):
        samples = getattr(dataset, "samples", 10) if dataset.length is None else dataset.length
        for i in range(min(samples, 10)):
            tokens, counts = dataset.sample(i), dataset.loss_mask(i)
            assert counts.dtype == bool and counts.shape == tokens.shape == (25,)
            unmasked = dataset.describe(i).startswith("plain")
            assert dataset.masked or unmasked
            seen[unmasked] += 1
            wanted = np.ones_like(counts) if unmasked else tokens >= FIRST
            assert np.array_equal(counts[tokens >= 0], wanted[tokens >= 0]), (words, i)
        if dataset.length is not None:
            assert not dataset.loss_mask(dataset.length).any()
    assert seen[False] and bool(seen[True]) == ("plain" in words or "stages" in words)


def test_a_batch_counts_labels_not_inputs():
    rows = np.array([[1, 2, 150, 160, EOD, 5, 6, 170], [7, 8, 9, 10, 11, 12, 13, 14]])
    counted = rows >= FIRST
    batch = make_batch(rows, DocumentRules(EOD), 0, counted)
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 0, 0, 1], [0] * 7] and batch.token_count == 4
    rows[0, 5] = 180  # after an end of a document
    both = make_batch(rows, DocumentRules(EOD, eod_mask_loss=True), 0, rows >= FIRST)
    assert both.loss_mask[0].tolist() == [0, 1, 1, 1, 0, 0, 1]
    rows[1, 4:] = -1  # PAD
    padded = make_batch(rows, DocumentRules(EOD), 0, np.ones_like(counted))
    assert padded.loss_mask[1].tolist() == [1, 1, 1, 0, 0, 0, 0]


def test_ranks_of_a_layout_read_the_same_masks_and_context_parallel_ranks_their_part():
    config = read("--data-path 0.5 a 0.5 plain --global-batch-size 4", base=BASE)
    (whole,) = build_loaders(config, TOKENIZER, 0, 1).train.next_global_batch(4, 2)
    assert whole.token_count == whole.loss_mask.sum() < whole.tokens.numel()
    parts = [
        build_loaders(config, TOKENIZER, 0, 1, context=(rank, 2)).train.next_global_batch(4, 2)[0]
        for rank in range(2)
    ]
    assert sum(part.token_count for part in parts) == whole.token_count
    for part in parts:
        assert part.token_count == part.loss_mask.sum()
        for row, places in enumerate(part.position_ids):
            assert part.loss_mask[row].equal(whole.loss_mask[row, places])


def test_all_batches_of_masked_data_have_a_mask():
    """Also of the parts without one, as gradients are scaled by it."""
    config = read("--data-path 0.1 a 0.9 plain --global-batch-size 4", base=BASE)
    loader = build_loaders(config, TOKENIZER, 0, 1).train
    kinds = {
        bool((batch.loss_mask == 1).all())
        for step in range(10)
        for batch in loader.next_global_batch(4 * step, 4)
    }
    assert kinds == {True, False}


def test_a_line_says_that_a_mask_is_read():
    said = []
    data_of("--data-path 0.3 a 0.3 b 0.4 plain --split 1", said.append)
    line = "data: the loss counts a part of the tokens of a (and 1 more), as its .loss_mask says"
    assert line in said
    said.clear()
    data_of("--data-path plain --split 1", said.append)
    assert not any("mask" in line for line in said)


def test_another_mask_is_other_data():
    def digests():
        train = data_of("--data-path a --split 1")["train"]
        return train.digest, train.corpus, train.sketch

    before = digests()
    write("a", 1, marks=lambda tokens: tokens >= FIRST + 1)
    other = digests()
    write("a", 1, masked=False)
    for end in (".bin", ".idx"):
        os.remove(f"a{SUFFIX}{end}")
    none = digests()
    for here in zip(before, other, none, strict=True):
        assert len(set(here)) == 3
    write("a", 1)
    assert digests() == before
    for end in (".bin", ".idx", ".json", f"{SUFFIX}.bin", f"{SUFFIX}.idx"):
        shutil.copyfile(f"a{end}", f"copy{end}")
    copy = data_of("--data-path copy --split 1")["train"]
    assert (copy.digest, copy.corpus, copy.sketch) == before


def replace_value():
    with open(f"a{SUFFIX}.bin", "r+b") as file:
        file.write(b"\x07")
    record = json.load(open("a.json"))
    record["loss_mask"] = IndexedTokens(f"a{SUFFIX}").digest
    json.dump(record, open("a.json", "w"))


def write_mask(kind, documents):
    with IndexedWriter(f"a{SUFFIX}", np.dtype(kind)) as out:
        for length in documents:
            out.add([1] * length)


def edit_record(**fields):
    record = json.load(open("a.json")) | fields
    json.dump({k: v for k, v in record.items() if v is not None}, open("a.json", "w"))


def copy_mask_of(prefix):
    for end in (".bin", ".idx"):
        shutil.copyfile(f"{prefix}{SUFFIX}{end}", f"a{SUFFIX}{end}")


def remove_mask(*ends):
    for end in ends:
        os.remove(f"a{SUFFIX}{end}")


LENGTHS = lambda: IndexedTokens("a").lengths.tolist()  # noqa: E731


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda: remove_mask(".bin", ".idx"),
            r"a\.json names a loss mask, and there is no a\.loss_mask\.bin: copy "
            r"a\.loss_mask\.bin and a\.loss_mask\.idx too",
        ),
        (lambda: remove_mask(".idx"), r"a\.loss_mask\.idx: cannot be read: No such file"),
        (lambda: remove_mask(".bin"), r"a\.loss_mask\.bin: cannot be read: No such file"),
        (
            lambda: copy_mask_of("b"),
            r"a\.loss_mask\.idx: document 0 has \d+ tokens, and in a\.idx \d+; make the pair again",
        ),
        (
            lambda: write_mask(np.uint8, LENGTHS()[:-1]),
            r"a\.loss_mask\.idx: it has 59 documents, and a\.idx 60",
        ),
        (
            lambda: write_mask(np.uint16, LENGTHS()),
            r"a\.loss_mask\.idx: token type: uint16 is not uint8",
        ),
        (
            lambda: write_mask(np.uint8, LENGTHS()),
            r"a\.json belongs to another pair than the loss mask: a\.loss_mask\.bin is not the "
            "mask that it names",
        ),
        (
            lambda: edit_record(loss_mask=None, loss_on=None),
            r"a\.loss_mask\.bin is there, and it names no mask",
        ),
        (lambda: edit_record(loss_mask=3), r"a\.json: loss_mask: 3 is not str"),
        (lambda: edit_record(loss_on=None), r"a\.json: loss_on: None is not list"),
        (replace_value, r"a\.loss_mask\.bin: values from 0 to 7 are not 0 and 1"),
        (lambda: os.truncate(f"a{SUFFIX}.bin", 9), r"a\.loss_mask\.bin: size: 9 bytes, but"),
    ],
)
def test_a_mask_that_is_not_the_pairs_is_refused(change, sentence):
    change()
    with pytest.raises(ValueError, match=sentence):
        data_of("--data-path 0.5 a 0.5 plain --split 1")


def test_without_a_record_the_lengths_decide():
    """As beside a pair of Megatron's. Without the mask, too, all tokens count."""
    os.remove("a.json")
    assert data_of("--data-path a --split 1")["train"].masked
    remove_mask(".bin", ".idx")
    assert not data_of("--data-path a --split 1")["train"].masked


def test_a_value_that_no_start_reads_is_found_where_it_is_read():
    write("big", 9, documents=12000)
    tokens = IndexedTokens("big")
    between = np.linspace(0, tokens.count - 2048, 64)[5] + 2048 + 100  # two of 64 blocks
    (probe,) = np.flatnonzero(tokens.lengths.cumsum() > between)[:1]
    with open(f"big{SUFFIX}.bin", "r+b") as file:
        file.seek(int(tokens.lengths[:probe].sum()))
        file.write(b"\x05")
    record = json.load(open("big.json"))
    record["loss_mask"] = IndexedTokens(f"big{SUFFIX}").digest
    json.dump(record, open("big.json", "w"))
    dataset = data_of("--data-path big --split 1 --full-validation --eval-interval 0")["train"]
    with pytest.raises(DataError, match=rf"big\.loss_mask\.bin: document {probe} has the value 5"):
        for i in range(tokens.count // 24 + 1):
            dataset.loss_mask(i)


def test_a_mask_that_is_written_to_during_a_run_is_an_error():
    dataset = data_of("--data-path a --split 1")["train"]
    dataset.loss_mask(0)
    with open(f"a{SUFFIX}.bin", "r+b") as file:
        file.write(b"\x00\x00")
    os.utime(f"a{SUFFIX}.bin", ns=(1, 1))
    dataset.sample(0)
    with pytest.raises(DataError, match=r"a\.loss_mask\.bin was changed while it was read"):
        dataset.loss_mask(0)


def test_a_mask_is_no_data():
    with pytest.raises(UsageError, match=r"a\.loss_mask: it is the loss mask of a: name a alone"):
        read("--data-path a.loss_mask", base=BASE)
    with pytest.raises(UsageError, match=r"in it are folder/a, folder/b, folder/plain\)"):
        os.mkdir("folder")
        for name in ("a", "b", "plain", f"a{SUFFIX}"):
            for end in (".bin", ".idx"):
                shutil.copyfile(name + end, f"folder/{name}{end}")
        read("--data-path folder", base=BASE)


def test_bytes_per_byte_are_of_the_tokens_that_count(tmp_path):
    """The space that SentencePiece puts in front of an answer is no text of it."""
    import io

    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["one two three", "two three"] * 20),
        model_writer=model, vocab_size=40, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "m.model").write_bytes(model.getvalue())
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "m.model"), None)
    prompt, answer = tokenizer.encode("one two"), [*tokenizer.encode("three one"), tokenizer.eod]
    row = np.array([[tokenizer.eod, *prompt, *answer, *prompt]])
    counted = np.zeros(row.shape, bool)
    counted[0, 1 + len(prompt) : 1 + len(prompt) + len(answer)] = True
    text = TextBytes(tokenizer)
    assert text.count(row, DocumentRules(tokenizer.eod), counted) == len("three one")
