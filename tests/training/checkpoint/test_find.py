# SPDX-License-Identifier: Apache-2.0
"""What --load may name, and the sentence for anything else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model.llama import LlamaConfig, hf_config
from mpu.grid import Grid
from training.checkpoint import CheckpointError, MismatchError, find_latest, save
from training.checkpoint.manifest import self_digest
from training.checkpoint.pieces import whole

SIZES = hf_config(LlamaConfig(250, 64, 96, 2, 8, 4))


def write(root: Path, step: int, **tensors: torch.Tensor) -> Path:
    pieces = [whole(n, t) for n, t in (tensors or {"a": torch.zeros(3)}).items()]
    return save(root, step=step, pieces=pieces, state={"hf_config": SIZES}, grid=Grid())


def test_nothing_there_is_none(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "no", Grid()) is None
    assert find_latest(tmp_path, Grid()) is None
    with pytest.raises(CheckpointError, match="--ckpt-step 3: .* does not exist"):
        find_latest(tmp_path / "no", Grid(), step=3)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is not a directory"):
        find_latest(tmp_path / "file", Grid())


def test_the_newest_by_number_a_named_step_and_a_directory_itself(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        write(tmp_path, step)
    (tmp_path / "latest").write_text("step_00000009\n")  # a hint, never believed

    def step_of(root: Path, step: int | None = None) -> int:
        found = find_latest(root, Grid(), step=step)
        assert found is not None
        return found.step

    assert step_of(tmp_path) == 100
    assert step_of(tmp_path, 20) == 20
    assert step_of(tmp_path / "step_00000009") == 9
    with pytest.raises(CheckpointError, match=r"--ckpt-step 21: .* has the steps \[9, 20, 100\]"):
        find_latest(tmp_path, Grid(), step=21)
    assert step_of(tmp_path / "step_00000009", 9) == 9


@pytest.mark.parametrize("what", ["step_00000009", "renamed", "hf"])
def test_a_step_that_is_not_the_one_of_the_directory_named_is_refused(
    tmp_path: Path, what: str
) -> None:
    write(tmp_path, 9)
    if what == "renamed":
        (tmp_path / "step_00000009").rename(tmp_path / what)
    elif what == "hf":
        (tmp_path / what).mkdir()
        (tmp_path / what / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"--ckpt-step 1: --branch-from .*{what} is a single"):
        find_latest(tmp_path / what, Grid(), step=1, flag="--branch-from")


def test_a_link_in_place_of_a_step_is_passed_over(tmp_path: Path) -> None:
    real = write(tmp_path / "elsewhere", 5)
    write(tmp_path / "run", 1)
    (tmp_path / "run" / "step_00000005").symlink_to(real)
    notes: list[str] = []
    found = find_latest(tmp_path / "run", Grid(), note=notes.append)
    assert found is not None and found.step == 1
    assert len(notes) == 1 and "link" in notes[0]


@pytest.mark.parametrize(
    "name",
    [
        "latest_checkpointed_iteration.txt",
        "mp_rank_00",
        "iter_0000100",
        ".metadata",
        "__0_0.distcp",
        "common.pt",
    ],
)
def test_a_megatron_checkpoint_is_shown_the_way(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("1")
    with pytest.raises(
        CheckpointError, match="Megatron-LM .*to Hugging Face format .* and load that"
    ):
        find_latest(tmp_path, Grid())


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("num_hidden_layers", 3, "--num-layers"),
        ("vocab_size", 251, "--vocab-size"),
        ("rope_theta", 5.0, "--rotary-base"),
        ("tie_word_embeddings", True, "--untie-embeddings-and-output-weights"),
    ],
)
def test_another_models_sizes_are_refused_by_name(
    tmp_path: Path, field: str, value: Any, flag: str
) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    with pytest.raises(MismatchError, match=f"another model: {field} is .*{flag}"):
        find_latest(tmp_path, Grid(), expect={**SIZES, field: value})
    free = {"torch_dtype": "bfloat16", "max_position_embeddings": 1}
    assert find_latest(tmp_path, Grid(), expect={**SIZES, **free}) is not None


def test_another_models_tensors_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, 1, a=torch.zeros(3, 4))

    def find(name: str, tensor: torch.Tensor, **more: Any) -> None:
        find_latest(tmp_path, Grid(), pieces=[whole(name, tensor)], **more)

    with pytest.raises(MismatchError, match=r"a has shape \[3, 4\] there and \[4, 3\] here"):
        find("a", torch.zeros(4, 3))
    with pytest.raises(MismatchError, match="another model: it has no b"):
        find("b", torch.zeros(3))
    with pytest.raises(
        MismatchError, match=r"lacks optimizer state \(a.exp_avg\): give --finetune"
    ):
        find("a.exp_avg", torch.zeros(3, 4))
    with pytest.raises(MismatchError, match="a was saved in F32 .* in BF16"):
        find("a", torch.zeros(3, 4, dtype=torch.bfloat16))
    find("a", torch.zeros(3, 4, dtype=torch.bfloat16), cast=True)


def resign(directory: Path, **changes: Any) -> None:
    """Edit a manifest as someone would who can also compute its digest."""
    path = directory / "manifest.json"
    manifest = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({**manifest, "digest": self_digest(manifest)}))


def test_a_newer_format_is_refused_not_skipped(tmp_path: Path) -> None:
    write(tmp_path, 1)
    resign(write(tmp_path, 2), version=3)
    with pytest.raises(MismatchError, match="version 3; this program reads versions 1 and 2"):
        find_latest(tmp_path, Grid())
