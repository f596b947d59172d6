# SPDX-License-Identifier: Apache-2.0
"""Is a model that is trained on better? Evaluations before the first step and without any, and the
best checkpoint.

What --eval-at-start and --skip-train print is compared, to the bit, with what a run prints of the
same weights; what --keep-best keeps, with the checkpoints of a run that keeps every step.
"""

import json
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import pretrain_llama
from tests.launcher import Launcher
from tests.sampling import sampled
from tests.saved import check_equal, tensors
from tools.checkpoint import main as checkpoint_tool
from tools.plot_loss import main as plot
from tools.plot_loss import read_log
from training.data.indexed import IndexedWriter, token_dtype
from training.flags.parse import UsageError, parse
from training.run.best import Best

FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 100
    --tokenizer-type NullTokenizer --num-workers 0 --device cpu --train-iters 4 --lr 1e-2
    --micro-batch-size 1 --global-batch-size 4 --log-interval 1 --eval-interval 2 --eval-iters 2
"""
ALL = """
    --vocab-size 100 --num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 16
    --train-iters 4 --lr 1e-2
"""
LATER = pytest.mark.prove


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Write what is trained on and two held-out sets, which are learnt unequally well."""
    folder, draw = tmp_path_factory.mktemp("data"), np.random.RandomState(0)
    for name, ids in (("train", 20), ("easy", 20), ("other", 99)):
        with IndexedWriter(f"{folder}/{name}", token_dtype(100)) as writer:
            for _ in range(30):
                writer.add(draw.randint(1, ids, 50).tolist())
    return folder


def words(data, more, sets=("easy",)):
    paths = ["--train-data-path", f"{data}/train", "--valid-data-path"]
    return [*FLAGS.split(), *paths, *(f"{data}/{name}" for name in sets), *more.split()]


def evaluations(log):
    """Return {(iteration, set): loss} of a run's log."""
    rows = map(json.loads, Path(log).read_text().splitlines())
    found = [(row["iteration"], key, row[key]) for row in rows for key in row]
    return {(i, key[16:]): loss for i, key, loss in found if key.startswith("validation_loss")}


def files(folder):
    """Return each file below a folder with its contents and its time."""
    paths = (path for path in Path(folder).rglob("*") if path.is_file())
    return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}


def test_the_loss_before_the_first_step(data, tmp_path, capsys, monkeypatch):
    """It is that of the same weights with nothing trained; it is in log, files and picture."""
    sets, log = ("easy", "other"), tmp_path / "log.jsonl"
    several = "--multiple-validation-sets"
    more = f"{several} --eval-at-start --log-json {log} --tensorboard-dir {tmp_path}/tb"
    assert pretrain_llama.main(words(data, f"{more} --save {tmp_path}/saved", sets)) == 0
    said = capsys.readouterr().out.splitlines()
    found = evaluations(log)
    assert sorted(found) == [(i, name) for i in (0, 2, 4) for name in sets]
    first = json.loads(log.read_text().splitlines()[0])
    assert first["iteration"] == 0, "it comes before the first step's line"
    for name in sets:
        line = f"validation-{name} loss {found[0, name]:.4f} before the first step, "
        assert f"{line}{found[4, name]:.4f} at the end" in said[-4:]
    alone = tmp_path / "alone.jsonl"
    assert pretrain_llama.main(words(data, f"{several} --skip-train --log-json {alone}", sets)) == 0
    assert evaluations(alone) == {(0, name): found[0, name] for name in sets}

    run = read_log(log)
    for axis in ("iterations", "tokens", "time"):
        assert run.curve("validation_loss/easy", axis)[0] == (0.0, found[0, "easy"])
    out = tmp_path / "loss.svg"
    monkeypatch.setattr("sys.argv", ["x", str(log), "--output", str(out)])
    plot()
    assert f"easy {found[4, 'easy']:.2f}" in out.read_text()
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen = events.EventAccumulator(f"{tmp_path}/tb")
    seen.Reload()
    assert [e.step for e in seen.Scalars("validation_loss/other")] == [0, 2, 4]


def test_a_resume_evaluates_before_its_own_first_step(data, tmp_path, capsys):
    place = f"--save {tmp_path}/saved --load {tmp_path}/saved --eval-at-start"
    log = tmp_path / "log.jsonl"
    more = f"{place} --log-json {log} --tensorboard-dir {tmp_path}/tb"
    assert pretrain_llama.main(words(data, f"{more} --exit-interval 2")) == 0
    assert ", " in (said := capsys.readouterr().out) and "at iteration 2\n" in said
    before = evaluations(log)
    assert pretrain_llama.main(words(data, more)) == 0
    said, after = capsys.readouterr().out, evaluations(log)
    assert after[2, ""] == before[2, ""] and len(after) == 3, "the same weights again"
    line = f"validation loss {after[2, '']:.4f} before iteration 3, {after[4, '']:.4f} at the end"
    assert line in said
    assert len(read_log(log).curve("loss")) == 4, "no step's loss is lost in the picture"
    assert pretrain_llama.main(words(data, more)) == 0
    assert "nothing to do" in capsys.readouterr().out and evaluations(log) == after


LAYOUTS = {
    "tp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "zero": "--zero-stage 3 --overlap-grad-reduce",
    "cp": "--context-parallel-size 2",
    "pp": "--pipeline-model-parallel-size 2",
    "experts": "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2",
    "bf16": "--pipeline-model-parallel-size 2 --bf16 --pipeline-schedule zb-v",
}


@pytest.mark.prove
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("order", ["weft", "megatron"])
def test_evaluation_alone_prints_the_losses_of_the_run(order, layout, data, launcher: Launcher):
    """Also of a step in the middle. It writes nothing, and locks nothing."""
    ranks, layout = 2, LAYOUTS[layout]
    same = f"{layout} --data-order {order} --eval-at-start --save {{dir}}/saved --save-interval 2"
    ran = launcher.run(ranks, words(data, same))
    assert ran.codes == [0] * ranks, ran.said(0)
    wanted, before = evaluations(ran.folder / "log.jsonl"), files(ran.folder / "saved")
    plain = launcher.run(ranks, words(data, f"{layout} --data-order {order}"))
    assert ran.losses()[1:] == plain.losses(), "an evaluation changes no bit of the training"
    for more, step in (("--load", 4), ("--ckpt-step 2 --load", 2)):
        alone = f"{same} --skip-train {more} {ran.folder}/saved".format(dir=ran.folder)
        found = launcher.run(ranks, words(data, alone))
        assert found.codes == [0] * ranks, found.said(0)
        assert evaluations(found.folder / "log.jsonl") == {(step, ""): wanted[step, ""]}
        assert found.said(0, "out").splitlines()[-1] == (
            f"evaluated at iteration {step}: --skip-train trains and saves nothing"
        )
    assert files(ran.folder / "saved") == before
    fresh = launcher.run(ranks, words(data, f"{layout} --data-order {order} --skip-train"))
    assert evaluations(fresh.folder / "log.jsonl") == {(0, ""): wanted[0, ""]}


def test_weights_of_hugging_face_are_evaluated_alone(data, tmp_path, capsys):
    log, hf = tmp_path / "log.jsonl", f"{tmp_path}/hf"
    assert pretrain_llama.main(words(data, f"--save {tmp_path}/saved --log-json {log}")) == 0
    convert = f"convert --to-hf {hf} --load {tmp_path}/saved --dtype float32"
    assert checkpoint_tool(convert.split()) == 0
    alone = tmp_path / "alone.jsonl"
    more = f"--skip-train --load {hf} --log-json {alone} --eval-interval 0"
    assert pretrain_llama.main(words(data, more)) == 0
    assert evaluations(alone) == {(0, ""): evaluations(log)[4, ""]}
    capsys.readouterr()
    assert pretrain_llama.main(words(data, f"--skip-train --load {tmp_path}/none")) == 2
    assert f"--skip-train --load {tmp_path}/none: no checkpoint there" in capsys.readouterr().err


@pytest.mark.prove
def test_a_checkpoint_of_any_run_is_evaluated_alone(data, tmp_path, capsys):
    """What only matters to go on training may be another's: data, batch, optimizer, frozen."""
    log, alone = tmp_path / "log.jsonl", tmp_path / "alone.jsonl"
    more = f"--save {tmp_path}/saved --log-json {log} --full-validation --param-group *norm* frozen"
    assert pretrain_llama.main(words(data, more)) == 0
    capsys.readouterr()
    others = "--optimizer muon --seed 7 --global-batch-size 2 --train-iters 9 --full-validation"
    more = f"--skip-train --load {tmp_path}/saved --log-json {alone} {others}"
    trained_on = ["--train-data-path", f"{data}/other"]
    assert pretrain_llama.main([*words(data, more), *trained_on]) == 0
    (found,), wanted = evaluations(alone).items(), evaluations(log)[4, ""]
    assert found[0] == (4, "")
    assert math.isclose(found[1], wanted, rel_tol=1e-6)
    assert " was made with " not in capsys.readouterr().out


def test_an_earlier_step_evaluated_alone_leaves_the_picture(data, tmp_path):
    log = tmp_path / "log.jsonl"
    more = f"--save {tmp_path}/saved --load {tmp_path}/saved --save-interval 2 --log-json {log}"
    assert pretrain_llama.main(words(data, more)) == 0
    before = read_log(log)
    assert pretrain_llama.main(words(data, f"{more} --skip-train --ckpt-step 2")) == 0
    assert read_log(log) == before


def test_evaluations_by_interval_begin_at_a_step(data, tmp_path):
    """The last step is evaluated in any case, as it is without the flag."""
    for first, wanted in ((2, [2, 4, 5]), (3, [4, 5]), (9, [5])):
        log = tmp_path / f"{first}.jsonl"
        more = f"--train-iters 5 --start-eval-at-iter {first} --log-json {log}"
        assert pretrain_llama.main(words(data, more)) == 0
        assert [i for i, _ in evaluations(log)] == wanted


MOCK = [*ALL.split(), *"--mock-data --device cpu".split()]


@pytest.mark.parametrize("flag", ["--eval-at-start", "--skip-train"])
def test_an_evaluation_on_nothing_is_refused(flag, data):
    with pytest.raises(UsageError, match=f"^{flag} .*--eval-iters 0 asks for none"):
        parse([*MOCK, flag, "--eval-iters", "0"], 1)
    own = [*ALL.split(), "--train-data-path", f"{data}/train", "--tokenizer-type", "NullTokenizer"]
    with pytest.raises(UsageError, match=f"^{flag} has nothing to evaluate on: .*--valid-data-pat"):
        parse([*own, flag], 1)
    cut = [*ALL.split(), "--data-path", f"{data}/train", "--tokenizer-type", "NullTokenizer"]
    with pytest.raises(UsageError, match=f"^{flag} has nothing to evaluate on: .*--split"):
        parse([*cut, "--split", "1,0,0", flag], 1)
    assert parse([*MOCK, flag], 1)


def test_evaluation_alone_takes_the_flags_of_the_run(tmp_path):
    """Those of saving have no effect, whatever they name; the order says what it depends on."""
    (tmp_path / "file").write_text("")
    made = parse([*MOCK, "--skip-train", "--save", f"{tmp_path}/file", "--save-hf", "x"], 1)
    assert made.checkpoint.save is made.checkpoint.save_hf is None
    (note,) = parse([*MOCK, "--skip-train", "--data-order", "megatron"], 1).notes
    assert note.startswith("--skip-train without --eval-interval: --data-order megatron draws")


LONG = """
    --train-iters 8 --eval-interval 1 --lr 1e-1 --lr-decay-style constant --save {dir}/saved
"""


def losses(log, name=""):
    return {i: loss for (i, of), loss in evaluations(log).items() if of == name}


def lowest(found):
    """Return the step of the lowest loss, the first of equal ones."""
    return min(found, key=lambda step: (found[step], step))


def steps(folder):
    return sorted(int(path.name[5:]) for path in (Path(folder) / "saved").glob("step_????????"))


def recorded(folder, step):
    state = json.loads((Path(folder) / f"saved/step_{step:08d}/state.json").read_text())
    return state.get("evaluation")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """Return the folder of a run that saves every step, and its losses."""
    folder = tmp_path_factory.mktemp("whole")
    more = f"{LONG} --save-interval 1 --log-json {folder}/log.jsonl".format(dir=folder)
    assert pretrain_llama.main(words(data, more)) == 0
    found = losses(folder / "log.jsonl")
    assert 1 < lowest(found) < 8, "the best one is neither the first nor the last"
    return folder, found


@pytest.mark.parametrize(
    "kept", sampled(["--keep-last-k 1 --save-interval 3", "", "--async-save"], 3)
)
def test_the_best_checkpoint_stays_beside_the_newest(kept, data, whole, tmp_path, capsys):
    """Its weights are those of its step; those that it outdid are gone; a step is saved once."""
    there, found = whole
    best = lowest(found)
    more = f"{LONG} --keep-best {kept} --log-json {tmp_path}/log.jsonl".format(dir=tmp_path)
    assert pretrain_llama.main(words(data, more)) == 0
    said = capsys.readouterr().out
    assert losses(tmp_path / "log.jsonl") == found
    assert steps(tmp_path) == [best, 8]
    check_equal(tensors(tmp_path / "saved", best), tensors(there / "saved", best))
    assert recorded(tmp_path, best)["loss"] == found[best]
    where = f"{tmp_path}/saved/step_{best:08d}"
    assert f"lowest validation loss {found[best]:.4f}, of iteration {best}: {where}\n" in said
    assert checkpoint_tool(["list", f"{tmp_path}/saved"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    tails = [f"all there; validation loss {found[best]:.4f}, the lowest", f" {found[8]:.4f}"]
    assert all(row.endswith(tail) for row, tail in zip(rows, tails, strict=True))
    made = [line for line in said.splitlines() if line.startswith("saved ")]
    lower = {i for i in found if found[i] < min([found[j] for j in found if j < i], default=9e9)}
    due = {3, 6, 8} if "interval" in kept else {8}
    assert made == [f"saved {tmp_path}/saved/step_{i:08d}" for i in sorted(lower | due)]


def test_a_resume_knows_the_best_one(data, whole, tmp_path, capsys):
    """It is known from the disk, is not saved anew, and stays where --keep-best is left out."""
    found = whole[1]
    best = lowest(found)
    more = f"{LONG} --load {tmp_path}/saved --keep-best --eval-at-start".format(dir=tmp_path)
    for stop in range(best, 8):
        assert pretrain_llama.main(words(data, f"{more} --exit-interval {stop}")) == 0
    capsys.readouterr()
    before = files(tmp_path / f"saved/step_{best:08d}")
    assert pretrain_llama.main(words(data, f"{more}")) == 0
    said = capsys.readouterr().out
    assert f"--keep-best: lowest validation loss {found[best]:.4f}, of iteration {best}: " in said
    assert steps(tmp_path) == [*range(best, 9)]
    assert files(tmp_path / f"saved/step_{best:08d}") == before
    longer = f"{LONG} --load {tmp_path}/saved --train-iters 9 --keep-last-k 1".format(dir=tmp_path)
    assert pretrain_llama.main(words(data, longer)) == 0
    assert steps(tmp_path) == [best, 9] and recorded(tmp_path, 9) is None
    other = f"{more} --train-iters 10 --eval-iters 1"
    assert pretrain_llama.main(words(data, other)) == 0
    assert f"step_{best:08d} was evaluated on other held-out data" in capsys.readouterr().out
    assert steps(tmp_path) == [best, 9, 10]


@pytest.mark.prove
def test_the_best_one_by_a_set_of_several(data, tmp_path, capsys):
    sets, several = ("easy", "other"), "--multiple-validation-sets"
    found = {}
    for name, flag in (("other", "--keep-best other"), ("easy", "--keep-best")):
        folder = tmp_path / name
        more = f"{LONG} {several} {flag} --log-json {folder}/log.jsonl".format(dir=folder)
        assert pretrain_llama.main(words(data, more, sets)) == 0
        found = losses(folder / "log.jsonl", name)
        assert steps(folder) == sorted({lowest(found), 8})
        assert f"lowest validation-{name} loss" in capsys.readouterr().out
        assert recorded(folder, lowest(found))["set"] == name
    for more, told in (
        ("--keep-best wiki --save x", "--keep-best wiki: .* name; the sets are easy, other"),
        ("--keep-best", "--keep-best needs --save"),
        ("--keep-best --save x --eval-interval 0", "--keep-best needs --eval-interval"),
        ("--keep-best --save x --eval-iters 0", "--keep-best .*--eval-iters 0 asks for none"),
    ):
        with pytest.raises(UsageError, match=f"^{told}"):
            parse(words(data, f"{several} {more}", sets), 1)
    with pytest.raises(UsageError, match="^--keep-best easy: .* there is one set, without --mult"):
        parse(words(data, "--keep-best easy --save x"), 1)


SAVES = ({"point": f"save: {at}", "call": 1, "save": n} for at, n in product(
    ("piece", "shards", "manifest", "renamed"), (2, 3)))  # fmt: skip
REMOVALS = ({"point": f"save: {at}", "call": n} for at, n in product(("pruning", "trash"), (1, 2)))
KILLS = [
    pytest.param(kill, marks=[] if i == 5 else LATER, id=f"{kill['point'][6:]}-{i % 2}")
    for i, kill in enumerate((*SAVES, *REMOVALS))
]


@pytest.mark.prove
@pytest.mark.parametrize("kill", KILLS)
def test_no_kill_loses_the_best_one(kill, data, whole, launcher: Launcher):
    """kill -9 of all ranks inside a save or a removal. Whatever is left, the lowest loss that was
    saved is there; the run goes on to the checkpoints of one that was not killed.
    """
    flags = f"{LONG} --keep-best --keep-last-k 1 --load {{dir}}/saved --zero-stage 1"
    flags += " --async-save" * (kill.get("save") == 3)
    fault = {**kill, "rank": 0, "how": "kill all"}
    folder = launcher.start(2, words(data, flags), fault=fault)
    result = launcher.wait()
    assert result.codes == [-9, -9], result.said(0)
    done = losses(folder / "log.jsonl")
    out = result.said(0, "out")
    saved = {i for i in done if f"saved {folder}/saved/step_{i:08d}\n" in out}
    left = {i: recorded(folder, i)["loss"] for i in steps(folder)}
    if saved:
        assert min(left.values()) <= min(done[i] for i in saved)
    again = launcher.run(2, words(data, flags), folder=folder)
    assert again.codes == [0, 0], again.said(0)
    found = losses(folder / "log.jsonl")
    assert found == pytest.approx(whole[1], rel=1e-4)
    best = lowest(found)
    assert steps(folder) == [best, 8] and recorded(folder, best)["loss"] == found[best]


def test_where_training_makes_it_worse_the_begin_is_the_best(data, launcher: Launcher):
    """Step 0 is saved with its loss. A run that was killed in its first step begins again there."""
    flags = "--lr 5 --save {dir}/saved --keep-best --keep-last-k 1 --eval-at-start"
    fault = {"point": "step", "rank": 0, "call": 1, "how": "kill"}
    folder = launcher.start(1, words(data, flags), fault=fault)
    assert launcher.wait().codes == [-9] and steps(folder) == [0]
    result = launcher.run(1, words(data, flags), folder=folder)
    assert result.codes == [0], result.said(0)
    found = losses(folder / "log.jsonl")
    assert lowest(found) == 0 and steps(folder) == [0, 4]
    assert recorded(folder, 0)["loss"] == found[0]
    line = f"lowest validation loss {found[0]:.4f}, of iteration 0: {folder}/saved/step_00000000"
    assert line in result.said(0, "out").splitlines()


def test_checkpoints_of_another_run_are_not_removed(data, tmp_path, capsys):
    assert pretrain_llama.main(words(data, f"--save {tmp_path}/b --train-iters 2")) == 0
    assert pretrain_llama.main(words(data, f"--save {tmp_path}/a --train-iters 3")) == 0
    more = f"--load {tmp_path}/a --save {tmp_path}/b --keep-best"
    assert pretrain_llama.main(words(data, more)) == 2
    said = capsys.readouterr().err
    assert "of another run" in said and "which --keep-best would remove" in said


def test_a_signal_saves_first_and_then_the_loss(data, launcher: Launcher):
    fault = {"point": "step", "rank": 0, "call": 2, "how": "term"}
    flags = f"{LONG} --keep-best --load {{dir}}/saved"
    folder = launcher.start(1, words(data, flags), fault=fault)
    result = launcher.wait()
    assert result.codes == [75], result.said(0)
    step = max(steps(folder))
    assert recorded(folder, step)["loss"] == losses(folder / "log.jsonl")[step]


@LATER
def test_the_folder_for_transformers_of_the_best_one_stays(data, whole, tmp_path):
    best = lowest(whole[1])
    more = f"{LONG} --keep-best --save-hf {{dir}}/hf --save-hf-keep-last-k 1 --save-interval 1"
    assert pretrain_llama.main(words(data, more.format(dir=tmp_path))) == 0
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert names == [f"step_{i:08d}" for i in (best, 8)]


def test_a_loss_counts_once_it_is_saved():
    """One whose save failed is none; NaN, the loss of no token, and an equal one are not lower."""
    ends = []
    best = Best("", {"": "a"}, wait=lambda: ends and ends.pop()())

    def save(step, fails=False):
        best.settle()
        state = best.saving(step, only=True)
        ends.append(lambda: None if fails else setattr(best, "written", step))
        return state["evaluation"]["loss"]

    assert not best.evaluated(1, {"": math.nan}) and not best.evaluated(1, {})
    assert best.saving(1, only=False) == {}
    assert best.evaluated(2, {"": 5.0}) and save(2) == 5.0
    assert not best.evaluated(3, {"": 5.0}) and best.evaluated(4, {"": 4.0})
    save(4, fails=True)
    assert best.evaluated(5, {"": 3.9}), "lower than one of which it is not known yet"
    assert best.evaluated(6, {"": 4.5}), "the lower one was not saved"
    save(6)
    best.settle()
    assert best.saved.step == 6 and best.names == ["step_00000006"]


def test_an_evaluation_that_counts_no_token_is_nan(tmp_path, capsys):
    with IndexedWriter(f"{tmp_path}/train", token_dtype(100)) as writer:
        writer.add([*range(1, 90)])
    with IndexedWriter(f"{tmp_path}/easy", token_dtype(100)) as writer:
        for _ in range(4000):
            writer.add([99])
        writer.add([1, 2, 99])
    log = tmp_path / "log.jsonl"
    more = f"--eod-mask-loss --train-iters 2 --eval-iters 1 --log-json {log} --keep-best --save x"
    flags = words(tmp_path, more.replace("--save x", f"--save {tmp_path}/saved"))
    assert pretrain_llama.main(flags) == 0
    assert losses(log) == {2: None}
    assert "validation at iteration 2 | loss nan" in capsys.readouterr().out
    assert steps(tmp_path) == [2] and recorded(tmp_path, 2) is None
