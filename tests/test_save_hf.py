# SPDX-License-Identifier: Apache-2.0
"""--save-hf writes each save's weights as a folder that transformers loads, from any layout."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_llama
from mpu.context import LayerContext
from mpu.grid import Grid
from mpu.param import unique_parameters
from tests.launcher import Launcher
from tools.checkpoint import main as checkpoint_tool
from training.checkpoint import Checkpoint, load, parameter_pieces

ROOT = Path(__file__).resolve().parents[1]
TOKENIZER = ROOT / "tests" / "data" / "tokenizer" / "tokenizer.json"
FLAGS = f"""
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model {TOKENIZER} --mock-data --num-layers 2
    --hidden-size 40 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 16 --num-workers 0 --device cpu --lr 1e-2 --micro-batch-size 1
    --global-batch-size 4 --log-interval 1 --save {{dir}}/run --save-hf {{dir}}/hf
"""
THREE = "--train-iters 6 --save-interval 2 --save-hf-dtype float32"
LAYOUTS = (
    pytest.param(2, "--tensor-model-parallel-size 2 --async-save", id="tp"),
    pytest.param(
        8,
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --zero-stage 3",
        id="tp-pp-zero3",
        marks=pytest.mark.prove,
    ),
)


def ours(saved: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits [b, s, V] of a checkpoint, by Weft's own model."""
    from model.llama import Llama, from_hf_config, hf_names

    found = Checkpoint(saved)
    model = Llama(from_hf_config(found.state["hf_config"]), LayerContext(Grid()))
    pieces = parameter_pieces(unique_parameters(model), hf_names(model), Grid())
    with torch.no_grad():
        load(found, pieces, Grid())
        return model(tokens)[..., : model.config.vocab_size].transpose(0, 1)


@pytest.mark.parametrize("ranks, layout", LAYOUTS)
def test_folders_of_three_saves_load_in_transformers(
    ranks: int, layout: str, launcher: Launcher, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    result = launcher.run(ranks, f"{FLAGS} {THREE} {layout}".split())
    assert result.codes == [0] * ranks, result.said(0)
    hf = result.folder / "hf"
    steps = [f"step_{i:08d}" for i in (2, 4, 6)]
    assert sorted(p.name for p in hf.iterdir()) == steps
    assert "transformers" not in result.said(0).replace("for transformers", "")  # no complaint
    tokens = torch.randint(0, 200, (2, 16), generator=torch.Generator().manual_seed(1))
    for step in steps:
        folder = hf / step
        theirs = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32)
        with torch.no_grad():
            got = theirs(tokens).logits
        torch.testing.assert_close(got, ours(result.folder / "run" / step, tokens))
    text = "def f(x):"
    assert (
        AutoTokenizer.from_pretrained(folder)
        .decode(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
        .endswith(text)
    )
    assert GenerationConfig.from_pretrained(folder).eos_token_id is not None
    by_tool = tmp_path / "tool"
    words = ["--to-hf", str(by_tool), "--load", str(result.folder / "run" / step)]
    assert checkpoint_tool(["convert", *words]) == 0
    names = sorted(p.name for p in by_tool.iterdir())
    assert names == sorted(p.name for p in folder.iterdir())
    for name in names:  # the same writer: the same bytes, whoever called it
        if name != "model.safetensors.index.json" and not name.endswith(".safetensors"):
            assert (by_tool / name).read_bytes() == (folder / name).read_bytes(), name


def run(folder: Path, more: str) -> int:
    words = f"{FLAGS} --log-json {folder}/log {more}".replace("{dir}", str(folder)).split()
    return pretrain_llama.main(words)


def test_bf16_is_the_default_and_retention_is_its_own(tmp_path: Path, capsys: Any) -> None:
    more = "--train-iters 4 --save-interval 1 --keep-last-k 3 --save-hf-keep-last-k 2"
    assert run(tmp_path, more) == 0
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["step_00000003", "step_00000004"]
    config = json.loads((tmp_path / "hf" / "step_00000004" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"
    assert "hf/step_00000004 for transformers" in capsys.readouterr().out


def test_a_resume_writes_the_folder_that_a_kill_left_out(tmp_path: Path) -> None:
    assert run(tmp_path, "--train-iters 2") == 0
    hf = tmp_path / "hf"
    (hf / "step_00000002").rename(hf / f".step_00000002.tmp-{'0' * 16}")  # as a kill leaves it
    assert run(tmp_path, f"--train-iters 2 --load {tmp_path}/run") == 0
    assert [p.name for p in hf.iterdir()] == ["step_00000002"]


def test_a_vocabulary_without_the_padding_of_the_model_type(tmp_path: Path, capsys: Any) -> None:
    """Phi-3's pad_token_id is 32000 in transformers, for a config.json that has none."""
    from transformers import Phi3ForCausalLM

    fork = ROOT / "examples" / "forks" / "phi3.py"
    assert run(tmp_path, f"--train-iters 1 --model-file {fork}") == 0
    assert "--save-hf" not in capsys.readouterr().out
    loaded = Phi3ForCausalLM.from_pretrained(tmp_path / "hf" / "step_00000001")
    assert loaded.config.pad_token_id is None


def test_a_fork_says_what_transformers_cannot_load(tmp_path: Path, capsys: Any) -> None:
    fork = tmp_path / "fork.py"
    text = (ROOT / "model" / "llama.py").read_text()
    fork.write_text(text.replace('MODEL_TYPE = "llama"', 'MODEL_TYPE = "frog"'))
    assert run(tmp_path, f"--train-iters 1 --model-file {fork}") == 0
    said = capsys.readouterr().out
    assert "has no model_type 'frog': the folders hold the weights under the fork's own" in said
    assert (tmp_path / "hf" / "step_00000001" / "model.safetensors").is_file()
