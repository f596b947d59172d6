# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory is complete or absent, at whatever moment its writer dies."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mpu.grid import Grid
from training.checkpoint import Checkpoint, SaveError, save
from training.checkpoint.pieces import NamedPiece, whole
from training.checkpoint.write_huggingface import clear, keep_newest, write_huggingface
from training.files.written import Written
from training.run.export import HuggingFaceSaves
from training.settings.arguments import CheckpointConfig

NAMES = [f"layers.{i}.weight" for i in range(7)]
MOMENTS = 20


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoint:
    """A checkpoint of seven weights and their moments."""
    pieces = [whole(n, torch.full((3, 4), float(i))) for i, n in enumerate(NAMES)]
    pieces += [whole(f"{n}.exp_avg", torch.zeros(3, 4)) for n in NAMES]
    state = {"hf_config": {"model_type": "llama"}}
    return Checkpoint(save(tmp_path / "run", step=5, pieces=pieces, state=state, grid=Grid()))


def record_of(root: Path) -> Path:
    return root.with_name(f"{root.name}.record")


def write(saved: Checkpoint, target: Path, hook: Any = lambda at: None, extra: Any = None) -> None:
    """Write the weights in bf16, two to a file, and record that in "record" beside the folder."""
    write_huggingface(
        target, saved, saved.weights(), extra or (lambda: ({"t.json": b"{}"}, {"eos": 3})),
        dtype=torch.bfloat16, shard_bytes=2 * 24, grid=Grid(), hook=hook,
        record=Written(record_of(target.parent)),
    )  # fmt: skip


def check_whole(target: Path) -> None:
    """Raise AssertionError unless all tensors and small files are there."""
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 7 * 24} and sorted(index["weight_map"]) == NAMES
    for i, name in enumerate(NAMES):
        tensor = load_file(target / index["weight_map"][name])[name]
        assert tensor.dtype == torch.bfloat16 and (tensor == i).all()
    config = json.loads((target / "config.json").read_text())
    assert config == {"model_type": "llama", "torch_dtype": "bfloat16", "eos": 3}
    assert (target / "t.json").read_bytes() == b"{}"
    assert sorted(p.name for p in target.glob("*.safetensors")) == [
        f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)
    ]


@pytest.mark.prove
@pytest.mark.parametrize("again", [False, True])
def test_killed_at_twenty_moments_there_is_no_half_folder(
    saved: Checkpoint, tmp_path: Path, again: bool
) -> None:
    """again: a folder of that name is there before. A moment is a call of the hook, or of a system
    call that makes, renames or syncs a file.
    """
    torch.set_num_threads(1)
    outcomes, moment, status = [], 0, 1
    while status:
        root = tmp_path / str(moment)
        if again:
            write(saved, root / "step_00000005")
        child = os.fork()
        if child == 0:
            count = 0

            def tick(*args: Any, moment: int = moment) -> None:
                nonlocal count
                count += 1
                if count > moment:
                    os.kill(os.getpid(), signal.SIGKILL)

            def dying(call: Any) -> Any:
                return lambda *args, **more: (tick(), call(*args, **more))[1]

            for name in ("fsync", "rename", "mkdir"):
                setattr(os, name, dying(getattr(os, name)))
            write(saved, root / "step_00000005", hook=tick)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        there = (root / "step_00000005").is_dir()
        if there:
            check_whole(root / "step_00000005")
        outcomes.append(there)
        clear(root, Written(record_of(root)))
        left = [] if not root.is_dir() else sorted(os.listdir(root))
        assert left == ["step_00000005"] * there, "a next start removes what is not whole"
        moment += 1
    assert moment > MOMENTS and outcomes[-1], outcomes
    assert outcomes[0] == again and (False in outcomes)


def test_a_failure_leaves_nothing_and_names_the_folder(saved: Checkpoint, tmp_path: Path) -> None:
    def fails() -> Any:
        raise OSError(28, "No space left on device", "tokenizer.json")

    with pytest.raises(SaveError, match="hf: no Hugging Face directory was written: No space left"):
        write(saved, tmp_path / "hf", extra=fails)
    assert sorted(os.listdir(tmp_path)) == ["run"]


def export_what_rank_1_cannot_open(comm: Any, root: str) -> str:
    grid, run = comm.grid(), Path(root) / "run"
    saves = HuggingFaceSaves(
        CheckpointConfig(save=str(run), save_hf=f"{root}/hf", save_hf_dtype="float32"), grid, print
    )
    state = {"hf_config": {"model_type": "llama"}}
    piece = NamedPiece("w", (3,), (0,), (3,), torch.ones(3), (grid.dp_cp,))
    path = save(run, step=1, pieces=[piece], state=state, grid=grid)
    try:
        saves.write(path if comm.rank != 1 else Path(root) / path.name, grid.world)
    except SaveError as error:
        return str(error)
    return ""


def test_a_rank_that_cannot_open_the_checkpoint_fails_the_write_on_all(
    world: Any, tmp_path: Path
) -> None:
    said = world(2).run(export_what_rank_1_cannot_open, str(tmp_path))
    assert said[0] == said[1] and f"--save-hf {tmp_path}/hf: step_00000001: rank 1: " in said[0]
    assert not (tmp_path / "hf").exists()


def test_the_newest_of_ours_stay(tmp_path: Path) -> None:
    steps, root, record = re.compile(r"step_\d{8,}"), tmp_path / "hf", Written(tmp_path / "record")
    for name in ("step_00000002", "step_00000010", "step_00000003", "step_100000000", "other"):
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(name)
        if name not in ("step_00000003", "other"):
            record.add(name, root / name)
    everything = sorted(os.listdir(root))
    assert keep_newest(root, None, steps, record) == ([], [])
    (root / "step_00000002" / "notes.txt").write_text("of a person")
    assert keep_newest(root, 2, steps, record) == ([], ["step_00000002"])
    assert sorted(os.listdir(root)) == everything
    (root / "step_00000002" / "notes.txt").unlink()
    os.chmod(root / "step_00000002" / "config.json", 0o644)  # it is compared by its sum then
    assert keep_newest(root, 2, steps, Written(record.path)) == (["step_00000002"], [])
    assert sorted(os.listdir(root)) == [n for n in everything if n != "step_00000002"]
    assert (root / "step_00000003" / "config.json").read_text() == "step_00000003"


def test_what_was_changed_in_place_is_not_ours(tmp_path: Path) -> None:
    folder, record = tmp_path / "step_00000002", Written(tmp_path / "record")
    folder.mkdir()
    (folder / "a").write_bytes(b"12")
    record.add(folder.name, folder)
    assert record.ours(folder) and Written(record.path).ours(folder)
    before = os.stat(folder / "a")
    (folder / "a").write_bytes(b"21")
    os.utime(folder / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not record.ours(folder)
    folder.rename(tmp_path / "step_00000003")
    folder.symlink_to(tmp_path / "step_00000003")
    assert not record.ours(folder) and not record.ours(tmp_path / "step_00000003")


@pytest.mark.parametrize("there", ["notes.txt", "config.json", "link", "file"])
def test_what_appears_meanwhile_is_not_replaced(
    saved: Checkpoint, tmp_path: Path, there: str
) -> None:
    """After the check at the start of a run another program may have made the folder."""
    root, target = tmp_path / "hf", tmp_path / "hf" / "step_00000005"

    def appears(phase: str) -> None:
        if phase == "commit" and there == "link":
            target.symlink_to(saved.directory)
        elif phase == "commit" and there == "file":
            target.write_text("kept")
        elif phase == "commit":
            target.mkdir()
            (target / there).write_text("kept")

    for hook in (appears, lambda phase: None):  # then it is there from the beginning
        with pytest.raises(SaveError, match="and is not replaced: .*step_00000005"):
            write(saved, target, hook)
        assert os.listdir(root) == ["step_00000005"]
        if there == "link":
            assert target.readlink() == saved.directory and (target / "manifest.json").is_file()
        else:
            assert (target if there == "file" else target / there).read_text() == "kept"
