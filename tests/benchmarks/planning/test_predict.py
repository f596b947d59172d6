# SPDX-License-Identifier: Apache-2.0
"""Published runs of three formats are predicted, each alone, and what cannot be read is named."""

import csv
import hashlib
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import plan_predict
from benchmarks.planning.foreign_runs import constants_of, even_cut, stacked
from benchmarks.planning.frameworks import ProfileError, profile, read_fitted
from benchmarks.planning.other_runs import BLIND, NOT_SEEN, SOURCES
from benchmarks.planning.predict import COLUMNS, predict
from benchmarks.planning.published import RowError, playbook_cut, read_table
from forecast.device_file import read_device
from forecast.planner.step_time import collective, matmul
from forecast.rehearsal.links import collective_seconds
from forecast.rehearsal.roofline import matmul_seconds

COMMITTED = (  # of BLIND: runs, columns before the measured rates, and their hash
    (51, 24, "c93f07764da56701e8df3b8ddae0b634115c129d9d1cdd50553dc285dd1f641b"),
    (79, 27, "5e51cb4a14e86d4ffb1d84da539643a6d4dd5d79730128d8cabfd7186596bc89"),
)
PLAYBOOK = "model,nodes,dp,tp,pp,mbs,grad_acc,gbs,zero,mfu_pct,tok_s_gpu,tok_s,mem_gb,status"
# four runs of the Ultra-Scale Playbook (Hugging Face, Apache-2.0)
KNOWN = """1B,1,8,1,1,1,32,256,1,38.1,39006,312045,24.2,ok
1B,1,1,8,1,1,256,256,0,6.7,6907,55256,5.4,ok
3B,2,8,1,2,1,32,256,1,43.1,15160,242566,38.9,ok
3B,2,1,8,2,1,256,256,0,2.1,756,12097,7.1,ok"""
VTRAIN = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
    "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
)
SEVERAL = (
    "source,framework,model,family,layers,hidden,heads,kv_heads,ffn,vocab,gpu,gpu_mem_gb,n_gpus,"
    "precision,tp,pp,vpp,dp,cp,zero,mbs,gbs,seq,recompute,tokens_s_gpu,step_time_s,mem_gib,notes"
)


def written(folder: Path, text: str) -> Path:
    path = folder / "runs.csv"
    path.write_text(text + "\n", encoding="utf-8")
    return path


def test_rows_keep_their_columns_and_gain_five(tmp_path: Path) -> None:
    path, out = (
        written(tmp_path, f"{PLAYBOOK}\n{KNOWN}\n1B,2,,4,2,8,,256,1,,,,,crashed"),
        tmp_path / "o",
    )
    assert plan_predict.main([str(path), "--out", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5 and set(COLUMNS) < set(rows[0])
    for row in rows[:4]:
        assert float(row["predicted_tok_s_gpu"]) == pytest.approx(float(row["tok_s_gpu"]), rel=0.25)
        assert float(row["predicted_mem_gib"]) == pytest.approx(float(row["mem_gb"]), rel=0.2)
        assert row["predicted_fits"] == "yes"
    crashed = rows[4]  # dp and grad_acc are told by nodes and gbs: 2 and 16
    rate, seconds = float(crashed["predicted_tok_s_gpu"]), float(crashed["predicted_step_s"])
    assert rate * 16 * seconds == pytest.approx(256 * 4096, rel=1e-4)


def test_a_ring_has_a_step_for_each_rank_of_its_group() -> None:
    """256 ranks, 8 or 1 of each of 32 nodes: the same network cards, other numbers of steps."""
    runs = stacked([read_table(BLIND[0]).rows[0].record] * 2)
    c = constants_of(profile("nemo_h100"), runs)
    size, inner = np.array([256.0, 32.0]), np.array([1.0, 8.0])
    one = collective(c, runs, "all_gather", np.full(2, 1e-9), size, inner) - c["collective_start"]
    assert one == pytest.approx(np.array([255, 31]) * c["network_step"])


@pytest.mark.parametrize("verb", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_the_planner_and_the_rehearsal_have_one_cost_of_a_collective(verb: str) -> None:
    """Of groups in a node, over nodes and across both, for this repository's own runs."""
    device, c = read_device("h100"), profile("weft_h100")
    runs = stacked([read_table(BLIND[0]).rows[0].record] * 4)
    runs = replace(runs, network=np.full(4, device.levels[1].bandwidth))
    groups = [range(8), range(0, 64, 8), range(64), range(0, 32, 2)]
    size, inner = np.array([[len(g), g.step] for g in groups], float).T
    for whole in (1e3, 1e6, 1e10):
        told = collective(c, runs, verb, np.full(4, whole), size, inner)
        sent = whole / size if verb == "all_gather" else np.full(4, whole)
        wanted = [collective_seconds(device, verb, s, g) for s, g in zip(sent, groups, strict=True)]
        assert told == pytest.approx(np.array(wanted))


@pytest.mark.parametrize("float8", [0, 1])
def test_the_planner_and_the_rehearsal_have_one_cost_of_a_matmul(float8: int) -> None:
    device, c = read_device("h100"), profile("weft_h100")
    sizes = np.array([[8192, 28672, 4096], [1024, 128, 8192], [3, 5, 7]], float).T
    runs = stacked([read_table(BLIND[0]).rows[0].record | {"float8": float8}] * 3)
    dtype = "float8" if float8 else "bfloat16"
    wanted = [matmul_seconds(device, *map(int, mnk), dtype) for mnk in sizes.T]
    assert matmul(c, runs, *sizes) == pytest.approx(np.array(wanted))


@pytest.mark.parametrize("path, committed", list(zip(BLIND, COMMITTED, strict=True)))
def test_blind_runs_are_as_they_were_when_nobody_had_compared_them(
    path: Path, committed: tuple[int, int, str]
) -> None:
    """Their sizes and predictions, whose commit came before that of the measured rates."""
    runs, columns, digest = committed
    with path.open(encoding="utf-8") as file:
        rows = [list(row.values())[:columns] for row in csv.DictReader(file)]
    text = "\n".join(",".join(row) for row in rows)
    assert hashlib.sha256(text.encode()).hexdigest() == digest
    table = read_table(path)
    assert not table.reasons and len(table.rows) == len(rows) == runs
    uses = {SOURCES[line["source"]].use for line in table.lines}
    assert uses == {NOT_SEEN} and all(row.seconds > 0 for row in table.rows)


def test_ends_are_one_matrix_where_a_program_ties_them(tmp_path: Path) -> None:
    rows = read_table(written(tmp_path, f"{PLAYBOOK}\n{KNOWN}\n8B,4,4,8,1,1,64,256,1,,,,,ok")).rows
    assert [bool(row.record["tied"]) for row in rows] == [True, True, True, True, False]
    line = "x,nemo/megatron,{0},{0},48,6144,48,,,,H100-SXM,80,64,fp8,2,4,12,8,1,1,1,256,2048,,,,,"
    named = [line.format(name) for name in ("gpt", "nemotron", "mixtral")]
    rows = read_table(written(tmp_path, "\n".join([SEVERAL, *named]))).rows
    assert [bool(row.record["tied"]) for row in rows] == [True, False, False]


def test_other_models_and_more_gpus_are_predicted(tmp_path: Path) -> None:
    rows = [
        f"{m},{n},{n},8,1,1,{256 // n},256,1,,,,,ok"
        for m in ("8B", "80B", "405B")
        for n in (64, 256)
    ]
    told = predict(read_table(written(tmp_path, "\n".join([PLAYBOOK, *rows]))).rows)
    assert np.all(np.isfinite(told.seconds)) and np.all(told.rate > 0)
    assert told.rate[0] > told.rate[2] > told.rate[4]
    assert told.fits[0] and not told.fits[4] and told.gib[2] > told.gib[0]


def test_vtrain_and_several_are_told_by_their_header(tmp_path: Path) -> None:
    path = written(
        tmp_path, f"{VTRAIN}\n8,64,1,2048,16,24,1024,2,2,2,500\n512,512,1,12288,96,96,2048,8,8,8,"
    )
    rows = read_table(path).rows
    assert rows[0].profile == "megatron-deepspeed_a100" and rows[0].record["micro_batches"] == 32
    assert rows[0].seconds == 0.5 and math.isnan(rows[1].seconds)
    assert np.all(predict(rows).seconds > 0)
    llama = "x,titan FSDP,llama3,llama,32,4096,32,8,14336,,H100,80,8,bf16,1,1,,8,1,3,1,8,8192,,,,,"
    bare = "x,new,405b,llama,126,16384,128,8,,,GB200,,512,fp8,4,8,,,2,,1,1152,8192,,,,,"
    chunks = (
        "x,nemo/megatron,g,gpt,48,6144,48,,,,H100-SXM,80,64,fp8,2,4,12,8,1,1,1,256,2048,full,,,,"
    )
    rows = read_table(written(tmp_path, "\n".join([SEVERAL, llama, bare, chunks]))).rows
    assert [row.profile for row in rows] == ["titan_h100", "nemo_b200", "nemo_h100"]
    assert rows[1].record["dp"] == 8 and rows[1].record["ffn"] == 43776
    told = predict(rows)
    assert np.all(told.seconds > 0) and np.all(told.gib > 1)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1B,1,8,one,1,1,32,256,1,,,,,ok", "runs.csv, line 3, tp: 'one' must be a number"),
        ("1B,1,8,0,1,1,32,256,1,,,,,ok", "runs.csv, line 3, tp: '0' must be a whole number"),
        ("1B,1,8,1,1,1.5,32,256,1,,,,,ok", "line 3, mbs: '1.5' must be a whole"),
        ("1B,1,8,1,1,,32,256,1,,,,,ok", "line 3, mbs: '' must be given"),
        ("9Q,1,8,1,1,1,32,256,1,,,,,ok", "line 3, model: '9Q' must be one of "),
        ("1B,1,8,1,1,1,32,256,inf,,,,,ok", "line 3, zero: 'inf' must be a finite"),
        ("1B,1,8,1,9999,1,32,256,1,,,,,ok", "line 3, pp: '9999' must be at most 4,096"),
        ("1B,1,8,1,1,1,32,256,1,,,,,ok,more", "line 3: has more values"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = "1B,1,8,1,1,1,32,256,1,,inf,,-3,ok"  # what was measured is not needed
    path = written(tmp_path, f"{PLAYBOOK}\n{KNOWN.splitlines()[0]}\n{line}\n{odd}")
    assert plan_predict.main([str(path), "--out", str(tmp_path / "o")]) == 0
    assert "2 rows predicted, 1 not: predicted_reason" in capsys.readouterr().out
    with (tmp_path / "o").open() as file:
        good, bad, unmeasured = csv.DictReader(file)
    assert said in bad["predicted_reason"] and not any(bad[name] for name in COLUMNS[:-1])
    assert not good["predicted_reason"] and float(unmeasured["predicted_step_s"]) > 0


def test_an_unknown_gpu_has_a_reason_and_a_known_model_needs_no_sizes(tmp_path: Path) -> None:
    head = "framework,model,gpu,n_gpus,precision,tp,pp,mbs,gbs,seq"
    lines = ["x,llama3.1 8B,H100,8,bf16,1,1,1,128,8192", "x,llama3.1 8B,TPUv5,8,bf16,1,1,1,8,8192",
             "x,unknown,H100,8,bf16,1,1,1,128,8192"]  # fmt: skip
    table = read_table(written(tmp_path, "\n".join([head, *lines])))
    assert [row.record["ffn"] for row in table.rows] == [14336]
    assert "must be one of GB300" in table.reasons[1]
    assert "layers: None must be given" in table.reasons[2]


@pytest.mark.parametrize(
    ("gpu", "precision", "recompute", "said"),
    [
        ("GB200", "NVFP4", "", "line 3, precision: 'NVFP4' must be bf16, fp16"),
        ("H100", "fp4", "", "precision: 'fp4' must be bf16, fp16"),
        ("H100", "int8", "", "precision: 'int8' must be bf16, fp16"),
        ("H100", "fp32", "", "precision: 'fp32' must be bf16, fp16"),
        ("A100-SXM-80G", "fp8", "", "precision: 'fp8' is not available on NVIDIA A100 SXM"),
        ("H200", "FP8-MX", "", "precision: 'FP8-MX' is not available on NVIDIA H200"),
        ("H100-PCIe", "bf16", "", "gpu: 'H100-PCIe' must be one of"),
        ("RTX A1000", "bf16", "", "gpu: 'RTX A1000' must be one of"),
        ("H100", "bf16", "some", "recompute: 'some' must be full, selective or none"),
    ],
)
def test_what_is_not_known_is_refused(
    gpu: str, precision: str, recompute: str, said: str, tmp_path: Path
) -> None:
    head = "framework,model,gpu,n_gpus,precision,tp,pp,mbs,gbs,seq,recompute"
    lines = [f"nemo,llama3.1 8B,{g},8,{p},1,1,1,128,8192,{r}" for g, p, r in
             (("DGX-B200", "FP8-CS", "none"), (gpu, precision, recompute))]  # fmt: skip
    table = read_table(written(tmp_path, "\n".join([head, *lines])))
    assert [row.record["float8"] for row in table.rows] == [True]
    assert said in table.reasons[1]


def test_host_waits_of_nanotron_are_not_other_programs(tmp_path: Path) -> None:
    line = "512,512,1,12288,96,96,2048,8,8,8,"  # 175B: tensor and pipeline ranks on 64 nodes
    row = read_table(written(tmp_path, f"{VTRAIN}\n{line}")).rows[0]
    told = predict([row])
    assert 0.25 < told.mfu[0] < 0.5  # Megatron's own runs: docs/predictions.md


def test_an_unknown_header_and_a_broken_profile_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RowError, match="one of the three known ones"):
        read_table(written(tmp_path, "a,b\n1,2"))
    with pytest.raises(ProfileError, match="must be FRAMEWORK_DEVICE"):
        profile("nanotron_v100")
    broken = tmp_path / "p.json"
    broken.write_text('{"constants": {"speed": 1}}')
    with pytest.raises(ProfileError, match="constants has the unknown key speed"):
        read_fitted(broken)


def test_nanotron_leaves_ranks_idle_in_the_pipelines_that_never_started() -> None:
    sizes = {"1B": (16, 2048, 8192, 131072), "3B": (28, 3072, 8192, 131072)}
    idle = {
        (m, pp): playbook_cut(*s, pp)[2] for m, s in sizes.items() for pp in (1, 2, 4, 8, 16, 32)
    }
    assert [key for key, is_idle in idle.items() if is_idle] == [("1B", 16), ("1B", 32), ("3B", 32)]
    assert playbook_cut(*sizes["1B"], 2)[0] == [11, 5]
    assert all(sum(playbook_cut(*s, pp)[0]) == s[0] for s in sizes.values() for pp in (1, 3, 8, 32))
    assert even_cut(10, 4) == [3, 3, 2, 2]
