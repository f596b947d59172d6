# SPDX-License-Identifier: Apache-2.0
"""--model-file: a fork is one file, with its own flags; what is wrong with the file is told."""

from pathlib import Path

import pytest

import pretrain_llama
from model.load import load_model_file, model_file_of, saved_config
from tools import generate

ROOT = Path(__file__).resolve().parents[2]
OWN_FLAG = """
from argparse import ArgumentParser
def extra_args_provider(parser: ArgumentParser) -> None:
    parser.add_argument("--bonus", type=float, default=1.5)
    parser.add_argument("--unrelated", default="no field of the config")
"""
RUN = """
    --vocab-size 64 --mock-data --num-layers 2 --hidden-size 64 --num-attention-heads 2
    --seq-length 8 --global-batch-size 2 --lr 1e-3 --train-iters 2 --num-workers 0 --device cpu
""".split()


@pytest.fixture(scope="module")
def fork(tmp_path_factory) -> Path:
    """Return a copy of model/llama.py with a field, a flag for it, and a use of it."""
    text = (ROOT / "model/llama.py").read_text()
    for old, new in {
        "    tied: bool = False\n": "    tied: bool = False\n    bonus: float = 0.0\n",
        "        logits = self.head(self.norm(h))": (
            "        logits = self.config.bonus * self.head(self.norm(h))"
        ),
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path_factory.mktemp("fork") / "bonus.py"
    path.write_text(text + OWN_FLAG)
    return path


def test_a_fork_trains_with_its_own_flags_and_is_found_again(fork, tmp_path, capsys):
    save = tmp_path / "run"
    argv = [*RUN, "--save", str(save), "--model-file", str(fork), "--bonus", "0"]
    assert pretrain_llama.main(argv) == 0
    assert "loss 4.1589" in capsys.readouterr().out  # log 64: every logit is 0
    state = generate.find_latest(str(save), pretrain_llama.Grid()).state
    file = model_file_of(state["hf_config"], state["config"])
    assert file.__file__ == str(fork)
    assert saved_config(file, state["hf_config"], state["config"]).bonus == 0.0
    model, _, _ = generate.load_model(str(save), pretrain_llama.Grid(), "cpu", None)
    assert model.config.bonus == 0.0 and type(model).__module__ == "model_file_bonus"
    other = generate.load_model(str(save), pretrain_llama.Grid(), "cpu", None, "model/llama.py")[0]
    assert not hasattr(other.config, "bonus")


def test_megatrons_flag_names_the_second_model():
    assert pretrain_llama.model_file(["--qk-layernorm"]) == "model/qwen3.py"
    assert pretrain_llama.model_file(["--qk-layernorm", "--model-file=a.py"]) == "a.py"
    assert pretrain_llama.model_file(["--lr", "1"]) == ""
    assert pretrain_llama.file_of("").__name__ == "model.llama"
    assert load_model_file("model/qwen3.py").__name__ == "model.qwen3"


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "there is no such Python file"),
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import math\n\nx = math.nothing\n", "line 3: AttributeError: module 'math' has no"),
        ("from model.llama import hf_names, hf_config\nModel = 1\n", "does not define ModelConfig"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, capsys, text, message):
    path = tmp_path / f"wrong{abs(hash(text))}.py"
    if text is not None:
        path.write_text(text)
    assert pretrain_llama.main([*RUN, "--model-file", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"pretrain_llama.py: --model-file {path}") and message in said


def test_an_architecture_that_nobody_has_is_refused_by_name():
    with pytest.raises(ValueError, match="model_type is 'mamba', and Weft has llama and qwen3"):
        model_file_of({"model_type": "mamba"})
    assert model_file_of({"model_type": "qwen3"}).__name__ == "model.qwen3"
