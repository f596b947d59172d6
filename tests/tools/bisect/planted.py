# SPDX-License-Identifier: Apache-2.0
"""Differences planted in one of two runs: which step and which operation does bisect name?

    python tests/tools/bisect/planted.py                 all of them, a row each
    python tests/tools/bisect/planted.py "flip" "lr"     those whose names have one of these words
    python tests/tools/bisect/planted.py held-out        HELD_OUT, of other places and models
    python tests/tools/bisect/planted.py further         FURTHER, of other kinds

Each has the step at which it first shows, and a text that the sentence must have: the module, the
tensor or the number where it was planted. EQUAL are pairs in which nothing may be named.
"""

import json
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

BASE = """
    --num-layers 4 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --seq-length 16
    --group-query-attention --num-query-groups 2 --vocab-size 64 --make-vocab-size-divisible-by 8
    --untie-embeddings-and-output-weights --mock-data --num-workers 0 --train-iters 6 --lr 1e-2
    --min-lr 1e-3 --lr-decay-style cosine --device cpu --global-batch-size 8 --micro-batch-size 2
    --weight-decay 0.1 --clip-grad 1.0
"""
TP, SP = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel"
PP, CP = "--pipeline-model-parallel-size 2", "--context-parallel-size 2"
FP64 = "--fp64"
SCRIPT = Path(__file__).resolve().parent / "plant.py"


class Planted(NamedTuple):
    """A difference. base: flags of both sides; more: flags of B alone; edit: of a file of B's tree.

    step: the first that differs. says: what the sentence must have, a regular expression. ranks: of
    both sides, or of A and of B.
    """

    kind: str
    step: int
    says: str
    base: str = ""
    more: str = ""
    plant: dict[str, Any] = {}
    ranks: tuple[int, int] = (1, 1)
    edit: tuple[str, str, str] = ("", "", "")


def _weight(name: str, step: int, bit: int, says: str, **more: Any) -> Planted:
    plant = {"what": "flip weight", "name": name, "step": step, "element": 7, "bit": bit}
    return Planted("flipped bit", step, says, plant=plant, **more)


def _module(name: str, step: int, how: str, says: str = "", **more: Any) -> Planted:
    own = {k: more.pop(k) for k in ("factor", "p") if k in more}
    plant = {"what": "module", "name": name, "step": step, "how": how, **own}
    kind = {"dropout": "dropout", "round": "rounding"}.get(how, "function")
    return Planted(kind, step, says or re.escape(f"the output of {name} ("), plant=plant, **more)


def _order(name: str, step: int, **more: Any) -> Planted:
    plant = {"what": "order", "name": name, "step": step}
    says = re.escape(name) + " .*operations in another order"
    return Planted("order of operations", step, says, plant=plant, **more)


def _sum(axis: str, verb: str, call: int, how: str, says: str, base: str, ranks: int) -> Planted:
    plant = {"what": "collective", "axis": axis, "verb": verb, "call": call, "how": how, "step": 3}
    return Planted("axis of a sum", 3, says, base, plant=plant, ranks=(ranks, ranks))


def _gradients(name: str, how: str, axes: list[str], says: str, base: str, ranks: int) -> Planted:
    plant = {"what": "gradient sum", "name": name, "how": how, "axes": axes, "step": 2}
    return Planted("axis of a sum", 2, says, base, plant=plant, ranks=(ranks, ranks))


def _loaded(name: str, how: str, says: str, **more: Any) -> Planted:
    plant = {"what": "loaded", "name": name, "how": how, "factor": 1.5}
    return Planted("loaded tensor", 1, says, plant=plant, **more)


def _flag(flag: str, step: int, says: str, **more: Any) -> Planted:
    return Planted(more.pop("kind", "flag"), step, says, more=flag, **more)


def _edit(file: str, old: str, new: str, step: int, says: str, **more: Any) -> Planted:
    return Planted("commit", step, says, edit=(file, old, new), **more)


TABLE = r"the input of layers\.0 \(Block\)|attention\.proj"  # of the rotation
BOTH = {"base": TP, "ranks": (2, 2)}
PLANTED: dict[str, Planted] = {
    # bits: of a weight, a moment, a gradient, the batch
    "flip weight, top": _weight("layers.2.mlp.down.weight", 4, 30, r"layers\.2\.mlp\.down"),
    "flip weight, low": _weight("layers.0.attention.qkv.weight", 2, 3, r"self_attn\.q_proj"),
    "flip weight, norm": _weight("layers.1.mlp_norm.weight", 5, 20, "post_attention_layernorm",
                                 base=PP, ranks=(2, 2)),
    "flip weight, tp": _weight("layers.3.attention.proj.weight", 3, 25, r"self_attn\.o_proj",
                               **BOTH),
    "flip weight, ZeRO 3": _weight("head.weight", 3, 22, "lm_head", base="--zero-stage 3",
                                   ranks=(2, 2)),
    "flip weight, bf16": _weight("embedding.weight", 2, 12, "embed_tokens", base="--bf16"),
    "flip moment": Planted("flipped bit", 3, "exp_avg_sq .*gate_proj", plant={
        "what": "flip moment", "name": "layers.1.mlp.gate_up.weight", "kind": "exp_avg_sq",
        "element": 5, "bit": 28, "step": 3}),
    "flip gradient": Planted("flipped bit", 4, r"summed gradient of .*layers\.0.*down_proj", plant={
        "what": "change gradient", "name": "layers.0.mlp.down.weight", "step": 4, "element": 11,
        "bit": 29}),
    "flip gradient, dp": Planted("flipped bit", 2, "summed gradient of lm_head", ranks=(2, 2),
                                 plant={"what": "change gradient", "name": "head.weight",
                                        "step": 2, "element": 3, "bit": 24}),
    "flip token": Planted("flipped bit", 5, r"the batch \(tokens\).*samples 38", plant={
        "what": "token", "row": 6, "position": 9, "bit": 2, "step": 5}),
    "flip token, dp": Planted("flipped bit", 3, r"the batch \(tokens\).*samples 18",
                              ranks=(2, 2), plant={"what": "token", "row": 2, "position": 0,
                                                   "bit": 0, "step": 3}),
    # data
    "labels moved": Planted("batch", 3, r"the batch \(labels\)", plant={
        "what": "labels", "row": 1, "step": 3}),
    "a document": Planted("document", 4, r"the batch .*other tokens in samples 27", plant={
        "what": "data", "samples": {"27": 5}}),
    "a document, cp": Planted("document", 2, r"the batch .*other tokens in samples 9", base=CP,
                              ranks=(2, 2), plant={"what": "data", "samples": {"9": 30}}),
    "two samples exchanged": Planted("data order", 2,
                                     "same samples in another order, samples 8 and 15",
                                     plant={"what": "data", "samples": {"8": 15, "15": 8}}),
    "samples exchanged between steps": Planted("data order", 3,
                                               "the batch .*other tokens in samples 16",
                                               plant={"what": "data",
                                                      "samples": {"16": 24, "24": 16}}),
    # flags
    "norm epsilon": _flag("--norm-epsilon 1e-4", 1, r"layers\.0\.attention_norm"),
    "rotary base": _flag("--rotary-base 500", 1, TABLE),
    "clip": _flag("--clip-grad 0.1", 1, "gradient norm|update|exp_avg"),
    "weight decay": _flag("--weight-decay 0.3", 1, "the update, the weight"),
    "beta2": _flag("--adam-beta2 0.9", 1, "exp_avg_sq"),
    "epsilon of Adam": _flag("--adam-eps 1e-3", 1, "the update, the weight"),
    "warm-up": _flag("--lr-warmup-iters 2", 1, "learning rate"),
    "decay style": _flag("--lr-decay-style linear", 2, "learning rate"),
    "init std": _flag("--init-method-std 0.03", 1, "the weight .*before the step.*1.5 times"),
    "rope scaling": _flag("--use-rope-scaling", 1, TABLE),
    "bf16": _flag("--bf16", 1, "rounded to bfloat16|bfloat16", kind="rounding"),
    "gradients in bf16": _flag("--grad-reduce-in-bf16", 1, "summed gradient of", kind="rounding",
                               ranks=(2, 2)),
    "seed": _flag("--seed 99", 1, r"the batch|the weight", kind="seed"),
    "min lr": _flag("--min-lr 1e-4", 1, "learning rate"),
    # learning rate and decay at a step
    "lr at a step": Planted("learning rate", 4, "learning rate.*0.5 times", plant={
        "what": "learning rate", "factor": 0.5, "step": 4}),
    "lr at a step, tp": Planted("learning rate", 2, "learning rate", **BOTH, plant={
        "what": "learning rate", "factor": 1.0001, "step": 2}),
    "decay at a step": Planted("learning rate", 3, "the update, the weight", plant={
        "what": "decay", "factor": 3.0, "step": 3}),
    # one call of one module
    "dropout": _module("layers.1.mlp", 3, "dropout", p=0.1),
    "dropout of attention": _module("layers.0.attention", 2, "dropout", p=0.3),
    "dropout, pp": _module("layers.3.mlp", 2, "dropout", p=0.2, base=PP, ranks=(2, 2)),
    "rounding": _module("layers.2.attention.proj", 3, "round"),
    "rounding, fp64": _module("layers.0.mlp.down", 2, "round", base=FP64),
    "a scale": _module("layers.1.attention.qkv", 2, "scale", factor=1.001),
    "a scale of logits": _module("head", 4, "scale", factor=0.9),
    "tokens moved": _module("embedding", 2, "shift"),
    "noise": _module("layers.3.attention_norm", 5, "noise", factor=1e-3),
    "a gradient lost": _module("layers.2.mlp", 2, "detach", says=r"in backward.*layers\.2\."),
    "a backward scaled": _module("layers.1.attention.proj", 3, "backward", factor=2.0,
                                 says=r"in backward.*layers\.1\.attention\.proj"),
    # order of operations
    "order of a product": _order("layers.2.mlp.down", 3),
    "order of a product, tp": _order("layers.1.attention.proj", 2, **BOTH),
    "order of a product, fp64": _order("head", 2, base=FP64),
    # sums over ranks
    "no sum over tp": _sum("tp", "all_reduce", 3, "left out",
                           r"all_reduce over tp of layers\.0\.mlp\.down", TP, 2),
    "a sum over tp twice": _sum("tp", "all_reduce", 2, "twice",
                                r"layers\.0\.attention\.proj.*2 times", TP, 2),
    "no sum over tp, SP": _sum("tp", "reduce_scatter", 3, "left out", r"layers\.0\.mlp\.down",
                               SP, 2),
    "gradients not over dp": _gradients("layers.1.mlp.down.weight", "only", [],
                                        "in the sum over ranks, the summed gradient of", "", 2),
    "gradients over dp, not cp": _gradients("layers.2.mlp.down.weight", "only", ["dp"],
                                            "in the sum over ranks, the summed gradient of", CP, 4),
    "gradients twice": _gradients("layers.0.mlp.down.weight", "twice", [], "2 times", "", 2),
    # what was loaded
    "a loaded tensor rounded": _loaded("layers.1.mlp.down.weight", "round",
                                       r"layers\.1\.mlp\.down_proj.*rounded to bfloat16"),
    "a loaded tensor zero": _loaded("layers.3.attention.proj.weight", "zero", "o_proj.*zero"),
    "a loaded tensor drawn": _loaded("embedding.weight", "draw", "embed_tokens.* before the step"),
    # stages
    "a block left out": Planted("stage's cut", 1, r"layers\.[12]", PP, ranks=(2, 2),
                                plant={"what": "stage", "layer": "1", "how": "left out"}),
    "two blocks exchanged": Planted("stage's cut", 1, r"layers\.[23]", PP, ranks=(2, 2),
                                    plant={"what": "stage", "layer": "3", "how": "exchanged"}),
    "a message rounded": Planted("stage's cut", 3, "the input of stage 1 of the model.*rounded", PP,
                                 ranks=(2, 2), plant={"what": "message", "step": 3}),
    # commits
    "a commit of the block": _edit("model/llama.py", "return h + self.mlp(x)",
                                   "return h + 1.01 * self.mlp(x)", 1,
                                   r"the output of layers\.0 \(Block\)"),
    "a commit of the loss": _edit("model/llama.py", "return self.loss(h, labels.t()).t()  # [b, s]",
                                  "return (self.loss(h, labels.t()) + 0.1).t()", 1, "the model"),
    "a commit of the MLP, tp": _edit("model/llama.py", "swiglu(x, self.gate_up, self.down)",
                                     "self.down(swiglu(self.gate_up(x).neg()))", 1,
                                     r"the input of layers\.0\.mlp\.down ", **BOTH),
    "a commit of Adam": _edit("mpu/optim/optimizer.py", "self.clip / (norm + 1e-6)",
                              "self.clip / (norm + 1e-2)", 1, "update|exp_avg"),
}  # fmt: skip


EXPERTS = "--num-experts 4 --expert-tensor-parallel-size 1 --tied"
EP = "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall"


def _held(
    kind: str, step: int, says: str, base: str = "", ranks: int = 1, /, **plant: Any
) -> Planted:
    return Planted(kind, step, says, base, plant=plant, ranks=(ranks, ranks))


# Written after the engine was built, and committed before it was run on them: 17 of 27 were right
# the first time. Of the other ten the list was wrong in three ("cp a2a", "experts, a gradient",
# "tied ends"), and one had no effect ("a group of the decay"). Six were the engine's: what comes
# between two steps, an empty tensor of an expert, a mask that one side has alone (two), moments,
# which no digest shows, and a learning rate whose effect is below what two layouts may differ by.
HELD_OUT: dict[str, Planted] = {
    "cp ring, rounded": _held("collective", 3, r"layers\.0\.attention", CP, 2, what="ring", step=3),
    "cp a2a, no exchange": _held(
        "collective", 2, r"all_to_all over cp of layers\.2\.attention",
        CP + " --cp-comm-type a2a", 2, what="collective", axis="cp", verb="all_to_all", call=5,
        how="left out", step=2),
    "ZeRO 3, a gathered weight": _held(
        "rounding", 3, r"the output of layers\.2\.mlp\.down ", "--zero-stage 3", 2,
        what="gathered weight", name="layers.2.mlp.down.weight", step=3),
    "ZeRO 1, a stale weight": _held(
        "loaded tensor", 2, r"a tensor changes between it and the next step.*layers\.1\.mlp\.down",
        "--zero-stage 1", 2, what="stale weight",
        name="layers.1.mlp.down.weight", factor=1.01, step=2, rank=1),
    "pipeline v, a message back": _held(
        "stage's cut", 2, "in backward", PP + " --pipeline-schedule v-half", 2, what="message",
        phase="backward", step=2),
    "experts, weights": _held(
        "experts", 3, r"the output of layers\.1\.mlp \(SparseMLP\)", f"{EXPERTS} {EP}", 2,
        what="experts", name="layers.1.mlp", how="weights", factor=1.01, step=3),
    "experts, the choice": _held(
        "experts", 2, r"layers\.2\.mlp\.experts|the output of layers\.2\.mlp \(SparseMLP\)",
        EXPERTS, 1, what="experts", name="layers.2.mlp", how="choice", step=2),
    "experts, a gradient": _held(
        "experts", 3, r"summed gradient of .*layers\.1\.[\w.]*experts\.\d\.w2.*1/2 of the other",
        f"{EXPERTS} {EP} {SP}", 2, what="change gradient", name="layers.1.mlp.experts.down.weight",
        factor=0.5, step=3),
    "experts, the router": _held(
        "experts", 4, r"the output of layers\.3\.mlp\.router ", f"{EXPERTS} {EP}", 2, what="module",
        name="layers.3.mlp.router", how="scale", factor=1.05, step=4),
    "experts, bias of the gate's bits": _held(
        "flipped bit", 3, r"block_sparse_moe\.gate", EXPERTS, 1, what="flip weight",
        name="layers.2.mlp.router.weight", element=5, bit=22, step=3),
    "a norm of keys": _held(
        "function", 3, r"the output of layers\.1\.attention\.k_norm ", "--qk-layernorm " + TP, 2,
        what="module", name="layers.1.attention.k_norm", how="scale", factor=1.01, step=3),
    "a norm's epsilon": _held(
        "function", 4, r"the output of layers\.2\.mlp_norm ", what="attribute",
        name="layers.2.mlp_norm", field="eps", value=1e-2, step=4),
    "tied ends": _held(
        "axis of a sum", 3, r"embed_tokens.*only on rank 0, of 2", "--tied " + PP, 2,
        what="change gradient", name="embedding.weight", factor=2.0, step=3),
    "a rotation": _held(
        "function", 3, r"the input of layers\.2\.attention\.proj |layers\.2\.attention \(\w+\)",
        TP, 2, what="rotation", layer=2, factor=1.1, step=3),
    "lost momentum": _held(
        "resume", 4, "optimizer's exp_avg of .* before the step.*zero", what="lost state",
        kind="exp_avg"),
    "a bias correction": _held(
        "update", 1, "the update, the weight", what="lost state", count=1),
    "a group of the decay": _edit(
        "model/llama.py", 'return "matrix" if param.dim() > 1 else "vector"', 'return "matrix"', 1,
        r"norm\.weight.* after the step")._replace(kind="update"),
    "a loss mask": _held(
        "batch", 3, r"the batch \(loss_mask\).*samples 18", what="mask", row=2, tokens=4, step=3),
    "a loss mask, dp": _held(
        "batch", 2, r"the batch \(loss_mask\)", "", 2, what="mask", row=5, tokens=1, step=2),
    "fewer micro-batches": _held(
        "count", 3, "the batch|samples", what="fewer micro-batches", step=3),
    "a count of micro-batches": _held(
        "count", 2, r"summed gradient.*0\.8 times", "", 2, what="gradient scale", factor=0.8,
        step=2),
    "betas at a flag": _flag("--adam-beta1 0.8", 1, "exp_avg ")._replace(kind="update"),
    "Adam's root": _edit(
        "mpu/optim/adam.py", "eps=divided(self._rule.eps, group)",
        "eps=divided(self._rule.eps, group) + 1e-3", 1,
        "the update")._replace(kind="update"),
    "a clipped SwiGLU": _edit(
        "model/llama.py", "swiglu(x, self.gate_up, self.down)",
        "self.down(swiglu(self.gate_up(x).clamp(-0.2, 0.2)))", 1,
        r"the input of layers\.0\.mlp\.down "),
    "one rank and tp 2": Planted(
        "function", 3, r"layers\.2\.mlp", "", TP, {"what": "module", "name": "layers.2.mlp",
        "step": 3, "how": "scale", "factor": 1.01}, (1, 2)),
    "one rank and dp 2, cp 2": Planted(
        "rounding", 2, r"layers\.1\.attention\.qkv", "", CP, {"what": "module", "name":
        "layers.1.attention.qkv", "step": 2, "how": "round"}, (1, 4)),
    "tp 2 and pp 2": Planted(
        "learning rate", 4, "learning rate", TP, "--tensor-model-parallel-size 1 " + PP,
        {"what": "learning rate", "factor": 1.001, "step": 4}, (2, 2)),
}  # fmt: skip

# Of kinds that stand in neither list, written before they were run.
FURTHER: dict[str, Planted] = {
    "an attention's window": _held(
        "attention", 3, r"the input of layers\.1\.attention\.proj ",
        what="attribute", name="layers.1.attention", field="window", value=8, step=3),
    "features rolled": _held(
        "another order", 2, r"the output of layers\.0\.attention\.qkv ",
        what="module", name="layers.0.attention.qkv", how="roll", step=2),
    "one value not finite": _held(
        "not finite", 3, r"the output of layers\.2\.mlp \(MLP\).*4 of \d+ values of B are not",
        what="module", name="layers.2.mlp", how="not a number", step=3),
    "a clamp": _held(
        "saturation", 4, r"the output of layers\.1\.mlp \(MLP\)", what="module",
        name="layers.1.mlp", how="clamp", factor=0.01, step=4),
    "a sign": _held(
        "function", 3, r"the output of layers\.3\.attention\.proj .*-1 times the other", TP, 2,
        what="module", name="layers.3.attention.proj", how="scale", factor=-1.0, step=3),
    "positions from 0 again": _held(
        "positions", 4, r"the batch \(position_ids\).*samples 29", what="positions",
        row=5, step=4),
    "the backward of one micro-batch": _held(
        "accumulation", 3, r"in backward, the gradient of the output of layers\.1\.mlp ",
        what="module", name="layers.1.mlp", how="first backward",
        step=3),
    "moments exchanged": _held(
        "resume", 4, r"optimizer's exp_avg of .*mlp\.down_proj.* before the step", "", 2,
        what="exchanged moments", kind="exp_avg", step=4,
        names=["layers.0.mlp.down.weight", "layers.2.mlp.down.weight"]),
    "a weight transposed": _held(
        "loaded tensor", 1, r"layers\.2\.self_attn\.o_proj.*before the step",
        what="loaded", name="layers.2.attention.proj.weight", how="transpose", rows=32),
    "a residual left out": _held(
        "function", 2, r"the output of layers\.1 \(Block\)", PP, 2, what="module",
        name="layers.1", how="no residual", step=2),
    "a norm whose gradient is not summed": _edit(
        "mpu/layers/fused.py", "ctx.replicated_parameter((hidden_size,), region)",
        "ctx.replicated_parameter((hidden_size,), Region.REPLICATED)", 1,
        r"B fails in step 1, its first.*gradient of model\.norm\.weight.*a sum over tp is missing",
        more=SP, ranks=(1, 2))._replace(kind="axis of a sum"),
    "a matmul without its sum": _edit(
        "model/llama.py", "swiglu(x, self.gate_up, self.down)",
        "nn.functional.linear(swiglu(self.gate_up(x)), self.down.weight)", 1,
        r"B fails in step 1, its first.*the other never calls layers\.0\.mlp\.down",
        more=TP, ranks=(1, 2))._replace(kind="axis of a sum"),
    "a frozen norm": _edit(
        "model/llama.py", "        self.mlp = self.mlp_type(config, ctx)\n",
        "        self.mlp = self.mlp_type(config, ctx)\n"
        "        self.mlp_norm.weight.requires_grad_(False)\n", 1,
        r"summed gradient of .*post_attention_layernorm\.weight .*only A has it",
    )._replace(kind="update"),
    "a lost update": _held(
        "update", 3, r"the update, .*layers\.1\.self_attn\.o_proj",
        "--zero-stage 1", 2, what="lost update", name="layers.1.attention.proj.weight", step=3),
}  # fmt: skip


class Equal(NamedTuple):
    """A pair that is equal: B's flags and ranks beside those of A."""

    base: str
    more: str
    ranks: tuple[int, int]
    resumed: bool = False


EQUAL: dict[str, Equal] = {
    "tp 2": Equal("", TP, (1, 2)),
    "tp 2 + SP": Equal("", SP, (1, 2)),
    "tp 2 and tp 2 + SP": Equal(TP, SP, (2, 2)),
    "pp 2": Equal("", PP, (1, 2)),
    "pp 2, interleaved": Equal(PP, "--num-virtual-stages-per-pipeline-rank 2 "
                               "--pipeline-schedule interleaved", (2, 2)),
    "pp 2, zb-v": Equal("", PP + " --pipeline-schedule zb-v", (1, 2)),
    "dp 2": Equal("", "", (1, 2)),
    "dp 2, ZeRO 1": Equal("", "--zero-stage 1", (2, 2)),
    "dp 2, ZeRO 3": Equal("", "--zero-stage 3 --overlap-param-gather", (2, 2)),
    "cp 2": Equal("", CP, (1, 2)),
    "cp 2, all-gather": Equal(CP + " --cp-comm-type p2p", "--cp-comm-type all_gather", (2, 2)),
    "recompute full": Equal("", "--recompute-granularity full", (1, 1)),
    "recompute selective": Equal("", "--recompute-granularity selective", (1, 1)),
    "micro-batch 1": Equal("", "--micro-batch-size 1", (1, 1)),
    "buckets": Equal("", "--ddp-bucket-size 1000 --overlap-grad-reduce", (2, 2)),
    "fp64, tp 2": Equal(FP64, TP, (1, 2)),
    "bf16, tp 2": Equal("--bf16", TP, (1, 2)),
    "resumed": Equal("", "", (1, 1), True),
    "resumed on tp 2": Equal("", TP, (1, 2), True),
    "resumed on pp 2": Equal("", PP, (1, 2), True),
}  # fmt: skip


class Result(NamedTuple):
    """How bisect did: right step, right operation, and what it said."""

    step: bool
    operation: bool
    said: str
    seconds: float


class Bench:
    """Makes the runs. A run of the same side is made once."""

    def __init__(self, work: Path) -> None:
        self.work, self.made = work, dict[tuple[str, int], Path]()

    def baseline(self, flags: str, ranks: int) -> Path:
        """Return the folder of a finished run with a digest of each step and a save at step 3."""
        from tools.bisect.ranks import Program, run

        if (flags, ranks) not in self.made:
            folder = self.work / f"base-{len(self.made)}"
            argv = tuple(flags_of(flags).split())
            more = f"--log-json {folder}/log.jsonl --log-digests 1 --log-interval 1".split()
            more += f"--save {folder}/saved --save-interval 3".split()
            run(Program(ROOT, ROOT / "pretrain_llama.py", argv, ranks), folder, more)
            self.made[flags, ranks] = folder
        return self.made[flags, ranks]

    def bisect(self, a: str, b: str, ranks: tuple[int, int], tree: Path = ROOT) -> Any:
        from tools.bisect.sides import named
        from tools.bisect_runs import bisect

        work = self.work / "pair"
        shutil.rmtree(work, ignore_errors=True)
        one = named("A", a, ROOT, ranks[0], work)
        other = named("B", b, tree, ranks[1], work, one)
        return bisect(one, other, work, None, None, 300.0)

    def planted(self, name: str) -> Result:
        """Bisect a planted difference."""
        case, began = {**PLANTED, **HELD_OUT, **FURTHER}[name], time.monotonic()
        base = self.baseline(case.base, case.ranks[0])
        flags = flags_of(f"{case.base} {case.more}")
        if case.kind == "resume":
            flags += f" --load {base}/saved --ckpt-step 3"
        tree = ROOT
        if case.plant:
            flags = f"{SCRIPT} --plant '{json.dumps(case.plant)}' {flags}"
        if case.edit[0]:
            tree = edited(self.work / "edited", *case.edit)
        found = self.bisect(str(base), flags, case.ranks, tree)
        step = found.step is not None and found.step.iteration == case.step
        right = bool(re.search(case.says, found.sentence))
        return Result(step, right, found.sentence, time.monotonic() - began)

    def equal(self, name: str) -> Result:
        """Bisect a pair that is equal."""
        case, began = EQUAL[name], time.monotonic()
        base = self.baseline(case.base, case.ranks[0])
        flags = flags_of(f"{case.base} {case.more}")
        if case.resumed:
            flags += f" --load {base}/saved --ckpt-step 3"
        found = self.bisect(str(base), flags, case.ranks)
        return Result(found.same, found.same, found.sentence, time.monotonic() - began)


def flags_of(more: str) -> str:
    """Return the flags of a side; --tied in `more`: head and embedding are one."""
    flags = f"{BASE} {more}"
    untied = "--untie-embeddings-and-output-weights"
    return flags.replace(" --tied", "").replace(untied, "") if " --tied" in flags else flags


def edited(folder: Path, file: str, old: str, new: str) -> Path:
    """Write a copy of this checkout with one file edited; return its root."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    skipped = shutil.ignore_patterns("__pycache__")
    for room in ("mpu", "model", "training", "tools"):
        shutil.copytree(ROOT / room, folder / room, ignore=skipped)
    shutil.copy(ROOT / "pretrain_llama.py", folder)
    shutil.copytree(ROOT / "build", folder / "build")
    text = (folder / file).read_text()
    assert old in text, f"{old!r} is not in {file}"
    (folder / file).write_text(text.replace(old, new))
    return folder


def results(words: list[str]) -> Iterator[tuple[str, str, Result]]:
    """Yield (kind, name, result) of the pairs whose names have one of the words, or of all."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        bench = Bench(Path(folder))
        others = {"held-out": HELD_OUT, "further": FURTHER}.get(words[0] if words else "")
        words = words if others is None else words[1:]
        for name, case in (PLANTED if others is None else others).items():
            if not words or any(word in name for word in words):
                yield case.kind, name, tried(bench.planted, name)
        for name in EQUAL if others is None else ():
            if not words or any(word in f"equal {name}" for word in words):
                yield "equal", name, tried(bench.equal, name)


def tried(work: Any, name: str) -> Result:
    try:
        return work(name)  # type: ignore[no-any-return]
    except Exception as error:
        return Result(False, False, f"{type(error).__name__}: {error}", 0.0)


def main(words: list[str]) -> None:
    """Print a row for each pair, and how many are right."""
    rows = []
    for kind, name, result in results(words):
        rows.append((kind, result))
        right = "right" if result.step and result.operation else "step" if result.step else (
            "operation" if result.operation else "WRONG")  # fmt: skip
        print(f"{kind:<20} {name:<32} {right:<10} {result.seconds:5.0f} s", flush=True)
        if right != "right":
            print(f"    {result.said}", flush=True)
    planted = [result for kind, result in rows if kind != "equal"]
    equal = [result for kind, result in rows if kind == "equal"]
    both = sum(r.step and r.operation for r in planted)
    kinds = len({kind for kind, _ in rows} - {"equal"})
    steps, operations = (sum(r[i] for r in planted) for i in range(2))
    print(f"{both} of {len(planted)} differences of {kinds} kinds: step and operation right")
    print(f"{steps} steps right, {operations} operations right")
    print(f"{sum(r.step for r in equal)} of {len(equal)} equal pairs: nothing is named")


if __name__ == "__main__":
    main(sys.argv[1:])
