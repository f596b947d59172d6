# SPDX-License-Identifier: Apache-2.0
"""Three validation sets have a loss each, the same at every layout and batch size.

The sets are read whole (--full-validation), so the losses are means over all of their tokens. In
fp64 layouts differ by rounding alone.
"""

import json
import math
from pathlib import Path

import numpy as np
import pytest

import pretrain_llama
from tests.launcher import Launcher
from tools.plot_loss import main as plot
from tools.plot_loss import read_log
from training.data.indexed import IndexedTokens, IndexedWriter, token_dtype
from training.data.tokenizer import HuggingFaceTokenizer

TOKENIZER = Path(__file__).parent / "data" / "tokenizer" / "tokenizer.json"
FLAGS = f"""
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model {TOKENIZER} --num-layers 2
    --hidden-size 40 --num-attention-heads 4 --seq-length 16 --num-workers 0 --device cpu --fp64
    --train-iters 4 --lr 1e-2 --micro-batch-size 1 --global-batch-size 4 --log-interval 1
    --eval-interval 2 --eval-iters 1 --eod-mask-loss --reset-attention-mask
"""
LATER = pytest.mark.prove
SETS = "--multiple-validation-sets --full-validation"
LAYOUTS = (
    pytest.param(2, "--tensor-model-parallel-size 2 --sequence-parallel", marks=LATER, id="tp"),
    pytest.param(2, "--zero-stage 3 --overlap-grad-reduce", marks=LATER, id="dp"),
    pytest.param(2, "--context-parallel-size 2", marks=LATER, id="cp"),
    pytest.param(2, "--pipeline-model-parallel-size 2", id="pp"),
)
NAMES = ("wiki", "code", "books")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Write a training set and three of validation, of 203, 101 and 40 tokens."""
    folder, draw = tmp_path_factory.mktemp("sets"), np.random.RandomState(0)
    tokenizer = HuggingFaceTokenizer(str(TOKENIZER))
    words = "the cat sat on a mat and saw 7 dogs; def f(x): return x + 中文 naïve 😀".split()
    for name, size in zip(("train", *NAMES), (4000, 203, 101, 40), strict=True):
        ids = tokenizer.encode(" ".join(draw.choice(words, size)))[: size - 1]
        with IndexedWriter(
            str(folder / f"{name}_text_document"), token_dtype(tokenizer.vocab_size)
        ) as writer:
            for i in range(0, len(ids), 57):
                writer.add([*ids[i : i + 57], tokenizer.eod])
    return {name: str(folder / f"{name}_text_document") for name in ("train", *NAMES)}


def words_of(paths, more):
    data = f"--train-data-path {paths['train']} --valid-data-path"
    return [*FLAGS.split(), *data.split(), *(paths[name] for name in NAMES), *more.split()]


def evaluations(log):
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    found = {}
    for row in rows:
        for key, value in row.items():
            if key.startswith("validation"):
                found[row["iteration"], key] = value
    return found


@pytest.fixture(scope="module")
def serial(paths, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serial")
    more = f"{SETS} --log-json {folder}/log.jsonl --tensorboard-dir {folder}/tb"
    assert pretrain_llama.main(words_of(paths, more)) == 0
    return folder


def test_each_set_has_a_loss_and_bits_a_byte_everywhere(serial, capsys):
    found = evaluations(serial / "log.jsonl")
    keys = {f"validation_{what}/{name}" for what in ("loss", "bits_per_byte") for name in NAMES}
    assert {key for step, key in found if step == 2} == keys
    assert len({found[4, f"validation_loss/{name}"] for name in NAMES}) == 3
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    seen = events.EventAccumulator(str(serial / "tb"))
    seen.Reload()
    for name in NAMES:
        values = [(e.step, e.value) for e in seen.Scalars(f"validation_loss/{name}")]
        wanted = [found[step, f"validation_loss/{name}"] for step in (2, 4)]
        assert values == [(2, pytest.approx(wanted[0])), (4, pytest.approx(wanted[1]))]


def test_bits_a_byte_are_of_the_text_itself(serial, paths):
    """Documents are cut anywhere, also in a character; the end of one has no text, and the token
    after it no loss. A token of this vocabulary is a byte.
    """
    found = evaluations(serial / "log.jsonl")
    for name in NAMES:
        data = IndexedTokens(paths[name])
        tokens, size = int((data.lengths - 1).sum()), int((data.lengths - 2).sum())
        bits = found[2, f"validation_loss/{name}"] / math.log(2) * tokens / size
        assert found[2, f"validation_bits_per_byte/{name}"] == pytest.approx(bits, rel=1e-12)


def test_the_picture_has_a_curve_for_each(serial, monkeypatch):
    run = read_log(serial / "log.jsonl")
    assert [len(run.curve(f"validation_loss/{name}")) for name in NAMES] == [2, 2, 2]
    out = serial / "loss.svg"
    monkeypatch.setattr("sys.argv", ["x", str(serial / "log.jsonl"), "--output", str(out)])
    plot()
    text = out.read_text()
    assert all(
        f"{name} {run.curve(f'validation_loss/{name}')[-1][1]:.2f}" in text for name in NAMES
    )


@pytest.mark.parametrize("ranks, more", LAYOUTS)
def test_the_losses_are_equal_at_every_layout(ranks, more, paths, serial, launcher: Launcher):
    result = launcher.run(ranks, words_of(paths, f"{SETS} {more}"))
    assert result.codes == [0] * ranks, result.said(0)
    wanted = evaluations(serial / "log.jsonl")
    assert evaluations(result.folder / "log.jsonl") == pytest.approx(wanted, rel=1e-12)


def test_the_loss_of_all_tokens_does_not_depend_on_the_batch(paths, serial, tmp_path, capsys):
    """Other batch sizes; the first evaluation of all is before any update: lr is 0."""
    found = []
    for size, micro in ((4, 4), (6, 2)):
        log = tmp_path / f"{size}.jsonl"
        more = f"{SETS} --global-batch-size {size} --lr 0 --min-lr 0 "
        more += f"--micro-batch-size {micro} --train-iters 2 --log-json {log}"
        assert pretrain_llama.main(words_of(paths, more)) == 0
        found.append(evaluations(log))
    assert found[0] == pytest.approx(found[1], rel=1e-12) and len(found[0]) == 6
    said = capsys.readouterr().out
    assert "validation-code at iteration 2 | loss" in said and "bits per byte" in said


def test_without_a_full_validation_each_set_gives_eval_iters_batches(paths, tmp_path):
    log = tmp_path / "log.jsonl"
    more = f"--multiple-validation-sets --train-iters 2 --log-json {log}"
    assert pretrain_llama.main(words_of(paths, more)) == 0
    assert len(evaluations(log)) == 6


def test_no_evaluation_of_no_batch(paths, tmp_path, capsys):
    log = tmp_path / "log.jsonl"
    words = words_of(paths, f"--eval-iters 0 --log-json {log} --train-iters 2")
    assert pretrain_llama.main(words) == 0
    assert not evaluations(log)
