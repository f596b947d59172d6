# SPDX-License-Identifier: Apache-2.0
"""Llama 2, 3, 3.1, 3.2: the whole architecture in one file, written parallel. Copy and change it.

    s sequence   b micro-batch   h hidden   a query heads   g key/value groups   d head size
    f ffn hidden   V vocabulary   t tensor-parallel size
    under sequence parallelism (SP) hidden states are [s/t, b, h]

    tokens [b, s] -> embedding [s/t, b, h] -> L x { norm, attention, +;  norm, SwiGLU MLP, + }
    -> norm -> head [s, b, V/t] -> vocabulary-parallel cross entropy [s, b]

Where bytes move (docs/parallelism.md draws it): ColumnParallelLinear gathers s before its matmul,
RowParallelLinear reduce-scatters after it, the embedding reduce-scatters once, the loss gathers
three numbers a token. A pipeline rank builds only its stages; mpu/pipeline/engine.py sends the
hidden states between them.
"""

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from model.huggingface import (  # noqa: F401  # forks find all of these here, too
    BIASES,
    filled,
    multipliers,
    no_windows,
    read_config,
    read_rope,
    rope_scaling,
    unless_standard,
    unread,
    window_rule,
    without,
)
from model.sizes import check_sizes
from mpu.context import LayerContext
from mpu.layers.context_attention import core_attention_of
from mpu.layers.cross_entropy import output_loss
from mpu.layers.embedding import VocabParallelEmbedding
from mpu.layers.fused import ResidualRMSNorm, RMSNorm, swiglu
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.layers.qkv import local_heads, qkv_linear
from mpu.layers.rope import Yarn, rope_frequencies, rope_table
from mpu.mup import MuP, Widths
from mpu.param import draw_normal, placement_of, saved_buffers, tie, unique_parameters
from mpu.pipeline.stage_layout import Stage
from mpu.recompute import Recompute

MODEL_TYPE = "llama"  # is in every checkpoint; give a fork its own
Cache = list[Tensor] | None  # keys and values [b, g/t, S, d] of one layer; empty at first
Packed = PackedSeqParams | None  # the documents in each row of tokens; None: each row is one


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes. `rope_scaling_factor` 0: not Llama 3.1's scaling; `yarn` is another. `tied`: embedding
    and head share a weight.
    """

    vocab_size: int
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int = 0  # head size; 0 means hidden_size / num_attention_heads
    max_position_embeddings: int = 4096
    rotary_base: float = 10000.0
    rope_scaling_factor: float = 0.0
    rope_original_length: int = 8192
    yarn: Yarn | None = None
    norm_epsilon: float = 1e-5
    tied: bool = False
    init_method_std: float = 0.02
    make_vocab_size_divisible_by: int = 128
    # muP's multipliers (`with_mup`), of a model that Hugging Face calls Granite
    embedding_mult: float = 1.0  # of what the embedding returns
    logits_divisor: float = 1.0
    softmax_scale: float = 0.0  # of q k^T; 0: 1 / sqrt(head size)
    width_mult: float = 1.0  # hidden matrices are drawn from N(0, std^2 / width_mult)

    def __post_init__(self) -> None:
        check_sizes(self)

    @property
    def head_size(self) -> int:
        """Return d, the size of one head."""
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_size(self) -> int:
        """Return r, the elements of a head that RoPE rotates: all, or in a fork the first r."""
        return self.head_size


def _size(
    v: int, h: int, f: int, layers: int, a: int, g: int,
    positions: int, base: float, scaling: float = 0.0, tied: bool = False,
) -> LlamaConfig:  # fmt: skip
    return LlamaConfig(
        v, h, f, layers, a, g,
        max_position_embeddings=positions, rotary_base=base, rope_scaling_factor=scaling, tied=tied,
    )  # fmt: skip


#                          V       h      f      L    a    g  positions  rope base
SIZES = {
    "llama2-7b":     _size(32000,  4096,  11008, 32,  32,  32, 4096,   10000.0),
    "llama2-13b":    _size(32000,  5120,  13824, 40,  40,  40, 4096,   10000.0),
    "llama2-70b":    _size(32000,  8192,  28672, 80,  64,  8,  4096,   10000.0),
    "llama3-8b":     _size(128256, 4096,  14336, 32,  32,  8,  8192,   500000.0),
    "llama3-70b":    _size(128256, 8192,  28672, 80,  64,  8,  8192,   500000.0),
    "llama3.1-8b":   _size(128256, 4096,  14336, 32,  32,  8,  131072, 500000.0, 8.0),
    "llama3.1-70b":  _size(128256, 8192,  28672, 80,  64,  8,  131072, 500000.0, 8.0),
    "llama3.1-405b": _size(128256, 16384, 53248, 126, 128, 8,  131072, 500000.0, 8.0),
    "llama3.2-1b":   _size(128256, 2048,  8192,  16,  32,  8,  131072, 500000.0, 32.0, True),
    "llama3.2-3b":   _size(128256, 3072,  8192,  28,  24,  8,  131072, 500000.0, 32.0, True),
}  # fmt: skip


class Attention(nn.Module):
    """Grouped-query attention; q, k and v are one column-parallel matmul, cut head by head.

    Where g < t, several ranks share a key/value head, which `qkv` gathers (mpu/layers/qkv.py).
    """

    qkv_bias, proj_bias = False, False  # a fork sets them
    window = 0  # tokens that a query looks at, itself included; 0: all before it

    def __init__(self, config: LlamaConfig, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__()
        h, d = config.hidden_size, config.head_size
        a, g = config.num_attention_heads, config.num_query_groups
        self.heads, self.groups = local_heads(a, g, d, ctx)
        self.head_size, self.ctx = d, ctx
        r = config.rotary_size
        self.rotary = 0 if r == d else r  # elements of a head that RoPE rotates; 0: all
        if r != d and (r % 2 or not 0 < r < d):
            raise ValueError(f"rotary_size is {r}: it must be even, from 2 to the head size, {d}")
        if self.rotary and config.softmax_scale:
            raise ValueError(f"rotary_size is {r}: with softmax_scale it must be {d}, a whole head")
        self.core = recompute.selective(core_attention_of(ctx))
        self.qkv = qkv_linear(h, (a * d, g * d, g * d), ctx=ctx, bias=self.qkv_bias)
        self.proj = RowParallelLinear(a * d, h, ctx=ctx, bias=self.proj_bias)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed = None, cache: Cache = None
    ) -> Tensor:
        """x [s/t, b, h] -> [s/t, b, h]. cache: what `decode` keeps of earlier tokens."""
        qkv, more = self.project(x), {"window": self.window}
        if self.rotary:  # a fork's own core need not know of it
            more["rotary"] = self.rotary
        y = self.core(qkv, cos, sin, self.heads, self.groups, packed, cache=cache, **more)
        return self.proj(y)

    def project(self, x: Tensor) -> Tensor:
        """x [s/t, b, h] -> queries, keys and values before RoPE [s, b, (a + 2g) d / t]."""
        return self.qkv(x)


class MLP(nn.Module):
    """SwiGLU MLP; gate and up are one column-parallel matmul."""

    def __init__(self, config: LlamaConfig, ctx: LayerContext) -> None:
        super().__init__()
        h, f = config.hidden_size, config.ffn_hidden_size
        self.gate_up = ColumnParallelLinear(h, (f, f), ctx=ctx)
        self.down = RowParallelLinear(f, h, ctx=ctx)

    def forward(self, x: Tensor) -> Tensor:
        """x [s/t, b, h] -> [s/t, b, h]."""
        return swiglu(x, self.gate_up, self.down)


class Block(nn.Module):
    """One transformer layer, pre-norm."""

    attention_type: type[Attention] = Attention
    mlp_type: type[nn.Module] = MLP
    norm_type: type[RMSNorm] = ResidualRMSNorm

    def __init__(self, config: LlamaConfig, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__()
        self.attention_norm = self.norm_type(config.hidden_size, ctx=ctx, eps=config.norm_epsilon)
        self.attention = self.attention_type(config, ctx, recompute)
        self.mlp_norm = self.norm_type(config.hidden_size, ctx=ctx, eps=config.norm_epsilon)
        self.mlp = self.mlp_type(config, ctx)

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, packed: Packed = None, cache: Cache = None
    ) -> Tensor:
        """h [s/t, b, h] -> [s/t, b, h]."""
        x, h = self.attention_norm(h)
        x, h = self.mlp_norm(h, self.attention(x, cos, sin, packed, cache))  # of h + attention(x)
        return h + self.mlp(x)


class Llama(nn.Module):
    """The model, or this pipeline rank's stages of it, one a chunk; layers keep their numbers.

    Raises ValueError where a size does not divide over the tensor-parallel ranks.
    """

    block: type[Block] = Block
    norm_type: type[nn.Module] = RMSNorm
    head_bias = False
    # a block's modules, and Hugging Face's modules that are fused in each
    hf_modules: Mapping[str, tuple[str, ...]] = {
        "attention_norm": ("input_layernorm",),
        "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.proj": ("self_attn.o_proj",),
        "mlp_norm": ("post_attention_layernorm",),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.down": ("mlp.down_proj",),
    }
    # the modules outside of blocks
    hf_ends = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}

    def __init__(
        self,
        config: LlamaConfig,
        ctx: LayerContext,
        recompute: Recompute | None = None,
        stages: Sequence[Stage] | None = None,
    ) -> None:
        super().__init__()
        recompute = recompute or Recompute()
        self.config, self.ctx, self.recompute = config, ctx, recompute
        self.stages = stages or [Stage(0, config.num_layers, embedding=True, loss=True)]
        h, v, pad = config.hidden_size, config.vocab_size, config.make_vocab_size_divisible_by
        shared = None  # the embedding's weight, where the head is tied to it
        if any(stage.embedding for stage in self.stages):
            self.embedding = VocabParallelEmbedding(v, h, ctx=ctx, pad_to=pad)
            shared = self.embedding.weight if config.tied else None
        numbers = [i for stage in self.stages for i in stage.layers]
        self.layers = nn.ModuleDict(
            {str(i): self.block(self.layer_config(i), ctx, recompute) for i in numbers}
        )
        self.blocks = [[self.layers[str(i)] for i in stage.layers] for stage in self.stages]
        if any(stage.loss for stage in self.stages):
            self.norm = self.norm_type(h, ctx=ctx, eps=config.norm_epsilon)
            self.head = ColumnParallelLinear(
                h, v, ctx=ctx, pad_to=pad, weight=shared, output_layer=True, bias=self.head_bias
            )
        if config.tied and hasattr(self, "embedding") != hasattr(self, "head"):
            end = self.embedding if hasattr(self, "embedding") else self.head
            tie(end.weight, ctx.grid.embd)  # the other end of the pipeline holds a copy
        self._rope: tuple[Tensor, Tensor] | None = None

    def layer_config(self, i: int) -> LlamaConfig:
        """Return the sizes of layer i: all layers have the same."""
        return self.config

    def frequencies(self) -> Tensor:
        """Return the r/2 angular frequencies, in fp64."""
        c = self.config
        if c.yarn is not None:
            return c.yarn.frequencies(c.rotary_size, c.rotary_base)
        scaling = (c.rope_scaling_factor, c.rope_original_length)
        return rope_frequencies(c.rotary_size, c.rotary_base, *scaling)

    def rope(self, positions: Tensor | None, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions [b, s], or of 0 .. length - 1; the table may grow."""
        if self._rope is None or len(self._rope[0]) < length:
            factor = 1.0 if self.config.yarn is None else self.config.yarn.attention_factor
            if scale := self.config.softmax_scale:  # q and k have its root each: no kernel knows it
                factor *= (scale * self.config.head_size**0.5) ** 0.5
            arguments = (self.frequencies(), length, self.ctx.accumulate, self.ctx.device, factor)
            self._rope = rope_table(*arguments)
        cos, sin = self._rope
        if positions is None:
            return cos[:length], sin[:length]
        at = positions.t()  # [s, b]
        return cos[at, 0], sin[at, 0]  # [s, b, 1, d/2]

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Packed = None,
        *,
        hidden: Tensor | None = None,
        chunk: int = 0,
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """tokens, labels [b, s] -> loss of each token [b, s]; without labels -> logits [s, b, V/t].

        packed_seq_params keeps attention inside documents; position_ids [b, s] replaces 0, 1, 2,
        ... In a pipeline this runs the stage of `chunk`, which takes hidden [s/t, b, h] unless it
        is the first stage, and returns hidden unless it is the last. caches: see `decode`.
        """
        stage = self.stages[chunk]
        cos, sin = self.rope(position_ids, tokens.shape[1] * self.ctx.grid.cp.size)
        h = self.embed(tokens) if hidden is None else hidden  # [s/t, b, h]
        if self.recompute.runs_blocks and caches is None:
            h = self.recompute.blocks(self.blocks[chunk], h, cos, sin, packed_seq_params)
        else:
            for i, block in enumerate(self.blocks[chunk]):
                h = block(h, cos, sin, packed_seq_params, caches and caches[i])
        if not stage.loss:
            return h
        h = self.last_norm(h)
        if labels is None:
            return self.logits(h)  # [s, b, V/t]
        return self.loss(h, labels.t()).t()  # [b, s]

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [b, s] -> [s/t, b, h], what the first layer takes."""
        x, by = self.embedding(tokens), self.config.embedding_mult
        return x if by == 1.0 else x * by

    def last_norm(self, h: Tensor) -> Tensor:
        """h [s/t, b, h], what the last layer returns -> what the head takes."""
        x, by = self.norm(h), self.config.logits_divisor  # of the logits, as the head is linear
        return x if by == 1.0 else x / by

    def logits(self, h: Tensor) -> Tensor:
        """h [s/t, b, h] -> [s, b, V/t], of which decode and the loss are made."""
        return self.head(h)

    def loss(self, h: Tensor, labels: Tensor) -> Tensor:
        """h [s/t, b, h], labels [s, b] -> loss of each token [s, b]: the logits' cross entropy."""
        v = self.config.vocab_size
        return output_loss(self.head, h, labels, v, self.ctx, self.logits)

    def hidden_shape(self, batch: int, length: int) -> tuple[int, int, int]:
        """Return the shape of the hidden states between stages, for tokens [batch, length]."""
        return length // (self.ctx.tp.size if self.ctx.sp else 1), batch, self.config.hidden_size

    def chunk_of(self, name: str) -> int:
        """Return this rank's chunk that holds a parameter; if unknown 0, whose backward is last."""
        part, *rest = name.split(".")
        for chunk, stage in enumerate(self.stages):
            here = {"embedding": stage.embedding, "norm": stage.loss, "head": stage.loss}
            if int(rest[0]) in stage.layers if part == "layers" else here.get(part):
                return chunk
        return 0

    def decode(self, tokens: Tensor, position: int, caches: Sequence[Cache]) -> Tensor:
        """Return the logits [n, b, V/t] of new tokens [b, n] at `position`; one cache a layer."""
        self.rope(None, position + tokens.shape[1])  # the table may grow
        at = torch.arange(position, position + tokens.shape[1], device=tokens.device)
        return self(tokens, position_ids=at.expand_as(tokens), caches=caches)

    def initialize(self, seed: int, names: Container[str] | None = None) -> "Llama":
        """Draw the weights, or only those of `names`: the same model for every layout.

        norms                          1, biases 0: `initial_vector`
        embedding, head, qkv, gate_up  N(0, std)
        proj, down                     N(0, std / sqrt(2 L)), as each adds to the residual stream

        With muP the matrices of blocks have std / sqrt(width_mult).
        """
        std, table = self.config.init_method_std, hf_names(self)
        every = unique_parameters(self)
        for name, param in every if names is None else (e for e in every if e[0] in names):
            if param.dim() == 1 or name.endswith("bias"):  # those of experts are one matrix
                nn.init.constant_(param, self.initial_vector(name))
            else:
                deep = name.endswith(("proj.weight", "down.weight"))
                scale = math.sqrt(2 * self.config.num_layers) if deep else 1.0
                if parameter_group(name, param) != "embedding":
                    scale *= math.sqrt(self.config.width_mult)
                draw_normal(param, table[name], std / scale, seed)
        return self

    def initial_vector(self, name: str) -> float:
        """Return the initial value of a vector: of a norm, a gain, a bias."""
        return 0.0 if name.endswith("bias") else 1.0


def hf_names(model: Llama) -> dict[str, tuple[str, ...]]:
    """Return each parameter's Hugging Face tensor names, one for each fused section of it.

    A parameter of a module that the tables do not list keeps its own name. Buffers that a
    checkpoint holds have one name each.
    """
    ends = model.hf_ends
    table: dict[str, tuple[str, ...]] = {ours: (theirs,) for ours, theirs in ends.items()}
    for i in range(model.config.num_layers):
        for ours, theirs in model.hf_modules.items():
            table[f"layers.{i}.{ours}"] = tuple(f"model.layers.{i}.{n}" for n in theirs)

    def names(name: str, sections: int) -> tuple[str, ...]:
        module, _, kind = name.rpartition(".")
        if name == "head.weight" and model.config.tied:
            module = "embedding"
        if module in table:
            return tuple(f"{theirs}.{kind}" for theirs in table[module])
        return tuple(f"{name}.{i}" for i in range(sections)) if sections > 1 else (name,)

    found = {n: names(n, len(placement_of(p).sections)) for n, p in unique_parameters(model)}
    return found | {n: names(n, 1) for n, _ in saved_buffers(model)}


def hf_config(config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
    """Return Hugging Face's config.json of the same model."""
    return {
        "architectures": [f"{MODEL_TYPE.capitalize()}ForCausalLM"],
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_query_groups,
        "head_dim": config.head_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rotary_base,
        "rope_scaling": rope_scaling(config),
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_method_std,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    } | multipliers(config)


# what a Mistral's config.json that does not say it means
MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}


def from_hf_config(hf: dict[str, Any]) -> LlamaConfig:
    """Read a Hugging Face config.json of a Llama, or of a Mistral without a window, which is one;
    refuse what this file does not compute.

    Raises ValueError naming the field, its value and what is supported.
    """
    kind, rules = MODEL_TYPE, dict[str, Any]()
    if hf.get("model_type") == "granite":  # what hf_config writes of muP's multipliers
        kind, rules = "granite", {"residual_multiplier": lambda v: v == 1.0}
        hf = filled(hf, {"attention_multiplier": 1.0})
    elif hf.get("model_type") == "mistral":
        hf = filled(hf, MISTRAL)
        kind, rules = "mistral", window_rule(hf) | unread(BIASES)
    return read_hf_config(hf, kind, rules=rules)


def read_hf_config(
    hf: dict[str, Any],
    model_type: str,
    make: Callable[..., Any] = LlamaConfig,
    rules: Mapping[str, Callable[[Any], bool]] | None = None,
    **own: Any,
) -> Any:
    """Do `from_hf_config` for a fork: make(sizes of a Llama, and the fork's own fields `own`).

    rules: what a field that is there may be, added to those of a Llama or in place of them.
    """
    return read_config(hf, model_type, make, rules or {}, **own)


def with_mup(config: LlamaConfig, mup: MuP) -> Widths:
    """Return the sizes with muP's multipliers: the width is h, to which f and a d are proportional.

    Matrices of blocks have an input that grows with h; the embedding, the output layer and vectors
    have not. A fork with such parameters imports this function, one with others writes its own.
    """
    h, d = config.hidden_size, config.head_size
    sizes = replace(
        config,
        embedding_mult=mup.embedding_mult,
        logits_divisor=mup.logits_divisor(h),
        softmax_scale=unless_standard(mup.softmax_scale(d), d),
        width_mult=mup.width_mult(h),
    )
    return Widths(sizes, dict.fromkeys(("matrix", "matrix_no_decay"), mup.width_mult(h)))


def parameter_group(name: str, param: nn.Parameter) -> str:
    """Return a parameter's group; settings/update_rules.py has what the flags do with it."""
    if name in ("embedding.weight", "head.weight"):
        return "embedding"
    return "matrix" if param.dim() > 1 else "vector"


Model, ModelConfig = Llama, LlamaConfig  # as --model-file finds them (model/load.py)
