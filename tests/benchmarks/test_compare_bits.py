# SPDX-License-Identifier: Apache-2.0
"""The comparison of two trees calls them the same only if every bit is."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.compare_bits import FORK, fork
from benchmarks.differences import rows, rows_differ, saves_differ
from tools.bisect.checkouts import ROOT, NoCheckout, checkout

SCRIPT = ROOT / "benchmarks" / "compare_bits.py"
STEPS = ["step_00000006", "step_00000008"]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compare this checkout with itself over one run, and keep what was written."""
    folder = tmp_path_factory.mktemp("kept")
    words = [str(ROOT), "--runs", "dp2-zero1", "--keep", str(folder)]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\ndp2-zero1 +2 +same +same +same\n1 of 1", done.stdout)
    return folder / "dp2-zero1"


def differ(kept: Path, other: Path) -> str:
    return saves_differ(kept / "base" / "saved", other, STEPS)


@pytest.mark.prove
def test_a_checkout_is_the_same_as_itself(kept: Path) -> None:
    assert [row["iteration"] for row in rows(kept / "resumed")] == [7, 8]
    assert len(rows(kept / "base")) == 8 and rows(kept / "base")[0]["grad_norm"] > 0
    assert differ(kept, kept / "resumed" / "saved") == ""


@pytest.mark.prove
def test_the_last_bit_of_a_loss_or_a_norm_is_found(kept: Path) -> None:
    for key in ("loss", "grad_norm"):
        want, got = rows(kept / "base"), rows(kept / "new")
        assert rows_differ(want, got) == ""
        got[4][key] = math.nextafter(got[4][key], 9)
        assert rows_differ(want, got).startswith(f"iteration 5: {key}: {want[4][key]!r}, here ")
    assert rows_differ(want, got[:-1]) == "8 steps are logged in base, here 7"


@pytest.mark.prove
def test_the_last_bit_of_a_tensor_is_found(kept: Path, tmp_path: Path) -> None:
    other = shutil.copytree(kept / "new" / "saved", tmp_path / "saved")
    file = other / STEPS[1] / "rank_00001-000.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[3]
    tensors[name].view(-1)[2:3].nextafter_(tensors[name].new_tensor([9.0]))
    save_file(tensors, file)
    said = differ(kept, other)
    head = f"{STEPS[1]}/{file.name}: {name}: 1 of {tensors[name].numel()} differ, element 2: "
    assert said.startswith(head), said


@pytest.mark.prove
def test_json_bytes_and_missing_files_are_found(kept: Path, tmp_path: Path) -> None:
    other = shutil.copytree(kept / "new" / "saved", tmp_path / "saved")
    file = other / STEPS[0] / "state.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state))
    assert differ(kept, other) == f"{STEPS[0]}/state.json: bytes, not contents"
    state["config"]["run.seed"] = 5
    file.write_text(json.dumps(state))
    assert differ(kept, other) == f"{STEPS[0]}/state.json: config: run.seed: 1234, here 5"
    state["config"] |= {"run.seed": 1234, "run.newer": 1}
    file.write_text(json.dumps(state))
    assert differ(kept, other) == ""  # a newer commit may store more
    del state["config"]["run.seed"]
    file.write_text(json.dumps(state))
    assert differ(kept, other).endswith("config: run.seed is only in base")
    file.unlink()
    assert differ(kept, other) == f"{STEPS[0]}: only one side has ['state.json']"
    shutil.rmtree(other / STEPS[0])
    assert differ(kept, other).endswith(f"holds ['{STEPS[1]}'], not {STEPS}")


def test_a_fork_is_edited_everywhere_or_refused(tmp_path: Path) -> None:
    fork(ROOT, tmp_path / "fork")
    text = (tmp_path / "fork" / "alpaca.py").read_text()
    assert text.count("mlp_out_norm") == 3 and "relu().square()" in text
    assert "from alpaca import" in (tmp_path / "fork" / "pretrain_alpaca.py").read_text()
    tree = tmp_path / "tree"
    (tree / "model").mkdir(parents=True)
    for old in ("swiglu(x, self", "self.mlp_norm = ", "return h + self", '"mlp_norm": '):
        changed = (ROOT / "model" / "llama.py").read_text().replace(old, "another")
        (tree / "model" / "llama.py").write_text(changed)
        with pytest.raises(NoCheckout, match="matches 0 times"):
            fork(tree, tmp_path / f"fork of {len(list(tmp_path.iterdir()))}")
    assert len(FORK) == 5  # and a function at the end


def test_what_is_no_commit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoCheckout, match="nowhere: not a commit of "):
        checkout("nowhere", tmp_path / "base")
