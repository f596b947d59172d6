# SPDX-License-Identifier: Apache-2.0
"""tools/checkpoint.py reports checkpoints truthfully, and refuses in one sentence."""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from tests.launcher import Launcher
from tests.training.checkpoint.holder import Holder
from tools.checkpoint import main
from tools.checkpoints.copy import consolidate
from tools.checkpoints.diff import diff
from training.checkpoint import Checkpoint
from training.checkpoint.lock import DirectoryLock
from training.checkpoint.manifest import self_digest
from training.run.text import in_units
from training.run.waiting import Progress

ROOT = Path(__file__).resolve().parents[2]
SHARD = "rank_00000-000.safetensors"
NORM, WIDE = "model.norm.weight", "model.embed_tokens.weight"


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_list(tmp_path: Path, tool: Any, write: Any) -> None:
    for step in (5, 20, 100):
        write(tmp_path, step)
    os.truncate(tmp_path / "step_00000020" / SHARD, 9)
    (tmp_path / "step_00000100" / "manifest.json").unlink()
    for name in ("step_00000101.tmp-ab", "step_00000004.trash-cd"):
        (tmp_path / name).mkdir()
    shutil.copytree(tmp_path / "step_00000005", tmp_path / "step_00000007.old-ef")
    code, (head, *rows), err = tool("list", tmp_path)
    assert code == 0 and not err
    assert head.split() == "step saved samples tokens size written by files".split()
    cells = [row.split() for row in rows]
    assert [c[0] for c in cells] == ["5", "7.old-ef", "20", "100", "4.trash-cd", "101.tmp-ab"]
    assert cells[0][3:5] == ["5,000", "320,000"] and cells[0][7:] == "1 rank all there".split()
    size = sum(p.stat().st_size for p in (tmp_path / "step_00000005").iterdir())
    manifest = (tmp_path / "step_00000005" / "manifest.json").stat().st_size
    assert " ".join(cells[0][5:7]) == in_units(size - manifest)
    # step 7's directory says that it is step 5's: a copy under another name
    assert "DAMAGED: manifest.json says step 5" in rows[1]
    assert f"DAMAGED: {SHARD} has 9 bytes" in rows[2]
    assert "DAMAGED: manifest.json: No such file" in rows[3]
    assert rows[4].endswith("unfinished removal") and rows[5].endswith("unfinished save")
    assert len({row.index("DAMAGED") for row in rows[1:4]}) == 1, "one column"


def test_verify(tmp_path: Path, tool: Any, write: Any) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    code, lines, _ = tool("verify", tmp_path)
    assert code == 0
    assert [line.split()[:2] for line in lines] == [[f"step_0000000{n}", "complete"] for n in "123"]
    assert all("4 files, " in line for line in lines)
    flip(tmp_path / "step_00000002" / SHARD)
    (tmp_path / "step_00000002" / "tokenizer.json").unlink()
    flip(tmp_path / "step_00000003" / "index.json", 5)
    code, lines, _ = tool("verify", tmp_path)
    assert code == 1 and [line.split()[1] for line in lines] == ["complete", "DAMAGED", "DAMAGED"]
    assert f"{SHARD} has another SHA-256" in lines[1]
    assert "tokenizer.json: No such file" in lines[1], "all that is wrong"
    assert "index.json has another SHA-256" in lines[2]
    assert tool("verify", tmp_path / "step_00000001")[0] == 0
    assert tool("verify", tmp_path / "step_00000002")[0] == 1


def test_verify_compares_the_sum_that_cannot_be_forged(
    tmp_path: Path, tool: Any, write: Any
) -> None:
    """Who wants to deceive can make other bytes of the same XXH3-128, not of the same SHA-256."""
    directory = write(tmp_path, 1)
    flip(directory / SHARD)
    manifest = json.loads((directory / "manifest.json").read_text())
    changed = xxhash.xxh3_128((directory / SHARD).read_bytes()).hexdigest()
    manifest["files"][SHARD]["xxh3_128"] = changed
    manifest["digest"] = self_digest(manifest)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    Checkpoint(directory).verify([SHARD])
    code, lines, _ = tool("verify", tmp_path)
    assert code == 1 and f"{SHARD} has another SHA-256" in lines[0]


def test_show(tmp_path: Path, tool: Any, write: Any) -> None:
    write(tmp_path, 1)
    write(tmp_path, 12345)
    (write(tmp_path, 12346) / "state.json").unlink()
    code, lines, err = tool("show", tmp_path, "--tensors")
    assert code == 0 and lines[0] == str(tmp_path / "step_00012345")
    assert len(err) == 1 and "step_00012346 is skipped: " in err[0] and "state.json" in err[0]
    facts = dict(re.split("  +", line) for line in lines[1 : lines.index("")])
    assert facts["step"].startswith("12345, saved 20") and facts["written by"] == "1 rank"
    assert facts["consumed_samples"] == "12,345,000"
    assert facts["weights"] == "52 numbers in 2 tensors, F32"
    assert facts["optimizer"] == "7 numbers in 1 tensors, F32"
    assert facts["config.model.num_layers"] == "2" and facts["hf_config.vocab_size"] == "250"
    table = [line.split() for line in lines[lines.index("") + 1 :]]
    assert table[1:] == [
        [NORM, "F32", "7", "28", "1", "rank", "0"],
        [WIDE, "F32", "9x5", "180", "1", "rank", "0"],
        [f"{NORM}.exp_avg", "F32", "7", "28", "1", "rank", "0"],
    ]
    assert "" not in tool("show", tmp_path)[1], "no table of tensors unless asked"


def test_prune(tmp_path: Path, tool: Any, write: Any) -> None:
    for step in (10, 20, 30, 40):
        write(tmp_path, step)
    flip(tmp_path / "step_00000040" / SHARD)
    (tmp_path / "step_00000050.tmp-ab").mkdir()
    before = sorted(os.listdir(tmp_path))
    flags = ["--keep-last-k", 1, "--save-retain-interval", 20]
    code, lines, err = tool("prune", tmp_path, *flags, "--dry-run")
    assert code == 0 and sorted(os.listdir(tmp_path)) == before
    stay = "keeps 3: step_00000020, step_00000030, step_00000040"
    assert lines == [f"would remove {tmp_path / 'step_00000010'}", stay]
    assert len(err) == 1 and "step_00000040 is left in place and not counted" in err[0]
    code, lines, _ = tool("prune", tmp_path, *flags)
    assert code == 0 and lines == [f"removed {tmp_path / 'step_00000010'}", stay]
    assert {n for n in os.listdir(tmp_path) if n.startswith("step")} == {
        *("step_00000020", "step_00000030", "step_00000040")
    }


def test_prune_keeps_out_while_a_run_writes(tmp_path: Path, tool: Any, write: Any) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    holder = Holder(tmp_path)
    code, _, err = tool("prune", tmp_path, "--keep-last-k", 1)
    assert code == 2 and f"is being written by another run: process {holder.pid}" in err[0]
    assert (tmp_path / "step_00000001").exists()
    assert tool("list", tmp_path)[0] == tool("verify", tmp_path)[0] == 0, "looking is free"
    holder.free()
    assert tool("prune", tmp_path, "--keep-last-k", 1)[0] == 0
    assert not (tmp_path / "step_00000001").exists()
    DirectoryLock(tmp_path).close()


REFUSED = [
    (["list", "{dir}/no"], "{dir}/no is not a directory"),
    (["list", "{dir}"], "{dir}: no checkpoint there"),
    (["list", "{dir}/run/step_00000001"], "is one step's directory: give the run's, {dir}/run"),
    (["list", "{dir}/hf"], "is a Hugging Face directory: only show, diff and convert read it"),
    (["verify", "{dir}/no"], "{dir}/no is not a directory"),
    (["verify", "{dir}/megatron"], "holds a Megatron-LM checkpoint"),
    (["list", "{dir}/exports"], "step_00000001 is a Hugging Face directory: only show, diff and"),
    (["verify", "{dir}/exports"], "step_00000001 is a Hugging Face directory: only show, diff and"),
    (["list", "{dir}/deepspeed"], "(it has global_step10: DeepSpeed's save, of pickles"),
    (["show", "{dir}/deepspeed"], "global_step10: DeepSpeed's save, of pickles"),
    (["show", "{dir}/no"], "{dir}/no: no checkpoint there"),
    (["show", "{dir}/file"], "{dir}/file is not a directory"),
    (["show", "{dir}/megatron"], "checkpoint: {dir}/megatron holds a Megatron-LM checkpoint"),
    (["diff", "{dir}/run", "{dir}/no"], "{dir}/no: no checkpoint there"),
    (["consolidate", "{dir}/no", "--save", "{dir}/x"], "{dir}/no: no checkpoint there"),
    (["prune", "{dir}/run"], "prune needs --keep-last-k or --save-retain-interval"),
    (["prune", "{dir}/no", "--keep-last-k", "1"], "{dir}/no is not a directory"),
    (["prune", "{dir}/run/step_00000001", "--keep-last-k", "1"], "is one step"),
    (["convert", "--from-hf", "{dir}/hf"], "--from-hf needs --save"),
    (["convert", "--to-hf", "{dir}/x"], "--to-hf needs --load"),
    (["convert", "--from-hf", "{dir}/no", "--save", "{dir}/x"], "hf {dir}/no: no checkpoint"),
    (["convert", "--from-hf", "{dir}/run", "--save", "{dir}/x"], "run holds checkpoints of Weft"),
    (["convert", "--upcycle", "{dir}/run", "--num-experts", "2", "--moe-router-topk", "3", "--save",
      "x"], "--moe-router-topk 3 is more than --num-experts 2"),
    (["convert", "--from-hf", "a", "--save", "b", "--dtype", "float32"], "be used with --to-hf"),
    (["convert", "--from-hf", "a", "--save", "b", "--max-shard-size", "1"], "with --to-hf"),
    (["convert", "--to-hf", "a", "--load", "b", "--save", "c"], "--from-mcore or --upcycle"),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "sentence"), REFUSED)
def test_bad_input_is_a_sentence(
    tmp_path: Path, tool: Any, write: Any, argv: list[str], sentence: str
) -> None:
    write(tmp_path / "run", 1)
    files = {
        "hf": "config.json", "exports/step_00000001": "config.json", "megatron": "common.pt",
        "deepspeed/global_step10": "mp_rank_00_model_states.pt",
    }  # fmt: skip
    for name, file in files.items():
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "file").write_text("")
    there = sorted(tmp_path.rglob("*"))
    code, out, err = tool(*(word.format(dir=tmp_path) for word in argv))
    assert code == 2 and not out and len(err) == 1
    assert err[0].startswith("checkpoint: ") and sentence.format(dir=tmp_path) in err[0]
    assert sorted(tmp_path.rglob("*")) == there


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["rename", "x"],
        ["list"],
        ["prune", "x", "--keep-last-k", "0"],
        ["prune", "x", "--keep-last", "1"],
        ["consolidate", "x", "--save", "y", "--max-file-size", "0"],
        ["convert", "--save", "x"],
        ["convert", "--upcycle", "x", "--num-experts", "1", "--save", "y"],
        ["convert", "--to-hf", "x", "--load", "y", "--max-shard-size", "nan"],
    ],
)
def test_bad_flags(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2 and "usage: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["", *"list verify show diff convert consolidate prune".split()]
)
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*([command] if command else []), "--help"])
    said = capsys.readouterr().out
    assert end.value.code == 0 and len(said.splitlines()) > 5
    if not command:
        for each in ("list", "verify", "show", "diff", "convert", "consolidate", "prune"):
            assert f"tools/checkpoint.py {each} " in said


def test_it_runs_as_a_script_from_anywhere(tmp_path: Path, launcher: Launcher) -> None:
    script = Path(__file__).resolve().parents[2] / "tools" / "checkpoint.py"
    done = launcher.python(script, "list", tmp_path / "nothing", cwd=tmp_path)
    assert done.returncode == 2 and "nothing" in done.stderr and "Traceback" not in done.stderr


def test_long_work_counts_what_it_wrote(tmp_path: Path, write: Any) -> None:
    """The line of training/run/waiting.py has bytes or tensors, all of them at the end."""
    a, b = write(tmp_path / "a", 3), write(tmp_path / "b", 3, norm=torch.ones(7))
    progress = Progress()
    consolidate(tmp_path / "a", tmp_path / "c", 1 << 30, progress)
    assert str(progress) == "writing 236 B of 236 B"
    list(diff(Checkpoint(a), Checkpoint(b), False, progress))
    assert str(progress) == "3 of 3 tensors"
