# SPDX-License-Identifier: Apache-2.0
"""The ZeRO benchmark gives all sides one start, refuses unlike losses, and measures right."""

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks import bench_step
from benchmarks.bench_overlap import hidden
from benchmarks.bench_zero import Start, missing_deepspeed, rows, run_all
from benchmarks.peak import watch
from benchmarks.peers import native
from mpu.grid import Grid
from training.checkpoint import find_latest
from training.checkpoint.pieces import whole


def side(seconds: float, peak: float, *losses: float) -> tuple[bench_step.Side, list[float]]:
    made = bench_step.Side()
    made.add([seconds], peak)
    return made, list(losses)


def test_rows_hold_each_level_against_its_peer() -> None:
    sides = {
        ("Weft", 1): side(0.2, 400, 8.0, 7.5),
        ("Weft", 3): side(0.25, 300, 8.0, 7.5),
        ("FSDP2", 3): side(0.5, 310, 8.0, 7.5),
        ("FSDP2 kept", 2): side(0.3, 500, 8.0, 7.5),
        ("DeepSpeed", 1): side(0.4, 600, 8.0, 7.5002),
    }
    made = rows("tiny-fp32-2", sides, 0.1, 0.18)
    assert made == [
        (
            "FSDP2",
            "| tiny, fp32, 2 | 1 | 5120 | 3413 (kept) | **1.50** | 50%, 90% | 400 / 500 | 0e+00 |",
        ),
        (
            "DeepSpeed",
            "| tiny, fp32, 2 | 1 | 5120 | 2560 | **2.00** | 50%, 90% | 400 / 600 | 2e-04 |",
        ),
        ("FSDP2", "| tiny, fp32, 2 | 3 | 4096 | 2048 | **2.00** | 40%, 72% | 300 / 310 | 0e+00 |"),
    ]


def test_another_training_is_not_timed() -> None:
    sides = {("Weft", 3): side(0.2, 400, 8.0, 7.5), ("FSDP2", 3): side(0.5, 500, 8.0, 7.6)}
    [(table, problem)] = rows("tiny-fp32-2", sides, 0.1, 0.18)
    assert table == "not the same training" and "losses differ by 1.0e-01" in problem


def test_hidden_share() -> None:
    assert hidden(11.0, 14.0, 10.0, 4.0) == 0.75


def test_deepspeed_is_left_out_with_its_reason() -> None:
    assert "names no interpreter" in missing_deepspeed(None)
    assert "No such file" in missing_deepspeed("/there/is/none")
    lacking = f"{sys.executable}: ModuleNotFoundError: No module named 'deepspeed'"
    assert missing_deepspeed(sys.executable) in (f"--deepspeed-python {lacking}", "")


def test_start_is_the_peers_own_weights_and_wefts_own_tokens(tmp_path: Path) -> None:
    start = Start("tiny", 2, tmp_path)
    arguments = SimpleNamespace(**native.SIZES["tiny"], rope="half", gqa="expand")
    theirs = native.Transformer(arguments)
    theirs.init_weights(1)
    found = find_latest(start.weights, Grid())
    assert found is not None and found.state["hf_config"]["vocab_size"] == 4096
    for name, param in theirs.named_parameters():
        stored = whole(native.hf_name(name), torch.empty_like(param))
        found.read([stored])
        assert torch.equal(stored.tensor, param), name
    data = SimpleNamespace(
        micro_batch=1, microbatches=4, seq=256, data=str(start.tokens), device="cpu"
    )
    tokens, labels = native.Data(data)(1)
    assert tokens.shape == (4, 256) and tokens.dtype == torch.int64 and tokens.max() < 4096
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    assert np.load(start.tokens).shape == (2, 4, 257)


RANK = """
import os, sys, time
held = bytearray(200 << 20)
del held
open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
time.sleep(0.6)
held = bytearray(50 << 20)
time.sleep(0.3)
"""
LAUNCHER = """
import subprocess, sys
ranks = [subprocess.Popen(sys.argv[1:]) for _ in range(2)]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.prove
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_is_of_the_time_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    marks = tmp_path / "freed"
    marks.mkdir()
    words = [sys.executable, str(tmp_path / "rank.py"), str(marks)]
    run = subprocess.Popen([sys.executable, "-c", LAUNCHER, *words])
    after = watch(run, "rank.py", due=lambda: len(list(marks.iterdir())) == 2)
    assert len(after) == 2 and all(50 < peak < 150 for peak in after.values())
    whole_life = watch(subprocess.Popen(words), "rank.py", due=lambda: True)
    assert len(whole_life) == 1 and min(whole_life.values()) > 200


@pytest.mark.prove
def test_one_case_in_full() -> None:
    args = argparse.Namespace(levels=[0, 1], steps=1, launches=1, deepspeed_python=None)
    sides, bound, alone = run_all("tiny-fp32-2", args, with_deepspeed=False)
    assert set(sides) == {("Weft", 0), ("Weft", 1), ("FSDP2 kept", 2)} and alone > bound > 0
    assert sides["Weft", 0][1] == sides["Weft", 1][1]
    assert all(made.peak > 100 for made, _ in sides.values())
    assert len(rows("tiny-fp32-2", sides, bound, alone)) == 2
