# SPDX-License-Identifier: Apache-2.0
"""Fits find the constants that made the runs; the odds are written beside a time, not into it."""

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks import plan_odds, plan_predict
from benchmarks.plan_accuracy import auc, spearman
from benchmarks.plan_fit import fit_memory, fit_stalls, fit_time
from benchmarks.planning import odds
from benchmarks.planning.foreign_runs import stacked, times
from benchmarks.planning.frameworks import profile
from benchmarks.planning.predict import memory
from benchmarks.planning.published import read_table

PLAYBOOK = "model,nodes,dp,tp,pp,mbs,grad_acc,gbs,zero,mfu_pct,tok_s_gpu,tok_s,mem_gb,status"


def written(folder: Path, text: str) -> Path:
    path = folder / "runs.csv"
    path.write_text(text + "\n", encoding="utf-8")
    return path


def test_a_pipeline_that_nearly_fills_a_gpu_is_told_to_stall(tmp_path: Path) -> None:
    lines = ["3B,2,4,1,4,4,16,256,1,,,,,ok", "3B,2,4,1,4,2,32,256,1,,,,,ok"]
    rows = read_table(written(tmp_path, "\n".join([PLAYBOOK, *lines]))).rows
    runs = stacked([row.record for row in rows])
    full, half = odds.stall_odds(odds.fitted(), runs)
    assert full > 0.5 > half  # as measured: 20 s and 4 s a step


def test_the_odds_stand_beside_the_time_that_the_planner_predicts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["3B,2,4,1,4,4,16,256,1,,,,,ok", "1B,1,8,1,1,1,32,256,1,38.1,39006,312045,24.2,ok",
             "1B,1,8,1,1,64,1,512,0,,,,,crashed", "9Q,1,8,1,1,64,1,512,0,,,,,ok"]  # fmt: skip
    path = written(tmp_path, "\n".join([PLAYBOOK, *lines]))
    alone, beside = tmp_path / "alone.csv", tmp_path / "beside.csv"
    assert plan_predict.main([str(path), "--out", str(alone)]) == 0
    assert plan_odds.main([str(path), "--out", str(beside)]) == 0
    with alone.open() as first, beside.open() as second:
        before, after = list(csv.DictReader(first)), list(csv.DictReader(second))
    assert len(after) == 3 and "stall" not in "".join(before[0])
    for one, other in zip(before[:3], after, strict=True):
        assert one["predicted_step_s"] == other["predicted_step_s"]
        assert one["predicted_mem_gib"] == other["predicted_mem_gib"]
    stalls, runs, crashed = after
    assert float(stalls["odds_of_stall"]) > 0.5 and float(stalls["stall_s"]) > 5
    assert float(runs["odds_of_stall"]) == 0 and float(runs["odds_of_crash"]) < 0.1
    assert float(crashed["odds_of_crash"]) > 0.9
    path.write_text(path.read_text().replace("model,", "framework,gpu,n_gpus,seq,model,"))
    assert plan_odds.main([str(path), "--out", str(beside)]) == 2
    assert "no runs; odds are known for nanotron_h100 only" in capsys.readouterr().err


def test_a_fit_finds_the_constants_that_made_the_runs(tmp_path: Path) -> None:
    lines = [f"3B,{n},{8 * n // (tp * pp)},{tp},{pp},{b},{4 * tp},256,1,,,,,ok"
             for n in (1, 2) for tp in (1, 2, 4) for pp in (1, 2) for b in (1, 4)]  # fmt: skip
    runs = stacked(
        [row.record for row in read_table(written(tmp_path, "\n".join([PLAYBOOK, *lines]))).rows]
    )
    start = profile("nanotron_h100")
    true = {**start, "matmul": start["matmul"] * 0.8, "host_layer_tp": start["host_layer_tp"] * 2}
    found = fit_time(start, runs, times(true, runs).step, ("matmul", "host_layer_tp"))
    assert found["matmul"] == pytest.approx(true["matmul"], rel=0.02)
    assert found["host_layer_tp"] == pytest.approx(true["host_layer_tp"], rel=0.02)
    more = {**start, "logit_memory": 2 * start["logit_memory"]}
    measured = memory(more, runs)
    again = memory(fit_memory(start, runs, measured), runs)
    assert np.mean(np.abs(again / measured - 1)) < 0.3 * np.mean(
        np.abs(memory(start, runs) / measured - 1)
    )
    assert fit_stalls(runs, runs.pp > 1)["stall_pp"] > 1


def test_rank_statistics_agree_with_counting_pairs() -> None:
    draw = np.random.default_rng(3)
    score, label = draw.integers(0, 6, 40).astype(float), draw.random(40) < 0.4
    pairs = [(a > b) + 0.5 * (a == b) for a in score[label] for b in score[~label]]
    assert auc(score, label) == pytest.approx(float(np.mean(pairs)))
    assert spearman(score, 3 * score + 1) == pytest.approx(1) and spearman(
        score, -score
    ) == pytest.approx(-1)
