# SPDX-License-Identifier: Apache-2.0
"""An operation that fails in the first step: the traceback ends with the flag that may avoid it."""

import json

import pytest
import torch
import torch.nn.functional as F

import pretrain_llama
from mpu.kernels import available
from mpu.layers import experts, linear_cross_entropy
from mpu.layers.attention import core, max_logits
from mpu.layers.float8.recipe import Float8
from mpu.layers.linear import Recipe
from mpu.optim import muon
from training.run import hints, same_settings
from training.run.device import agreed

FLAGS = """--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --lr 1e-3
    --micro-batch-size 1 --global-batch-size 1 --train-iters 2 --mock-data --vocab-size 96 --bf16
    --device cpu --distributed-backend gloo --log-interval 9"""
MOE = "--model-file model/moe.py --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16"
FLOAT8 = "--fp8-format e4m3 --fp8-recipe rowwise"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("owner", "name", "more", "hint"),
    [
        (F, "scaled_dot_product_attention", "", "--attention-backend unfused"),
        (max_logits, "_products", "--log-max-attention-logit", "no --log-max-attention-logit"),
        (Recipe, "accumulate", "", "--main-grads-dtype bf16"),
        (Float8, "accumulate", FLOAT8, "--fp8-wgrad-bf16, or no --fp8-format"),
        (Float8, "product", FLOAT8, "another --fp8-recipe, or no --fp8-format"),
        (experts, "grouped_product", MOE, "--hidden-size and --moe-ffn-hidden-size in multiples"),
        (linear_cross_entropy, "softmax_stats", "--fused-linear-cross-entropy",
         "no --fused-linear-cross-entropy"),
        (muon, "orthogonalise", "--optimizer muon", "--optimizer adam"),
    ],
)  # fmt: skip
def test_the_traceback_ends_with_what_avoids_it(monkeypatch, owner, name, more, hint):
    def fails(*args, **kwargs):
        raise RuntimeError("no kernel image is available for execution on the device")

    if code := getattr(getattr(owner, name), "__code__", None):  # it fails in itself
        there = {"co_name": name, "co_filename": code.co_filename}
        fails.__code__ = fails.__code__.replace(**there)
    monkeypatch.setattr(hints, "DEVICES", ("cpu",))
    monkeypatch.setattr(core, "takes_native", lambda *qkv: False)
    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(RuntimeError, match="no kernel image") as error:
        pretrain_llama.main(f"{FLAGS} {more}".split())
    (note,) = error.value.__notes__
    assert note.startswith(f"If a library has no kernel for this GPU or dtype, try {hint}")


@pytest.mark.parametrize(
    ("device", "step", "message"),
    [
        ("cpu", 1, "CUDA error: an illegal memory access"),  # of a kernel that was launched before
        ("cpu", 2, "a mistake"),
        ("cuda", 1, "a mistake of the model, as it runs on a CPU"),
    ],
)
def test_other_errors_get_none(monkeypatch, device, step, message):
    monkeypatch.setattr(hints, "DEVICES", (device,))
    seen, attention = [], core.CoreAttention.__call__

    def fails(*args, **kwargs):
        seen.append(1)
        if len(seen) == step:
            raise RuntimeError(message)
        return attention(*args, **kwargs)

    monkeypatch.setattr(core.CoreAttention, "__call__", fails)
    with pytest.raises(RuntimeError) as error:
        pretrain_llama.main(FLAGS.split())
    assert len(seen) == step and not hasattr(error.value, "__notes__")


def test_ranks_that_differ_in_triton_are_named(monkeypatch):
    """Else one node would compute by other kernels, slowly, and only rank 0 has a log."""
    assert agreed(CPU) == {}
    monkeypatch.setattr(available, "why_not", lambda: "")
    mine = agreed(CUDA)
    monkeypatch.setattr(available, "why_not", lambda: "Triton launches no kernel here (no gcc)")
    said = same_settings.difference(json.dumps(mine), json.dumps(agreed(CUDA)), 9)
    assert said == (
        "what keeps Triton from running is '' on rank 0 and 'Triton launches no kernel here (no "
        "gcc)' on rank 9: all ranks need the same value"
    )
