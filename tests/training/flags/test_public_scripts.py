# SPDX-License-Identifier: Apache-2.0
"""Public Megatron scripts for dense Llamas: what parses, what is refused and why, as docs say."""

import re
from pathlib import Path

import pytest

import pretrain_llama
from tests.launcher import Launcher
from tests.training.flags.public_scripts import refusal, scripts, summary, unknown

SCRIPTS = scripts()
# What a refusal must name: a feature that is not here, a file that is, or a mistake in the script.
REASONS = (
    r"(is not a flag|are not flags) of this program",
    r"--deepspeed.*: DeepSpeed is not used and its file is not read",
    r"--multiple-of: give the width itself: --ffn-hidden-size",
    r"is refused: fp16 with its loss scaling is not available here",
    r"--global-batch-size \d+ is not a multiple of --micro-batch-size",
    r"--normalization (rmsnorm|layernorm): only RMSNorm is accepted",
    r"--tokenizer-type Llama3Tokenizer: must be one of .* HuggingFaceTokenizer",
    r"--use-checkpoint-args: there is no checkpoint to take the arguments from",
)


def named(script):
    return f"{script.repository}-{Path(script.path).name}-{script.edit or 'as published'}"


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_a_script_parses_or_the_refusal_names_what_is_missing(script):
    """Any other exception than UsageError, a traceback for the user, fails the test."""
    why = refusal(script.flags, script.world)
    assert not why or any(re.search(reason, why) for reason in REASONS), why
    of_each = why.split("; ")  # a part for each flag
    assert "\n" not in why
    assert all(len(part) < 300 for part in of_each) or "ignores them: --ignore-flags" in why


def test_enough_of_them_parse_as_published():
    unchanged = [s for s in SCRIPTS if not s.edit and not refusal(s.flags, s.world)]
    assert len(unchanged) >= 12
    assert len({s.repository.split("/")[0] for s in unchanged}) >= 5


def test_a_fork_s_flags_can_be_left_out_where_nothing_else_is_in_the_way():
    open_ = [s for s in SCRIPTS if unknown(s.flags)]
    names = [[*s.flags, "--ignore-flags", *unknown(s.flags)] for s in open_]
    parsed = [s for s, flags in zip(open_, names, strict=True) if not refusal(flags, s.world)]
    assert {s.repository for s in parsed} >= {"swiss-ai/Megatron-LM", "llm-jp/scripts"}


NVIDIA = "examples/llama/train_llama3_8b_h100_fp8.sh"  # with its own DTYPE, fp8
TINY = """
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
    --num-query-groups 2 --kv-channels 32 --seq-length 64 --max-position-embeddings 64
    --vocab-size 250 --global-batch-size 8 --train-samples 160 --lr-warmup-samples 16 --device cpu
""".split()


def flags_of_nvidia(folder):
    """Return the flags of NVIDIA's Llama 3 8B example, its files in a folder of ours."""
    (script,) = [s for s in SCRIPTS if s.path == NVIDIA and not s.edit]
    assert "--fp8-format" in script.flags and "--fp8-recipe" not in script.flags
    return [word.replace("/x/", f"{folder}/") for word in script.flags]


@pytest.mark.parametrize(
    "more", [pytest.param([], marks=pytest.mark.prove), ["--num-layers", "4"]], ids=str
)
def test_nvidia_s_llama_3_8b_in_fp8_passes_the_dry_run(more, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert pretrain_llama.main([*flags_of_nvidia(tmp_path), *more, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "TP 1 x CP 1 x DP 8 x PP 1 = 8 ranks" in said and "delayed" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.prove
def test_nvidia_s_llama_3_8b_in_fp8_trains_20_steps_at_tiny_size(tmp_path, free_port):
    launcher = Launcher(tmp_path, free_port)
    try:
        result = launcher.run(2, [*flags_of_nvidia(tmp_path), *TINY])
    finally:
        launcher.close()
    assert result.codes == [0, 0], result.said(0)
    rows = [row for row in result.rows() if "grad_norm" in row]
    assert [row["iteration"] for row in rows] == list(range(1, 21))
    assert rows[-1]["loss"] < rows[0]["loss"]


def test_the_table_of_the_docs_is_what_the_command_prints():
    page = (Path(__file__).parents[3] / "docs" / "megatron.md").read_text()
    table = "\n".join(summary())
    assert f"{table}\n" in page, "print it again: python -m tests.training.flags.public_scripts"
