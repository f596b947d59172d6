# SPDX-License-Identifier: Apache-2.0
"""A step of few micro-batches tells the memory, the traffic and the time of one of all."""

from collections import Counter

import pytest

LAYOUTS = {
    "1 rank": (1, "--global-batch-size 8"),
    "ring": (2, "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap ring "
                "--global-batch-size 8 --recompute-granularity selective"),
    "ZeRO 2": (2, "--zero-stage 2 --overlap-grad-reduce --zero-reduce-each-microbatch "
                  "--global-batch-size 16"),
    "ZeRO 3": (2, "--zero-stage 3 --overlap-param-gather --overlap-grad-reduce "
                  "--global-batch-size 16"),
    "1F1B": (2, "--pipeline-model-parallel-size 2 --rehearse-rank 1 --global-batch-size 8"),
    "interleaved": (2, "--pipeline-model-parallel-size 2 --global-batch-size 8 "
                       "--num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full "
                       "--recompute-method uniform --recompute-num-layers 1"),
    "ZB-H1": (2, "--pipeline-model-parallel-size 2 --rehearse-rank 1 --pipeline-schedule zb-h1 "
                 "--global-batch-size 8"),
    "a deep pipeline": (8, "--num-layers 8 --pipeline-model-parallel-size 4 "
                           "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 24 "
                           "--tensor-model-parallel-size 2 --sequence-parallel "
                           "--recompute-granularity full --recompute-method uniform "
                           "--recompute-num-layers 1"),
    "offload": (2, "--pipeline-model-parallel-size 2 --num-layers 6 --cpu-offload-activations "
                   "--min-offloaded-tensor-size 1 --offload-modules mlp attention.qkv "
                   "--rehearse-rank 1 --global-batch-size 8"),
    "offload, ZB-H1": (2, "--pipeline-model-parallel-size 2 --num-layers 6 --global-batch-size 8 "
                          "--cpu-offload-activations --min-offloaded-tensor-size 1 "
                          "--pipeline-schedule zb-h1"),
    "offload, recomputed": (2, "--zero-stage 3 --overlap-param-gather --global-batch-size 16 "
                               "--recompute-granularity full --cpu-offload-activations "
                               "--min-offloaded-tensor-size 1"),
    "deferred": (2, "--pipeline-model-parallel-size 2 --rehearse-rank 1 "
                    "--defer-embedding-wgrad-compute --global-batch-size 8"),
    "experts, recomputed": (2, "--pipeline-model-parallel-size 2 --global-batch-size 8 "
                               "--num-experts 4 --expert-tensor-parallel-size 1 "
                               "--moe-router-topk 2 --recompute-granularity full "
                               "--recompute-method uniform --recompute-num-layers 2"),
    "ZeRO 3 in a pipeline": (4, "--pipeline-model-parallel-size 2 --zero-stage 3 "
                                "--overlap-param-gather --global-batch-size 16"),
}  # fmt: skip

SAME = ("findings", "launches", "activations")
TIMES = ("step_seconds", "mfu", "bound_seconds")


def collectives(report):
    """Count a step's transfers of each kind, receives from any rank together: an action posts that
    of another one, which is not at the same place of each group of an interleaved pipeline.
    """
    keys = ("verb", "axis", "bytes", "sent", "dtype", "shape", "layer", "stream", "ranks", "peer")
    return Counter(
        str([row[key] for key in keys[: -3 if row["verb"] == "receive" else None]])
        for row in report["collectives"]
    )


@pytest.mark.prove
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_micro_batches_tell_of_all(rehearse, layout):
    world, flags = LAYOUTS[layout]
    few, every = rehearse(flags, world).report, rehearse(flags, world, every=True).report
    assert len(few["actions"]) <= len(every["actions"])
    assert collectives(few) == collectives(every)
    for key in SAME:
        assert few[key] == every[key], key
    for key in ("peak_bytes", "by_kind"):
        assert few["memory"][key] == every["memory"][key], key
    for key in TIMES:
        assert few["time"][key] == pytest.approx(every["time"][key], rel=0.02), key
