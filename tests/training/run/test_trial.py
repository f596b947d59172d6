# SPDX-License-Identifier: Apache-2.0
"""Trial calls: each kind of kernel that a run will use is called at start; a failure is said."""

import json

import pytest
import torch
import torch.nn.functional as F

import pretrain_llama
from mpu.kernels import available
from mpu.layers import experts, linear_cross_entropy
from mpu.layers.attention import max_logits
from mpu.layers.float8.recipe import Float8
from training.flags.parse import parse
from training.run import same_settings, start, trial
from training.run.trial import agreed, trials, try_calls
from training.settings.config import UsageError

FLAGS = """--num-layers 2 --hidden-size 256 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --seq-length 512 --lr 1e-3 --train-iters 1 --mock-data --vocab-size 1000
    --global-batch-size 8"""
MOE = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 176"
CAPACITY = "--moe-expert-capacity-factor 1.0"
EP = "--expert-model-parallel-size 4 --moe-token-dispatcher-type"
FLOAT8 = "--fp8-format hybrid --fp8-recipe"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def read(more="", world=1):
    return parse(f"{FLAGS} --device cpu {more}".split(), world)


@pytest.mark.parametrize(
    ("more", "world", "count"),
    [
        ("", 1, 8),
        ("--bf16 --reset-attention-mask", 1, 8),
        ("--bf16 --context-parallel-size 2 --cp-comm-type a2a", 2, 8),
        ("--bf16 --context-parallel-size 2 --reset-attention-mask", 2, 8),
        ("--bf16 --fp8-format hybrid --fp8-recipe rowwise", 1, 11),
        ("--bf16 --main-grads-dtype bf16 --zero-stage 1", 1, 8),
        ("--bf16 --context-parallel-size 2 --qk-clip --fused-linear-cross-entropy", 2, 10),
        (f"--bf16 {MOE}", 1, 11),
        (f"--bf16 {MOE} {CAPACITY} --moe-pad-expert-input-to-capacity {EP} alltoall", 4, 11),
        ("--bf16 --optimizer muon", 1, 9),
        (f"--bf16 --zero-stage 1 {FLOAT8} blockwise", 1, 12),
    ],
)
def test_the_calls_of_a_run(more, world, count):
    """They are the layers' own code: on a CPU it runs through, for every kind."""
    notes = []
    try_calls(read(more, world), CPU, notes.append)
    assert notes[0].startswith(f"trial calls: {count} on cpu, in ")


def raising(sentence):
    def call(*args, **kwargs):
        raise RuntimeError(f"{sentence}\nException raised from somewhere")

    return call


@pytest.mark.parametrize(
    ("owner", "name", "more", "words"),
    [
        # aten/src/ATen/native/cuda/ScaledBlas.cpp, of cards without such a kernel
        (Float8, "accumulate", "--bf16 --fp8-format hybrid --fp8-recipe rowwise",
         ("the matmul of --fp8-recipe rowwise of the weight's gradient (wgrad), added in float32",
          "Only bf16", "use --fp8-wgrad-bf16")),
        (Float8, "product", "--bf16 --fp8-format e4m3 --fp8-recipe blockwise",
         ("the forward matmul of --fp8-recipe blockwise", "omit --fp8-format")),
        (F, "scaled_dot_product_attention", "--bf16",
         ("attention of rows by --attention-backend auto, heads of 64 in bfloat16",
          "try --attention-backend unfused")),
        (trial, "swiglu", "", ("SwiGLU",)),
        (experts, "grouped_product", f"--bf16 {MOE}",
         ("the grouped matmul of experts, [n, 256] x [256, 176] in bfloat16",
          "without --bf16 each expert has its own matmul")),
        (torch, "sort", f"--bf16 {MOE}", ("the router of --moe-router-score-function softmax",)),
        (max_logits, "_products", "--bf16 --log-max-attention-logit",
         ("the largest attention logit of --log-max-attention-logit, heads of 64 in bfloat16",
          "omit --log-max-attention-logit")),
        (linear_cross_entropy, "softmax_stats", "--bf16 --fused-linear-cross-entropy",
         ("the loss of --fused-linear-cross-entropy", "omit --fused-linear-cross-entropy")),
    ],
)  # fmt: skip
def test_a_failure_is_the_librarys_sentence_and_what_avoids_it(
    monkeypatch, owner, name, more, words
):
    from mpu.layers.attention import core

    monkeypatch.setattr(core, "takes_native", lambda *qkv: False)
    monkeypatch.setattr(owner, name, raising("Only bf16 high precision output types"))
    world = 4 if EP in more else 2 if "--context" in more else 1
    with pytest.raises(UsageError) as refused:
        try_calls(read(more, world), CPU, print)
    said = str(refused.value)
    assert all(word in said for word in words), said
    assert "fails on cpu: RuntimeError: Only bf16 high precision output types; " in said
    assert "\n" not in said


def test_what_avoids_a_kernel_of_triton(monkeypatch):
    """On CUDA, where Triton runs: without it the same is done by torch. Nothing is called here."""
    monkeypatch.setattr(available, "why_not", lambda: "")
    told = {t.what: t.avoid for t in trials(read("--bf16 --qk-clip"), CUDA)}
    assert "pip uninstall triton" in told["SwiGLU"] and "pip uninstall" in told["the cross entropy"]
    (avoid,) = (told[what] for what in told if "--qk-clip" in what)
    assert avoid.startswith("omit --qk-clip; ") and "pip uninstall triton" in avoid
    config = parse(
        f"{FLAGS} --dry-run --bf16 --norm-backend te --optimizer-backend te".split(), 1
    )
    told = {t.what: t.avoid for t in trials(config, CUDA)}
    assert told["the norm of --norm-backend te"] == "use --norm-backend weft"
    assert told["the update of --optimizer-backend te"] == "use --optimizer-backend torch"


def test_a_run_makes_them_before_it_meets_other_ranks(monkeypatch, capsys):
    def fails(config, device, note):
        assert config.model.vocab_size == 1000 and device == CUDA
        raise UsageError("attention of rows fails on cuda")

    monkeypatch.setattr(start, "choose_device", lambda *about: CUDA)
    monkeypatch.setattr(start, "prepare_attention", lambda *about: None)
    monkeypatch.setattr(start, "try_calls", fails)
    monkeypatch.setattr(start, "build_loaders", lambda *about: pytest.fail("data is read"))
    assert pretrain_llama.main(f"{FLAGS} --device cpu".split()) == 2
    assert capsys.readouterr().err == "pretrain_llama.py: attention of rows fails on cuda\n"


def test_ranks_that_differ_in_triton_are_named(monkeypatch):
    """Else one node would compute by other kernels, slowly, and only rank 0 has a log."""
    assert agreed(CPU) == {}
    monkeypatch.setattr(available, "why_not", lambda: "")
    mine = agreed(CUDA)
    monkeypatch.setattr(available, "why_not", lambda: "Triton cannot launch a kernel (no gcc)")
    said = same_settings.difference(json.dumps(mine), json.dumps(agreed(CUDA)), 9)
    assert said == (
        "Triton's error is '' on rank 0 and 'Triton cannot launch a kernel (no "
        "gcc)' on rank 9: all ranks need the same value"
    )
