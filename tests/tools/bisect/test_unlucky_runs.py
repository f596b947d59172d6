# SPDX-License-Identifier: Apache-2.0
"""tools/bisect_runs.py on folders of runs that are damaged, or made to harm whoever compares them.

A folder is what a run of the mock data writes, with two losses of another run; so a step differs,
and the tool would make it again. Whatever the folder says, no file of it is executed, nothing is
written outside the tool's own folder, and the answer is a sentence.
"""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sampling import sampled
from tests.unlucky import Case, check, drawn

FLAGS = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 8 "
    "--vocab-size 32 --mock-data --train-iters 3 --lr 1e-2 --global-batch-size 2 "
    "--micro-batch-size 2 --device cpu"
).split()
NAMES = ["model.norm.weight", "lm_head.weight"]
EVIL = "import pathlib\npathlib.Path({!r}).touch()\nfrom model.llama import *\n"
Row = dict[str, Any]


def head(flags: list[str], **more: Any) -> Row:
    row = {"format": "weft digests 1", "iteration": 0, "world": 1, "torch": "2.0"}
    return {**row, "command_line": flags, "names": NAMES, **more}


def step(i: int, loss: float = 1.0) -> Row:
    sketch = [[1.0, 0.5, 0.5]] * 2
    row = {
        "iteration": i,
        "samples": [2 * i, 2],
        "batch": "f",
        "loss": loss,
        "norm": 1.0,
        "lr": 0.1,
    }
    return {**row, "gradient": ["1", "2"], "weight": ["1", "2"], "gradient sketch": sketch,
            "weight sketch": sketch}  # fmt: skip


def written(folder: Path, first: Row, rows: list[Row], name: str = "digests.jsonl") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in [first, *rows]))
    return folder


def pair(folder: Path, flags: list[str], words: list[str] | None = None, **more: Any) -> list[Any]:
    """Write two runs that differ in step 2, whose folders record `flags`; return a command line."""
    a = written(folder / "a", head(flags, **more), [step(1), step(2), step(3)])
    b = written(folder / "b", head(flags, **more), [step(1), step(2, 1.5), step(3)])
    out = ["--out", folder / "out", "--timeout", "30"]
    return ["tools/bisect_runs.py", a, b, *out, *(words or [])]


def evil(folder: Path, name: str = "evil.py") -> tuple[Path, Path]:
    """Write a model's file that leaves a mark when it runs."""
    mark, file = folder / "executed", folder / "a" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(EVIL.format(str(mark)))
    return file, mark


def spelt(rng: random.Random, flag: str, value: Path | str) -> list[str]:
    """Return a flag in one of the ways in which it can be written."""
    name = rng.choice([flag, "--" + flag[2:].replace("-", "_")])
    return rng.choice([[name, str(value)], [f"{name}={value}"]])


def a_model_file(rng: random.Random, folder: Path) -> Case:
    file, mark = evil(folder)
    more = spelt(rng, "--model-file", file)
    flags = rng.choice([[*FLAGS, *more], [*more, *FLAGS]])
    argv = pair(folder, flags, world=1)
    says = r"step 2 .*--model-file \S+evil.py.* is code.* give --model-file-a"
    return Case(argv, codes=(1,), says=says, kept=[folder / "a"], absent=[mark])


def a_model_file_of_this_folder(rng: random.Random, folder: Path) -> Case:
    """The folder of the run is where the tool is started, and has a model/ of its own."""
    file, mark = evil(folder, "model/llama.py")
    flags = FLAGS + rng.choice([[], ["--model-file", "model/llama.py"]])
    argv = pair(folder, flags)
    code = "import os, runpy, sys; os.chdir(sys.argv[1]); sys.argv = sys.argv[2:]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    script = Path(__file__).resolve().parents[3] / "tools" / "bisect_runs.py"
    case = ["-c", code, file.parent.parent, script, *argv[1:]]
    return Case(case, codes=(1,), says="step 2 .*Replayed", kept=[folder / "a"], absent=[mark])


def a_hidden_model_file(rng: random.Random, folder: Path) -> Case:
    """It is the value of another flag, or a way out of model/."""
    file, mark = evil(folder)
    up = "../" * 12 + str(file)[1:]
    hidden = [
        [f"--data-path=--model-file={file}"],
        ["--profile-ranks", "0", f"--model-file={file}"],
        ["--model-file", f"model/{up}"],
        ["--save", "--model-file", str(file)],
        ["--ignore-flags", "x:1", "--x", "y", "--model_file", str(file)],
        ["--lr-decay-style=--model-file", str(file)],
    ]
    argv = pair(folder, FLAGS + hidden[rng.randrange(len(hidden))])
    return Case(argv, codes=(1, 2), says="step 2 ", kept=[folder / "a"], absent=[mark])


def places_to_write(rng: random.Random, folder: Path) -> Case:
    victim = folder / "victim"
    written(victim, head(FLAGS), [step(1)])
    flags = ["--save", "--save-hf", "--log-json", "--tensorboard-dir", "--memory-snapshot-path",
             "--rehearse-json", "--rehearse-trace", "--data-cache-path",
             "--wandb-project"]  # fmt: skip
    some = rng.sample(flags, 3)
    words = [word for flag in some for word in spelt(rng, flag, victim / flag[2:])]
    words += rng.choice([[], ["--save-interval", "1"], ["--log-digests", "1", "--profile"]])
    argv = pair(folder, FLAGS + words)
    return Case(argv, codes=(1,), says="step 2 .*Replayed", kept=[victim, folder / "a"])


def another_program(rng: random.Random, folder: Path) -> Case:
    words = rng.choice([["--dry-run"], ["--help"], ["--rehearse"], ["--rehearse", "--dry-run"]])
    argv = pair(folder, FLAGS + words)
    return Case(argv, codes=(1, 2), says="step 2 |help", kept=[folder / "a"])


def many_processes(rng: random.Random, folder: Path) -> Case:
    world = rng.choice([100_000, 10**15, 17, -1, True, "4", [2], 1.5, {}])
    argv = pair(folder, FLAGS, world=world)
    says = "its number of processes, .* must be from 1 to 16: give --ranks-a"
    return Case(argv, codes=(1,), says=says, kept=[folder / "a"])


def values_of_no_flag(rng: random.Random, folder: Path) -> Case:
    words = [
        ["--train-iters", "many"], ["--lr=" + "9" * 5000], ["--no-such-flag", "1"], ["stray"],
        ["--seed", "\x1b[2J"], ["--lr"], ["x"] * 20_000, ["--seed", "1" * 100_000],
        ["--hidden-size", "1", "2"],
    ]  # fmt: skip
    argv = pair(folder, rng.choice(words) + FLAGS)
    return Case(argv, codes=(1,), says="step 2 .*A cannot be run again", kept=[folder / "a"])


def no_flags_at_all(rng: random.Random, folder: Path) -> Case:
    flags: Any = rng.choice(["--seed 1", {"a": 1}, [1, 2], [["--seed"]], 7, [None]])
    argv = pair(folder, flags)
    return Case(argv, says="command_line is not what a run writes", kept=[folder / "a"])


def a_wrong_value(rng: random.Random, folder: Path) -> Case:
    wrong: Any = rng.choice(["x", {}, [[]], -1, 1.5, [1, "a"], True])
    key = rng.choice([*step(1), "names", "head iteration"])
    argv = pair(folder, FLAGS)
    first, row = head(FLAGS), step(2)
    if key in ("names", "head iteration"):
        first[key.rpartition(" ")[2]] = wrong
    elif key in ("loss", "norm", "lr") and type(wrong) in (int, float):
        row[key] = "1.0"
    elif key == "batch" and wrong == "x":
        row[key] = 3
    else:
        row[key] = wrong
    written(folder / "a", first, [step(1), row])
    says = r"digests.jsonl, line \d+: .*(is not what a run writes|lacks a digest of one of)"
    return Case(argv, says=says, kept=[folder / "a"])


def a_lost_value(rng: random.Random, folder: Path) -> Case:
    argv = pair(folder, FLAGS)
    first, row = head(FLAGS), step(2)
    rows = rng.choice([first, row])
    key = rng.choice(sorted(rows.keys() & {"names", "iteration", *step(1)} - {"iteration"}))
    del rows[key]
    written(folder / "a", first, [step(1), row])
    return Case(argv, says=rf"line \d+: {key} is missing", kept=[folder / "a"])


def other_tensors(rng: random.Random, folder: Path) -> Case:
    argv = pair(folder, FLAGS)
    rows = [step(1), head(FLAGS, names=NAMES[: rng.randrange(2)], iteration=3)]
    written(folder / "a", head(FLAGS), [step(1), step(2), *rows[rng.randrange(2) :]])
    return Case(argv, says="steps of models with different tensors", kept=[folder / "a"])


def no_plain_file(rng: random.Random, folder: Path) -> Case:
    argv = pair(folder, FLAGS)
    name = rng.choice(["digests.jsonl", "log.jsonl", "step_00000001/state.json"])
    path = folder / "a" / name
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    if rng.random() < 0.5:
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return Case(argv, says=rf"{path.name}: not a plain file", kept=[])


def a_damaged_state(rng: random.Random, folder: Path) -> Case:
    argv = pair(folder, FLAGS)
    place = folder / "a" / "step_00000001"
    place.mkdir()
    texts = ["[]", "{}", "[" * 9000, '{"iteration": 1e999}', '{"iteration": NaN}', "",
             '{"iteration": ' + "9" * 5000 + "}", '{"iteration": 1, "config": []}',
             '{"iteration": 1, "command_line": "--seed"}', '{"iteration": "1"}', "\x00",
             '{"iteration": 1, "config": {"parallel.world_size": 0}}']  # fmt: skip
    (place / "state.json").write_text(rng.choice(texts))
    written(folder / "a", head([], command_line=None), [step(1), step(2)])
    return Case(argv, says=r"bisect_runs.py: \S+/a\S*( is not JSON)?: ", kept=[folder / "a"])


def random_bytes(rng: random.Random, folder: Path) -> Case:
    """Bytes of sound files are turned, lost and doubled."""
    argv = pair(folder, [*FLAGS, "--seed", "1"])
    path = folder / "a" / "digests.jsonl"
    data = bytearray(path.read_bytes())
    for _ in range(rng.randrange(1, 9)):
        at = rng.randrange(len(data))
        what = rng.randrange(3)
        if what == 0:
            data[at] = rng.randrange(256)
        elif what == 1:
            del data[at : at + rng.randrange(40)]
        else:
            data[at:at] = data[at : at + rng.randrange(40)]
    path.write_bytes(bytes(data))
    return Case(argv, codes=(0, 1, 2), says=r"step \d|bisect_runs.py: ", kept=[folder / "a"])


def huge_numbers(rng: random.Random, folder: Path) -> Case:
    argv = pair(folder, FLAGS)
    row = step(2)
    huge: Any = rng.choice([1e300, -1e308, float("nan"), float("inf"), 2**62])
    row["weight sketch"] = [[huge, huge, -huge]] * 2
    row["loss"] = huge
    written(folder / "a", head(FLAGS, machine=["a"]), [step(1), row, step(3)])
    written(folder / "b", head(FLAGS, machine=["b"]), [step(1), step(2), step(3)])
    return Case(argv, codes=(1,), says="step 2 ", kept=[folder / "a"])


def escape_codes(rng: random.Random, folder: Path) -> Case:
    code = rng.choice(["\x1b[2J", "\u202e", "\x07", "\ud800"])
    names = [f"a{code}", "b"]
    argv = pair(folder, FLAGS, names=names, torch=f"1{code}", digests={f"x{code}": code})
    rows = [step(1), {**step(2), "weight": ["5", "6"]}]
    written(folder / "a", head(FLAGS, names=names, config={f"model.{code}": code}), rows)
    return Case(argv, codes=(1, 2), says="step|bisect_runs.py: ", kept=[folder / "a"])


KINDS: dict[str, Callable[[random.Random, Path], Case]] = {
    kind.__name__: kind
    for kind in (
        a_model_file, a_model_file_of_this_folder, a_hidden_model_file, places_to_write,
        another_program, many_processes, values_of_no_flag, no_flags_at_all, a_wrong_value,
        a_lost_value, other_tensors, no_plain_file, a_damaged_state, random_bytes, huge_numbers,
        escape_codes,
    )
}  # fmt: skip
CASES = drawn(KINDS, 36)


@pytest.mark.parametrize(("name", "seed"), sampled(CASES, 13))
def test_folders_that_are_hostile_or_unlucky(launcher, tmp_path, name, seed):
    check(launcher, KINDS[name], seed, tmp_path)


@pytest.mark.prove
def test_a_folder_is_compared_and_its_step_made_again(launcher, tmp_path):
    """The controls: a sound folder is replayed, and a model's file that the user names is run."""
    argv = pair(tmp_path, FLAGS)
    done = launcher.python(*argv)
    assert done.returncode == 1 and "step 2 is the first that differs" in done.stdout
    assert "Replayed from the start of the run, all " in done.stdout, done.stdout + done.stderr
    file, mark = evil(tmp_path)
    argv = pair(tmp_path, [*FLAGS, "--model-file", str(file)])
    done = launcher.python(*argv, "--model-file-a", file, "--model-file-b", file)
    assert "Replayed from the start of the run, all " in done.stdout, done.stdout + done.stderr
    assert mark.exists()
