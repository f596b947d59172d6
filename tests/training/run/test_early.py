# SPDX-License-Identifier: Apache-2.0
"""What is quick to check is checked before long work, and too little memory is a sentence."""

import pytest

import pretrain_llama
from training.run import start

FLAGS = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --lr 1e-3
    --train-iters 1 --mock-data --vocab-size 64 --device cpu""".split()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--load", "megatron"], "holds a Megatron-LM checkpoint"),
        (["--load", "a-file"], "--load a-file is not a directory"),
        (["--load", "empty", "--ckpt-step", "7"], "--ckpt-step 7: empty has the steps"),
        (["--pretrained-checkpoint", "megatron"], "--pretrained-checkpoint megatron holds a Meg"),
        (["--pretrained-checkpoint", "a/b"], "hf download a/b --local-dir b`, and give b"),
        (["--load", "no", "--pretrained-checkpoint", "/no"], "no checkpoint there (nothing is dow"),
        (["--load", "a/b", "--use-checkpoint-args"], "hf download a/b --local-dir b"),
        (["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", "a/b"], "hf download a/b"),
        (["--wandb-project", "p"], "--wandb-project p: the package wandb is not installed"),
        (["--tensorboard-dir", "p"], "--tensorboard-dir p: the package tensorboard is not ins"),
    ],
)
def test_names_are_checked_before_any_data_is_read(words, says, tmp_path, monkeypatch, capsys):
    def read(config):
        raise AssertionError("the data is read already")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "megatron" / "iter_0000001").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").touch()
    monkeypatch.setattr(start, "tokenizer_for", read)
    monkeypatch.setattr(start, "find_spec", lambda name: None)
    assert pretrain_llama.main([*FLAGS, *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_too_little_memory_is_a_sentence(error, monkeypatch, capsys):
    def build(*args):
        raise error

    monkeypatch.setattr(pretrain_llama, "build", build)
    assert pretrain_llama.main(FLAGS) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("pretrain_llama.py: there is not enough memory: ")


def test_another_error_keeps_its_traceback(monkeypatch):
    def build(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(pretrain_llama, "build", build)
    with pytest.raises(RuntimeError, match="a bug"):
        pretrain_llama.main(FLAGS)
