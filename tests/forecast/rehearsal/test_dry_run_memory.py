# SPDX-License-Identifier: Apache-2.0
"""The dry run's bytes are within 2% of what a rehearsal counts, for the examples' ranks.

Of layouts drawn at random test_drawn_memory.py holds the same.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import pretrain_llama
from forecast.dry_run import step_memory
from forecast.recording import record
from tests.forecast.rehearsal.conftest import SMALL as LITTLE
from tests.forecast.rehearsal.conftest import stated
from tests.forecast.rehearsal.test_drawn_memory import MODEL
from training.flags.parse import parse

ROOT = Path(__file__).resolve().parents[3]
MORE = "--mock-data --tokenizer-type NullTokenizer --vocab-size 128256"
RANKS = [  # example, ranks, a rank, samples a step
    ("llama3_8b_one_node.sh", 8, 1, 8),
    ("llama3_70b_16_nodes.slurm", 128, 0, 16),
    ("llama3_70b_16_nodes.slurm", 128, 33, 16),
    ("llama3_70b_16_nodes.slurm", 128, 127, 16),
    ("llama3_405b_64_nodes.slurm", 512, 0, 64),
    ("llama3_405b_64_nodes.slurm", 512, 256, 64),
    ("llama3_405b_64_nodes.slurm", 512, 511, 64),
]
SIZES = (
    "num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-query-groups",
    "seq-length", "max-position-embeddings", "rotary-base", "rope-scaling-factor",
    "tensor-model-parallel-size", "pipeline-model-parallel-size", "micro-batch-size",
    "num-virtual-stages-per-pipeline-rank", "recompute-granularity", "recompute-method",
    "recompute-num-layers", "lr", "train-iters",
)  # fmt: skip
SWITCHES = (
    "group-query-attention", "use-rope-scaling", "untie-embeddings-and-output-weights",
    "sequence-parallel", "bf16", "use-distributed-optimizer", "overlap-grad-reduce",
    "overlap-param-gather",
)  # fmt: skip


def flags(example, samples):
    """Return the example's flags that decide its memory."""
    words = (ROOT / "examples" / example).read_text().replace("\\\n", " ").split()
    found = [f"--{name}" for name in SWITCHES if f"--{name}" in words]
    for name in SIZES:
        if f"--{name}" in words:
            found += [f"--{name}", words[words.index(f"--{name}") + 1]]
    return [*found, *shlex.split(MORE), "--global-batch-size", str(samples)]


@pytest.mark.prove
@pytest.mark.parametrize("example, world, rank, samples", RANKS)
def test_the_dry_run_is_within_two_percent(tmp_path, example, world, rank, samples):
    argv, file = flags(example, samples), tmp_path / "report.json"
    rehearse = ["--rehearse", "--rehearse-rank", str(rank)]
    done = subprocess.run(
        [sys.executable, "pretrain_llama.py", *argv, *rehearse, "--rehearse-json", str(file)],
        cwd=ROOT, env=os.environ | {"WORLD_SIZE": str(world)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert file.exists(), done.stderr[-2000:]
    counted = json.loads(file.read_text())["memory"]["peak_bytes"]
    config = parse([*argv, "--dry-run"], world)
    told = sum(stated(config, rank).values())
    assert abs(told - counted) <= 0.02 * counted, (told / 1e9, counted / 1e9)


PP = "--pipeline-model-parallel-size"
STEPS = [
    f"--global-batch-size 24 {PP} 2",
    "--global-batch-size 24 --zero-stage 2",
    "--global-batch-size 8 --zero-stage 3 --overlap-grad-reduce",
    f"--global-batch-size 24 {PP} 4 --zero-stage 2 --recompute-granularity full",
    f"--global-batch-size 24 {PP} 2 --pipeline-schedule zb-h1 --zero-stage 1",
    "--global-batch-size 24 --tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1",
    "--global-batch-size 24 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4 "
    "--moe-token-dispatcher-type alltoall --expert-tensor-parallel-size 1",
]


@pytest.mark.prove
@pytest.mark.parametrize("flags", STEPS)
def test_each_action_has_the_bytes_that_are_said(rehearse, flags):
    """What --memory-picture draws: the fullest moment of each action, within 2% of the peak."""
    flags = " ".join([*MODEL, "--num-layers 4 --micro-batch-size 1", flags])
    code, report, text = rehearse(flags, 8, False)
    assert (code, report["findings"]) == (0, []), text
    config = parse([*flags.split(), "--dry-run"], 8)
    said = step_memory(config, record(config, pretrain_llama, [0])[0])
    told = {str(moment.action): moment.total for moment in said}
    counted = {}
    for words, nbytes in report["actions"]:
        if match := re.match(r"([FBW])W? (chunk \d+ micro-batch \d+) in", words):
            counted[f"{match[1]} {match[2]}"] = nbytes
    both = counted.keys() & told.keys()
    assert len(both) > 1 and both == {a for a in told if " chunk " in a}
    most = report["memory"]["peak_bytes"]
    apart = {a: (told[a] / most, counted[a] / most) for a in both}
    assert all(abs(a - b) <= 0.02 for a, b in apart.values()), apart


@pytest.mark.prove
def test_a_step_has_no_memory_of_the_model_that_warms_up(rehearse):
    """A record keeps nothing alive: the model that loads kernels before a pipeline's first message
    is gone when steps run, with its largest weight and gradient.
    """
    flags = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"
    code, report, text = rehearse(f"{flags} --tp-comm-overlap ring --global-batch-size 4", 4)
    assert (code, report["findings"]) == (0, []), text
    places = {each["place"] for each in report["memory"]["largest"]}
    assert places and not any("warm_up" in place for place in places)


@pytest.mark.prove
@pytest.mark.parametrize("stage", [2, 3])
def test_unsharded_gradients_come_bucket_by_bucket_where_none_leaves_early(rehearse, stage):
    """One micro-batch a step, and sums after backward: at its start only the head's is there."""
    flags = f"--zero-stage {stage} --seq-length 1024 --global-batch-size 4"
    code, report, text = rehearse(f"{flags} --max-position-embeddings 1024", 4)
    assert (code, report["findings"]) == (0, []), text
    config = parse([*LITTLE, *flags.split(), "--max-position-embeddings", "1024", "--dry-run"], 4)
    told, counted = stated(config), report["memory"]["peak_bytes"]
    fixed = told["workspaces"]  # larger than the model
    assert abs(sum(told.values()) - counted) <= 0.02 * (counted - fixed), (told, counted)
