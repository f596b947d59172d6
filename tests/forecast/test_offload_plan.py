# SPDX-License-Identifier: Apache-2.0
"""What a dry run states of activations in host memory: what leaves the device is there."""

import pytest

import pretrain_llama
from forecast.dry_run import report
from forecast.recording import ACTIVATIONS, HOST, record
from forecast.rehearsal.activation_costs import saved_by_module
from tests.sampling import sampled
from tests.training.small_llama import read

ON = "--cpu-offload-activations --min-offloaded-tensor-size 1 --num-layers 6"


def recorded(more, world=1):
    found = record(read(more, world), pretrain_llama)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize("more,world", sampled([
    ("--pipeline-model-parallel-size 2 --global-batch-size 8", 2),
    ("", 1), ("--recompute-granularity selective", 1), ("--bf16", 1),
    ("--offload-modules mlp", 1), ("--cpu-offloading-num-layers 2", 1),
    ("--recompute-granularity full", 1),
    ("--pipeline-model-parallel-size 2 --global-batch-size 8 --pipeline-schedule zb-v", 2),
], 4))  # fmt: skip
def test_what_leaves_the_device_is_in_host_memory(more, world):
    """All but the two units that are under way is less on the device."""
    kept = recorded(f"--num-layers 6 {more}".replace("--offload-modules mlp", "").replace(
        "--cpu-offloading-num-layers 2", ""), world)  # fmt: skip
    for one, other in zip(kept, recorded(f"{ON} {more}", world), strict=True):
        in_host = other.most(HOST)
        assert one.most(HOST) == sum(one.copied()) == 0 < in_host
        assert 0 < one.most(ACTIVATIONS) - other.most(ACTIVATIONS) <= in_host
        assert other.copied()[0] == other.copied()[1] >= in_host


def test_the_table_of_modules_is_what_a_layer_keeps():
    config = read("--num-layers 6 --bf16")
    rows = saved_by_module(config, pretrain_llama.model_provider, recomputes=False)
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
    six, five = (recorded(f"--num-layers {n} --bf16")[0].most(ACTIVATIONS) for n in (6, 5))
    assert six - five == sum(rows.values())


def test_a_report_says_where_activations_are():
    text = report(read(f"{ON} --bf16"), pretrain_llama)
    assert "  host memory " in text and "  activations; pinned\n" in text
