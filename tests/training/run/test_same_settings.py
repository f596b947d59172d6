# SPDX-License-Identifier: Apache-2.0
"""Ranks that run other code, or stand on other versions, are told which."""

import json
import shutil
from pathlib import Path

import pytest

from training.run import same_settings
from training.run.same_settings import KINDS, ROOMS, ROOT, sources


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a second checkout of the product's sources."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, tmp_path / room)
    shutil.copy(ROOT / "pretrain_llama.py", tmp_path)
    return tmp_path


def difference(theirs: dict[str, str]) -> str:
    mine = json.dumps({"run.seed": 1} | sources())
    return same_settings.difference(mine, json.dumps({"run.seed": 2} | theirs), 3)


def test_every_source_of_the_product_is_in_it(copy: Path) -> None:
    found = sources()
    for name in ("pretrain_llama.py", "mpu/grid.py", "csrc/symmetric.cpp", "model/llama.py"):
        assert f"the file {name}" in found
    files = {p for room in ROOMS for p in (ROOT / room).rglob("*") if p.suffix in KINDS}
    assert len(found) == len(files) + 1 + 3 and not any("tests" in name for name in found)
    assert sources(copy) == found


def test_a_changed_file_is_named(copy: Path) -> None:
    (copy / "mpu/optim/adam.py").write_text("# another\n")
    assert difference(sources(copy)) == (
        "the file mpu/optim/adam.py differs on rank 0 and rank 3 (and 1 more): all "
        "must run the same code"
    )


@pytest.mark.parametrize("new", [True, False])
def test_a_file_that_one_rank_alone_has_is_named(copy: Path, new: bool) -> None:
    if new:
        (copy / "mpu/extra.py").write_text("")
    else:
        (copy / "mpu/grid.py").unlink()
    name = "mpu/extra.py" if new else "mpu/grid.py"
    assert difference(sources(copy)).startswith(f"the file {name} differs on rank 0")


def test_another_torch_is_named() -> None:
    theirs = sources() | {"the version of torch": "1.0"}
    assert difference(theirs).startswith("the version of torch is ")
    assert difference(theirs).endswith(
        "on rank 0 and '1.0' on rank 3: all ranks need the same value"
    )
