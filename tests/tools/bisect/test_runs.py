# SPDX-License-Identifier: Apache-2.0
"""tools/bisect_runs.py names the step and the operation of a planted difference (planted.py)."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.bisect import planted as cases
from tools import bisect_runs
from tools.bisect import sides
from tools.bisect.lines import DIGESTS, Lines, compared, first_step, read
from tools.bisect.ranks import Program, RunError, _own_model
from tools.bisect.recorded import _kept
from tools.bisect.sides import named, without
from tools.compare.first_difference import Allowed

ROOT = Path(__file__).resolve().parents[3]
FOUND = re.compile(r"(\d+) of (\d+) differences of (\d+) kinds: step and operation right")
EQUAL = re.compile(r"(\d+) of (\d+) equal pairs: nothing is named")


def planted(*words):
    script = ROOT / "tests" / "tools" / "bisect" / "planted.py"
    done = subprocess.run(
        [sys.executable, str(script), *words], capture_output=True, text=True, cwd=ROOT
    )
    return done.stdout + done.stderr


@pytest.mark.prove
def test_a_planted_difference_is_named():
    out = planted("noise")
    assert FOUND.search(out).groups() == ("1", "1", "1"), out


def test_what_a_planted_edit_changes_is_in_its_file():
    for name, case in (cases.PLANTED | cases.HELD_OUT | cases.FURTHER).items():
        file, old, _ = case.edit
        assert not file or (ROOT / file).read_text().count(old) == 1, name


@pytest.mark.prove
def test_planted_differences_are_named_and_nothing_is_in_equal_pairs():
    out = planted()
    right, count, kinds = map(int, FOUND.search(out).groups())
    assert count >= 60 and kinds >= 12 and right >= 0.9 * count, out
    equal, pairs = map(int, EQUAL.search(out).groups())
    assert pairs == equal == 20, out


@pytest.mark.prove
def test_differences_of_other_places_and_models_are_named():
    right, count, _ = map(int, FOUND.search(out := planted("held-out")).groups())
    assert count >= 25 and right >= 0.9 * count, out


@pytest.mark.prove
def test_differences_of_further_kinds_are_named():
    right, count, _ = map(int, FOUND.search(out := planted("further")).groups())
    assert right == count >= 11, out


def drifting(gradient, weight):
    """Two runs of other layouts: weights are apart by 1e-5 of their norm after step 1."""
    one, other = digests(), digests()
    for i, line in other.steps.items():
        far = 1e-5 if i == 1 else weight
        line["weight sketch"] = [[1.0, 0.5 + far, 0.5 - far], [1.0, 1.0 + far, 0.1]]
        line["gradient sketch"] = [[1.0, gradient if i == 2 else 0.0, 0.0]] * 2
    return one, other


@pytest.mark.parametrize(
    "gradient, weight, what",
    [
        (1e-3, 1.1e-5, None),  # 4e-4 of fp32, and 120 times 1e-5
        (2e-3, 1.1e-5, "gradient"),
        (1e-4, 1e-2, "weight"),
    ],
)
def test_a_step_is_judged_by_what_it_begins_with(gradient, weight, what):
    found = first_step(*drifting(gradient, weight), Allowed(False))
    assert what is None and found is None or (found.iteration, found.what) == (2, what)
    if found is not None:
        assert found.distances["a"] == pytest.approx(4e-5, rel=1e-3)


def test_rounding_that_hides_what_follows_is_said():
    one, other = drifting(0.0, 1e-5)
    for line in other.steps.values():
        line["weight sketch"] = [[1.0, 0.55, 0.45], [1.0, 1.05, 0.1]]
    for side in (one, other):
        side.head["config"] = {"run.dtype": "bfloat16"}
    notes = []
    assert first_step(one, other, Allowed(False), notes) is None
    assert notes and "from step 2 on rounding has grown so much" in notes[0]


def test_what_cannot_be_told_is_said(tmp_path):
    """Another torch, other data, and no command line to make a step again."""
    for name, loss in (("a", 1.0), ("b", 1.5)):
        lines = digests(loss=loss)
        head = {"format": "weft digests 1", "iteration": 0, "world": 1, "torch": f"1.{name}"}
        head |= lines.head | {"digests": {"data_digest": name, "tokenizer": "t"}}
        (tmp_path / name).mkdir()
        rows = map(json.dumps, [head, *lines.steps.values()])
        (tmp_path / name / "digests.jsonl").write_text("\n".join(rows))
    a, b = (named(n.upper(), str(tmp_path / n), ROOT, None, tmp_path) for n in "ab")
    found = bisect_runs.bisect(a, b, tmp_path, None, None, 10.0)
    assert "another torch: 1.a and 1.b: equal bits are not expected" in found.notes[0]
    assert "A was made with torch 1.a, but its steps" in found.notes[1] and not found.same
    assert "step 2 is the first that differs, in its loss; flags that differ: data_digest" in (
        found.sentence)  # fmt: skip
    assert "A cannot be run again: its command line is not recorded there" in found.sentence


@pytest.mark.parametrize(
    "flags, name",
    [
        ("--seed 1", "llama"),
        ("--num-experts 4", "moe"),
        ("--qk-layernorm", ""),
        ("--qk-layernorm --num-experts=4", "moe"),
        ("--model-file=model/qwen2.py", "qwen2"),
    ],
)
def test_a_run_has_the_model_of_its_checkout(flags, name):
    found = _own_model(Program(ROOT, ROOT / "pretrain_llama.py", tuple(flags.split())))
    assert found == (["--model-file", str(ROOT / "model" / f"{name}.py")] if name else [])


def test_a_flag_that_only_a_rule_asks_for_is_run_again():
    words = ("--group-query-attention", "--num-query-groups", "2")
    assert _kept(words, ROOT, "A", None) == words


@pytest.mark.parametrize("sizes", ["--pp-size 2 --tp=2", "--model-parallel-size 2 --cp_size=2"])
def test_a_command_line_needs_the_ranks_of_its_sizes_by_any_name(sizes, tmp_path, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for more, ranks in (("", 4), ("--nproc_per_node=8 ", 8)):
        side = named("A", f"torchrun {more}pretrain_llama.py {sizes}", ROOT, None, tmp_path)
        assert side.program.world == ranks


def test_each_use_of_a_repeated_flag_is_run_again():
    given = "--param-group *norm* frozen --lr 1 --param-group head.* lr-mult=2"
    words = (*given.split(),)
    assert _kept(words, ROOT, "A", None) == words
    with pytest.raises(ValueError, match="--param-group head.*: there is no property"):
        _kept(words[:-1], ROOT, "A", None)


def digests(loss=1.0, weight="0" * 16, sketch=1.0):
    lines = Lines(head={"names": ["a", "b"], "config": {"run.dtype": "float32"}})
    for i in (1, 2, 3):
        at = i == 2
        lines.steps[i] = {
            "iteration": i, "samples": [8 * i, 8], "batch": "f", "norm": 1.0, "lr": 0.1,
            "loss": loss if at else 1.0, "gradient": ["1", "2"],
            "weight": ["1", weight if at else "0" * 16],
            "gradient sketch": [[1.0, 0.0, 0.0]] * 2,
            "weight sketch": [[1.0, 0.5, 0.5], [1.0, sketch if at else 1.0, 0.1]],
        }  # fmt: skip
    return lines


@pytest.mark.parametrize(
    "other, exact, what, names",
    [
        (digests(loss=1.5), True, "loss", []),
        (digests(weight="1" * 16), True, "weight", ["b"]),
        (digests(weight="1" * 16), False, None, []),
        (digests(sketch=1.01), False, "weight", ["b"]),
        (digests(sketch=1.00001), False, None, []),
    ],
)
def test_the_first_step_that_differs(other, exact, what, names):
    found = first_step(digests(), other, Allowed(exact))
    if what is None:
        assert found is None
    else:
        assert (found.iteration, found.what, found.names) == (2, what, names)
        assert found.between == 1


def test_a_tensor_that_one_run_alone_has_differs():
    one, other = digests(), digests()
    other.head = {**other.head, "names": ["a", "c"]}
    for pair in ((one, other), (other, one)):
        assert {*first_step(*pair, Allowed(True)).names} == {"b", "c"}


def test_logged_losses_count_after_the_last_digests():
    one, other = digests(), digests()
    for side, loss in ((one, 3.5), (other, 3.25)):
        side.log = {i: {"iteration": i, "loss": loss if i == 5 else 4.0} for i in (3, 4, 5, 6)}
    found = first_step(one, other, Allowed(True))
    assert (found.iteration, found.what, found.between) == (5, "loss", 4)
    assert first_step(one, other, Allowed(False)) is None  # by how much they may differ?
    assert [compared(one, other, Allowed(exact))[-1] for exact in (True, False)] == [
        (6, False), (3, True)]  # fmt: skip


def test_losses_and_norms_say_it_where_there_are_no_digests(tmp_path):
    for name, loss in (("a", 3.5), ("b", 3.25)):
        (tmp_path / name).mkdir()
        rows = ['{"iteration": 1, "loss": 4.0, "grad_norm": 1.0}']
        rows += [f'{{"iteration": 2, "loss": {loss}, "grad_norm": 1.0}}', '{"iteration": 3, "lo']
        (tmp_path / name / "log.jsonl").write_text("\n".join(rows))
    one, other = (read(tmp_path / name) for name in "ab")
    found = first_step(one, other, Allowed(True))
    assert found.iteration == 2 and "of losses and norms alone" in found.text
    with pytest.raises(ValueError, match="no step in common"):
        first_step(one, Lines(), Allowed(True))
    (tmp_path / "a" / "texts.jsonl").write_text('{"text": "a", "format": "markdown"}\n')
    assert read(tmp_path / "a").log.keys() == {1, 2}
    (tmp_path / "a" / "digests.jsonl").write_text('{"format": "weft digests 9", "iteration": 0}\n')
    with pytest.raises(ValueError, match="weft digests 9"):
        read(tmp_path / "a")


def test_what_names_a_side(tmp_path):
    side = named("A", "--num-layers 2 --tensor-model-parallel-size=2", ROOT, None, tmp_path)
    assert side.program.world == 2 and side.program.script == ROOT / "pretrain_llama.py"
    words = "torchrun --nproc-per-node 4 pretrain_llama.py --seed 1"
    side = named("A", words, ROOT, None, tmp_path)
    assert side.program.world == 4 and side.program.argv == ("--seed", "1")
    for before, unset in (("OMP_NUM_THREADS=1 WORLD_SIZE=4 torchrun", ["OMP_NUM_THREADS=1"]),
                          (".venv/bin/torchrun", []), ("python3.11 -m torchrun", [])):  # fmt: skip
        same = named("A", words.replace("torchrun", before), ROOT, None, tmp_path)
        assert same.program == side.program and same.unset == unset
    other = named("B", "", tmp_path, None, tmp_path, like=side)
    assert other.program.tree == tmp_path and other.program.argv == ("--seed", "1")
    with pytest.raises(ValueError, match="is neither a folder nor a command line"):
        named("A", "runs/none", ROOT, None, tmp_path)
    side = named("A", str(tmp_path), ROOT, None, tmp_path)
    assert side.program is None and "command line" in side.why_not
    argv = ["--save", "x", "--seed", "1", "--log_json=y", "--async-save"]
    assert without(argv, {"--save", "--log-json", "--async-save"}) == ["--seed", "1"]


def of_run(folder, *names):
    """Write files as the tool's own run leaves them; return their folder."""
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("")
    return folder


def test_a_run_replaces_only_one_of_an_earlier_comparison(tmp_path, capsys, monkeypatch):
    """What is left of the earlier one is not read as the new one's. Nobody's own files go."""

    def fails(program, folder, *more, **kept):
        raise RunError("rank 0 exited with code 2: --no-such-flag")

    monkeypatch.setattr(sides, "run", fails)
    b = of_run(tmp_path / "b", "log.jsonl")
    b.joinpath("log.jsonl").write_text('{"iteration": 1, "loss": 4.0}')
    for name in ("cache", "notes.txt", "saved"):
        out = tmp_path / f"with {name}"
        kept = of_run(out / "run-A", name, *["out.0"] * (name != "saved"))
        shutil.copy(b / "log.jsonl", kept)
        assert bisect_runs.main(["--no-such-flag 1", str(b), "--out", str(out)]) == 2
        said = capsys.readouterr().err
        if name == "cache":
            assert "A: rank 0 exited with code 2: --no-such-flag" in said
        else:
            assert "it exists and is not of an earlier comparison" in said
        assert kept.exists() == (name != "cache")
    out = tmp_path / "out"
    shutil.copytree(b, out / "run-A").joinpath("out.0").write_text("")
    assert bisect_runs.main(["--no-such-flag 1", str(out / "run-A"), "--out", str(out)]) == 2
    assert "a run of A would replace" in capsys.readouterr().err
    assert (out / "run-A" / "log.jsonl").exists()


def test_a_run_made_again_writes_nothing_beside_its_data(tmp_path, monkeypatch):
    head = {"format": "weft digests 1", "iteration": 0, "world": 1, "names": []}
    monkeypatch.setattr(sides.recorded, "flags_of", lambda argv, *more: tuple(argv))
    for flags, kept in (("--train-data-path x", True), ("--data-stages x", True),
                        ("--mock-data", False)):  # fmt: skip
        (tmp_path / DIGESTS).write_text(json.dumps(head | {"command_line": flags.split()}))
        side = named("B", str(tmp_path), ROOT, None, tmp_path / "out")
        cache = ("--data-cache-path", str(tmp_path / "out" / "run-B" / "cache")) * kept
        assert side.program.argv == (*flags.split(), *cache)
