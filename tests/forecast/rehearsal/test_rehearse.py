# SPDX-License-Identifier: Apache-2.0
"""A rehearsal counts what is known otherwise: FLOPs, parameters, traffic; and takes the flags."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import pretrain_llama
from forecast.device_file import path_of
from forecast.rehearsal.events import Alloc, Free, Launch, Where
from forecast.rehearsal.main import NO_LAYERS
from forecast.rehearsal.memory import memory
from forecast.rehearsal.workspaces import of_launch
from forecast.traffic import totals, traffic
from tests.forecast.rehearsal.conftest import SMALL
from tests.sampling import sampled
from training.flags.parse import parse

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("again", "of_layers", "of_core"), [("", 6, 3.5), ("selective", 6, 4.5), ("full", 8, 4.5)]
)
def test_flops_of_a_step(rehearse, again, of_layers, of_core):
    """Forward, dgrad and wgrad of a matmul: 6 x weights; causal attention: half of 4 s s d. What is
    recomputed runs its forward twice.
    """
    flags = f"--recompute-granularity {again}" if again else ""
    report = rehearse(f"--global-batch-size 2 {flags}").report
    layers, head = 4 * (64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 176), 64 * 1024
    matmuls = sum(row["flops"] for row in report["launches"] if row["part"] != "attention")
    assert matmuls == (of_layers * layers + 6 * head) * 2 * 64
    core = sum(row["flops"] for row in report["launches"] if row["part"] == "attention")
    forward = 4 * 64 * 64 * 16 * 4 / 2 * 4 * 2  # 4 s s d, 4 heads, causal, 4 layers, 2 samples
    assert core == pytest.approx(forward * of_core)  # flash's backward computes the scores again


@pytest.mark.prove
def test_kernels_that_overlap_multiply_as_much(rehearse):
    """A Triton kernel declares the FLOPs of its launch (mpu/kernels/declared.py)."""
    flops = {}
    for method in ("none", "symmetric"):
        flags = f"--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap {method}"
        found = rehearse(f"{flags} --global-batch-size 2 --rehearse-rank 1", 2)
        assert found.code == 0, found.text
        flops[method] = sum(row["flops"] for row in found.report["launches"])
    assert flops["none"] == flops["symmetric"]
    assert "triton::all_gather_matmul_kernel" in {row["op"] for row in found.report["launches"]}


@pytest.mark.prove
def test_memory_of_what_is_kept(rehearse):
    kinds = rehearse("--global-batch-size 2").report["memory"]["by_kind"]
    parameters = 2 * 64 * 1024 + 4 * (64 * 128 + 64 * 64 + 3 * 64 * 176 + 2 * 64) + 64
    held = kinds["parameters"] // 2
    assert parameters <= held < 1.03 * parameters  # buckets are padded
    assert kinds["masters"] == kinds["gradients"] == 4 * held and kinds["moments"] == 8 * held


@pytest.mark.prove
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (4, "--tensor-model-parallel-size 2 --sequence-parallel --zero-stage 1"),
        (4, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --zero-stage 3 "
            "--rehearse-rank 2"),
        (4, "--tensor-model-parallel-size 2 --zero-stage 2 --overlap-grad-reduce "
            "--rehearse-rank 3"),
        (2, "--pipeline-model-parallel-size 2 --rehearse-rank 1"),
    ],
)  # fmt: skip
def test_traffic_is_worked_out(rehearse, world, flags):
    """The same list as that which `make explain` holds against a run on CPUs."""
    report = rehearse(f"{flags} --global-batch-size 4", world).report
    words = [w for w in [*SMALL, *flags.split(), "--global-batch-size", "4"]]
    config = parse([*words, "--rehearse", "--dry-run"], world)
    ranks = config.parallel.world_size // config.parallel.pipeline_model_parallel_size
    counted = {}
    for row in report["collectives"]:
        times, sent = counted.get((row["axis"], row["verb"]), (0, 0))
        counted[row["axis"], row["verb"]] = times + 1, sent + row["sent"]
    assert counted == totals(traffic(config, pretrain_llama, report["rank"] // ranks))


def test_each_transfer_has_its_turn_on_its_communicator(rehearse):
    """What tp waits for comes before what dp sends, where both have kernels to run."""
    _, report, text = rehearse("--tensor-model-parallel-size 2 --sequence-parallel "
                               "--global-batch-size 4 --overlap-grad-reduce --rehearse-rank 1",
                               4)  # fmt: skip
    rows = report["collectives"]
    urgent = {
        axis: {row["urgent"] for row in rows if row["axis"] == axis} for axis in ("tp", "dp_cp")
    }
    assert urgent == {"tp": {True}, "dp_cp": {False}}
    streams = {axis: {row["stream"] for row in rows if row["axis"] == axis} for axis in urgent}
    assert not streams["tp"] & streams["dp_cp"]
    told = [line for line in text.splitlines() if "this rank sends" in line]
    assert all((", high priority" in line) == line.startswith("  tp ") for line in told) and told
    seen: Counter[int] = Counter()
    first: dict[int, int] = {}
    for row in rows:
        begin = first.setdefault(row["stream"], row["number"])
        assert row["number"] == begin + seen[row["stream"]]
        seen[row["stream"]] += 1
    assert len(seen) >= 2


def test_mistakes_are_one_sentence(rehearse):
    for flags, said in {
        "--global-batch-size 4 --rehearse-rank 4": "--rehearse-rank 4",
        "--global-batch-size 4 --rehearse-device nosuch": "nosuch is no GPU known by name",
        "--tensor-model-parallel-size 3": "not a multiple of --tensor-model-parallel-size 3",
    }.items():
        found = rehearse(flags, 4)
        assert found.code == 2 and said in found.text, found.text
        assert len(found.text.splitlines()) == 1


@pytest.mark.prove
def test_a_changed_copy_is_rehearsed_itself(tmp_path):
    """The program, a fork of it, starts the rehearsal with its own path and its own step."""
    fork = (ROOT / "pretrain_llama.py").read_text()
    line = "    step, schedule = run.iteration + 1, run.schedule(len(batches))\n"
    assert line in fork
    copy = tmp_path / "pretrain_fork.py"
    copy.write_text(fork.replace(line, line + "    run.model.norm.weight.sum().item()\n"))
    report = tmp_path / "report.json"
    words = [sys.executable, copy, *SMALL, "--global-batch-size", "2", "--rehearse"]
    env = {**os.environ, "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*words, "--rehearse-json", report], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    (finding,) = json.loads(report.read_text())["findings"]
    assert finding["kind"] == "host read"


@pytest.mark.parametrize(
    "more, kernel",
    sampled(
        [
            ("--rehearse-device h100", "cudnn"),
            ("--rehearse-device a100", "flash"),
            ("--rehearse-device h100 --kv-channels 256", "flash"),
            ("--rehearse-device h100 --deterministic-mode", "flash"),
        ],
        4,
    ),
)
def test_attention_is_the_kernel_that_torch_chooses_on_the_device(rehearse, more, kernel):
    code, report, text = rehearse(more)
    assert code == 0, text
    ops = {row["op"] for row in report["launches"] if "attention" in row["op"]}
    both = {f"aten::_scaled_dot_product_{kernel}_attention{way}" for way in ("", "_backward")}
    assert ops == both


@pytest.mark.prove
def test_a_card_that_nobody_measured_is_predicted_as_a_range(rehearse):
    _, report, text = rehearse("--rehearse-device h200")
    low, high = report["time"]["range"]
    assert low["step_seconds"] < high["step_seconds"] and low["mfu"] > high["mfu"]
    assert report["time"]["step_seconds"] in (low["step_seconds"], high["step_seconds"])
    assert all(f"{1e3 * end['step_seconds']:.1f} ms" in text for end in (low, high))
    low, high = rehearse("--rehearse-device a100").report["time"]["range"]
    assert low == high


def test_a_rank_without_layers_predicts_no_time(rehearse):
    layout = "--pipeline-model-parallel-layout E|tttt|L --pipeline-model-parallel-size 3"
    _, report, text = rehearse(f"--global-batch-size 4 {layout}", 3)
    assert report["time"] == {} and f"  {NO_LAYERS}\n" in text and report["memory"]["peak_bytes"]
    middle = rehearse(f"--global-batch-size 4 {layout} --rehearse-rank 1", 3)
    assert middle.report["time"]["step_seconds"] > 0 and NO_LAYERS not in middle.text


@pytest.mark.prove
def test_the_host_pays_for_autograd_functions_and_for_each_argument_of_triton(rehearse, tmp_path):
    content = json.loads(path_of("h100").read_text())
    seconds = {}
    for key in ("launch_seconds", "function_seconds", "triton_argument_seconds"):
        content["numbers"][key]["value"] += 1.0
        file = tmp_path / f"{key}.json"
        file.write_text(json.dumps(content))
        content["numbers"][key]["value"] -= 1.0
        seconds[key] = rehearse(f"--rehearse-device {file}").report["time"]["bounds"]["host"]
    launches = rehearse("--rehearse-device h100").report["launches"]
    triton = sum(row["count"] for row in launches if row["op"].startswith("triton::"))
    others = sum(row["count"] for row in launches) - triton
    assert round(seconds["launch_seconds"]) == others
    assert seconds["function_seconds"] > 2 * 2 * 4  # norms alone: 4 layers, forward and backward
    assert seconds["triton_argument_seconds"] > 5 * triton


@pytest.mark.prove
def test_the_workspaces_of_operators_are_counted_or_named(rehearse):
    """FlashAttention's backward has dq in fp32 and dk, dv of each head; cuDNN's is not known."""
    wide = "--num-attention-heads 4 --kv-channels 64 --seq-length 128"
    devices = ("a100", "h100")
    said = {d: rehearse(f"{wide} --rehearse-device {d}").report["memory"] for d in devices}
    flash = "aten::_scaled_dot_product_flash_attention_backward"
    q = launch(flash, (2, 8, 100, 40), (2, 4, 64, 40))
    assert of_launch(q) == 4 * 2 * 8 * 128 * (64 + 1) + 2 * 2 * 64 * 8 * 40 * 2
    packed = launch("aten::_flash_attention_backward", (300, 8, 64), (300, 8, 64))
    assert of_launch(packed) == 4 * 8 * 384 * 65
    for device, each in (("a100", 8519680), ("h100", 33554432)):
        assert said[device]["by_kind"]["workspaces of cuBLAS"] == 2 * each  # two host threads
        assert sum(said[device]["by_kind"].values()) == said[device]["peak_bytes"]
    named = {d: any("cuDNN" in what for what in m["not_counted"]) for d, m in said.items()}
    assert named == {"a100": False, "h100": True}
    assert not any("NCCL" in what for what in said["a100"]["not_counted"])


def test_the_peak_is_in_flash_s_backward_where_its_workspace_makes_it():
    q = launch("aten::_flash_attention_backward", (300, 8, 64), (300, 8, 64))
    events = [Alloc(0, 1000, "", 0, "cuda", q.where), Free(0, ""),
              Alloc(1, 100, "", 0, "cuda", q.where), q]  # fmt: skip
    found = memory(events, {}, "cuda")
    assert (found.peak, found.at) == (100 + of_launch(q), 3)
    assert found.by_kind["workspaces of operators"] == of_launch(q)


def launch(op, q, k):
    """Return a launch whose tensors are the output's gradient, q and k."""
    return Launch(op, 0, (q, q, k), "bfloat16", (), (), 0, 1.0, Where())
