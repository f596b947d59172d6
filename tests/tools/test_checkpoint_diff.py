# SPDX-License-Identifier: Apache-2.0
"""tools/checkpoint.py diff finds every difference, to the bit; consolidate makes none."""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.saved import check_equal, stored, tensors
from tools.checkpoints import diff as checkpoint_diff
from training.checkpoint import NamedPiece, find_latest, load, save

SHARD = "rank_00000-000.safetensors"
NORM, WIDE = "model.norm.weight", "model.embed_tokens.weight"


def save_cut(comm: Any, root: str) -> None:
    """Save a tensor of which each rank has some rows, and one that all have."""
    grid = comm.grid(tp=comm.size)
    rows = 8 // comm.size
    full = torch.arange(24.0).view(8, 3)
    mine = full[comm.rank * rows : (comm.rank + 1) * rows]
    pieces = [
        NamedPiece("cut", (8, 3), (comm.rank * rows, 0), (rows, 3), mine),
        NamedPiece("same", (5,), (0,), (5,), torch.arange(5.0).bfloat16(), (grid.tp,)),
    ]
    state = {"iteration": 3, "config": {"parallel": {"tp": 0}}}
    save(root, step=3, pieces=pieces, state=state, grid=grid, attach={"tokenizer.json": b"{}"})


def load_cut(comm: Any, root: str) -> list[list[float]]:
    grid = comm.grid(tp=comm.size)
    columns = torch.zeros(8, 1)
    piece = NamedPiece("cut", (8, 3), (0, comm.rank), (8, 1), columns)
    found = find_latest(root, grid, pieces=[piece])
    assert found is not None
    load(found, [piece], grid)
    return columns.flatten().tolist()


def test_consolidate(world: Any, tmp_path: Path, tool: Any) -> None:
    world(2).run(save_cut, str(tmp_path / "run"))
    code, lines, _ = tool("show", tmp_path / "run", "--tensors")
    table = {row[0]: row[4:] for row in map(str.split, lines[lines.index("") + 2 :])}
    assert table["cut"] == ["2", "ranks", "0-1"]
    assert any(
        line.split(maxsplit=2)[2:] == ["2 ranks, tp 2"] for line in lines if "written" in line
    )
    code, lines, _ = tool("consolidate", tmp_path / "run", "--save", tmp_path / "whole")
    made = tmp_path / "whole" / "step_00000003"
    assert code == 0 and lines[0].startswith(f"{tmp_path / 'run' / 'step_00000003'} -> {made}: ")
    check_equal(stored(made), stored(tmp_path / "run" / "step_00000003"))
    check_equal(tensors(tmp_path / "whole", 3), tensors(tmp_path / "run", 3))
    assert sorted(os.listdir(made)) == [
        *("index.json", "manifest.json", SHARD, "state.json", "tokenizer.json")
    ]
    assert tool("diff", tmp_path / "run", tmp_path / "whole")[:2] == (
        0,
        [
            f"A  {tmp_path / 'run' / 'step_00000003'}",
            f"B  {made}",
            "all 2 tensors are equal to the bit",
        ],
    )
    for rank, column in enumerate(world(2).run(load_cut, str(tmp_path / "whole"))):
        assert column == [float(3 * i + rank) for i in range(8)]
    code, _, err = tool("consolidate", tmp_path / "run", "--save", tmp_path / "whole")
    assert code == 2 and "already holds checkpoints" in err[0]
    code, _, err = tool("consolidate", tmp_path / "run", "--save", tmp_path / "run")
    assert code == 2 and "already holds checkpoints" in err[0]
    many = ["--save", tmp_path / "many", "--max-file-size", "1e-8"]
    assert tool("consolidate", tmp_path / "run", *many)[0] == 0
    assert len(list((tmp_path / "many" / "step_00000003").glob("rank_*"))) == 2


def test_what_is_consolidated_is_hashed_before(tmp_path: Path, tool: Any, write: Any) -> None:
    write(tmp_path / "run", 1)
    path = write(tmp_path / "run", 2) / SHARD
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    code, lines, err = tool("consolidate", tmp_path / "run", "--save", tmp_path / "whole")
    assert code == 0 and "step_00000001 -> " in lines[0]
    assert "step_00000002 is skipped" in err[0] and "XXH3-128" in err[0]
    code, _, err = tool("consolidate", tmp_path / "run" / "step_00000002", "--save", tmp_path / "x")
    assert code == 2 and "XXH3-128" in err[-1] and not (tmp_path / "x").exists()


nan, inf = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def no_look_at_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save what is not finite, as a program that does not look might have."""
    monkeypatch.setattr(sys.modules["training.checkpoint.save"], "check_pieces", list)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"norm": None}, f"tensor  {NORM}: only in A"),
        ({"other": torch.ones(1)}, "tensor  other: only in B"),
        ({"norm": torch.zeros(8)}, f"tensor  {NORM}: shape [7] | [8]"),
        ({"state": {"config": {"model": {"num_layers": 3}, "run": {"seed": 1234}}}},
         "state   config.model.num_layers: 2 | 3"),
        ({"state": {"config": {"model": {"num_layers": 2}, "run": {}}}},
         "state   config.run.seed: 1234 | None"),
    ],
)  # fmt: skip
def test_diff_says_what_differs(
    tmp_path: Path, tool: Any, write: Any, changes: dict[str, Any], line: str
) -> None:
    write(tmp_path / "a", 1)
    write(tmp_path / "b", 1, **changes)
    code, lines, _ = tool("diff", tmp_path / "a", tmp_path / "b")
    assert code == 1 and line in lines
    tensors_only = tool("diff", tmp_path / "a", tmp_path / "b", "--tensors")
    assert (line in tensors_only[1]) == (tensors_only[0] == 1) == line.startswith("tensor")


@pytest.mark.parametrize("rows", [1 << 20, 10])
@pytest.mark.parametrize(
    ("there", "told"),
    [
        ({(8, 4): 1.5}, "1 of 45 elements differ, by at most 0.5; the first at [8, 4]: 1.0 | 1.5"),
        ({(2, 1): 0.0, (2, 3): -3.0, (7, 0): 2.0},
         "3 of 45 elements differ, by at most 4; the first at [2, 1]: 1.0 | 0.0"),
        ({(1, 1): nan, (8, 0): 5.0},
         "2 of 45 elements differ, by at most nan; the first at [1, 1]: 1.0 | nan"),
        ({(0, 0): inf}, "1 of 45 elements differ, by at most inf; the first at [0, 0]: 1.0 | inf"),
    ],
)  # fmt: skip
def test_diff_of_values(
    tmp_path: Path, tool: Any, write: Any, there: Any, told: str, rows: int, monkeypatch: Any
) -> None:
    """Whether a tensor is read at once or two rows at a time."""
    monkeypatch.setattr(checkpoint_diff, "BLOCK", rows)
    one, other = torch.ones(9, 5), torch.ones(9, 5)
    for at, value in there.items():
        other[at] = value
    write(tmp_path / "a", 1, wide=one)
    write(tmp_path / "b", 1, wide=other)
    code, lines, _ = tool("diff", tmp_path / "a", tmp_path / "b")
    count, largest = told.split()[0], re.search(r"at most (\S+);", told)
    assert count and largest and code == 1
    both = next(word for word in lines[-1].split() if word.isdigit() and word != "1")
    said = f"in all  1 of {both} tensors differ in value ({count} elements, by at most "
    assert lines[2:] == [f"tensor  {WIDE}: {told}", f"{said}{largest[1]} in {WIDE})"]


def test_diff_is_of_bits(tmp_path: Path, tool: Any, write: Any) -> None:
    values = torch.tensor([nan, 0.0, inf, 1.0, 2.0, 3.0, 4.0])
    write(tmp_path / "a", 1, norm=values)
    write(tmp_path / "b", 1, norm=values.clone())
    assert tool("diff", tmp_path / "a", tmp_path / "b")[0] == 0, "a NaN is equal to itself"
    values[1] = -0.0
    write(tmp_path / "c", 1, norm=values)
    code, lines, _ = tool("diff", tmp_path / "a", tmp_path / "c")
    assert code == 1
    assert f"{NORM}: 1 of 7 elements differ, by at most 0; the first at [1]: 0.0 | -0.0" in lines[2]


def test_diff_of_two_dtypes(tmp_path: Path, tool: Any, write: Any) -> None:
    values = torch.arange(7.0)
    write(tmp_path / "a", 1, norm=values)
    write(tmp_path / "b", 1, norm=values.bfloat16())
    write(tmp_path / "c", 1, norm=values.bfloat16() + 1)
    assert (
        f"tensor  {NORM}: F32 | BF16, equal in value"
        in tool("diff", tmp_path / "a", tmp_path / "b")[1]
    )
    assert (
        f"{NORM}: F32 | BF16, 7 of 7 elements differ, by at most 1;"
        in tool("diff", tmp_path / "a", tmp_path / "c")[1][2]
    )
