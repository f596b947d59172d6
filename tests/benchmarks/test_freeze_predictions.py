# SPDX-License-Identifier: Apache-2.0
"""What was frozen before a card ran is what these files predict: the hash is the same."""

import json
from pathlib import Path

from benchmarks import freeze_predictions
from benchmarks.freeze_predictions import DEVICES, FROZEN, MADE_BY, STEPS, fingerprint, show


def test_the_frozen_predictions_are_of_these_files():
    frozen = json.loads(FROZEN.read_text())
    again = "run benchmarks/freeze_predictions.py: what makes the predictions has changed"
    assert frozen["made_by"] == list(MADE_BY) and frozen["sha256"] == fingerprint(), again
    assert set(frozen["steps"]) == set(DEVICES)
    for steps in frozen["steps"].values():
        assert len(steps) == len(STEPS) + 1 and all(
            low < high for low, high in (s["seconds"] for s in steps.values())
        )
    assert len(show(frozen)) == 2 + (len(STEPS) + 1) * len(DEVICES)


def test_a_change_of_what_predicts_changes_the_hash(monkeypatch, tmp_path):
    for name in MADE_BY:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((freeze_predictions.ROOT / name).read_bytes())
    monkeypatch.setattr(freeze_predictions, "ROOT", tmp_path)
    before = fingerprint()
    path = Path(tmp_path / MADE_BY[-1])
    path.write_bytes(path.read_bytes().replace(b"0.67", b"0.68"))
    assert fingerprint() != before
