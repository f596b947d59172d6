# SPDX-License-Identifier: Apache-2.0
"""The dry run's bytes are within 2% of what a rehearsal counts, in each action of a step too.

Of the examples test_layouts.py holds the same, of layouts drawn at random test_drawn_layouts.py.
"""

import re

import pytest

import pretrain_llama
from forecast.dry_run import step_memory
from forecast.recording import record
from tests.forecast.rehearsal.conftest import SMALL as LITTLE
from tests.forecast.rehearsal.conftest import stated
from tests.forecast.rehearsal.test_drawn_layouts import MODEL
from training.flags.parse import parse

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
