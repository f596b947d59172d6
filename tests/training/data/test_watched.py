# SPDX-License-Identifier: Apache-2.0
"""A file of the corpus that changes during a run ends it with a sentence, not with SIGBUS."""

import os
import re
import threading
import time

import numpy as np
import pytest

import pretrain_llama
from tools.checkpoint import main
from training.data.cache import IndexCache
from training.data.dataset import DataError
from training.data.gpt import GPTDataset
from training.data.indexed import IndexedTokens, IndexedWriter
from training.data.watched import WatchedFile


@pytest.fixture
def prefix(tmp_path):
    rng = np.random.default_rng(0)
    with IndexedWriter(str(tmp_path / "corpus"), np.dtype(np.uint16)) as out:
        for _ in range(100):
            out.add(rng.integers(0, 499, 100))
    return str(tmp_path / "corpus")


def dataset(prefix):
    return GPTDataset(
        IndexedTokens(prefix), "train", range(100), 32, 1, IndexCache(prefix + ".cache")
    )


def test_a_short_read_names_file_place_and_sizes(prefix):
    file = WatchedFile(prefix + ".bin")
    assert len(file.read(19_990, 10)) == 10
    os.truncate(prefix + ".bin", 19_000)
    with pytest.raises(DataError) as caught:
        file.read(18_990, 100)
    assert str(caught.value) == (
        f"{prefix}.bin: 100 bytes were wanted at byte 18990 and 10 are there: the file had 20000 "
        "bytes when it was opened and has 19000"
    )
    with pytest.raises(DataError, match="had 20000 bytes and has 19000"):
        file.check()


def cut(prefix):
    os.truncate(prefix + ".bin", 10_000)


def grow(prefix):
    with open(prefix + ".bin", "ab") as file:
        file.write(bytes(2))


def write_over(prefix):
    with open(prefix + ".bin", "r+b") as file:
        file.write(bytes(20_000))


def write_over_and_set_the_time_back(prefix):
    was = os.stat(prefix + ".bin")
    write_over(prefix)
    os.utime(prefix + ".bin", ns=(was.st_atime_ns, was.st_mtime_ns))


@pytest.mark.parametrize("change", [cut, grow, write_over, write_over_and_set_the_time_back])
def test_a_changed_file_gives_no_sample(prefix, change):
    data = dataset(prefix)
    data.sample(0)
    os.utime(prefix + ".bin", ns=(1, 1))
    data = dataset(prefix)
    change(prefix)
    with pytest.raises(DataError, match="corpus.bin"):
        for i in range(300):
            data.sample(i)


def test_what_happens_to_the_name_and_to_the_index_does_not_matter(prefix):
    """The tokens stay readable after a rename or a removal, and the index is in memory."""
    expected = [dataset(prefix).sample(i).tolist() for i in range(300)]
    data = dataset(prefix)
    os.truncate(prefix + ".idx", 0)
    os.rename(prefix + ".bin", prefix + ".gone")
    os.unlink(prefix + ".gone")
    assert [data.sample(i).tolist() for i in range(300)] == expected


FLAGS = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 1e-3
    --train-iters 60 --save-interval 2 --tokenizer-type NullTokenizer --vocab-size 500 --split 1,0,0
    --data-path corpus --save saved --load saved --device cpu""".split()


@pytest.mark.parametrize("change", [cut, write_over, write_over_and_set_the_time_back])
def test_a_run_ends_with_a_sentence_and_keeps_its_checkpoints(
    prefix, tmp_path, change, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    os.utime("corpus.bin", ns=(1, 1))
    steps, step = [], pretrain_llama.train_step

    def counted(run, *args):
        steps.append(run.iteration)
        if run.iteration == 5:
            change(prefix)
        return step(run, *args)

    monkeypatch.setattr(pretrain_llama, "train_step", counted)
    assert pretrain_llama.main(FLAGS) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pretrain_llama.py: corpus.bin")
    assert 5 <= steps[-1] < 20  # what was read before the change was trained on
    newest = max(name for name in os.listdir("saved") if name.startswith("step"))
    assert newest == f"step_{(steps[-1] + 1) // 2 * 2:08d}"
    assert main(["verify", "saved"]) == 0


def test_a_run_whose_read_hangs_names_file_and_byte_and_ends(prefix, monkeypatch, capsys):
    """The system may never answer: here it does so only after the run has ended."""
    gate, pread, calls = threading.Event(), os.pread, []

    def hang(fd, size, offset):
        if threading.current_thread().name == "weft-loader":
            calls.append(offset)
            if len(calls) > 20:
                gate.wait(60)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", hang)
    flags = f"""--data-path {prefix} --tokenizer-type NullTokenizer --vocab-size 500 --num-layers 1
        --hidden-size 8 --ffn-hidden-size 8 --num-attention-heads 1 --seq-length 32 --lr 1e-3
        --train-iters 100 --device cpu --data-timeout 0.5 --num-workers 1"""
    begin = time.monotonic()
    try:
        assert pretrain_llama.main(flags.split()) == 1
    finally:
        gate.set()
    said = capsys.readouterr().err
    where = rf"{prefix}.bin, byte \d+: a read has taken \d\.\d s"
    assert re.search(rf"{where}: not read within 0.5 seconds \(--data-timeout\)", said), said
    assert time.monotonic() - begin < 30
