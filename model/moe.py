# SPDX-License-Identifier: Apache-2.0
"""Mixtral, Qwen3-MoE, Dots1: a Llama whose MLPs are mixtures of experts. Only the differences.

    T tokens of a rank = s/t x b   E experts   k experts per token   f ffn hidden of an expert

    x [s/t, b, h] -> router logits [T, E], fp32 -> k experts and weights per token [T, k]
    -> rows by expert [n, h] -> SwiGLU MLP of each expert -> weighted sum over k -> [s/t, b, h]

The router's weight is replicated, like that of a norm. The experts are distributed over the axis
ep, and mpu/layers/dispatch.py sends the tokens to them. A token's k experts are those with its k
highest scores, lower indices first among equal scores. They are chosen once: backward and
recomputation reuse the choice of forward. (Mixtral: Jiang et al. 2024; Qwen3 technical report,
2025; sigmoid scores and shared experts: DeepSeek-V3 technical report, 2024)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model import llama, qwen3
from model.huggingface import BIASES, filled, no_windows, unread, window_rule, without
from model.llama import LlamaConfig, hf_names, parameter_group, read_hf_config, with_mup
from model.load import MISSING, missing_in
from model.sizes import IN_JSON
from mpu.comm.collectives import sum_in_order
from mpu.comm.transport import Label
from mpu.context import LayerContext
from mpu.layers.dispatch import Capacity, Plan, count_of, dispatcher
from mpu.layers.expert_load import ExpertLoad
from mpu.layers.experts import Experts, RouterLinear
from mpu.pipeline.stage_layout import Stage
from mpu.recompute import Decisions, Recompute

__all__ = [
    "Model", "ModelConfig", "from_hf_config", "hf_config", "hf_names", "parameter_group",
    "with_mup",
]  # fmt: skip
SCORES = ("softmax", "sigmoid")


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """Sizes of a Llama and of its experts; the names are those of Megatron-LM's flags.

    ffn_hidden_size is that of dense layers.
    """

    num_experts: int = 8
    moe_router_topk: int = 2  # experts of a token
    moe_ffn_hidden_size: int = 0  # of an expert; 0: ffn_hidden_size
    # every n-th layer has experts, from layer 0 on; or 1 or 0 for each layer
    moe_layer_freq: int | tuple[int, ...] = 1
    # weights are the chosen entries of a softmax over all experts; else a softmax over the chosen
    moe_router_pre_softmax: bool = False
    moe_router_score_function: str = "softmax"
    moe_router_topk_scaling_factor: float = 1.0  # multiplies the weights
    moe_shared_expert_intermediate_size: int = 0  # ffn size of an expert for every token; 0: none
    qk_layernorm: bool = False  # queries and keys are normalised, as in Qwen3
    # add a bias to sigmoid scores for the choice of experts
    moe_router_enable_expert_bias: bool = False
    moe_router_num_groups: int = 0  # groups of experts; 0: none
    moe_router_group_topk: int = 0  # groups from which a token chooses its experts

    def __post_init__(self) -> None:
        super().__post_init__()
        e, freq, layers = self.num_experts, self.moe_layer_freq, self.num_layers
        integer = "a whole number"
        self._rule("num_experts", 2 <= e <= 1 << 14, f"{integer} from 2 to {1 << 14}")
        self._rule("moe_router_topk", 1 <= self.moe_router_topk <= e, f"{integer} from 1 to {e}")
        for name in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"):
            size = getattr(self, name)
            self._rule(name, 0 <= size <= 1 << 23, f"{integer} from 0 to {1 << 23}")
        rule = f"a whole number >= 0, or 0 or 1 for each of {layers} layers"
        listed = isinstance(freq, tuple) and len(freq) == layers and {*freq} <= {0, 1}
        self._rule("moe_layer_freq", listed or isinstance(freq, int) and freq >= 0, rule)
        object.__setattr__(self, "moe_layer_freq", self._same_layers())
        score = self.moe_router_score_function
        self._rule("moe_router_score_function", score in SCORES, f"one of {', '.join(SCORES)}")
        factor = self.moe_router_topk_scaling_factor
        self._rule("moe_router_topk_scaling_factor", 0 < factor < float("inf"), "above 0")
        if self.moe_router_topk == 1 and score == "softmax" and not self.moe_router_pre_softmax:
            raise ValueError(
                "--moe-router-topk 1: the softmax over one chosen expert is always 1, so the "
                "router would not be trained: give --moe-router-pre-softmax"
            )
        if self.moe_router_enable_expert_bias and score != "sigmoid":
            raise ValueError(
                "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid, "
                f"not {score}"
            )
        self._check_groups()

    def _check_groups(self) -> None:
        groups, best = self.moe_router_num_groups, self.moe_router_group_topk
        e, k = self.num_experts, self.moe_router_topk
        if not groups:
            rule = "0 (its default) without --moe-router-num-groups"
            return self._rule("moe_router_group_topk", best == 0, rule)
        self._rule("moe_router_num_groups", e % groups == 0, f"a divisor of the {e} experts")
        rule = f"a whole number from 1 to the {groups} groups that divides --moe-router-topk {k}"
        self._rule("moe_router_group_topk", 1 <= best <= groups and k % best == 0, rule)
        size = e // groups
        rule = f"at least {-(-k // size)}: --moe-router-topk is {k}, and a group has {size} experts"
        self._rule("moe_router_group_topk", best * size >= k, rule)

    def _rule(self, name: str, valid: bool, rule: str) -> None:
        if not valid:
            also = f" ({IN_JSON[name]})" if name in IN_JSON else ""
            raise ValueError(f"{name}{also} is {getattr(self, name)!r}: it must be {rule}")

    def _same_layers(self) -> int | tuple[int, ...]:
        """Return moe_layer_freq in a canonical form for the same layers: the smallest number >= 1
        if there is one, else the list.
        """
        layers = range(self.num_layers)
        chosen = [i for i in layers if self.sparse(i)]
        numbers = (n for n in range(1, len(layers) + 1) if [*layers[::n]] == chosen)
        return next(numbers, tuple(int(i in chosen) for i in layers))

    def sparse(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        freq = self.moe_layer_freq
        return bool(freq[layer] if isinstance(freq, tuple) else freq and layer % freq == 0)

    @property
    def expert_ffn(self) -> int:
        """Return f, the ffn hidden size of an expert."""
        return self.moe_ffn_hidden_size or self.ffn_hidden_size


class Attention(qwen3.Attention):
    """Grouped-query attention; queries and keys are normalised if qk_layernorm is set."""

    def __init__(self, config: MoEConfig, ctx: LayerContext, recompute: Recompute) -> None:
        of = qwen3.Attention if config.qk_layernorm else llama.Attention
        of.__init__(self, config, ctx, recompute)
        self.project_of = of.project

    def project(self, x: Tensor) -> Tensor:
        """x [s/t, b, h] -> queries, keys and values before RoPE [s, b, (a + 2g) d / t]."""
        return self.project_of(self, x)


class Routing(NamedTuple):
    """The router's decisions for a micro-batch, made once.

    load: this rank's tokens that chose each expert [E], followed by the number of dropped pairs if
    experts have a capacity [E + 1]. shares: f of each balance loss, the share of the pairs (token,
    choice) of each expert: per sequence [b, E], or over all sequences of the micro-batch or of the
    previous step [1, E]. best: if a loss of the next step needs it, this rank's tokens that have
    each expert among their k best scores [E].
    """

    plan: Plan
    load: Tensor
    shares: tuple[Tensor, ...]
    best: Tensor | None = None


class SparseMLP(nn.Module):
    """A mixture of experts, with an optional shared expert for all tokens."""

    def __init__(self, config: MoEConfig, ctx: LayerContext, decisions: Decisions) -> None:
        super().__init__()
        h, e = config.hidden_size, config.num_experts
        self.config, self.ctx, self.decisions = config, ctx, decisions
        self.router = RouterLinear(h, e, ctx=ctx)
        biased = config.moe_router_enable_expert_bias
        # whether the choice of a token may differ from its k best scores
        self.limited = biased or config.moe_router_num_groups > 1
        lagged = "lagged_global_aux_loss" in (kind for kind, _ in ctx.experts.balance)
        self.load = ExpertLoad(
            e, self.router.weight, ctx=ctx, bias=biased, best=lagged and self.limited
        )
        self.experts = Experts(e, h, config.expert_ffn, ctx=ctx)
        self.dispatcher = dispatcher(
            ctx.experts, e, config.moe_router_topk, ctx.grid.ep, self, ctx.interleaver
        )
        self.shared: nn.Module | None = None
        if size := config.moe_shared_expert_intermediate_size:
            self.shared = llama.MLP(replace(config, ffn_hidden_size=size), ctx)
        self.label = Label(self, "forward")

    def forward(self, x: Tensor) -> Tensor:
        """x [s/t, b, h] -> [s/t, b, h]."""
        tokens = x.flatten(0, 1)  # [T, h]
        logits = self.router(tokens)  # [T, E]
        scores = logits.sigmoid() if self.config.moe_router_score_function == "sigmoid" else logits
        routing = self.decisions.record(lambda: self.decide(scores.detach(), x.shape[1]))
        plan, d = routing.plan, self.dispatcher
        sent = d.start(tokens, plan)
        shared = None if self.shared is None else self.shared(x)  # while the rows are in flight
        rows = self.experts(d.finish(sent, plan), plan.counts, sent.later)  # [n, h]
        y = d.combine(rows, self.weights(scores, plan.choice), plan).view_as(x)
        y = y if shared is None else y + shared
        losses = self.losses(logits, scores, routing.shares)
        if losses is not None:
            y = self.ctx.auxiliary_loss(y, losses)
        return self.load.note(y, routing.load, losses, routing.best)

    def decide(self, scores: Tensor, batch: int) -> Routing:
        """Choose k experts for each token by its scores [T, E], and plan the dispatch."""
        bias = self.load.e_score_correction_bias
        kinds = [kind for kind, _ in self.ctx.experts.balance]
        choice = self.choose(scores if bias is None else scores + bias)
        load = count_of(choice, self.config.num_experts)
        # f of a loss counts the k best scores of all experts (DeepSeek-V3, eq. 18): bias and groups
        # would hide imbalance
        best = self.choose(scores, groups=False) if kinds and self.limited else choice
        shares = tuple(self.share(best, kind, batch) for kind in kinds)
        counted = count_of(best, self.config.num_experts) if self.load.counts_best else None
        capacity, options = None, self.ctx.experts
        if options.capacity_factor is not None:
            weights, padded = self.weights(scores, choice), options.pad_to_capacity
            capacity = Capacity.of(choice, load, options.capacity_factor, weights, padded)
            dropped = (load - capacity.size).clamp(min=0).sum()
            plan = self.dispatcher.plan(choice, load, capacity)
            return Routing(plan, torch.cat([load, dropped[None]]), shares, counted)
        return Routing(self.dispatcher.plan(choice, load), load, shares, counted)

    def choose(self, scores: Tensor, groups: bool = True) -> Tensor:
        """Return the indices of the k highest scores [T, E], lower indices first among equals:
        [T, k]. If the model has groups of experts, groups are first chosen in the same way;
        groups False: all experts are one group.
        """
        k, e = self.config.moe_router_topk, self.config.num_experts
        if self.ctx.experts.force_balance:
            pairs = torch.arange(len(scores) * k, device=scores.device)
            return pairs.view(-1, k) % e
        if groups and self.config.moe_router_num_groups > 1:
            scores = self.of_best_groups(scores)
        return torch.sort(scores, dim=1, descending=True, stable=True).indices[:, :k]

    def of_best_groups(self, scores: Tensor) -> Tensor:
        """Return scores [T, E] with -infinity outside of each token's best groups.

        The score of a group is the sum of its k / (groups chosen) best scores (DeepSeek-V3: two);
        before a softmax over all experts, as in Megatron-LM, of their probabilities.
        """
        c = self.config
        softmax = c.moe_router_pre_softmax and c.moe_router_score_function == "softmax"
        ranked = scores.softmax(1) if softmax else scores
        n = c.moe_router_group_topk
        of_group = scores.unflatten(1, (c.moe_router_num_groups, -1))  # [T, groups, E / groups]
        of_ranked = ranked.unflatten(1, (c.moe_router_num_groups, -1))
        best = of_ranked.sort(dim=2, descending=True).values[:, :, : c.moe_router_topk // n].sum(2)
        chosen = torch.sort(best, dim=1, descending=True, stable=True).indices[:, :n]
        out = torch.ones_like(best, dtype=torch.bool).scatter_(1, chosen, False)
        return of_group.masked_fill(out[:, :, None], -torch.inf).flatten(1)

    def weights(self, scores: Tensor, choice: Tensor) -> Tensor:
        """Return the weight of each chosen expert [T, k], given scores [T, E] and choice [T, k]."""
        c = self.config
        if c.moe_router_score_function == "sigmoid":
            chosen = scores.gather(1, choice)
            if c.moe_router_topk > 1:
                chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20)
        elif c.moe_router_pre_softmax:
            chosen = scores.softmax(1).gather(1, choice)
        else:
            chosen = scores.gather(1, choice).softmax(1)
        factor = c.moe_router_topk_scaling_factor
        return chosen if factor == 1.0 else chosen * factor

    def share(self, choice: Tensor, kind: str, batch: int) -> Tensor:
        """Return f of a balance loss for the chosen experts [T, k]. batch: number of sequences."""
        if kind == "lagged_global_aux_loss":
            before = self.load.before
            return (before / before.sum().clamp(min=1))[None]
        sequences = batch if kind == "seq_aux_loss" else 1
        ranks = self.ctx.grid.cp.size * (self.ctx.tp.size if self.ctx.sp else 1)
        return self.count(choice, sequences).double() / (choice.numel() * ranks // sequences)

    def count(self, choice: Tensor, sequences: int) -> Tensor:
        """Return the number of tokens that chose each expert [sequences, E], over tp and cp."""
        e = self.config.num_experts
        at = torch.arange(len(choice), device=choice.device) % sequences  # tokens are [s/t, b]
        found = count_of(at[:, None] * e + choice, sequences * e)
        axes = (self.ctx.tp,) * self.ctx.sp + (self.ctx.grid.cp,)
        for axis in axes:
            found = sum_in_order(found, axis, self.label)
        return found.view(sequences, e)

    def losses(self, logits: Tensor, scores: Tensor, shares: tuple[Tensor, ...]) -> Tensor | None:
        """Return the sum of the router's losses over this rank's tokens, or None if there are none.

        balance    E sum_i f_i P_i, f_i the share of expert i in the pairs of a token and one of
                   its k best scores, P_i the mean of its probability: 1 if balanced (Fedus et al.
                   2021). Over each sequence (seq_aux_loss, DeepSeek-V3) or over the micro-batch of
                   a data-parallel rank (aux_loss). f has no gradient and P is a sum, so each rank
                   adds the part of its own tokens. lagged_global_aux_loss: f is of the global batch
                   of the previous step, known to all ranks; there is no loss in the first step
        z-loss     the mean of logsumexp(logits)^2 (Zoph et al. 2022)
        """
        options, found = self.ctx.experts, list[Tensor]()
        if shares:
            if self.config.moe_router_score_function == "sigmoid":
                probabilities = scores / (scores.sum(1, keepdim=True) + 1e-20)
            else:
                probabilities = logits.softmax(1)
        for share, (_, coefficient) in zip(shares, options.balance, strict=True):
            each = probabilities.unflatten(0, (-1, len(share))).sum(0)  # [sequences, E]
            scale = coefficient * self.config.num_experts
            found.append((share.to(each.dtype) * each).sum() * scale)
        if options.z_coefficient:
            found.append(logits.logsumexp(1).square().sum() * options.z_coefficient)
        return sum(found[1:], found[0]) if found else None


class Block(llama.Block):
    """One transformer layer, pre-norm, with experts or a dense MLP."""

    attention_type = Attention
    sparse_type: type[SparseMLP] = SparseMLP

    def __init__(self, config: MoEConfig, ctx: LayerContext, recompute: Recompute) -> None:
        nn.Module.__init__(self)
        h, eps = config.hidden_size, config.norm_epsilon
        self.attention_norm = self.norm_type(h, ctx=ctx, eps=eps)
        self.attention = self.attention_type(config, ctx, recompute)
        self.mlp_norm = self.norm_type(h, ctx=ctx, eps=eps)
        self.mlp: nn.Module = (
            self.sparse_type(config, ctx, recompute.decisions)
            if config.sparse(0)
            else llama.MLP(config, ctx)
        )


class MoE(llama.Llama):
    """The model, or this pipeline rank's stages of it; see model/llama.py."""

    block = Block
    config: MoEConfig

    def __init__(
        self,
        config: MoEConfig,
        ctx: LayerContext,
        recompute: Recompute | None = None,
        stages: Sequence[Stage] | None = None,
    ) -> None:
        super().__init__(config, ctx, recompute, stages)
        self.hf_modules = hf_modules(config)

    def layer_config(self, i: int) -> MoEConfig:
        """Return the config of layer i, as that of a model with only this layer."""
        return replace(self.config, moe_layer_freq=int(self.config.sparse(i)))


def hf_modules(config: MoEConfig, kind: str = "") -> Mapping[str, tuple[str, ...]]:
    """Return a block's modules, and the Hugging Face modules fused in each. kind: a fork's own
    model_type, if any; unless it is "mixtral", experts have the names that other models use.
    """
    mixtral = (kind or hf_kind(config)) == "mixtral"
    at = "block_sparse_moe" if mixtral else "mlp"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    numbers = range(config.num_experts)
    return {
        **(qwen3.Qwen3 if config.qk_layernorm else llama.Llama).hf_modules,
        "mlp.router": (f"{at}.gate",),
        "mlp.load": (f"{at}.gate",),  # the bias for the choice of experts
        "mlp.experts.gate_up": tuple(f"{at}.experts.{i}.{n}" for i in numbers for n in (gate, up)),
        "mlp.experts.down": tuple(f"{at}.experts.{i}.{down}" for i in numbers),
        "mlp.shared.gate_up": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
        "mlp.shared.down": ("mlp.shared_experts.down_proj",),
    }


def dense_names(config: MoEConfig) -> dict[str, str]:
    """Return, for each tensor of an expert, the tensor of a dense model's MLP to copy it from."""
    ours, dense = hf_modules(config), llama.Llama.hf_modules
    found = {}
    for i in range(config.num_layers):
        for name in ("gate_up", "down") if config.sparse(i) else ():
            theirs = dense[f"mlp.{name}"]
            for j, module in enumerate(ours[f"mlp.experts.{name}"]):
                at = f"model.layers.{i}."
                found[f"{at}{module}.weight"] = f"{at}{theirs[j % len(theirs)]}.weight"
    return found


def hf_kind(config: MoEConfig) -> str:
    """Return Hugging Face's model_type of the same model, or "moe" if there is none."""
    c = config
    if _is_dots1(c):
        return "dots1"
    plain = c.moe_router_score_function == "softmax" and c.moe_router_topk_scaling_factor == 1.0
    if not plain or c.moe_shared_expert_intermediate_size or c.moe_router_num_groups > 1:
        return "moe"
    if c.qk_layernorm:
        return "qwen3_moe"
    dense = not all(c.sparse(i) for i in range(c.num_layers))
    mixtral = not (dense or c.moe_router_pre_softmax or c.expert_ffn != c.ffn_hidden_size)
    return "mixtral" if mixtral else "moe"


def _is_dots1(c: MoEConfig) -> bool:
    """Return whether Hugging Face's Dots1ForCausalLM computes the same: a Qwen3-MoE whose experts,
    router and first dense layers are DeepSeek-V3's.
    """
    sparse = [c.sparse(i) for i in range(c.num_layers)]
    two = c.moe_router_num_groups <= 1 or c.moe_router_topk == 2 * c.moe_router_group_topk
    shared = c.moe_shared_expert_intermediate_size
    return (
        c.moe_router_enable_expert_bias and c.qk_layernorm and two
        and shared > 0 and shared % c.expert_ffn == 0 and sparse == sorted(sparse)
    )  # fmt: skip


OWN = (
    "moe_layer_freq", "moe_router_pre_softmax", "moe_router_score_function", "qk_layernorm",
    "moe_router_topk_scaling_factor", "moe_shared_expert_intermediate_size",
)  # fmt: skip
LATER = ("moe_router_enable_expert_bias", "moe_router_num_groups", "moe_router_group_topk")


def hf_config(config: MoEConfig, dtype: str = "float32") -> dict[str, Any]:
    """Return Hugging Face's config.json of the same model; model_type "moe" is Weft's own."""
    kind, e, k = hf_kind(config), config.num_experts, config.moe_router_topk
    made = {**llama.hf_config(config, dtype), "model_type": kind, "num_experts_per_tok": k}
    if kind == "mixtral":
        own: dict[str, Any] = {"num_local_experts": e, "architectures": ["MixtralForCausalLM"]}
        return without(BIASES, {**made, **own, "sliding_window": None})
    if kind != "moe":
        made = without(qwen3.UNREAD, made)
    if kind == "dots1":
        return made | {
            "architectures": ["Dots1ForCausalLM"],
            "n_routed_experts": e,
            "moe_intermediate_size": config.expert_ffn,
            "n_shared_experts": config.moe_shared_expert_intermediate_size // config.expert_ffn,
            "first_k_dense_replace": sum(not config.sparse(i) for i in range(config.num_layers)),
            "n_group": config.moe_router_num_groups or 1,
            "topk_group": config.moe_router_group_topk or 1,
            "norm_topk_prob": k > 1,
            "routed_scaling_factor": config.moe_router_topk_scaling_factor,
            "scoring_func": "sigmoid",
            "sliding_window": None,
        }
    made |= {"num_experts": e, "moe_intermediate_size": config.expert_ffn}
    if kind == "moe":
        return {**made, "architectures": ["MoE"], **{n: getattr(config, n) for n in (*OWN, *LATER)}}
    dense = [i for i in range(config.num_layers) if not config.sparse(i)]
    return {
        **made,
        "architectures": ["Qwen3MoeForCausalLM"],
        "norm_topk_prob": not config.moe_router_pre_softmax,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
    }


# defaults of fields that are missing in a config.json
MIXTRAL = {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2,
           "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 1e6}  # fmt: skip
QWEN3 = {"num_key_value_heads": 4, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
         "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": [],
         "max_position_embeddings": 32768}  # fmt: skip
DOTS1 = {"norm_topk_prob": False, "n_shared_experts": None, "sliding_window": 4096,
         "max_position_embeddings": 2048}  # fmt: skip


def from_hf_config(hf: dict[str, Any]) -> MoEConfig:
    """Read a config.json of a Mixtral, a Qwen3-MoE, a Dots1 or of Weft's own model_type "moe".

    The coefficient of the balance loss is not read: it is a flag here, and their loss differs.
    Raises ValueError naming the field, its value and what is supported.
    """
    kind = hf.get("model_type", "mixtral")
    if kind == "mixtral":
        hf = filled(hf, MIXTRAL)
        own = {"num_experts": hf["num_local_experts"], "moe_router_topk": hf["num_experts_per_tok"]}
        rules = window_rule(hf) | unread(BIASES) | {"router_jitter_noise": lambda v: not v}
        return _read(hf, kind, rules, own, normalised=True)
    if kind == "qwen3_moe":
        hf = filled(hf, QWEN3)
        layers, step = range(hf["num_hidden_layers"]), hf["decoder_sparse_step"]
        only = hf["mlp_only_layers"] or ()
        freq = tuple(int(i not in only and (i + 1) % step == 0) for i in layers)
        own = {
            "num_experts": hf.get("num_experts") or hf.get("num_local_experts", 128),
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"], "qk_layernorm": True,
            "moe_router_pre_softmax": not hf["norm_topk_prob"],
            "moe_layer_freq": freq,
        }  # fmt: skip
        far = window_rule(hf)["sliding_window"](hf.get("sliding_window", 4096))
        rules = {"use_sliding_window": lambda v: far or not v} | unread(qwen3.UNREAD)
        return _read(hf, kind, rules, own, normalised=bool(hf["norm_topk_prob"]))
    if kind == "dots1":
        return _read_dots1(hf)
    if kind == "moe":
        own = {name: hf[name] for name in OWN}
        own |= {name: hf[name] for name in LATER if name in hf}
        freq = hf["moe_layer_freq"]
        own |= {
            "num_experts": hf["num_experts"], "moe_router_topk": hf["num_experts_per_tok"],
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_layer_freq": tuple(freq) if isinstance(freq, list) else freq,
        }  # fmt: skip
        return _read(hf, kind, {}, own)
    if kind in MISSING:
        raise ValueError(missing_in(kind))
    raise ValueError(
        f"config.json: model_type is {kind!r}: this --model-file reads 'mixtral', 'qwen3_moe', "
        "'dots1' and 'moe'"
    )


def _read_dots1(hf: dict[str, Any]) -> MoEConfig:
    layers, first = hf["num_hidden_layers"], hf.get("first_k_dense_replace") or 0
    hf = filled(hf, DOTS1)
    far, k = no_windows(hf, 62), hf["num_experts_per_tok"]
    rules = unread(qwen3.UNREAD) | {
        "sliding_window": lambda v: far,
        "norm_topk_prob": lambda v: v is True or k == 1,  # a single score is not normalised
        "n_shared_experts": lambda v: type(v) is int and v > 0,
        "scoring_func": lambda v: v in ("sigmoid", "noaux_tc"),
        "routed_scaling_factor": lambda v: v is None or v > 0,
    }
    groups, best = hf.get("n_group") or 1, hf.get("topk_group") or 1
    groups = 1 if best == groups else groups  # choosing all groups is the same as no groups
    if groups > 1:  # a group's score is its two best experts there, its k / topk_group best here
        rules["topk_group"] = lambda v: 2 * v == k
    own = {
        "num_experts": hf["n_routed_experts"], "moe_router_topk": k,
        "moe_ffn_hidden_size": hf["moe_intermediate_size"], "qk_layernorm": True,
        "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": float(hf.get("routed_scaling_factor") or 1.0),
        "moe_router_num_groups": groups if groups > 1 else 0,
        "moe_router_group_topk": best if groups > 1 else 0,
        "moe_layer_freq": tuple(int(i >= first) for i in range(layers)),
    }  # fmt: skip
    if type(shared := hf["n_shared_experts"]) is int:  # otherwise `rules` rejects it
        own["moe_shared_expert_intermediate_size"] = hf["moe_intermediate_size"] * shared
    return _read(hf, "dots1", rules, own, normalised=hf["norm_topk_prob"])


def _read(
    hf: dict[str, Any], kind: str, rules: Mapping[str, Callable[[Any], bool]], own: dict[str, Any],
    normalised: bool = False,
) -> MoEConfig:  # fmt: skip
    """Read the remaining fields. normalised: weights are divided by their sum, which is rejected
    with one expert per token, as in Megatron-LM.
    """
    if normalised and own["moe_router_topk"] == 1:
        also = "" if kind == "mixtral" else f", norm_topk_prob {hf['norm_topk_prob']}"
        raise ValueError(
            f"config.json: num_experts_per_tok is 1{also}: the normalised weight of one expert is "
            "always 1, so the router would not be trained"
        )
    made: MoEConfig = read_hf_config(hf, kind, MoEConfig, rules, **own)
    same = made.moe_ffn_hidden_size == made.ffn_hidden_size
    return replace(made, moe_ffn_hidden_size=0) if same else made


Model, ModelConfig = MoE, MoEConfig
