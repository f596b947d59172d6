# SPDX-License-Identifier: Apache-2.0
"""Mistakes that only some layouts have: is the tensor that fork-check names first the right one?

    python tests/tools/fork_tensors.py            prints a table: right or not, what was said

Sums, axes, cuts and positions, in Llama, Qwen3 and the worked forks. `said` is a regular expression
of what fork-check must print: the first tensor that a reader who knows the mistake would look for.
"""

import re
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.tools.fork_mistakes import (  # noqa: E402
    BACK,
    DOWN,
    GEMMA2,
    GRANITE,
    LLAMA,
    MLP,
    MOE,
    OLMO2,
    PHI,
    QWEN3,
    SUM,
    VALUES,
    Mistake,
    checked,
)

ARCEE, WINDOWS = "examples/forks/arcee.py", "examples/forks/windows.py"
PROJ = "        self.proj = RowParallelLinear(a * d, h, ctx=ctx, bias=self.proj_bias)\n"
QKV = '        qkv, more = self.project(x), {"window": self.window}\n'
CORE = "        return self.proj(y)\n"
EMBEDDED = "x, by = self.embedding(tokens), self.config.embedding_mult"
ROWS = "rows = self.experts(d.finish(sent, plan), plan.counts, sent.later)"
LOOP = "            for i, block in enumerate(self.blocks[chunk]):\n"
RUN = "                h = block(h, cos, sin, packed_seq_params, caches and caches[i])\n"
CONTEXT = "from mpu.context import LayerContext\n"
PARAM = "from mpu.param import draw_normal, placement_of, saved_buffers, tie, unique_parameters\n"
IMPORTS = {
    CONTEXT: CONTEXT
    + "from mpu.comm.mappings import copy_to_tensor_model_parallel_region as copy_to\n"
    + "from mpu.comm.mappings import reduce_from_tensor_model_parallel_region as reduce_from\n"
    + "from mpu.gradients import use\n",
    PARAM: PARAM.replace("import ", "import Region, "),
}


def mlp(new: str, more: str = "", layouts: str = "tp 2", said: str = "") -> Mistake:
    """Return a mistake in the forward of a Llama's MLP. more: lines before it."""
    text = "".join(f"        {line}\n" for line in more.split("; ") if line)
    return Mistake(LLAMA, IMPORTS | {MLP: f"{text}        return {new}\n"}, said, layouts)


def hidden_gain(region: str, layouts: str, said: str) -> Mistake:
    """Return a gain on the output of an MLP, in a region."""
    make = f"        self.gain = ctx.replicated_parameter((h,), Region.{region})\n"
    new = "        return self.down(swiglu(self.gate_up(x))) * use(self.gain, self.down.ctx.sink)\n"
    return Mistake(LLAMA, IMPORTS | {DOWN: DOWN + make, MLP: new}, said, layouts)


def head_gain(region: str, gain: str, layouts: str, said: str) -> Mistake:
    """Return a gain on this rank's queries, keys and values."""
    make = f"        self.gain = ctx.replicated_parameter((d,), Region.{region})\n"
    line = f"        qkv = (qkv.unflatten(-1, (-1, self.head_size)) * {gain}).flatten(2)\n"
    edits = {PROJ: PROJ + make, QKV: QKV + line}
    return Mistake(LLAMA, IMPORTS | edits, said, layouts)


def llama(old: str, new: str, layouts: str, said: str) -> Mistake:
    """Return an edit of a Llama."""
    return Mistake(LLAMA, IMPORTS | {old: new}, said, layouts)


Y = "swiglu(self.gate_up(x))"
GAIN = "use(self.gain, self.ctx.sink)"
TAKES = r"the input of layers\.0\.mlp\.down \(RowParallelLinear\) differs first"
GIVES = r"the output of layers\.0\.mlp \(MLP\) differs first"
PROJ_TAKES = r"the input of layers\.0\.attention\.proj \(RowParallelLinear\) differs first"
FIRST = r"the input of layers\.0 \(Block\).* differs first|the input of layers\.0\.attention_norm "

TENSORS: dict[str, Mistake] = {
    # what a rank computes from its own features
    "a norm over a shard": mlp("self.down(nn.functional.rms_norm(y, y.shape[-1:]))", f"y = {Y}",
                               said=TAKES),
    "a mean over a shard": mlp("self.down(y - y.mean(-1, keepdim=True))", f"y = {Y}", said=TAKES),
    "a softmax over a shard": mlp("self.down(y * y.softmax(-1))", f"y = {Y}", "tp 2 + SP", TAKES),
    "divided by the local width": mlp("self.down(y / y.shape[-1])", f"y = {Y}", "tp 2; tp 4",
                                      TAKES + ".*it is 2 times the other, as if by a size of one"),
    "features counted from 0": mlp("self.down(y * at)", f"y = {Y}; at = 1 + torch.arange("
                                   "y.shape[-1], dtype=y.dtype, device=y.device)", said=TAKES),
    "heads counted on a rank": llama(CORE, "        return self.proj(y / self.heads)\n", "tp 2",
                                     PROJ_TAKES + ".*it is 2 times"),
    "heads flipped on a rank": llama(
        CORE, "        y = y.unflatten(-1, (self.heads, -1)).flip(2)\n"
        "        return self.proj(y.flatten(2))\n", "tp 2", PROJ_TAKES),
    "a gate of a rank's heads": llama(CORE, "        return self.proj(y * y.mean(-1, "
                                      "keepdim=True).sigmoid())\n", "tp 2 + SP", PROJ_TAKES),
    "a gate of squares of a rank": Mistake(ARCEE, {"self.up(x).relu().square()": (
        "(y := self.up(x)).relu().square() / y.square().mean(-1, keepdim=True)")}, TAKES, "tp 2"),
    "a GELU of a rank's mean": Mistake(GEMMA2, {"F.gelu(gate, approximate=\"tanh\") * up": (
        "F.gelu(gate - gate.mean(-1, keepdim=True), approximate=\"tanh\") * up")}, TAKES, "tp 2"),
    "a mean of a rank's heads": Mistake(OLMO2, {SUM: "", BACK: ""},
                                        r"the output of layers\.0\.attention\.q_norm ",
                                        "tp 2"),
    "shared heads counted twice": Mistake(OLMO2, {"keepdim=True) / copies": "keepdim=True)"},
                                          r"the output of layers\.0\.attention\.k_norm ",
                                          "tp 4"),
    # cuts
    "two sections as one": Mistake(LLAMA, {"h, (f, f), ctx": "h, 2 * f, ctx",
                                           '("mlp.gate_proj", "mlp.up_proj")': '("mlp.gate_up",)'},
                                   TAKES, "tp 2"),
    "three sections as one": Mistake(LLAMA, {
        "qkv_linear(h, (a * d, g * d, g * d), ctx=ctx": "ColumnParallelLinear(h, (a + 2 * g) * d, "
        "ctx=ctx", '("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")': '("qkv",)'},
        PROJ_TAKES, "tp 2"),
    "rows that no rank holds": Mistake(LLAMA, IMPORTS | {
        PARAM: PARAM.replace("import ", "import Placement, parameter, "),
        DOWN: DOWN + "        low = Placement((5, h), 0, ctx.tp, local_size=5 // ctx.tp.size)\n"
        "        self.low = parameter(low, ctx.dtype, ctx.device, ctx.sink)\n",
        MLP: "        y = nn.functional.linear(copy_to(x, self.down.ctx.tp), low := use(self.low, "
        "self.down.ctx.sink))\n        y = reduce_from(y @ low, self.down.ctx.tp)\n"
        f"        return self.down({Y}) + y\n"},
        r"mlp\.low.*no rank holds its rows from 4 on, along dimension 0", "tp 2"),
    # sums of activations
    "a sum twice": mlp(f"reduce_from(self.down({Y}), self.down.ctx.tp)",
                       said=GIVES + ".*2 times the other: added over tp twice"),
    "a sum left out": mlp(f"nn.functional.linear({Y}, use(self.down.weight, self.down.ctx.sink))",
                          said=GIVES + ".*a sum over tp is missing"),
    "a mean in place of a sum": mlp(f"self.down({Y}) / self.down.ctx.tp.size",
                                    said=GIVES + ".*1/2 of the other"),
    "a bias on each rank before the sum": mlp(
        "reduce_from(nn.functional.linear(y, use(self.down.weight, self.down.ctx.sink)) + 0.1, "
        "self.down.ctx.tp)", f"y = {Y}",
        said=GIVES + "(.|\\n)*off by the same vector at every token(.|\\n)*adds it once, after"),
    "embeddings summed twice": llama(EMBEDDED, EMBEDDED.replace(
        "self.embedding(tokens)", "reduce_from(self.embedding(tokens), self.ctx.tp)"),
        "tp 2", FIRST),
    "embeddings divided": llama(EMBEDDED, EMBEDDED.replace(
        "self.embedding(tokens)", "self.embedding(tokens) / self.ctx.tp.size"), "tp 2", FIRST),
    "a sum of squares twice": Mistake(OLMO2, {SUM: SUM + SUM}, r"layers\.0\.attention\.q_norm",
                                      "tp 2"),
    "what depends on the rank": mlp(f"self.down({Y}) * (1 + 0.1 * self.down.ctx.tp.rank)",
                                    said=GIVES + ".*only on rank 1 of tp"),
    "a loss by rank": llama("        return self.loss(h, labels.t()).t()  # [b, s]\n",
                            "        return self.loss(h, labels.t()).t() * (1 + self.ctx.tp.rank)"
                            "\n", "tp 2", r"the output of the model \(Llama\)"),
    "a multiplier by ranks": Mistake(GRANITE, {
        "config.residual_multiplier": "config.residual_multiplier / ctx.tp.size"},
        r"the input of layers\.0\.mlp_norm |the output of layers\.0 \(Block\)",
        "tp 2 + SP"),
    "a last norm by ranks": llama("        x, by = self.norm(h), self",
                                  "        x, by = self.norm(h) * self.ctx.tp.size, self", "tp 2",
                                  r"the (in|out)put of head \(ColumnParallelLinear\)"),
    # sums of gradients
    "a norm of keys in no region": Mistake(QWEN3, {
        "self.k_norm = RMSNorm(d, ctx=ctx, eps=eps, region=region)":
        "self.k_norm = RMSNorm(d, ctx=ctx, eps=eps)"},
        r"self_attn\.k_norm\.weight.*a sum over tp is missing", "tp 2"),
    "a norm of queries in no region": Mistake(QWEN3, {
        "self.q_norm = RMSNorm(d, ctx=ctx, eps=eps, region=region)":
        "self.q_norm = RMSNorm(d, ctx=ctx, eps=eps)"},
        r"self_attn\.q_norm\.weight.*a sum over tp is missing", "tp 2"),
    "a bias in no region": Mistake(PHI, {
        "        self.bias = ctx.replicated_parameter((width,), Region.SEQUENCE_PARALLEL)":
        "        self.bias = ctx.replicated_parameter((width,), Region.REPLICATED)"},
        r"layernorm\.bias \(in [^)]*norm\).*a sum over tp is missing", "tp 2 + SP"),
    "a gain of heads in no region": head_gain(
        "REPLICATED", GAIN, "tp 2", r"attention\.gain \(in .*a sum over tp is missing"),
    "a gain of heads, twice": head_gain(
        "TENSOR_PARALLEL", f"copy_to({GAIN}, self.ctx.tp)", "tp 2",
        r"attention\.gain \(in .*added over tp twice"),
    "a gain of hidden states in no region": hidden_gain(
        "REPLICATED", "tp 2 + SP", r"mlp\.gain \(in .*a sum over tp is missing"),
    "a gain of hidden states in another region": hidden_gain(
        "TENSOR_PARALLEL", "tp 2", r"mlp\.gain \(in .*added over tp twice"),
    "a sum forward and none backward": Mistake(
        OLMO2, {BACK: ""}, r"in backward, the gradient of the (in|out)put of "
                           r"layers\.3\.attention\.q_norm",
        "tp 2"),
    # positions and tokens
    "positions of a shard": llama(
        QKV, QKV + "        at = torch.arange(x.shape[0]).repeat(qkv.shape[0] // x.shape[0])\n"
        "        cos, sin = cos[at], sin[at]\n", "tp 2 + SP", PROJ_TAKES),
    "positions of a context rank": llama(
        "position_ids, tokens.shape[1] * self.ctx.grid.cp.size", "None, tokens.shape[1]",
        "cp 2 all_gather", r"the input of layers\.0 \(Block\), tensor 1"),
    "a mean over a shard of tokens": mlp("self.down(swiglu(self.gate_up(x - x.mean(0))))",
                                         layouts="tp 2 + SP",
                                         said=r"the input of layers\.0\.mlp\.gate_up "),
    "a shift of a shard of tokens": mlp(
        "self.down(swiglu(self.gate_up(torch.cat([x[:1], x[:-1]]))))", layouts="tp 2 + SP",
        said=r"the input of layers\.0\.mlp\.gate_up "),
    "a shift of a context rank's tokens": mlp(
        "self.down(swiglu(self.gate_up(torch.cat([x[:1], x[:-1]]))))", layouts="cp 2 all_gather",
        said=r"the input of layers\.0\.mlp\.gate_up "),
    "a mean over rows": mlp("self.down(swiglu(self.gate_up(x - x.mean(1, keepdim=True))))",
                            layouts="dp 2", said=r"the input of layers\.0\.mlp\.gate_up "),
    # experts
    "experts counted on a rank": Mistake(
        MOE, {"self.weights(scores, plan.choice), plan).view_as(x)": (
            "self.weights(scores, plan.choice), plan).view_as(x) / self.dispatcher.local")},
        r"the output of layers\.0\.mlp \(SparseMLP\).*it is 2 times", "dp 2, ep 2 allgather"),
    "the output of an expert's rank": Mistake(
        MOE, {ROWS: (
            ROWS + " * (1 + 0.1 * self.ctx.grid.ep.rank)")},
        r"the output of layers\.0\.mlp \(SparseMLP\)", "tp 2 + SP, ep 2 alltoall"),
    "weights of a rank's tokens": Mistake(
        MOE, {"chosen = scores.gather(1, choice).softmax(1)": (
            "chosen = scores.gather(1, choice).softmax(1) * (1 + 0.01 * len(scores))")},
        r"the output of layers\.0\.mlp \(SparseMLP\)", "cp 2 all_gather"),
    "a router in no region": Mistake(
        MOE, {
            "self.router = RouterLinear(h, e, ctx=ctx)": (
                "self.router = RouterLinear(h, e, ctx=ctx)\n"
                "        self.router.weight = ctx.replicated_parameter((e, h), Region.REPLICATED)"),
            CONTEXT: CONTEXT + "from mpu.param import Region\n"},
        r"block_sparse_moe\.gate.*a sum over tp is missing", "tp 2 + SP"),
    # what ranks or rows share, whose gradients are parts of sums
    "a norm of keys that ranks share": Mistake(
        QWEN3, {", region=region)": ")"},
        r"layers\.\d\.self_attn\.[qk]_norm\.weight.*a sum over tp is missing", "tp 4"),
    "positions in no region": Mistake(
        LLAMA, {
            "class Llama(nn.Module):\n": (
                "class Positions(nn.Module):\n"
                "    def __init__(self, h, ctx):\n"
                "        super().__init__()\n"
                "        self.ctx = ctx\n"
                "        self.weight = ctx.replicated_parameter((12, h), Region.REPLICATED)\n\n"
                "    def forward(self, length):\n"
                "        first = self.ctx.tp.rank * length if self.ctx.sp else 0\n"
                "        rows = use(self.weight, self.ctx.sink)[first : first + length]\n"
                "        return rows[:, None]\n\n\n"
                "class Llama(nn.Module):\n"),
            "            shared = self.embedding.weight if config.tied else None\n": (
                "            shared = self.embedding.weight if config.tied else None\n"
                "            self.positions = Positions(h, ctx)\n"),
            EMBEDDED: EMBEDDED + "\n        x = x + self.positions(len(x))",
            **IMPORTS},
        r"positions\.weight \(in positions\).*a sum over tp is missing", "tp 2 + SP"),
    # stages, micro-batches, recomputation
    "layers counted in a stage": llama(
        LOOP + RUN, LOOP + RUN + "                h = h * (1 + 0.1 * i)\n", "pp 2 1f1b",
        r"the input of layers\.3 \(Block\)"),
    "a scale by a stage's layers": llama(
        EMBEDDED, EMBEDDED.replace("(tokens)", "(tokens) / len(self.layers)"),
        "pp 2 1f1b", r"the input of layers\.0 \(Block\).*it is 2 times the other \("),
    "the size of a micro-batch": mlp(
        f"self.down({Y}) * (1 + 0.01 * x.shape[1])", "", "one rank, 4 micro-batches", GIVES),
    # blocks that return more than hidden states, of another size on each layout
    "a mix of values in no region": Mistake(
        VALUES, {"(2,), Region.TENSOR_PARALLEL": "(2,), Region.REPLICATED"},
        r"layers\.\d\.attention\.mix \(in layers\.\d\.attention\).*a sum over tp is missing",
        "tp 2"),
    "a layer's own line": Mistake(
        VALUES, {"h = h + self.mlp(self.mlp_norm(h))": (
            "h = h + self.mlp(self.mlp_norm(h)) * (1 + 0.1 * h.shape[1])"),
            "return torch.cat([h, values": "return torch.cat([h, values  # here\n            "},
        r"the output of layers\.0 \(Block\) differs first.*\(fork_HERE\)",
        "one rank, 4 micro-batches"),
    "a state in recomputation": mlp(
        f"self.down({Y}) * (1 + 0.01 * torch.is_grad_enabled())", "", "recompute full",
        r"layers\.\d"),
}  # fmt: skip


def first(said: str) -> str:
    """Return the sentence on the tensor that differs first, of all that fork-check prints."""
    found = re.search(r"[^;]*; ([^;\n]*differs first[^\n]*)", said)
    return found[1] if found else said.strip().splitlines()[-1] if said.strip() else ""


def measure(names: list[str]) -> None:
    """Print a row for each mistake."""
    right = 0
    for name, mistake in TENSORS.items():
        if names and not any(word in name for word in names):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                _, out = checked(mistake, Path(folder))
            except Exception as error:
                out = f"fork-check crashed: {type(error).__name__}: {error}"
        found = bool(re.search(mistake.said, out))
        right += found
        print(f"{name:<44} {'right' if found else 'WRONG':<6} {time.monotonic() - began:4.0f} s",
              flush=True)  # fmt: skip
        print(f"    {first(out)}", flush=True)
    total = sum(not names or any(word in name for word in names) for name in TENSORS)
    print(f"{right} of {total}: the tensor that is named first is the right one")


if __name__ == "__main__":
    measure(sys.argv[1:])
