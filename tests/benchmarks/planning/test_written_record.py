# SPDX-License-Identifier: Apache-2.0
"""Records written from sizes: their FLOPs and bytes by formula, and steps made of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planning.published_rows import RECIPES, Left, predicted, read_runs
from benchmarks.planning.written_record import (
    Layout,
    Model,
    Passes,
    Recipe,
    StepClock,
    Writer,
    stage,
)
from forecast.device_file import read_device
from forecast.rehearsal.clock import Clock
from forecast.rehearsal.events import Launch, Transfer
from tests.forecast.rehearsal.clock_device import device

MODEL = Model(8, 256, 8, 2, 512, 1024, 128, True)
LAYOUT = Layout(1, 1, 1, 2, 3)
PLAIN = Recipe("plain", Passes(4, hidden=10, ffn=5), Passes(6, hidden=14, ffn=8))


def flops_of(model: Model, layout: Layout, recipe: Recipe = PLAIN) -> float:
    total = 0.0
    for kind in "FB":
        events = stage(Writer(model, layout, recipe), kind, model.layers, True, True)
        total += sum(event.flops for event in events if isinstance(event, Launch))
    return total


def test_a_record_has_the_model_s_flops() -> None:
    tokens = LAYOUT.micro_batch * MODEL.sequence
    weights = MODEL.layers * MODEL.layer_parameters + MODEL.vocab * MODEL.hidden
    matmuls = 6 * tokens * weights
    attention = MODEL.layers * tokens * MODEL.hidden * MODEL.sequence * 4 * 0.5 * (1 + 2.5)
    assert flops_of(MODEL, LAYOUT) == matmuls + attention
    assert flops_of(MODEL, replace(LAYOUT, tp=2)) == (matmuls + attention) / 2
    whole = flops_of(MODEL, LAYOUT, replace(PLAIN, causal=False))
    assert whole == matmuls + 2 * attention
    forward = (2 * tokens * MODEL.layers * MODEL.layer_parameters) + attention / 3.5
    assert flops_of(MODEL, replace(LAYOUT, recompute="full")) == matmuls + attention + forward


@pytest.mark.parametrize("sequence_parallel", (True, False))
def test_tensor_parallel_bytes_are_those_of_the_formulas(sequence_parallel: bool) -> None:
    layout = replace(LAYOUT, tp=4, sequence_parallel=sequence_parallel)
    sent = 0
    for kind in "FB":
        writer = Writer(MODEL, layout, PLAIN)
        layers = list(stage(writer, kind, 2, False, False))
        sent += sum(e.sent for e in layers if isinstance(e, Transfer))
    hidden = 2 * layout.micro_batch * MODEL.sequence * MODEL.hidden
    all_reduces = 4 if not sequence_parallel else 5  # with SP the inputs are gathered again
    assert sent == 2 * all_reduces * 2 * hidden * 3 // 4


def test_a_stage_of_many_layers_is_told_from_few() -> None:
    clock = StepClock(MODEL, LAYOUT, PLAIN, read_device("a100"), (8,))
    for kind in "FB":
        whole = Clock(read_device("a100"), trace=False)
        whole.run(list(stage(Writer(MODEL, LAYOUT, PLAIN), kind, 8, True, True)))
        direct = max([whole.host, *whole.free.values()])
        assert clock.stage_seconds(kind, 0) == pytest.approx(direct, rel=0.02)


def test_a_step_is_its_micro_batches_and_a_pipeline_adds_a_bubble() -> None:
    one = StepClock(MODEL, LAYOUT, PLAIN, read_device("a100"), (8,))
    body = one.stage_seconds("F", 0) + one.stage_seconds("B", 0)
    assert one.step()["pipeline"] == pytest.approx(3 * body)
    two = StepClock(MODEL, replace(LAYOUT, pp=2), PLAIN, read_device("a100"), (4, 4))
    assert 3 * body / 2 < two.step()["pipeline"] < 3 * body


def test_gradients_are_summed_over_the_data_parallel_ranks() -> None:
    slow = device(launch_seconds=0)
    layout = replace(LAYOUT, dp=4)
    recipe = replace(PLAIN, overlap_gradients=False)
    step = StepClock(MODEL, layout, recipe, slow, (8,)).step()
    numbers = MODEL.layers * MODEL.layer_parameters + 2 * MODEL.vocab * MODEL.hidden
    assert step["gradients"] == pytest.approx(2 * 3 / 4 * numbers * 4 / 10, rel=1e-3)
    hidden = StepClock(MODEL, layout, PLAIN, slow, (8,)).step()
    assert hidden["gradients"] < step["gradients"]


def test_rows_of_the_three_formats_are_read_and_predicted(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(
        "model,nodes,dp,tp,pp,mbs,grad_acc,gbs,zero,mfu_pct,tok_s_gpu,tok_s,mem_gb,status\n"
        "1B,1,8,1,1,2,16,256,0,40.0,40000,320000,50.0,ok\n"
        "1B,1,8,1,1,64,1,512,0,,,,,crashed_or_oom\n"
    )
    (tmp_path / "b.csv").write_text(
        "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
        "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)\n"
        "2,16,8,1024,16,24,1024,1,1,2,370.0\n"
    )
    header = (
        "source,framework,model,family,layers,hidden,heads,kv_heads,ffn,vocab,gpu,"
        "net_gbps_per_gpu,n_gpus,precision,tp,pp,vpp,dp,zero,mbs,gbs,seq,recompute,sp,"
        "flops_convention,tokens_s_gpu,step_time_s,notes\n"
    )
    megatron = "ZB T4,megatron fork,gpt-1.5B,gpt,22,2304,24,24,9216,,A100-SXM-80G,200,8,fp16"
    (tmp_path / "c.csv").write_text(
        header
        + f"{megatron},1,8,1,1,,6,144,1024,none,0,,12000,,schedule=1F1B; 24 microbatches\n"
        + f"{megatron},1,8,1,1,,6,144,1024,none,0,,14000,,schedule=ZB-2p; 24 microbatches\n"
    )
    runs, left = read_runs(tmp_path)
    assert [run.name for run in runs] == ["a.csv:2", "b.csv:2", "c.csv:2"]
    assert [run.seconds for run in runs] == pytest.approx([3.2768, 0.37, 1.536])
    assert runs[2].cut == (2, 3, 3, 3, 3, 3, 3, 2) and runs[1].layout.micro_batches == 2
    assert left == [
        Left("a.csv:3", "crashed"),
        Left("c.csv:3", "ZB-2p is no schedule of this repository"),
    ]
    for run in runs:
        seconds = predicted(run, read_device(run.device), {})
        peak = {"h100": 989.4e12, "a100": 312e12}[run.device]
        layout = run.layout
        batch = layout.micro_batches * layout.micro_batch * run.model.sequence * layout.dp
        gpus = layout.tp * layout.dp * layout.pp
        work = 6 * batch * run.model.layers * run.model.layer_parameters / (gpus * peak)
        assert work < seconds < 20 * work


def test_every_recipe_is_of_a_framework_that_a_table_names() -> None:
    assert all(recipe.name == name for name, recipe in RECIPES.items())
