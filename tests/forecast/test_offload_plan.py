# SPDX-License-Identifier: Apache-2.0
"""What a dry run states of activations in host memory: what leaves the device is there."""

import pytest
from estimate.dry_run import report

from estimate import activations
from estimate.saved_by_module import saved_by_module
from pretrain_llama import model_provider
from tests.training.small_llama import read

ON = "--cpu-offload-activations --min-offloaded-tensor-size 1 --num-layers 6"


def held(more, world=1):
    return activations.peaks(read(more, world), model_provider)


@pytest.mark.parametrize("more,world", [
    ("", 1), ("--recompute-granularity selective", 1), ("--recompute-granularity full", 1),
    ("--offload-modules mlp", 1), ("--cpu-offloading-num-layers 2", 1), ("--bf16", 1),
    ("--pipeline-model-parallel-size 2 --global-batch-size 8", 2),
    ("--pipeline-model-parallel-size 2 --global-batch-size 8 --pipeline-schedule zb-v", 2),
])  # fmt: skip
def test_what_leaves_the_device_is_in_host_memory(more, world):
    kept = held(f"--num-layers 6 {more}".replace("--offload-modules mlp", "").replace(
        "--cpu-offloading-num-layers 2", ""), world)  # fmt: skip
    away = held(f"{ON} {more}", world)
    for one, other in zip(kept, away, strict=True):
        assert other.in_host > 0 and other.logits == one.logits
        full = "granularity full" in more
        less = one.for_b - other.for_b
        if "zb-v" in more:  # its chunks differ, and so do the fullest moments
            assert 0.95 * other.in_host < less <= other.in_host
        elif full:  # one unit of a layer's input is under way while its layer runs again
            assert 0 < one.activations - other.activations <= less == other.in_host
        else:
            assert less == one.activations - other.activations == other.in_host
        # where layers run again, the fullest moment may be one with nothing under way
        assert other.under_way >= int(not full) and other.under_way <= other.in_host


def test_the_table_of_modules_is_what_a_layer_keeps():
    config = read("--num-layers 6 --bf16")
    rows, cores = saved_by_module(config, model_provider)
    assert cores == {"attention"}
    n, h, f, a, g, d = 2 * 32, 64, 96, 8, 4, 8
    assert rows == {
        "attention_norm": 2 * n * h + 4 * n,
        "attention.qkv": 2 * n * h,
        "attention": 2 * n * (a + 2 * g) * d + 2 * n * a * d + 4 * n * a,
        "mlp_norm": 2 * n * h + 4 * n,
        "mlp.gate_up": 2 * n * h,
        "mlp": 2 * n * 2 * f,
        "mlp.down": 2 * n * f,
    }
    per_layer = held("--num-layers 6 --bf16")[0].for_b - held("--num-layers 5 --bf16")[0].for_b
    assert per_layer == sum(rows.values())


def test_a_report_says_where_activations_are():
    text = report(read(f"{ON} --bf16"), model_provider)
    assert "activations being copied to or from host memory: two units" in text
    assert "offloaded activations, pinned" in text
