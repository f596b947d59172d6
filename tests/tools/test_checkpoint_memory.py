# SPDX-License-Identifier: Apache-2.0
"""tools/checkpoint.py copies one tensor into memory, however large the checkpoint is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORK = """
import json, sys, time
from pathlib import Path
from threading import Thread
import torch
from safetensors.torch import save_file
from tools.checkpoint import main
from tools.checkpoints.convert_huggingface import expected_tensors
from model import llama
from model.llama import LlamaConfig, hf_config

root = Path(sys.argv[1])
(root / "hf").mkdir()
config = LlamaConfig(4096, 512, 4096, 6, 8, 8, tied=True)
(root / "hf" / "config.json").write_text(json.dumps(hf_config(config)))
weight_map = {}
for i, (name, shape) in enumerate(expected_tensors(llama, config).items()):
    weight_map[name] = f"m-{i}.safetensors"
    save_file({name: torch.zeros(shape)}, root / "hf" / weight_map[name])
index = json.dumps({"weight_map": weight_map})
(root / "hf" / "model.safetensors.index.json").write_text(index)
hf, weft, out, whole = (str(root / name) for name in ("hf", "weft", "out", "whole"))


def anonymous():
    # without the pages of mapped files, which the kernel drops where memory is short
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon:"))) << 10


most = [anonymous()]


def watch():
    while True:
        most[0] = max(most[0], anonymous())
        time.sleep(0.001)


Thread(target=watch, daemon=True).start()
before = anonymous()
for argv in (
    ["convert", "--from-hf", hf, "--save", weft],
    ["convert", "--to-hf", out, "--load", weft],
    ["list", weft],
    ["verify", weft],
    ["show", weft, "--tensors"],
    ["consolidate", weft, "--save", whole],
    ["diff", weft, whole],
    ["diff", hf, out, "--tensors"],
    ["prune", whole, "--keep-last-k", "1"],
):
    assert main(argv) == 0, argv
    print("grew", argv[0], most[0] - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.prove
def test_memory_is_that_of_a_tensor_not_of_the_model(tmp_path: Path) -> None:
    """184 MB of weights, 8 MB the largest tensor."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WORK, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=400,
        check=True,
    )
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("grew")]
    sizes = [sum(p.stat().st_size for p in (tmp_path / n).rglob("*.safe*")) for n in ("hf", "out")]
    assert min(sizes) > 180e6 and len(lines) == 9
    assert 0 < max(int(grew) for _, _, grew in lines) < 100e6, lines  # 60 MB of imports
