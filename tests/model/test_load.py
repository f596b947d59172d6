# SPDX-License-Identifier: Apache-2.0
"""--model-file: what is no model is refused in a sentence, and a checkpoint chooses no code."""

import importlib
import re
from pathlib import Path

import pytest

import pretrain_llama
from model import llama, moe, qwen3
from model.load import MISSING, load_model_file, model_file_of, of_checkpoint
from tests.training.small_llama import read

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "there is no such Python file"),
        ("def f(:\n", "SyntaxError: "),
        ("import math\n\nmath.squirt(1)\n", "line 3: AttributeError: .*squirt"),
        ("import sys\n\nsys.exit(0)\n", "line 3: SystemExit: 0"),
        ("Model = ModelConfig = hf_names = hf_config = 1\n", "does not define from_hf_config, par"),
    ],
)
def test_what_is_no_model(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ValueError, match=f"--model-file {tmp_path}/mine.py.*{sentence}"):
        load_model_file(f"{tmp_path}/mine.py")


@pytest.mark.parametrize(
    ("call", "says", "code"),
    [
        ("sys.exit(0)", r"sys.exit\(\) was called at .*/mine.py:\d+ before the run was done", 1),
        ("__import__('os')._exit(0)", r"os._exit\(0\) was called at .*/mine.py:\d+ before", 1),
        ("raise KeyboardInterrupt", r"pretrain_llama.py: stopped by Ctrl-C\n$", 130),
    ],
)
def test_a_fork_that_exits_has_not_trained(tmp_path, launcher, call, says, code):
    """The exit code of a run that trained nothing is not 0."""
    text = (
        (ROOT / "model/llama.py").read_text().replace("import math", "import math\nimport sys", 1)
    )
    start = "        stage = self.stages[chunk]\n"
    assert start in text
    (tmp_path / "mine.py").write_text(text.replace(start, f"        {call}\n{start}", 1))
    flags = "--mock-data --vocab-size 64 --num-layers 1 --hidden-size 16 --num-attention-heads 2"
    flags += " --ffn-hidden-size 32 --seq-length 8 --train-iters 1 --lr 1e-3 --device cpu"
    flags += " --micro-batch-size 1"
    done = launcher.run(1, [*flags.split(), "--model-file", str(tmp_path / "mine.py")])
    assert done.codes == [code] and re.search(says, done.said(0)), done.said(0)
    assert "Traceback" not in done.said(0) or "_exit" in call


def test_a_checkpoint_says_which_of_our_models_it_is():
    assert model_file_of({"model_type": "llama"}) is llama and model_file_of({}) is llama
    qwen = {"model_type": "qwen3"}
    for saved in (None, {}, {"model.model_file": "model/qwen3.py"}):
        assert model_file_of(qwen, saved) is qwen3
    assert model_file_of(qwen, None, "model/llama.py") is llama
    sizes = qwen3.hf_config(qwen3.ModelConfig(100, 32, 48, 2, 4, 2))
    path, config = of_checkpoint(sizes)
    assert path == "model/qwen3.py" and qwen3.hf_config(config) == sizes
    for kind, why in {
        "gptj": "'gptj', which is none of Weft's .dots1, granite, llama, mistral, mixtral, moe",
        ("llama",): "must be a string",
    }.items():
        with pytest.raises(ValueError, match=f"model_type is .*{why}"):
            model_file_of({"model_type": kind})
    for kind, file in {
        "phi3": r"--model-file examples/forks/phi3\.py$",
        "gemma3_text": r"--model-file examples/forks/gemma3\.py$",
        "../arcee": "a --model-file that supports it",
    }.items():
        with pytest.raises(ValueError, match=f"give {file}"):
            model_file_of({"model_type": kind})


@pytest.mark.parametrize("kind", MISSING)
def test_another_mixture_is_refused_by_what_is_missing(kind):
    refused = re.escape(f"model_type is '{kind}', which has {MISSING[kind]}: that is not available")
    for reads in (model_file_of, moe.from_hf_config):
        with pytest.raises(ValueError, match=refused):
            reads({"model_type": kind})


@pytest.mark.parametrize("place", ["{folder}/evil.py", "model/../../../{folder}/evil.py"])
def test_what_a_checkpoint_says_runs_no_code(tmp_path, place):
    (tmp_path / "evil.py").write_text(f"open('{tmp_path}/ran', 'w')\nfrom model.llama import *\n")
    named = place.format(folder=tmp_path)
    with pytest.raises(ValueError, match="trained with --model-file .*evil.py: give this flag too"):
        model_file_of({"model_type": "llama"}, {"model.model_file": named})
    with pytest.raises(ValueError, match="model_type is '../evil'"):
        model_file_of({"model_type": "../evil"})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "flag, file", [("--qk-layernorm", "model/qwen3.py"), ("--add-qkv-bias", "model/qwen2.py")]
)
def test_megatron_s_flag_names_another_model(flag, file):
    assert read(flag).model.model_file == file
    assert read(f"--model-file {file}") == read(flag)


def test_two_models_exclude_each_other():
    both = "--qk-layernorm and --model-file model/qwen2.py set the same"
    with pytest.raises(ValueError, match=both):
        read("--qk-layernorm --add-qkv-bias")


def test_a_program_that_imports_a_fork_trains_the_fork(monkeypatch, tmp_path):
    """pretrain_llama.py may be forked too, with another file's Llama imported."""
    path = tmp_path / "alpaca.py"
    path.write_text("from model.llama import *\n\n\nclass Llama(Model):\n    pass\n")
    assert pretrain_llama.name_fork(["--lr", "1"]) == ["--lr", "1"]
    monkeypatch.syspath_prepend(tmp_path)
    alpaca = importlib.import_module("alpaca")
    monkeypatch.setattr(pretrain_llama, "Llama", alpaca.Llama)
    named = pretrain_llama.name_fork(["--lr", "1"])
    assert named == ["--model-file", str(path), "--lr", "1"]
    assert pretrain_llama.model_file([*named, "--model-file=b.py"]) == "b.py"
