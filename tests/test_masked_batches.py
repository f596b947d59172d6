# SPDX-License-Identifier: Apache-2.0
"""A global batch in which no token counts has loss 0 and gradients 0, and the update still runs.

That is Megatron's rule: the count that divides is at least 1 (finalize_model_grads). A run of two
ordinary steps goes on where documents hold nothing but their end, under --eod-mask-loss, and a line
says so. Data that have no other token at all are refused before the first step.
"""

from math import sqrt
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.launcher import Launcher
from tests.saved import tensors
from training.data.build import build_datasets
from training.data.indexed import IndexedWriter
from training.flags.parse import parse

LATER = pytest.mark.prove
LR, DECAY, BETAS, EPS = 1e-2, 0.1, (0.9, 0.95), 1e-8
FLAGS = f"""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 200
    --tokenizer-type NullTokenizer --eod-mask-loss --split 8,1,1 --num-workers 0 --device cpu
    --micro-batch-size 1 --global-batch-size 4 --lr {LR} --lr-decay-style constant
    --weight-decay {DECAY} --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]}
    --log-interval 1 --eval-interval 2 --eval-iters 1 --save {{dir}}/saved
"""
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"


READ = {"train": range(8, 16), "valid": range(4), "test": range(4)}  # samples after two steps


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora: one of documents as they are, and one of ends of documents (199) but for a token
    of each split that no sample of READ holds.
    """
    folder = tmp_path_factory.mktemp("data")
    numbers = np.random.default_rng(0).integers(0, 199, (64, 20))
    places = np.arange(numbers.size).reshape(numbers.shape)  # the order depends on lengths alone

    def write(name: str, rows: np.ndarray) -> str:
        with IndexedWriter(str(folder / name), np.dtype(np.uint16)) as out:
            for row in rows:
                out.add(row.astype(np.uint16))
        return str(folder / name)

    write("plain", numbers)
    words = f"{FLAGS} --train-iters 4 --data-path {write('places', places)}"
    tokenizer = SimpleNamespace(vocab_size=2000, eod=1999)
    splits = build_datasets(parse(words.replace("{dir}", str(folder)).split(), 1), tokenizer)
    masked = np.full_like(numbers, 199)
    for name, samples in READ.items():
        seen = {int(token) for i in samples for token in splits[name].sample(i)}
        all_of = {int(token) for i in range(100) for token in splits[name].sample(i)}
        masked.flat[min(all_of - seen)] = 0
    write("masked", masked)
    return folder


@pytest.mark.prove
@pytest.mark.parametrize(
    "ranks, more",
    [
        (1, ""),
        (2, "--zero-stage 3"),
        pytest.param(2, "", marks=LATER),
        pytest.param(2, "--zero-stage 1 --overlap-grad-reduce", marks=LATER),
        pytest.param(2, "--zero-stage 2 --bf16", marks=LATER),
        pytest.param(2, TP2, marks=LATER),
        pytest.param(2, f"{TP2} --sequence-parallel", marks=LATER),
        pytest.param(2, PP2, marks=LATER),
        pytest.param(4, f"{PP2} --zero-stage 3 --pipeline-schedule zb-v", marks=LATER),
        pytest.param(4, f"{TP2} --sequence-parallel --zero-stage 2 --clip-grad 0", marks=LATER),
        pytest.param(4, f"{TP2} --sequence-parallel {PP2}", marks=LATER),
    ],
)
def test_no_token_counts(launcher: Launcher, data: Path, ranks: int, more: str) -> None:
    def train(corpus: str, steps: int, load: str = "", folder: Path | None = None):
        words = f"{FLAGS} {more} --data-path {data / corpus} --train-iters {steps} {load}"
        result = launcher.run(ranks, words.split(), folder)
        assert result.codes == [0] * ranks, [result.said(rank) for rank in range(ranks)]
        return result

    plain = train("plain", 2)
    masked = train("masked", 4, "--load {dir}/saved --allow-change data", plain.folder)
    said = masked.said(0, "out")
    for samples in ("8 to 11", "12 to 15", "0 to 3"):
        assert f"--eod-mask-loss leaves no token of samples {samples} in the loss" in said
    rows = masked.rows()
    steps = {row["iteration"]: row for row in rows if "grad_norm" in row}
    assert steps[1]["grad_norm"] > 0 and steps[2]["loss"] > 1
    for step in (3, 4):
        assert steps[step]["loss"] == steps[step]["grad_norm"] == 0.0
    kinds = {row["iteration"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    assert kinds[2] > 1 and kinds[4] is None  # the mean of no token
    assert [row["test_loss"] for row in rows if "test_loss" in row][-1] is None

    before, after = (tensors(plain.folder / "saved", step) for step in (2, 4))
    weights = [name for name in before if f"{name}.exp_avg" in before]
    assert len(weights) > 10
    for name in weights:
        master = f"{name}.master" if f"{name}.master" in before else name
        p, m, v = (
            before[key].double() for key in (master, f"{name}.exp_avg", f"{name}.exp_avg_sq")
        )
        for t in (3, 4):  # AdamW of a zero gradient
            m, v = m * BETAS[0], v * BETAS[1]
            p = p * (1 - LR * DECAY * (p.dim() > 1))
            root = v.sqrt() / sqrt(1 - BETAS[1] ** t) + EPS
            p = p - LR / (1 - BETAS[0] ** t) * m / root
        torch.testing.assert_close(after[master].double(), p, rtol=1e-5, atol=1e-8)
        for key, wanted in ((f"{name}.exp_avg", m), (f"{name}.exp_avg_sq", v)):
            torch.testing.assert_close(after[key].double(), wanted, rtol=1e-5, atol=1e-30)
        assert not torch.equal(before[master], after[master]), name
