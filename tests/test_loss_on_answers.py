# SPDX-License-Identifier: Apache-2.0
"""Runs whose loss is on answers alone are a plain loop over transformers' Llama, labels of -100.

The tokens come from JSON lines by tools/preprocess_data.py --loss-on answer. Prompts have other
tokens than answers, so the loop knows from a token alone whether it counts.
"""

import json
import random
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_llama
from model.llama import hf_config, hf_names
from mpu.grid import Grid
from tests.launcher import Launcher, Result
from tests.saved import tensors
from tools.preprocess_data import preprocess
from training.data.build import build_datasets
from training.data.tokenizer import NullTokenizer
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse

LATER = pytest.mark.prove
STEPS, SIZE, ANSWERS, EOD = 3, 8, 60, 98  # ids from ANSWERS on are of answers; EOD ends a document
LR, DECAY, BETAS, EPS, CLIP = 1e-2, 0.1, (0.9, 0.95), 1e-8, 0.1
MODEL = f"""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 16 --vocab-size {EOD + 1}
    --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights --init-method-std 0.1
    --norm-epsilon 1e-5 --tokenizer-type NullTokenizer --split 3,1,0 --num-workers 0 --device cpu
    --fp64 --global-batch-size {SIZE} --train-iters {STEPS} --lr {LR} --lr-decay-style constant
    --weight-decay {DECAY} --adam-beta1 {BETAS[0]} --adam-beta2 {BETAS[1]} --adam-eps {EPS}
    --clip-grad {CLIP} --log-interval 1 --eval-interval {STEPS} --eval-iters 2
"""
FREQUENCIES = 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)  # of a head of 8
KINDS = ((False, False), (True, False), (False, True))  # documents, --eod-mask-loss
DOCUMENTS = "--reset-position-ids --reset-attention-mask"
TP2, CP2, PP2 = (
    f"--{axis}-parallel-size 2" for axis in ("tensor-model", "context", "pipeline-model")
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a pair and its mask. Some prompts are longer than a sample, in which nothing counts."""
    folder, draw = tmp_path_factory.mktemp("answers"), random.Random(7)
    with open(folder / "a.jsonl", "w") as file:
        for _ in range(60):
            prompt = [draw.randrange(ANSWERS) for _ in range(draw.choice((1, 3, 9, 40)))]
            answer = [draw.randrange(ANSWERS, EOD) for _ in range(draw.randint(1, 8))]
            row = {"prompt": prompt, "answer": answer}
            file.write(json.dumps({k: " ".join(map(str, v)) for k, v in row.items()}) + "\n")
    return tokens(folder, "answer")


def tokens(folder: Path, loss_on: str) -> str:
    """Make the pair of a folder's a.jsonl, with the mask of a key; return its prefix."""
    (made,) = preprocess(
        [str(folder / "a.jsonl")], str(folder / "tokens"), "NullTokenizer", vocab_size=EOD + 1,
        json_keys=["prompt", "answer"], loss_on=[loss_on], append_eod=True,
    )  # fmt: skip
    return made.prefix


def transformers_llama(data: str) -> Any:
    """Return LlamaForCausalLM with the weights that a run begins with, computing all in fp64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = parse(shlex.split(f"{MODEL} --data-path {data}"), 1)
    ours = pretrain_llama.build(config, Grid(), torch.device("cpu"), FailureMonitor()).model
    sizes = LlamaConfig(**hf_config(ours.config), attn_implementation="sdpa")
    theirs = LlamaForCausalLM(sizes).double()
    names, weights = hf_names(ours), dict[str, torch.Tensor]()
    for name, param in ours.named_parameters():
        sections = param.detach().split(list(param.placement.sections) or [len(param)])
        weights |= {n: part.clone() for n, part in zip(names[name], sections, strict=True)}
    theirs.load_state_dict(weights)
    return theirs


def rotary(
    layer: Any, x: torch.Tensor, position_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    angles = (position_ids[..., None] * FREQUENCIES).repeat(1, 1, 2)
    return angles.cos(), angles.sin()


def rms_norm(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, layer.weight.shape, layer.weight, layer.variance_epsilon)


def mean_loss(theirs: Any, rows: torch.Tensor, documents: bool, eod_mask: bool) -> torch.Tensor:
    """Return transformers' loss of samples [b, s + 1], on request of each document for itself."""
    labels = rows.where(rows >= ANSWERS, -100)
    if eod_mask:
        labels[:, 1:][rows[:, :-1] == EOD] = -100
    if not documents:
        return theirs(rows, labels=labels).loss
    total, count = torch.zeros(()).double(), 0
    for row, label in zip(rows, labels, strict=True):
        ends = [0, *(i + 1 for i in range(len(row)) if row[i] == EOD), len(row)]
        for first, last in zip(ends, ends[1:], strict=False):
            if counted := int((label[first + 1 : last] >= 0).sum()):
                part = theirs(row[None, first:last], labels=label[None, first:last]).loss
                total, count = total + part * counted, count + counted
    return total / count


@pytest.fixture(scope="module")
def by_transformers(data: str) -> Any:
    """Return what `train` does, for each of KINDS."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

    with pytest.MonkeyPatch.context() as patches:  # they compute these in fp32
        patches.setattr(torch.Tensor, "float", torch.Tensor.double)
        patches.setattr(LlamaRMSNorm, "forward", rms_norm)
        patches.setattr(LlamaRotaryEmbedding, "forward", rotary)
        return {kind: train(transformers_llama(data), data, *kind) for kind in KINDS}


def train(theirs: Any, data: str, documents: bool, eod_mask: bool) -> tuple[Any, float, Any]:
    """Train transformers' model; return loss and norm of each step, held-out loss and weights."""
    parameters = list(theirs.parameters())
    config = parse(shlex.split(f"{MODEL} --data-path {data}"), 1)
    splits = build_datasets(config, NullTokenizer(EOD + 1), lambda line: None)
    kinds = [[p for p in parameters if (p.dim() > 1) == matrix] for matrix in (True, False)]
    groups = [{"params": kinds[0], "weight_decay": DECAY}, {"params": kinds[1]}]
    adam = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0)

    def rows_of(split: str, step: int) -> torch.Tensor:
        samples = range(step * SIZE, (step + 1) * SIZE)
        return torch.stack([torch.from_numpy(splits[split].sample(i)) for i in samples])

    steps = []
    for step in range(STEPS):
        rows = rows_of("train", step)
        assert 0 < (rows >= ANSWERS).sum() < SIZE * 8
        assert any(row.max() < ANSWERS for row in rows)  # a micro-batch without a token that counts
        loss = mean_loss(theirs, rows, documents, eod_mask)
        adam.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        adam.step()
        steps.append((loss.item(), norm.item()))
    held_out = torch.cat([rows_of("valid", step) for step in range(2)])
    with torch.no_grad():
        loss = mean_loss(theirs, held_out, documents, eod_mask)
    return steps, loss.item(), {name: p.detach() for name, p in theirs.named_parameters()}


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        pytest.param(1, "--micro-batch-size 1", marks=LATER),
        pytest.param(2, f"{CP2} {DOCUMENTS} --micro-batch-size 2", marks=LATER),
        (4, f"{TP2} --sequence-parallel {PP2} --micro-batch-size 1 --eod-mask-loss"),
        pytest.param(1, "--micro-batch-size 8", marks=LATER),
        pytest.param(1, f"{DOCUMENTS} --micro-batch-size 4", marks=LATER),
        pytest.param(1, "--eod-mask-loss --micro-batch-size 2", marks=LATER),
        pytest.param(2, "--micro-batch-size 1 --zero-stage 3 --overlap-param-gather", marks=LATER),
        pytest.param(2, f"{TP2} --micro-batch-size 4", marks=LATER),
        pytest.param(2, f"{TP2} --sequence-parallel {DOCUMENTS}", marks=LATER),
        pytest.param(2, f"{PP2} --pipeline-schedule zb-v --micro-batch-size 2", marks=LATER),
        pytest.param(2, f"{CP2} --cp-comm-type p2p", marks=LATER),
        pytest.param(2, "--fused-linear-cross-entropy --micro-batch-size 2", marks=LATER),
        pytest.param(2, "--recompute-granularity full --micro-batch-size 2", marks=LATER),
        pytest.param(4, f"{TP2} {CP2} --zero-stage 1 {DOCUMENTS}", marks=LATER),
        pytest.param(4, f"{PP2} --zero-stage 2 --micro-batch-size 2", marks=LATER),
        pytest.param(4, "--zero-stage 2 --micro-batch-size 2", marks=LATER),
    ],
)
def test_a_run_is_a_loop_over_transformers(
    launcher: Launcher, data: str, by_transformers: Any, ranks: int, more: str
) -> None:
    argv = shlex.split(f"{MODEL} --data-path {data} --save {{dir}}/saved {more}")
    result = launcher.run(ranks, argv)
    assert result.codes == [0] * ranks, [result.said(rank) for rank in range(ranks)]
    said = result.said(0, "out")
    assert f"the loss counts a part of the tokens of {data}" in said
    steps, held_out, weights = by_transformers[DOCUMENTS in more, "--eod-mask-loss" in more]
    check(result, steps, held_out)
    saved = tensors(result.folder / "saved", STEPS)
    for name, wanted in weights.items():
        torch.testing.assert_close(saved[name], wanted, rtol=0, atol=1e-10 * float(wanted.norm()))


def check(result: Result, steps: list[tuple[float, float]], held_out: float) -> None:
    rows = [row for row in result.rows() if "grad_norm" in row]
    assert len(rows) == len(steps)
    for row, (loss, norm) in zip(rows, steps, strict=True):
        assert row["loss"] == pytest.approx(loss, rel=1e-12)
        assert row["grad_norm"] == pytest.approx(norm, rel=1e-12)
    (found,) = {row["validation_loss"] for row in result.rows() if "validation_loss" in row}
    assert found == pytest.approx(held_out, rel=1e-11)


@LATER
def test_a_resume_with_another_mask_is_refused(
    launcher: Launcher, data: str, tmp_path: Path
) -> None:
    """Also where the tokens are the same, byte for byte; --allow-change data goes on."""
    shutil.copy(Path(data).parent / "a.jsonl", tmp_path)
    words = f"{MODEL} --data-path {tokens(tmp_path, 'answer')} --save {{dir}}/saved"
    result = launcher.run(1, shlex.split(words))
    assert result.codes == [0], result.said(0)
    before = Path(f"{data}.bin").read_bytes()
    assert Path(f"{tokens(tmp_path, 'prompt')}.bin").read_bytes() == before
    words += " --load {dir}/saved --train-iters 4"
    refused = launcher.run(1, shlex.split(words), result.folder)
    assert refused.codes[0] and "was made with other data" in refused.said(0)
    changed = launcher.run(1, shlex.split(f"{words} --allow-change data"), result.folder)
    assert changed.codes == [0], changed.said(0)
