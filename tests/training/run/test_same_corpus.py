# SPDX-License-Identifier: Apache-2.0
"""A resume compares every token of the corpus, and for an older checkpoint what that knew of it."""

import numpy as np
import pytest

import pretrain_llama
from training.data.gpt import GPTDataset
from training.data.indexed import IndexedWriter

FLAGS = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 1e-3
    --tokenizer-type NullTokenizer --vocab-size 500 --split 1,0,0 --data-path corpus --device cpu
    --save saved --load saved --train-iters""".split()


def write(first, rest):
    """Write a corpus whose 64 blocks of 2,048 tokens, and the rest, hold these tokens."""
    tokens = np.full(300_000, rest)
    for place in np.linspace(0, 300_000 - 2048, 64).astype(np.int64):
        tokens[place : place + 2048] = first
    with IndexedWriter("corpus", np.dtype(np.uint16)) as out:
        out.add(tokens)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that trains for one more step; it gives exit code and all that was said."""
    monkeypatch.chdir(tmp_path)
    write(1, 2)
    steps = iter(range(1, 9))

    def train():
        code = pretrain_llama.main([*FLAGS, str(next(steps))])
        said = capsys.readouterr()
        return code, said.out + said.err

    return train


def test_other_tokens_between_the_blocks_are_another_corpus(run):
    assert run()[0] == 0
    write(1, 3)
    code, said = run()
    assert code == 2 and "was made with other data" in said and "--allow-change data" in said
    write(1, 2)
    assert run()[0] == 0


def test_an_older_checkpoint_resumes_by_what_it_knows(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(GPTDataset, "corpus", property(lambda data: data.sketch))
        assert run()[0] == 0
    write(2, 2)
    code, said = run()
    assert code == 2 and "was made with other data" in said
    write(1, 2)
    code, said = run()
    assert code == 0 and "identified the corpus by 64 blocks of each file" in said
    code, said = run()
    assert code == 0 and "64 blocks" not in said  # the save in between knows every token
