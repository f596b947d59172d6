# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V2, V2-Lite, V3 and R1, Kimi-K2, Moonlight: multi-head latent attention, and experts.

    latent of a query  x W -> [s, b, r_q] -> norm -> W -> q of each head, [n | p]
    latent of keys     x W -> [s, b, r_kv + p]: r_kv -> norm -> W -> k [n] and v [e] of each head;
                       p, rotated, is the end of every head's key
    scores             q k^T / sqrt(n + p), n + p = 192 and e = 128 in V3; with yarn times m^2

Every tensor-parallel rank computes the latents; with sequence parallelism only those of its own
tokens, so that latents are gathered instead of x. Heads are sharded over the ranks. RoPE rotates
neighbouring elements. Experts are those of model/moe.py. V2's router is a softmax, V3's are
sigmoids with a bias; a group of experts has the score of its best one (V2) or the sum of its best
two (V3). (DeepSeek-V2, 2024, section 2.1; DeepSeek-V3 technical report, 2024)
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import huggingface, llama, moe, qwen3
from model.huggingface import filled, unread, without
from model.llama import Cache, Packed, hf_names, parameter_group, read_hf_config
from model.moe import MoEConfig
from mpu.comm.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from mpu.context import LayerContext
from mpu.gradients import use
from mpu.layers.context_attention import core_attention_of
from mpu.layers.fused import RMSNorm
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpu.layers.rope import Yarn
from mpu.param import Region, divide
from mpu.pipeline.stage_layout import Stage
from mpu.recompute import Recompute

__all__ = ["Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group"]
LATENT_EPS = 1e-6  # of the latents' norms, regardless of rms_norm_eps
SIZES = {  # field, with Megatron-LM's name: config.json's key, its default there, the flag's help
    "q_lora_rank": ("q_lora_rank", 1536, "the latent of a query; 0: there is none"),
    "kv_lora_rank": ("kv_lora_rank", 512, "the latent of keys and values"),
    "qk_head_dim": ("qk_nope_head_dim", 128, "a head of q and k, without what RoPE turns"),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim", 64, "what RoPE turns of a head"),
    "v_head_dim": ("v_head_dim", 128, "a head of v"),
}
# defaults of keys that a config.json lacks, as in transformers
V2 = dict(
    first_k_dense_replace=0, moe_intermediate_size=1407, n_routed_experts=64, n_shared_experts=2,
    norm_topk_prob=False, rms_norm_eps=1e-6, routed_scaling_factor=1.0, topk_group=None,
)  # fmt: skip
V3 = dict(
    first_k_dense_replace=3, max_position_embeddings=4096, moe_intermediate_size=2048, n_group=8,
    n_routed_experts=256, n_shared_experts=1, norm_topk_prob=True, num_experts_per_tok=8,
    rms_norm_eps=1e-6, routed_scaling_factor=2.5, topk_group=4,
)  # fmt: skip


@dataclass(frozen=True)
class DeepseekConfig(MoEConfig):
    """Sizes. softmax_mscale: m of yarn's scale of scores, mscale_all_dim in a config.json."""

    q_lora_rank: int = 1536
    kv_lora_rank: int = 512
    qk_head_dim: int = 128
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128
    softmax_mscale: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in SIZES:
            size, least = getattr(self, name), int(name != "q_lora_rank")
            whole = type(size) is int and least <= size <= 1 << 20
            self._rule(name, whole, f"a whole number from {least} to {1 << 20}")
        even = self.qk_pos_emb_head_dim % 2 == 0
        self._rule("qk_pos_emb_head_dim", even, "even: RoPE turns pairs")
        d, heads = self.qk_head_dim + self.qk_pos_emb_head_dim, self.num_attention_heads
        rule = f"{d}, the qk_head_dim and qk_pos_emb_head_dim of a head of q and k (--kv-channels)"
        self._rule("kv_channels", self.kv_channels == d, rule)
        rule = f"{heads}, as each head has a key (leave --group-query-attention out)"
        self._rule("num_query_groups", self.num_query_groups == heads, rule)
        self._rule("qk_layernorm", not self.qk_layernorm, "left out: latents are normalised anyway")
        m = self.softmax_mscale
        self._rule("softmax_mscale", type(m) in (int, float) and 0 <= m < math.inf, "from 0 on")
        if m and self.yarn is None:
            raise ValueError("softmax_mscale is of yarn's scaling of positions: give that too")
        for name, plain in (("embedding_mult", 1), ("logits_divisor", 1), ("softmax_scale", 0)):
            self._rule(name, getattr(self, name) == plain, f"{plain}: there is no muP here")
        v3 = self.moe_router_score_function == "sigmoid"
        if self.moe_router_enable_expert_bias != v3 or self.moe_router_pre_softmax == v3:
            raise ValueError(
                "a DeepSeek's router is a softmax of all experts, --moe-router-pre-softmax, or "
                "--moe-router-score-function sigmoid with --moe-router-enable-expert-bias"
            )
        sparse = [self.sparse(i) for i in range(self.num_layers)]
        rule = "0 for the first layers and 1 for the others"
        self._rule("moe_layer_freq", sparse == sorted(sparse), rule)
        shared, f = self.moe_shared_expert_intermediate_size, self.expert_ffn
        rule = f"a multiple of an expert's {f}"
        self._rule("moe_shared_expert_intermediate_size", shared % f == 0, rule)

    @property
    def rotary_size(self) -> int:
        return self.qk_pos_emb_head_dim

    @property
    def score_scale(self) -> float:
        """Return the factor of q k^T."""
        m = 1.0 if self.yarn is None else Yarn.suggested(self.yarn.factor, self.softmax_mscale)
        return m * m * self.kv_channels**-0.5


class ToLatent(nn.Module):
    """y = x A^T, with A replicated over the tensor-parallel ranks: [s/t, b, h] -> [s/t, b, r]."""

    def __init__(self, hidden: int, rank: int, ctx: LayerContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.weight = ctx.replicated_parameter((rank, hidden), Region.SEQUENCE_PARALLEL)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, use(self.weight, self.ctx.sink))


class Attention(nn.Module):
    def __init__(self, config: DeepseekConfig, ctx: LayerContext, recompute: Recompute) -> None:
        super().__init__()
        self.config, self.ctx = config, ctx
        h, a, r = config.hidden_size, config.num_attention_heads, config.q_lora_rank
        self.heads = divide("tensor-parallel", a, ctx.tp, "attention heads")
        self.core = recompute.selective(core_attention_of(ctx).attend)
        if r:
            self.q_a, self.q_norm = ToLatent(h, r, ctx), RMSNorm(r, ctx=ctx, eps=LATENT_EPS)
        self.q_b = ColumnParallelLinear(r or h, a * config.kv_channels, ctx=ctx)
        self.kv_a = ToLatent(h, config.kv_lora_rank + config.qk_pos_emb_head_dim, ctx)
        self.kv_norm = RMSNorm(config.kv_lora_rank, ctx=ctx, eps=LATENT_EPS)
        of_head = config.qk_head_dim + config.v_head_dim
        self.kv_b = ColumnParallelLinear(config.kv_lora_rank, a * of_head, ctx=ctx)
        self.proj = RowParallelLinear(a * config.v_head_dim, h, ctx=ctx)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed = None, cache: Cache = None
    ) -> Tensor:
        """x [s/t, b, h] -> [s/t, b, h]."""
        c = self.config
        n, p, e = c.qk_head_dim, c.qk_pos_emb_head_dim, c.v_head_dim
        q = self.q_b(self.q_norm(self.q_a(x)) if c.q_lora_rank else x)  # [s, b, a (n + p) / t]
        latent, end = self.kv_a(x).split([c.kv_lora_rank, p], -1)
        kv = self.kv_b(self.kv_norm(latent.contiguous()))  # [s, b, a (n + e) / t]
        q, q_end = q.unflatten(-1, (self.heads, n + p)).split([n, p], -1)
        k, v = kv.unflatten(-1, (self.heads, n + e)).split([n, e], -1)
        end = turned(self.of_all_tokens(end)[:, :, None], cos, sin)  # [s, b, 1, p]
        q = torch.cat([q, turned(q_end, cos, sin)], -1)
        k = torch.cat([k, end.expand(-1, -1, self.heads, -1)], -1)
        return self.proj(self.core(q, k, v, packed, cache, scale=c.score_scale))

    def of_all_tokens(self, x: Tensor) -> Tensor:
        """x [s/t, b, p] -> [s, b, p]; backward sums the gradients of all ranks' heads."""
        axis = self.ctx.tp
        if self.ctx.sp:
            return gather_from_sequence_parallel_region(x.contiguous(), axis, self)
        return copy_to_tensor_model_parallel_region(x, axis, self)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of neighbours of x [s, b, n, p]; return all first elements, then all second."""
    a, b = x[..., ::2], x[..., 1::2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class SparseMLP(moe.SparseMLP):
    def of_best_groups(self, scores: Tensor) -> Tensor:
        """scores [T, E] -> [T, E], with -infinity outside of each token's best groups."""
        c = self.config
        of_group = scores.unflatten(1, (c.moe_router_num_groups, -1))  # [T, groups, E / groups]
        counted = 2 if c.moe_router_score_function == "sigmoid" else 1
        best = of_group.sort(dim=2, descending=True).values[:, :, :counted].sum(2)
        chosen = torch.sort(best, dim=1, descending=True, stable=True).indices
        out = torch.ones_like(best, dtype=torch.bool)
        out.scatter_(1, chosen[:, : c.moe_router_group_topk], False)
        return of_group.masked_fill(out[:, :, None], -torch.inf).flatten(1)


class Block(moe.Block):
    attention_type, sparse_type = Attention, SparseMLP


class Deepseek(moe.MoE):
    config: DeepseekConfig
    block = Block

    def __init__(
        self,
        config: DeepseekConfig,
        ctx: LayerContext,
        recompute: Recompute | None = None,
        stages: Sequence[Stage] | None = None,
    ) -> None:
        super().__init__(config, ctx, recompute, stages)
        kept = {n: m for n, m in self.hf_modules.items() if not n.startswith("attention.")}
        q = {"q_a": "q_a_proj", "q_norm": "q_a_layernorm", "q_b": "q_b_proj"}
        kv = {"kv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "kv_b": "kv_b_proj"}
        q = q if config.q_lora_rank else {"q_b": "q_proj"}
        named = {**q, **kv, "proj": "o_proj"}.items()
        self.hf_modules = kept | {f"attention.{n}": (f"self_attn.{m}",) for n, m in named}


def hf_config(config: DeepseekConfig, dtype: str = "float32") -> dict[str, Any]:
    c, v3 = config, config.moe_router_score_function == "sigmoid"
    groups = c.moe_router_num_groups
    greedy = "group_limited_greedy" if groups > 1 else "greedy"
    hf = {
        **llama.hf_config(c, dtype),
        **{theirs: getattr(c, ours) or None for ours, (theirs, *_) in SIZES.items()},
        "architectures": [f"DeepseekV{3 if v3 else 2}ForCausalLM"],
        "model_type": "deepseek_v3" if v3 else "deepseek_v2",
        "head_dim": c.qk_pos_emb_head_dim,
        "n_routed_experts": c.num_experts,
        "num_experts_per_tok": c.moe_router_topk,
        "moe_intermediate_size": c.expert_ffn,
        "n_shared_experts": c.moe_shared_expert_intermediate_size // c.expert_ffn,
        "first_k_dense_replace": sum(not c.sparse(i) for i in range(c.num_layers)),
        "moe_layer_freq": 1,
        "n_group": groups or (1 if v3 else None),
        "topk_group": c.moe_router_group_topk or (1 if v3 else None),
        "topk_method": "noaux_tc" if v3 else greedy,
        "scoring_func": c.moe_router_score_function,
        "norm_topk_prob": v3 and c.moe_router_topk > 1,
        "routed_scaling_factor": c.moe_router_topk_scaling_factor,
    }
    if v3:  # its MLPs have no biases; V2's RoPE always rotates neighbours, so it has no such key
        hf = without(qwen3.UNREAD, hf | {"rope_interleave": True})
    if m := c.softmax_mscale:
        assert c.yarn is not None
        log = Yarn.suggested(c.yarn.factor) - 1.0
        own = c.yarn.attention_factor * (m * log + 1.0) - 1.0
        hf["rope_scaling"] |= {"mscale": own / log if log else m, "mscale_all_dim": m}
        hf["rope_scaling"]["attention_factor"] = c.yarn.attention_factor
    return hf


def from_hf_config(hf: dict[str, Any]) -> DeepseekConfig:
    """Read a config.json of model_type deepseek_v2, deepseek_v3 or kimi_k2."""
    kind = hf.get("model_type")
    v3 = kind != "deepseek_v2"
    hf = filled(hf, V3 if v3 else V2)
    k = hf["num_experts_per_tok"]
    groups, best = hf.get("n_group") or 1, hf.get("topk_group") or 1
    limits = groups > 1 and (v3 or hf.get("topk_method", "greedy") == "group_limited_greedy")
    methods = ("noaux_tc",) if v3 else ("greedy", "group_limited_greedy")
    rules = {
        "model_type": lambda v: v in ("deepseek_v2", "deepseek_v3", "kimi_k2"),
        "scoring_func": lambda v: v == ("sigmoid" if v3 else "softmax"),
        "topk_method": lambda v: v in methods,
        "norm_topk_prob": lambda v: (False if v is None else v) is (v3 and k > 1),
        "routed_scaling_factor": lambda v: type(v) in (int, float) and v > 0,
        "moe_layer_freq": lambda v: v == 1,
        "rope_interleave": lambda v: v is True or not v3,
        "topk_group": lambda v: not limits or type(v) is int and 1 <= v <= groups,
        "head_dim": lambda v: v in (None, own["qk_pos_emb_head_dim"]),  # transformers 5 writes it
        "n_shared_experts": lambda v: v is None or type(v) is int and v >= 0,
        "num_key_value_heads": lambda v: v in (None, hf["num_attention_heads"]),
    }
    if v3:
        rules |= unread(qwen3.UNREAD) | {"topk_group": lambda v: (v or 1) <= groups}
    sizes = SIZES.items()
    own: dict[str, Any] = {ours: hf.get(name, size) or 0 for ours, (name, size, _) in sizes}
    rope, layers = huggingface.read_rope(hf), range(hf["num_hidden_layers"])
    first, f = hf["first_k_dense_replace"] or 0, hf["moe_intermediate_size"]
    own |= {
        "softmax_mscale": rope.get("mscale_all_dim") or 0.0 if rope["rope_type"] == "yarn" else 0.0,
        "num_experts": hf["n_routed_experts"],
        "moe_router_topk": k,
        "moe_ffn_hidden_size": 0 if f == hf["intermediate_size"] else f,
        "moe_shared_expert_intermediate_size": f * (hf["n_shared_experts"] or 0),
        "moe_layer_freq": tuple(int(i >= first) for i in layers),
        "moe_router_num_groups": groups if limits else 0,
        "moe_router_group_topk": best if limits else 0,
        "moe_router_score_function": "sigmoid" if v3 else "softmax",
        "moe_router_enable_expert_bias": v3,
        "moe_router_pre_softmax": not v3,
        "moe_router_topk_scaling_factor": hf["routed_scaling_factor"],
    }

    def make(**sizes: Any) -> DeepseekConfig:
        d = own["qk_head_dim"] + own["qk_pos_emb_head_dim"]
        return DeepseekConfig(**{**sizes, "kv_channels": d})

    return read_hf_config(hf, str(kind), make, rules, **own)


def extra_args_provider(parser: argparse.ArgumentParser) -> None:
    for name, (_, size, what) in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size, help=what)
    flag = "--softmax-mscale"
    parser.add_argument(flag, type=float, default=0.0, help="with yarn: mscale_all_dim of scores")


Model, ModelConfig = Deepseek, DeepseekConfig
