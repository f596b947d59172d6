# SPDX-License-Identifier: Apache-2.0
"""Mistakes planted in models that people would write: which of them does fork-check name?

    python tests/tools/fork_mistakes.py            prints a table: detected, said, seconds

Each is a few edits of a model's file. `said` is what fork-check must print of its cause. A mistake
that nothing here can see has said = "": docs/forking.md lists these.

All but one end in a sentence with their cause.
"""

import io
import re
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
LAYOUTS = "recompute full; tp 2; tp 2 + SP; pp 2 zb-v, tied; dp 2 + ZeRO 3"


class Mistake(NamedTuple):
    """What is edited, and what fork-check must say."""

    model: str
    edits: dict[str, str]
    said: str
    layouts: str = "one rank"


LLAMA, QWEN2, QWEN3 = "model/llama.py", "model/qwen2.py", "model/qwen3.py"
MOE = "model/moe.py"
OLMO2, GEMMA2, PHI, GRANITE = (
    f"examples/forks/{name}.py" for name in ("olmo2", "gemma2", "phi", "granite")
)
BITNET, PHI3 = "examples/forks/bitnet.py", "examples/forks/phi3.py"
VALUES = "tests/tools/value_residual.py"
GEMMA3, GLM4 = "examples/forks/gemma3.py", "examples/forks/glm4.py"
MLP = "        return swiglu(x, self.gate_up, self.down)\n"
READS = "    return read_hf_config(hf, kind, rules=rules)\n"
DOWN = "        self.down = RowParallelLinear(f, h, ctx=ctx)\n"
LOSS = "        return self.loss(h, labels.t()).t()  # [b, s]\n"
SUM = "        squares = reduce_from_tensor_model_parallel_region(squares, tp, self)\n"
BACK = "        squares = copy_to_tensor_model_parallel_region(squares, tp, self)\n"
SWAPPED = "are exchanged: hf_names has them swapped"
THEIRS = "its logits differ from those of transformers'"

MISTAKES = {
    # the loss and decode
    "a soft-cap in decode alone": Mistake(
        LLAMA,
        {
            "            return self.logits(h)": (
                "            return 5 * torch.tanh(self.logits(h) / 5)"
            )
        },
        "the cross entropy of its logits",
    ),
    "a soft-cap in the loss alone": Mistake(
        GEMMA2,
        {
            "    def logits(self, h: Tensor) -> Tensor:\n": (
                "    def loss(self, h, labels):\n"
                "        from mpu.layers.cross_entropy import vocab_parallel_cross_entropy as f\n"
                "        y = 5 * torch.tanh(self.head(h) / 5)\n"
                "        return f(y, labels, self.config.vocab_size, self.ctx)\n\n"
                "    def logits(self, h: Tensor) -> Tensor:\n"
            )
        },
        "the cross entropy of its logits",
    ),
    "a loss that is scaled": Mistake(
        LLAMA, {LOSS: LOSS.replace(".t()  #", ".t() * 1.01  #")}, "the cross entropy of its logits"
    ),
    "a loss of another size on each rank": Mistake(
        LLAMA,
        {LOSS: LOSS.replace(".t()  #", ".t() * (1 + 0.1 * self.ctx.tp.rank)  #")},
        "only with tensor parallelism", LAYOUTS,
    ),
    # names of Hugging Face
    "gate and up swapped": Mistake(
        LLAMA, {'("mlp.gate_proj", "mlp.up_proj")': '("mlp.up_proj", "mlp.gate_proj")'}, SWAPPED
    ),
    "norms swapped": Mistake(
        LLAMA,
        {
            '"attention_norm": ("input_layernorm",)': '"mlp_norm": ("input_layernorm",)',
            '"mlp_norm": ("post_attention_layernorm",)': (
                '"attention_norm": ("post_attention_layernorm",)'
            ),
        },
        SWAPPED,
    ),
    "a name that transformers does not have": Mistake(
        PHI, {'("self_attn.dense",)': '("self_attn.o_proj",)'}, "hf_names does not name the weights"
    ),
    "biases left out": Mistake(
        QWEN2, {"qkv_bias = True": "qkv_bias = False"}, "it also needs model.layers.0.self_attn"
    ),
    # sizes
    "the scaling of RoPE dropped": Mistake(
        LLAMA, {'"rope_scaling": rope_scaling(config)': '"rope_scaling": None'},
        "rope_scaling_factor = ",
    ),
    "the share of RoPE dropped": Mistake(
        PHI, {", rotary_factor=factor": ", rotary_factor=0.5"}, "rotary_factor = "
    ),
    "the base of some layers dropped": Mistake(
        GEMMA3, {'local["rope_theta"]}': "10000.0}"}, "with rope_parameters.sliding_attention = "
    ),
    "a multiplier dropped": Mistake(
        GRANITE, {'residual = hf["residual_multiplier"]': "residual = 1.0"},
        "residual_multiplier = ",
    ),
    "a field of transformers' that nobody reads": Mistake(
        QWEN3, {"unread(UNREAD) | {": 'unread(UNREAD) | {"layer_types": lambda v: not v, '},
        "from_hf_config refuses the config.json that transformers saves for this model: ",
    ),
    "an activation that nobody checks": Mistake(
        LLAMA, {READS: READS.replace("=rules", '=rules | {"hidden_act": bool}')}, "hidden_act = "
    ),
    "a model type that nobody checks": Mistake(
        QWEN3, {'(hf, "qwen3"': '(hf, hf["model_type"]'}, "model_type = "
    ),
    "the norm's epsilon written out": Mistake(
        LLAMA,
        {
            "        self.attention_norm = self.norm_type(config.hidden_size, ctx=ctx, "
            "eps=config.norm_epsilon)": "        self.attention_norm = "
            "self.norm_type(config.hidden_size, ctx=ctx, eps=1e-5)"
        },
        "with rms_norm_eps = ",
    ),
    # arithmetic that every rank does wrongly
    "a soft-cap left out": Mistake(
        GEMMA2, {"return cap * torch.tanh(y / cap) if cap else y": "return y"},
        "the model does not depend on final_logit_softcapping",
    ),
    "no scale of the embedding": Mistake(
        GEMMA2, {"super().embed(tokens) * self.config.hidden_size**0.5": "super().embed(tokens)"},
        THEIRS,
    ),
    "another GELU": Mistake(PHI, {', approximate="tanh"': ""}, THEIRS),
    "logits multiplied instead of divided": Mistake(
        GRANITE, {"    block = Block\n": "    block = Block\n\n    def last_norm(self, h):\n"
                  "        return self.norm(h) * self.config.logits_divisor\n"}, THEIRS
    ),
    "a multiplier of one branch alone": Mistake(
        GRANITE, {"self.mlp(x) * self.multiplier": "self.mlp(x)"}, THEIRS
    ),
    "RoPE of halves where neighbours are due": Mistake(
        GLM4,
        {"        qk = torch.cat([qk[..., 0:r:2], qk[..., 1:r:2], qk[..., r:]], -1)\n": (
            "        qk = qk + 0  # here\n"
        )},
        "from that of model.layers.0.self_attn.o_proj; made in fork_HERE",
    ),
    "a norm left out": Mistake(
        GLM4, {"self.mlp_out_norm(self.mlp(x))": "self.mlp(x)  # here"}, "; made in fork_HERE"
    ),
    "a window that is one too long": Mistake(
        GEMMA3, {"self.window = config.sliding_window": (
            "self.window = config.sliding_window and config.sliding_window + 1"
        )},
        "the input of layers.0.attention.proj is the first after the output of",
    ),
    "the sixth layer as the others": Mistake(
        GEMMA3, {"chunk(2, -1)[self.window > 0]": "chunk(2, -1)[1]"},
        "the model does not depend on rotary_base",
    ),
    "the worst experts": Mistake(
        MOE, {"        return torch.sort(scores, dim=1, descending=True": (
            "        scores = -scores  # here\n"
            "        return torch.sort(scores, dim=1, descending=True"
        )},
        "; made in fork_HERE",
    ),
    "one norm for queries and keys": Mistake(
        QWEN3, {"self.k_norm(k.contiguous())": "self.q_norm(k.contiguous())"},
        "the loss does not depend on model.layers.0.self_attn.k_norm.weight",
    ),
    "a size that config.json has no field for": Mistake(
        LLAMA, {'        "head_dim": config.head_size,\n': ""},
        "from_hf_config refuses what hf_config writes: num_attention_heads is 8",
    ),
    "a field that layers alone have": Mistake(
        GEMMA3,
        {
            "    sliding_window: int = 512  #": (
                "    local: bool = True\n    sliding_window: int = 512  #"
            ),
            "(self.config, sliding_window=0)": "(self.config, sliding_window=0, local=False)",
        },
        "belongs in a subclass of Gemma3Config, which layer_config returns",
    ),
    # initial values
    "a standard deviation written out": Mistake(
        LLAMA, {"std / scale, seed)": "0.02 / scale, seed)"}, "--init-method-std 0.2 asks for"
    ),
    "biases that begin at 1": Mistake(
        QWEN2, {"    block = Block\n": "    block = Block\n\n    def initial_vector(self, name):\n"
                "        return 1.0\n"}, "q_proj.bias is 1 after initialize()",
    ),
    "weights drawn as torch draws them": Mistake(
        LLAMA, {"draw_normal(param, table[name], std / scale, seed)":
                "nn.init.normal_(param, 0.0, std / scale)"},
        "draw it with mpu.param.draw_normal", LAYOUTS,
    ),
    "norms of 1 + w that begin at 2": Mistake(
        GEMMA2, {"        return 0.0\n": "        return 1.0\n"}, ""
    ),
    # sums over ranks
    "a mean of a rank's heads": Mistake(
        OLMO2, {SUM: "", BACK: ""}, "only with tensor parallelism", LAYOUTS
    ),
    "a sum forward and none backward": Mistake(
        OLMO2, {BACK: ""}, "only with tensor parallelism", LAYOUTS
    ),
    "shared heads counted twice": Mistake(
        OLMO2, {"keepdim=True) / copies": "keepdim=True)"}, "only at tp 4", f"{LAYOUTS}; tp 4"
    ),
    "a bias in another region": Mistake(
        PHI,
        {"        self.bias = ctx.replicated_parameter((width,), Region.SEQUENCE_PARALLEL)":
         "        self.bias = ctx.replicated_parameter((width,), Region.REPLICATED)"},
        "its gradient differs among the ranks of tp", LAYOUTS,
    ),
    # uses of a weight
    "layers of two pipeline ranks share an MLP": Mistake(
        LLAMA, {"        self.blocks = [[": "        for i in numbers[1:]:\n            self.layers"
                "[str(i)].mlp = self.layers[str(numbers[0])].mlp\n        self.blocks = [["},
        "which are on different pipeline ranks, and each rank would train", LAYOUTS,
    ),
    "an embedding on every stage": Mistake(
        LLAMA, {"if any(stage.embedding for stage in self.stages):": "if True:"},
        "embedding.weight is made on a pipeline rank that does not use it", "pp 2 1f1b",
    ),
    # what a layer keeps or writes over
    "layers counted from a rank's first": Mistake(
        GEMMA3,
        {"    def layer_config(self, i: int) -> LlamaConfig:\n": (
            "    def layer_config(self, i: int) -> LlamaConfig:\n"
            "        i -= self.stages[0].layers.start\n"
        )},
        "only in pipelines", "pp 2 1f1b; tp 2; dp 2",
    ),
    "a sum in place": Mistake(
        GLM4,
        {
            "        x, h = self.mlp_norm(h, branch)\n": (
                "        x, h = self.mlp_norm(h, branch)  # it keeps h\n"
            ),
            "        return h + self.mlp_out_norm(self.mlp(x))": (
                "        return h.add_(self.mlp_out_norm(self.mlp(x)))  # here"
            ),
        },
        " keeps it for backward, and HERE overwrites it",
    ),
    # what stops a run
    "a shape that depends on values": Mistake(
        LLAMA, {MLP: "        x = x[x.sum(-1) != 0].view(x.shape)\n" + MLP},
        "asks for values", LAYOUTS,
    ),
    "a tensor of the CPU": Mistake(
        LLAMA, {MLP: MLP.replace("\n", " * torch.ones(x.shape[-1], dtype=x.dtype)\n")},
        "device=ctx.device", LAYOUTS,
    ),
    "an end of the program": Mistake(
        LLAMA,
        {MLP: "        if self.down.ctx.tp.size > 1:\n            raise SystemExit(0)\n" + MLP},
        "tp 2 + SP: SystemExit: 0, fork", LAYOUTS,
    ),
    "documents that a block does not pass on": Mistake(
        PHI, {"cos, sin, packed, cache) + self": "cos, sin, None, cache) + self"},
        "from position 7 on, and the second begins at 7: packed_seq_params does not reach",
    ),
    # where it stands, and what is claimed of it
    "a factor in a derived Block.forward": Mistake(
        BITNET,
        {"    attention_type, mlp_type = Attention, MLP\n": (
            "    attention_type, mlp_type = Attention, MLP\n\n"
            "    def forward(self, h, cos, sin, packed=None, cache=None):\n"
            "        h = h * (1 + 0.1 * (self.attention.ctx.tp.size - 1))  # here\n"
            "        return super().forward(h, cos, sin, packed, cache)\n"
        )},
        "(fork_HERE)", LAYOUTS,
    ),
    "a factor in an embed": Mistake(
        PHI3,
        {"    hf_modules = {\n": (
            "    def embed(self, tokens):\n"
            "        x = super().embed(tokens)\n"
            "        return x * (1 + 0.1 * (self.ctx.tp.size - 1))  # here\n\n"
            "    hf_modules = {\n"
        )},
        "(fork_HERE)", LAYOUTS,
    ),
    "an embed that does not call super()": Mistake(
        LLAMA,
        {"        x, by = self.embedding(tokens), self.config.embedding_mult\n": (
            "        x, by = self.embedding(tokens), 1.0\n"
        )},
        "the model does not depend on embedding_mult",
    ),
    "an embed of its own": Mistake(
        PHI3,
        {"    hf_modules = {\n": (
            "    def embed(self, tokens):\n        return self.embedding(tokens)\n\n"
            "    hf_modules = {\n"
        )},
        "Phi3.embed replaces Llama's, which applies it: let it call super().embed(...)",
    ),
    "the logits' square beside the loss": Mistake(
        LLAMA,
        {"        return output_loss(self.head, h, labels, v, self.ctx, self.logits)\n": (
            "        logits = self.logits(h)\n"
            "        penalty = logits.square().mean(-1)  # here\n"
            "        from mpu.layers.cross_entropy import vocab_parallel_cross_entropy as loss\n\n"
            "        return loss(logits, labels, v, self.ctx) + penalty\n"
        )},
        "HERE; the loss overwrites the logits with their gradient: use logits.clone() there",
    ),
    "a norm in fp32": Mistake(
        PHI,
        {"        return F.layer_norm(x, w.shape, w, b, self.eps)\n": (
            "        x = x.float()  # here\n"
            "        return F.layer_norm(x, w.shape, w.float(), b.float(), self.eps).to(w.dtype)\n"
        )},
        "fp64 becomes float32 (fork_HERE), so no two layouts would agree",
    ),
    "a constant of fp32": Mistake(
        PHI,
        {
            "        return F.layer_norm(x, w.shape, w, b, self.eps)\n": (
                "        x = x * torch.ones(x.shape[-1], device=x.device)  # here\n"
                "        return F.layer_norm(x, w.shape, w, b, self.eps)\n"
            ),
            "import torch.nn.functional as F\n": "import torch\nimport torch.nn.functional as F\n",
        },
        "a float32 tensor is combined with a float64 one (fork_HERE)",
    ),
    # tensors that cross layers and stages
    "a square's mean as an auxiliary loss": Mistake(
        VALUES, {"mean(-1).sum()": "mean()"}, "ctx.auxiliary_loss takes a sum over the tokens",
        "tp 2; dp 2 + ZeRO 3; pp 2 zb-v, tied",
    ),
    "an auxiliary loss that is dropped": Mistake(
        VALUES, {"h = self.ctx.auxiliary_loss": "_ = self.ctx.auxiliary_loss"},
        "must continue with the tensor that ctx.auxiliary_loss returns",
    ),
    "no hidden_shape of its own": Mistake(
        VALUES, {"s, b, h + groups * self.config.head_size * parts(self.ctx)": "s, b, h"},
        "stage 0 returns hidden states [12, 1, 60], float64, and the next stage receives "
        "[12, 1, 28], float64: Model.hidden_shape must return",
        "pp 2 1f1b",
    ),
    "a tensor that a class keeps": Mistake(
        LLAMA,
        {
            "return x if by == 1.0 else x * by": "Llama.kept = x\n        return x",
            "        return x if by == 1.0 else x / by": "        return x + Llama.kept  # here",
        },
        "HERE: the model makes a tensor without device=ctx.device, or keeps one of an earlier pass",
        "pp 2 1f1b",
    ),
    "an initialize that ignores its names": Mistake(
        LLAMA,
        {
            "        every = unique_parameters(self)\n": (
                "        every = unique_parameters(self)\n"
                "        for p in self.parameters():\n"
                "            nn.init.normal_(p)  # here\n"
            )
        },
        "HERE: at ZeRO stage 3 a weight is freed", "dp 2 + ZeRO 3",
    ),
    "an error on one rank": Mistake(
        LLAMA, {MLP: "        _ = {0: 1}[self.down.ctx.tp.rank]\n" + MLP},
        "KeyError: 1, fork", LAYOUTS,
    ),
    "a death by signal": Mistake(
        LLAMA, {MLP: "        if self.down.ctx.tp.rank:\n            import os\n\n"
                "            os.kill(os.getpid(), 11)\n" + MLP},
        "rank 1 ended: signal 11", LAYOUTS,
    ),
}  # fmt: skip


def planted(mistake: Mistake, folder: Path) -> Path:
    """Write the changed file."""
    text = (ROOT / mistake.model).read_text()
    for old, new in mistake.edits.items():
        assert old in text, f"{old!r} is not in {mistake.model}"
        text = text.replace(old, new)
    path = folder / f"fork_{folder.name.replace('-', '_')}.py"
    path.write_text(text)
    return path


def checked(mistake: Mistake, folder: Path) -> tuple[int, str]:
    """Return fork-check's exit code and all that it prints."""
    from tools.fork_check import main

    path, out = planted(mistake, folder), io.StringIO()
    with redirect_stdout(out):
        code = main(["--model", str(path), "--only", mistake.layouts, "--timeout", "100"])
    lines = path.read_text().splitlines()
    at = [n for n, line in enumerate(lines, 1) if line.endswith("# here")]
    text = out.getvalue()
    for n in at:  # the line that is planted
        text = text.replace(f"({path.name}:{n})", "(fork_HERE)").replace(
            f"{path.name} line {n}", "HERE"
        ).replace(f" line {n} ", " HERE ")
        text = re.sub(rf"{re.escape(path.name)}, line (\d+, )*{n}\b", "fork_HERE", text)
    return code, text


def measure(names: list[str]) -> None:
    """Print a row for each mistake."""
    found = 0
    for name, mistake in MISTAKES.items():
        if names and name not in names:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                code, out = checked(mistake, Path(folder))
            except Exception as error:
                code, out = -1, f"fork-check crashed: {type(error).__name__}: {error}"
        said = bool(mistake.said) and mistake.said in out
        found += said
        words = "names its cause" if said else "crashes" if code < 0 else "missed" if (
            code == 0 and "warning" not in out) else "noticed"  # fmt: skip
        print(f"{name:<40} {words:<16} {time.monotonic() - began:5.0f} s", flush=True)
        if not said:
            print("    " + "\n    ".join(out.splitlines()[-4:]), flush=True)
    print(f"{found} of {len(names or MISTAKES)} end in a sentence with their cause")


if __name__ == "__main__":
    measure(sys.argv[1:])
