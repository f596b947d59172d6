# SPDX-License-Identifier: Apache-2.0
"""Is a model that is trained on better? Evaluations before the first step and without any.

What --eval-at-start and --skip-train print is compared, to the bit, with what a run prints of the
same weights.
"""

import json
from pathlib import Path

import numpy as np
import pytest

import pretrain_llama
from tests.launcher import Launcher
from tools.plot_loss import main as plot
from tools.plot_loss import read_log
from training.data.indexed import IndexedWriter, token_dtype
from training.flags.parse import UsageError, parse

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


ORDERS = ("weft", "megatron")
LAYOUTS = (
    pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel", marks=LATER, id="tp"),
    pytest.param(2, "--zero-stage 3 --overlap-grad-reduce", id="zero"),
    pytest.param(2, "--context-parallel-size 2", marks=LATER, id="cp"),
    pytest.param(2, "--pipeline-model-parallel-size 2", marks=LATER, id="pp"),
    pytest.param(
        2, "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2", marks=LATER,
        id="experts",
    ),
    pytest.param(
        2, "--pipeline-model-parallel-size 2 --bf16 --pipeline-schedule zb-v", marks=LATER,
        id="bf16",
    ),
)  # fmt: skip


@pytest.mark.parametrize("ranks, layout", LAYOUTS)
@pytest.mark.parametrize("order", ORDERS)
def test_evaluation_alone_prints_the_losses_of_the_run(
    ranks, layout, order, data, launcher: Launcher
):
    """Also of a step in the middle. It writes nothing, and locks nothing."""
    same = f"{layout} --data-order {order} --eval-at-start --save {{dir}}/saved --save-interval 2"
    ran = launcher.run(ranks, words(data, same))
    assert ran.codes == [0] * ranks, ran.said(0)
    wanted, before = evaluations(ran.folder / "log.jsonl"), files(ran.folder / "saved")
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
    more = f"--save {tmp_path}/saved --save-hf {hf} --save-hf-dtype float32 --log-json {log}"
    assert pretrain_llama.main(words(data, more)) == 0
    alone = tmp_path / "alone.jsonl"
    more = f"--skip-train --load {hf}/step_00000004 --log-json {alone} --eval-interval 0"
    assert pretrain_llama.main(words(data, more)) == 0
    assert evaluations(alone) == {(0, ""): evaluations(log)[4, ""]}
    capsys.readouterr()
    assert pretrain_llama.main(words(data, f"--skip-train --load {tmp_path}/none")) == 2
    assert f"--skip-train --load {tmp_path}/none: no checkpoint there" in capsys.readouterr().err


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
