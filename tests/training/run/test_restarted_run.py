# SPDX-License-Identifier: Apache-2.0
"""Where a run begins that a launcher started again: its flags are those of the first start."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_llama
from mpu.grid import Grid
from training.checkpoint import Roots, find_latest, save
from training.checkpoint.pieces import whole

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --mock-data "
    "--vocab-size 100 --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --log-interval 1 "
    "--device cpu --num-workers 0"
)


def begun_at(capsys: Any, words: str, code: int = 0) -> str:
    """Run; return what it says of where it begins."""
    capsys.readouterr()
    assert pretrain_llama.main([*FLAGS.split(), *words.split()]) == code
    said = capsys.readouterr()
    lines = [x for x in (said.out + said.err).splitlines() if "loaded " in x or code]
    return " ".join(lines)


def test_a_restart_goes_on_from_what_the_run_itself_saved(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, base = tmp_path / "mine", tmp_path / "base"
    begun_at(capsys, f"--train-iters 3 --save {base}")
    # a run of its own from those weights, which was killed after step 2
    tuned = f"--load {base} --finetune --train-iters 4 --save {mine} --save-interval 2"
    assert "step_00000003; starting at sample 0" in begun_at(capsys, tuned)
    shutil.rmtree(mine / "step_00000004")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert f"loaded {mine}/step_00000002: at iteration 2" in begun_at(capsys, tuned)
    # without --load too, where a first start would refuse the later steps of --save
    alone = f"--train-iters 5 --save {mine}"
    assert f"loaded {mine}/step_00000004: at iteration 4" in begun_at(capsys, alone)
    # what is newer counts: --load, as long as the run has saved nothing itself
    other = tmp_path / "other"
    begun_at(capsys, f"--train-iters 2 --save {other}")
    further = f"--load {base} --save {other} --train-iters 4"
    assert f"loaded {base}/step_00000003" in begun_at(capsys, further)
    assert f"loaded {other}/step_00000004" in begun_at(capsys, further)
    # and before anything is saved it begins as the first start did
    fresh = f"--load {base} --finetune --train-iters 2 --save {tmp_path}/new"
    assert "step_00000003; starting at sample 0" in begun_at(capsys, fresh)


def test_a_restart_has_the_step_and_the_optimizer_of_the_first_start(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, mine, new = (str(tmp_path / name) for name in ("base", "mine", "new"))
    begun_at(capsys, f"--train-iters 3 --save {base} --save-interval 1")
    step = f"--load {base} --ckpt-step 2 --save-interval 1 --save"
    assert f"loaded {base}/step_00000002: at" in begun_at(capsys, f"{step} {mine} --train-iters 4")
    tuned = f"--load {base} --ckpt-step 3 --finetune --train-iters 2 --save {tmp_path}/tuned"
    assert "step_00000003; starting at sample 0" in begun_at(capsys, tuned)
    plain = f"--load {base} --no-load-optim --save"
    said = begun_at(capsys, f"{plain} {tmp_path}/plain --train-iters 4 --save-interval 1")
    assert f"loaded {base}/step_00000003: at" in said
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert f"loaded {mine}/step_00000004: at" in begun_at(capsys, f"{step} {mine} --train-iters 5")
    assert f"loaded {base}/step_00000002: at" in begun_at(capsys, f"{step} {new} --train-iters 3")
    assert f"loaded {tmp_path}/tuned/step_00000002: at" in begun_at(capsys, tuned)
    again = begun_at(capsys, f"{plain} {tmp_path}/plain --train-iters 5")
    assert f"loaded {tmp_path}/plain/step_00000004: at" in again
    capsys.readouterr()
    words = f"{plain} {tmp_path}/plain2 --train-iters 4"
    assert pretrain_llama.main([*FLAGS.split(), *words.split()]) == 0
    assert "--no-load-optim resets the optimizer's state" in capsys.readouterr().out


def test_nothing_is_missing_without_load(capsys: Any) -> None:
    """A flag that the dry run calls idle is idle in the run."""
    begun_at(capsys, "--train-iters 1 --exit-on-missing-checkpoint")


def write(root: Path, step: int) -> Path:
    pieces = [whole("model.norm.weight", torch.full((4,), float(step)))]
    return save(root, step=step, pieces=pieces, state={"iteration": step}, grid=Grid())


def test_the_newest_sound_one_of_two_folders_counts(tmp_path: Path) -> None:
    load, save = tmp_path / "load", tmp_path / "save"
    for step in (10, 20):
        write(load, step)
    newest = write(save, 25)
    write(save, 20)
    pieces = [whole("model.norm.weight", torch.zeros(4))]
    notes: list[str] = []

    def found(roots: Roots) -> str:
        chosen = find_latest(roots, Grid(), pieces=pieces, note=notes.append)
        return "" if chosen is None else f"{chosen.directory.parent.name} {chosen.step}"

    both = Roots([str(load), str(save)])
    assert found(both) == "save 25" and not notes
    data = next(newest.glob("*.safetensors"))
    data.write_bytes(data.read_bytes()[:-1] + b"\x01")  # a bit flips
    assert found(both) == "load 20" and "step_00000025 is skipped" in notes[0]
    assert found(Roots([str(load)], after=20)) == ""
    assert found(Roots([str(save)], after=10)) == "save 20"
    assert found(Roots([str(tmp_path / "none")])) == ""
