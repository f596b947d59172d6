# SPDX-License-Identifier: Apache-2.0
"""The picture of experts' loads: what it reads, what it draws, what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import plot_experts


def log_of(path: Path, rows: list[tuple[int, Any]]) -> Path:
    lines = [json.dumps({"iteration": i, "loss": 1.0, "expert_tokens": rows}) for i, rows in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(monkeypatch: Any, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plot_experts.py", *words])
    plot_experts.main()


def test_a_later_line_replaces_what_a_resume_repeats(tmp_path: Path) -> None:
    rows = [(1, [[0, [4, 4]]]), (2, [[0, [8, 0]]]), (3, [[0, [7, 1]]]), (2, [[0, [6, 2]]])]
    found = plot_experts.read_counts(log_of(tmp_path / "log.jsonl", rows))
    assert found == {1: {0: [4, 4]}, 2: {0: [6, 2]}}
    assert plot_experts.loads(found) == {"layer 0": [(1, 1.0), (2, 1.5)]}


@pytest.mark.parametrize("layers", [2, 20])
def test_a_picture_is_drawn(tmp_path: Path, monkeypatch: Any, layers: int) -> None:
    rows = [(i, [[n, [4 + i, 4 - i, 4, 4]] for n in range(1, 1 + layers)]) for i in range(3)]
    log = log_of(tmp_path / "log.jsonl", rows)
    run(monkeypatch, str(log), "--output", str(tmp_path / "a.svg"))
    text = (tmp_path / "a.svg").read_text()
    assert f"{layers} layers of 4 experts, iterations 0 to 2" in text
    assert ("layer 1" in text) == (layers == 2) and ("highest layer" in text) == (layers == 20)


@pytest.mark.parametrize(
    "text, why",
    [
        ('{"iteration": 1, "loss": 2.0}', "train with --moe-per-layer-logging"),
        ('{"iteration": 1, "expert_tokens": [[0, [0, 0]]]}', "line 1: not a line"),
        ('{"iteration": 1, "expert_tokens": [[0, [1, 2]], [1, [3]]]}', "line 1: not a line"),
        ("nonsense", "line 1: not a line"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, monkeypatch: Any, text: str, why: str) -> None:
    (tmp_path / "log.jsonl").write_text(text + "\n")
    with pytest.raises(SystemExit, match=why):
        run(monkeypatch, str(tmp_path / "log.jsonl"))
