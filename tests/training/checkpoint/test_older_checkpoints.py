# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and token files that older commits wrote still load: tests/data/README.md."""

import json
import shutil
from pathlib import Path

import pytest

import pretrain_llama
from tools.checkpoint import main as checkpoint
from tools.generate import main as generate
from training.checkpoint.files import write_json
from training.checkpoint.manifest import self_digest
from training.data.indexed import IndexedTokens

DATA = Path(__file__).parents[2] / "data"
SAVED = sorted(path.name for path in DATA.glob("saved_*"))
# of steps 3 and 4 by the commits that saved step 2; both had the same
LOSSES = [5.525249846279621, 5.426734484732151]
FLAGS = """
    --num-layers 1 --hidden-size 8 --ffn-hidden-size 16 --num-attention-heads 2 --seq-length 16
    --norm-epsilon 1e-5 --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 4
    --lr-warmup-iters 1 --data-path text_text_document --split 1,0,0 --num-workers 0
    --log-interval 1 --eval-iters 0 --device cpu --seed 7 --bf16
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer
    --load saved --save saved --log-json log.jsonl
"""


@pytest.fixture(params=SAVED)
def folder(request, tmp_path, monkeypatch):
    """Go where the old run stood: its tokens, its tokenizer and its checkpoint of step 2."""
    shutil.copytree(DATA / request.param, tmp_path / "saved")
    shutil.copytree(DATA / "tokenizer", tmp_path / "tokenizer")
    for suffix in (".bin", ".idx"):
        shutil.copy(DATA / f"text_text_document{suffix}", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_there_is_a_checkpoint_of_each_format():
    """The older one has SHA-256 alone, the newer one XXH3-128 too."""
    manifests = [DATA / name / "step_00000002" / "manifest.json" for name in SAVED]
    files = [json.loads(path.read_text())["files"].values() for path in manifests]
    assert [any("xxh3_128" in f or "xxh3" in f for f in each) for each in files] == [False, True]


def test_an_old_run_goes_on_with_the_losses_that_it_had(folder):
    """A resume reads weights, moments, samples, the digest of the tokenizer and the token file."""
    assert pretrain_llama.main(FLAGS.split()) == 0
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]
    assert [row["iteration"] for row in rows] == [3, 4]
    assert [row["loss"] for row in rows] == pytest.approx(LOSSES, rel=1e-3)


def test_a_setting_that_is_gone_is_passed_over(folder):
    """As of a run with --peer-checkpoint 5."""
    step = folder / "saved" / "step_00000002"
    state = json.loads((step / "state.json").read_text())
    state["config"]["fault.peer_checkpoint"] = 5
    manifest = json.loads((step / "manifest.json").read_text())
    (step / "state.json").unlink()
    manifest["files"]["state.json"] = write_json(step / "state.json", state)
    manifest.pop("digest")
    (step / "manifest.json").write_text(json.dumps({**manifest, "digest": self_digest(manifest)}))
    assert pretrain_llama.main(FLAGS.split()) == 0
    assert (folder / "saved" / "step_00000004").is_dir()


def test_tools_read_an_old_checkpoint(folder, capsys):
    assert checkpoint(["verify", "saved"]) == 0
    words = "--load saved --device cpu --temperature 0 --max-new-tokens 3 --prompt loom"
    named = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer"
    assert generate([*words.split(), *named.split()]) == 0
    assert "loom" in capsys.readouterr().out


def test_an_old_index_holds_the_text():
    tokens = IndexedTokens(str(DATA / "text_text_document"))
    assert (len(tokens), tokens.count) == (4, 211)
