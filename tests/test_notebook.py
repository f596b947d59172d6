# SPDX-License-Identifier: Apache-2.0
"""examples/library.ipynb runs as it stands, without Jupyter, and prints the losses it shows."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = json.loads((ROOT / "examples" / "library.ipynb").read_text())
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


@pytest.mark.prove
def test_its_cells_print_the_losses_that_it_shows(tmp_path):
    """Those of its outputs; and torch computes the loss of the run from the loaded model."""
    source = "\n".join("".join(cell["source"]) for cell in CELLS)
    paths = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", source], env=os.environ | paths, cwd=tmp_path,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = "".join("".join(out["text"]) for cell in CELLS for out in cell["outputs"])
    losses = [[float(n) for n in re.findall(r"loss (\d+\.\d+)", text)] for text in
              (done.stdout, shown)]  # fmt: skip
    assert losses[0] == pytest.approx(losses[1], abs=0.02) and len(losses[0]) == 14
    *_, logged, by_torch = losses[0]
    assert logged == pytest.approx(by_torch, abs=2e-4)


def test_nothing_of_the_machine_that_ran_it_is_in_it():
    assert NOTEBOOK["metadata"].keys() == {"kernelspec", "language_info"}
    for cell in CELLS:
        assert cell["metadata"] == {}
        assert all(out["output_type"] == "stream" for out in cell["outputs"])
