# SPDX-License-Identifier: Apache-2.0
"""Experts under --eod-mask-loss: the router's losses are those of all tokens, on every layout, and
a resume of a run that an older version began says what it computed in another way.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.launcher import Launcher, Result
from tests.training.checkpoint.test_malicious import sign
from training.data.indexed import IndexedWriter

LATER = pytest.mark.prove
FLAGS = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 24 --num-attention-heads 4 --seq-length 16
    --vocab-size 200 --tokenizer-type NullTokenizer --split 8,1,1 --num-workers 0 --device cpu
    --fp64 --global-batch-size 8 --micro-batch-size 1 --lr 1e-2 --log-interval 1 --no-shared-memory
    --num-experts 8 --moe-router-topk 2 --moe-per-layer-logging
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01
"""
MASK = "--eod-mask-loss"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
PP2, EP2 = "--pipeline-model-parallel-size 2", "--expert-model-parallel-size 2"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 9 tokens and their end (199): ranks and micro-batches have uneven masks."""
    path, chance = tmp_path_factory.mktemp("data") / "text", np.random.default_rng(0)
    with IndexedWriter(str(path), np.dtype(np.uint16)) as out:
        for length in chance.integers(1, 10, 400):
            out.add(np.append(chance.integers(0, 199, length), 199).astype(np.uint16))
    return path


def train(launcher: Launcher, data: Path, ranks: int, more: str, folder: Path | None = None):
    words = f"{FLAGS} --data-path {data} {more}".split()
    result = launcher.run(ranks, words, folder)
    assert result.codes == [0] * ranks, [result.said(rank) for rank in range(ranks)]
    return result


def first(result: Result) -> dict[str, float]:
    return next(row for row in result.rows() if row.get("iteration") == 1 and "grad_norm" in row)


@pytest.fixture(scope="module")
def plain(launcher: Launcher, data: Path) -> dict[str, float]:
    """The first step of a run without a mask."""
    return first(train(launcher, data, 1, "--train-iters 1"))


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (2, f"{EP2} --zero-stage 2"),
        pytest.param(
            1,
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            marks=LATER,
        ),
        pytest.param(2, PP2, marks=LATER),
        pytest.param(2, f"{TP2} {EP2}", marks=LATER),
        pytest.param(2, "--context-parallel-size 2", marks=LATER),
        pytest.param(4, f"{PP2} {EP2} --pipeline-schedule zb-v --num-layers 4", marks=LATER),
        pytest.param(4, f"--context-parallel-size 2 {EP2} --zero-stage 3", marks=LATER),
    ],
)
def test_the_routers_losses_do_not_depend_on_the_mask(
    launcher: Launcher, data: Path, plain: dict[str, float], ranks: int, more: str
) -> None:
    if "--num-layers" in more:  # another model
        plain = first(train(launcher, data, 1, "--train-iters 1 --num-layers 4"))
    masked = first(train(launcher, data, ranks, f"--train-iters 1 {MASK} {more}"))
    assert masked["auxiliary_loss"] == pytest.approx(plain["auxiliary_loss"], rel=1e-12)
    layers = [key for key in plain if key.endswith("/router_loss")]
    for key in layers:
        assert masked[key] == pytest.approx(plain[key], rel=1e-12)
    assert sum(masked[key] for key in layers) == pytest.approx(masked["auxiliary_loss"], rel=1e-9)
    assert abs(masked["loss"] - plain["loss"]) > 1e-4  # that one depends on it


def told(result: Result) -> list[str]:
    return [line for line in result.said(0, "out").splitlines() if "older version" in line]


GROUPS = "--moe-router-num-groups 4 --moe-router-group-topk 2"
BIAS = "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
LAGGED = "--moe-router-load-balancing-type lagged_global_aux_loss"
NO_LOSS = "--moe-aux-loss-coeff 0 --moe-z-loss-coeff 0"
COUNTS = "balance losses count each token's best scores, no longer limited by {}"
MASKS = "--eod-mask-loss no longer multiplies the router's losses"


@pytest.mark.prove
@pytest.mark.parametrize(
    ("more", "what"),
    [
        (f"{GROUPS} {MASK}", [COUNTS.format("--moe-router-num-groups"), MASKS]),
        (GROUPS, [COUNTS.format("--moe-router-num-groups")]),
        (MASK, [MASKS]),
        (f"{BIAS} {LAGGED}", [COUNTS.format("--moe-router-enable-expert-bias")]),
        (f"{GROUPS} {MASK} {NO_LOSS}", []),
        (BIAS, []),
    ],
)
def test_a_run_that_an_older_version_began_says_what_changed(
    launcher: Launcher, data: Path, more: str, what: list[str]
) -> None:
    """In one line, at its first resume; a run of this version says nothing."""
    save = "--save {dir}/saved --load {dir}/saved"
    begun = train(launcher, data, 1, f"{more} {save} --train-iters 1")
    again = train(launcher, data, 1, f"{more} {save} --train-iters 2", begun.folder)
    assert not told(begun) and not told(again)
    directory = begun.folder / "saved" / "step_00000002"
    state = json.loads((directory / "state.json").read_text())
    state.pop("numerics", None)
    (directory / "state.json").write_text(json.dumps(state))
    sign(directory)
    older = train(launcher, data, 1, f"{more} {save} --train-iters 3", begun.folder)
    lines = told(older)
    assert len(lines) == bool(what) and all(each in lines[0] for each in what)
    assert not told(train(launcher, data, 1, f"{more} {save} --train-iters 4", begun.folder))
