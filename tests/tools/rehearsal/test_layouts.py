# SPDX-License-Identifier: Apache-2.0
"""The product's layouts and examples have no finding, on a rank and between all ranks."""

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TP, SP = "--tensor-model-parallel-size 2 ", "--tensor-model-parallel-size 2 --sequence-parallel "
PP, VP = "--pipeline-model-parallel-size ", "--num-virtual-stages-per-pipeline-rank 2 "
GRADS, GATHERS = "--overlap-grad-reduce ", "--overlap-param-gather "
ZERO = [f"--zero-stage {stage} " for stage in range(4)]
SCHEDULE = "--pipeline-schedule "
RECOMPUTE = "--recompute-granularity "
DOCUMENTS = "--reset-position-ids --reset-attention-mask --eod-mask-loss "
LAYOUTS = [  # world, flags; a global batch of 8
    (1, ""),
    (1, "--optimizer-cpu-offload --zero-stage 2"),
    (1, DOCUMENTS),
    (1, RECOMPUTE + "full"),
    (1, RECOMPUTE + "selective"),
    (1, RECOMPUTE + "full --recompute-method block --recompute-num-layers 2"),
    (2, TP),
    (2, SP),
    (2, SP + "--tp-comm-overlap ring"),
    (2, SP + RECOMPUTE + "full --tp-comm-overlap ring"),
    (2, SP + DOCUMENTS),
    (2, ZERO[0] + GRADS),
    (2, ZERO[1] + GRADS + GATHERS),
    (2, ZERO[2] + GRADS + GATHERS),
    (2, ZERO[3] + GRADS + GATHERS),
    (2, ZERO[3]),
    (2, ZERO[1] + GRADS + "--zero-reduce-each-microbatch"),
    (2, ZERO[2] + GRADS + "--zero-reduce-each-microbatch"),
    (2, ZERO[1] + "--optimizer-cpu-offload"),
    (2, ZERO[3] + GATHERS + RECOMPUTE + "full"),
    (2, PP + "2"),
    (2, PP + "2 " + SCHEDULE + "gpipe"),
    (2, PP + "2 " + SCHEDULE + "zb-h1"),
    (2, PP + "2 " + SCHEDULE + "zb-v"),
    (2, PP + "2 " + SCHEDULE + "v-half"),
    (2, PP + "2 " + SCHEDULE + "interleaved " + VP),
    (2, PP + "2 --wgrad-deferral-limit 2"),
    (4, PP + "4"),
    (4, SP + ZERO[1] + GRADS + GATHERS),
    (4, SP + ZERO[3] + GRADS + GATHERS + "--tp-comm-overlap ring"),
    (4, PP + "2 " + SP + SCHEDULE + "zb-v " + "--tp-comm-overlap ring"),
    (4, PP + "2 " + ZERO[2] + GRADS + SCHEDULE + "zb-h1 "),
    (8, PP + "2 " + SP + ZERO[1] + GRADS + GATHERS + SCHEDULE + "interleaved " + VP),
    (8, PP + "2 " + SP + ZERO[3] + GATHERS + RECOMPUTE + "full"),
]
QUICK = (9, 18, 25, 29)


def check(rehearse, layout, all_ranks):
    world, flags = layout
    more = " --rehearse-all-ranks" if all_ranks else f" --rehearse-rank {world - 1}"
    code, report, text = rehearse(f"{flags} --global-batch-size 8{more}", world)
    assert report, text
    assert (report["findings"], code) == ([], 0)


@pytest.mark.parametrize("layout", [LAYOUTS[i] for i in QUICK], ids=str)
def test_a_rank_of_a_layout_has_no_finding(rehearse, layout):
    check(rehearse, layout, False)


def test_the_ranks_of_a_pipeline_match(rehearse):
    check(rehearse, LAYOUTS[23], True)


@pytest.mark.prove
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_all_ranks_of_a_layout_have_no_finding(rehearse, layout):
    check(rehearse, layout, True)


def test_a_large_world_is_not_matched(rehearse):
    code, _, text = rehearse("--global-batch-size 32 --rehearse-all-ranks", 32)
    assert code == 2 and "--rehearse-all-ranks: 32 ranks" in text


def flags_of(example):
    """Return the flags of an example's trainer, without shell's variables and files of data."""
    text = (ROOT / "examples" / example).read_text().replace("\\\n", " ")
    line = next(each for each in text.splitlines() if re.search(r"pretrain_llama\.py .*--", each))
    words = shlex.split(line.partition("pretrain_llama.py")[2])
    return [word for word in words if not word.startswith("$")]
