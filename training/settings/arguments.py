# SPDX-License-Identifier: Apache-2.0
"""The table of settings: every flag that has an effect is a field of a dataclass here.

A field has the name of its Megatron-LM flag, with underscores. setting(...) gives its default,
help text, unit, the rule of its value and the flags that it needs (setting.py). argparse, --help,
Config (config.py), the lines on flags without effect and docs/flags.md are made from the fields.
Each dataclass is a group of --help, in the order of GROUPS. The rules between flags are in
training/flags/rules.py.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch

from mpu.grid import ORDER
from mpu.layers.attention.backends import BACKENDS
from mpu.layers.context_attention import COMM_TYPES
from mpu.layers.float8.rows import RECIPES
from mpu.pipeline.schedules import NAMES as SCHEDULES
from mpu.pipeline.schedules import SPLIT, V_SHAPED
from training.settings.param_groups import PARAM_GROUP
from training.settings.setting import (
    DIRECTORY,
    FILE,
    FRACTION,
    PATTERN,
    POSITIVE,
    REALS,
    SET,
    SWITCH,
    TEXTS,
    WHOLES,
    Order,
    Setting,
    Stop,
    integer,
    one_of,
    real,
    setting,
)

YARN: dict[str, Any] = {
    "needs": "--position-embedding-type", "needs_value": "yarn", "added": True,
}  # fmt: skip
CHANGES = ("seed", "data", "tokenizer", "batch", "rope", "mup")  # values of --allow-change
TOKENIZERS = (
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "NullTokenizer",
)


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of the model, and its file."""

    num_layers: int = setting(
        ...,
        "transformer blocks",
        "layers",
        integer(1, 1024),
        start=True,
    )
    hidden_size: int = setting(
        ..., "width of the residual stream, h", "channels", integer(1, 1_048_576), start=True
    )
    num_attention_heads: int = setting(
        ..., "query heads, a", "heads", integer(1, 65536), start=True
    )
    seq_length: int = setting(
        ..., "length of a sample, s", "tokens", integer(1, 8_388_608), start=True
    )
    ffn_hidden_size: int = setting(
        0,
        "width of the SwiGLU unit, f",
        "channels",
        integer(1, 8_388_608),
        derived="8/3 h rounded down to a multiple of 64",
    )
    num_query_groups: int = setting(
        0,
        "key/value heads of --group-query-attention, k",
        "heads",
        integer(1, 65536),
        derived="as many as query heads",
    )
    kv_channels: int = setting(
        0, "size of one head, d", "channels", integer(1, 65536), derived="h / a"
    )
    max_position_embeddings: int = setting(
        0,
        "number of positions the model is meant for",
        "tokens",
        integer(1, 1_099_511_627_776),
        derived="--seq-length",
    )
    vocab_size: int | None = setting(
        None,
        "vocabulary before padding, V",
        "tokens",
        integer(1, 2_147_483_647),
        derived="the tokenizer's",
    )
    make_vocab_size_divisible_by: int = setting(
        128,
        "pad the vocabulary to a multiple of this x tp",
        "tokens",
        integer(1, 2_147_483_647),
        off="1",
    )
    norm_epsilon: float = setting(1e-5, "added to the mean square of RMSNorm", rule=POSITIVE)
    rotary_base: float = setting(10000.0, "base of the rotary frequencies", rule=POSITIVE)
    use_rope_scaling: bool = setting(False, "scale the rotary frequencies as Llama 3.1 does")
    rope_scaling_factor: float = setting(
        8.0,
        "factor of --use-rope-scaling (3.1: 8, 3.2: 32)",
        "ratio",
        POSITIVE,
        needs="--use-rope-scaling",
    )
    rotary_seq_len_interpolation_factor: float = setting(
        1.0,
        "divide the positions by this (linear interpolation, rope_type linear of a config.json)",
        "ratio",
        real(1),
        added=True,
    )
    position_embedding_type: str = setting(
        "rope",
        "rotary positions; yarn extends them to more positions than the model was trained with",
        rule=one_of("rope", "yarn"),
        added=True,
        stops=(
            Stop(
                "--position-embedding-type yarn & --use-rope-scaling",
                "",
                "--position-embedding-type yarn and --use-rope-scaling exclude each other",
            ),
        ),
    )
    rotary_scaling_factor: float = setting(
        1.0, "factor by which YaRN extends the number of positions", "ratio",
        real(1), **YARN,
    )  # fmt: skip
    yarn_original_max_position_embeddings: int = setting(
        4096, "positions that the model was trained with before YaRN", "tokens",
        integer(1, 1_099_511_627_776), **YARN,
    )  # fmt: skip
    yarn_beta_fast: float = setting(
        32.0, "YaRN keeps frequencies with more turns than this over the original positions",
        "turns", POSITIVE, **YARN,
    )  # fmt: skip
    yarn_beta_slow: float = setting(
        1.0, "YaRN divides frequencies with fewer turns than this by its factor", "turns",
        POSITIVE, **YARN,
    )  # fmt: skip
    no_yarn_correction_range_round_to_int: bool = setting(
        False, "do not round the bounds that --yarn-beta-fast and --yarn-beta-slow give to whole "
        "frequency indices",
        **YARN,
    )  # fmt: skip
    mscale: float = setting(
        1.0, "YaRN multiplies cos and sin by (0.1 ln(factor) x this + 1) / (0.1 ln(factor) x "
        "--mscale-all-dim + 1)", "ratio", real(), **YARN,
    )  # fmt: skip
    mscale_all_dim: float = setting(
        0.0, "see --mscale", "ratio", real(), **YARN,
    )  # fmt: skip
    untie_embeddings_and_output_weights: bool = setting(
        False, "give the output layer its own weights", off="left out, one tied matrix"
    )
    init_method_std: float = setting(
        0.02,
        "spread of the initial weights, drawn from a normal distribution around 0",
        "standard deviation",
        POSITIVE,
    )
    use_mup: bool = setting(
        False,
        "scale initial weights, AdamW's learning rates, attention and logits by the width, so that "
        "the best learning rate is that of the base width (muP)",
        added=True,
    )
    mup_base_hidden_size: int = setting(
        0,
        "hidden size of the model whose learning rate was searched; at this size muP changes "
        "attention only",
        "channels",
        integer(0, 1_048_576),
        "--use-mup",
        added=True,
    )
    mup_embedding_mult: float = setting(
        1.0, "factor of the embedding's output", "ratio", POSITIVE, "--use-mup",
        added=True,
    )  # fmt: skip
    mup_output_mult: float = setting(
        1.0,
        "factor of the logits",
        "ratio",
        POSITIVE,
        "--use-mup",
        derived="base hidden size / hidden size, also if 1 is given",
        added=True,
    )
    mup_base_head_dim: float = setting(
        0.0,
        "head size at the base width, at which attention has its standard scale",
        "channels",
        real(),
        "--use-mup",
        off="0, q k^T / d",
        added=True,
    )
    model_file: str = setting(
        "model/llama.py",
        "Python file of the model: model/qwen3.py, or your changed copy of model/llama.py",
        "file",
        FILE,
        ours=True,
        changes_numbers=False,
    )

    def __post_init__(self) -> None:
        """Fill in the sizes that follow from the others."""
        derived = {
            "ffn_hidden_size": int((4 * self.hidden_size * 2 / 3) / 64) * 64,
            "num_query_groups": self.num_attention_heads,
            "kv_channels": self.hidden_size // self.num_attention_heads,
            "max_position_embeddings": self.seq_length,
        }
        for name, value in derived.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)

    def padded_vocab_size(self, tp: int) -> int:
        """Return vocab_size rounded up to a multiple of make_vocab_size_divisible_by x tp."""
        if self.vocab_size is None:
            raise ValueError("the vocabulary size is not known before the tokenizer is read")
        step = self.make_vocab_size_divisible_by * tp
        return -(-self.vocab_size // step) * step


EXPERTS, REHEARSE = "--num-experts", "--rehearse"
OPTIMIZERS_ELSEWHERE = tuple(  # those that only Megatron-LM has
    (name, f"{words} is not available here; docs/optimizers.md says how to add an optimizer")
    for name, words in (
        ("sgd", "SGD"), ("lion", "Lion"), ("soap", "SOAP"), ("adaptive_muon", "AdaMuon")
    )
)  # fmt: skip
MUON: dict[str, Any] = {"needs": "--optimizer", "needs_value": "muon", "added": True}
# sizes that experts add to those of a Llama: fields of MoEConfig, here and in model/moe.py
EXPERT_SIZES = """num_experts moe_router_topk moe_ffn_hidden_size moe_layer_freq
    moe_router_pre_softmax moe_router_score_function moe_router_topk_scaling_factor
    moe_shared_expert_intermediate_size qk_layernorm moe_router_enable_expert_bias
    moe_router_num_groups moe_router_group_topk""".split()


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts: its sizes, its router and its load balancing."""

    num_experts: int = setting(
        0,
        "experts of a layer, E; the model is then model/moe.py: Mixtral, or with --qk-layernorm "
        "Qwen3-MoE",
        "experts",
        integer(0, 16384),
        off="left out or 1, a dense model",
        added=True,
        stops=(
            Stop(
                "--num-experts & --tensor-model-parallel-size",
                "--sequence-parallel",
                "--num-experts {0} at --tensor-model-parallel-size {1} needs "
                "--sequence-parallel: a rank routes its own part of the sequence",
            ),
            Stop(
                "--num-experts & --fp8-format",
                "",
                "--fp8-format is not available with --num-experts {0}: experts multiply in "
                "the dtype of the weights",
            ),
        ),
    )
    moe_router_topk: int = setting(
        2, "experts of a token, k", "experts", integer(1, 16384), EXPERTS, added=True
    )
    moe_ffn_hidden_size: int = setting(
        0,
        "width of an expert",
        "channels",
        integer(1, 8_388_608),
        EXPERTS,
        derived="--ffn-hidden-size",
        added=True,
    )
    moe_layer_freq: Any = setting(
        1,
        "N: every N-th layer has experts; or a list with 1 (experts) or 0 (dense) for each layer",
        "layers",
        PATTERN,
        EXPERTS,
        added=True,
    )
    moe_router_pre_softmax: bool = setting(
        False,
        "take the weights of the chosen experts from a softmax over all experts; without it, from "
        "a softmax over the chosen ones",
        needs=EXPERTS,
        added=True,
    )
    moe_router_score_function: str = setting(
        "softmax", "function that turns the router's logits into scores", "",
        one_of("softmax", "sigmoid"), EXPERTS, added=True,
    )  # fmt: skip
    moe_router_topk_scaling_factor: float = setting(
        1.0, "factor of the experts' weights", "ratio", POSITIVE, EXPERTS, added=True
    )
    moe_router_enable_expert_bias: bool = setting(
        False,
        "choose experts by sigmoid score plus a bias, which each step adjusts by the tokens that "
        "each expert got in the global batch",
        needs=EXPERTS,
        added=True,
        stops=(
            Stop(
                "--moe-router-enable-expert-bias & --moe-router-score-function softmax",
                "",
                "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid: "
                "the bias is added to scores from 0 to 1",
            ),
        ),
    )
    moe_router_bias_update_rate: float = setting(
        1e-3,
        "change of an expert's bias in a step: up if it got fewer tokens than the mean, down if "
        "more",
        "score",
        real(),
        "--moe-router-enable-expert-bias",
        added=True,
    )
    moe_router_num_groups: int = setting(
        0,
        "divide the experts into this many groups; the experts of a token come from "
        "--moe-router-group-topk of them",
        "groups",
        integer(0, 16384),
        EXPERTS,
        off="0 or 1",
        added=True,
    )
    moe_router_group_topk: int = setting(
        0,
        "groups that the experts of a token come from: those with the largest sums of best scores",
        "groups",
        integer(0, 16384),
        "--moe-router-num-groups",
        off="0",
        added=True,
    )
    moe_shared_expert_intermediate_size: int = setting(
        0,
        "width of a shared expert, which every token goes through",
        "channels",
        integer(0, 8_388_608),
        EXPERTS,
        off="0",
        added=True,
    )
    moe_router_load_balancing_type: tuple[str, ...] = setting(
        ("aux_loss",),
        "load-balancing losses: over a micro-batch (aux_loss), which depends on "
        "--micro-batch-size; or, the same on every layout, over each sequence (seq_aux_loss) or "
        "over the global batch with the token counts of the previous step "
        "(lagged_global_aux_loss)",
        "names",
        one_of("none", "aux_loss", "seq_aux_loss", "lagged_global_aux_loss", several=True),
        EXPERTS,
        added=True,
    )
    moe_aux_loss_coeff: tuple[float, ...] = setting(
        (0.0,), "factor of each load-balancing loss", "ratios", REALS, EXPERTS, added=True
    )
    moe_z_loss_coeff: float = setting(
        0.0, "factor of the mean square of the router's logsumexp", "ratio", real(),
        EXPERTS, added=True,
    )  # fmt: skip
    moe_router_force_load_balancing: bool = setting(
        False,
        "send every expert the same number of tokens, to measure speed",
        needs=EXPERTS,
        added=True,
    )
    moe_expert_capacity_factor: float = setting(
        0.0,
        "capacity of an expert: this times the mean number of (token, choice) pairs per expert, of "
        "a rank's tokens in a micro-batch; pairs beyond it are dropped",
        "ratio",
        real(),
        EXPERTS,
        off="0, no token is dropped",
        added=True,
    )
    moe_pad_expert_input_to_capacity: bool = setting(
        False,
        "pad the input of every expert to its capacity with zeros, so that sizes are known without "
        "waiting for the device",
        needs="--moe-expert-capacity-factor",
        added=True,
        reported=False,
    )
    moe_per_layer_logging: bool = setting(
        False,
        "log each layer's load and router losses, and with --log-json the tokens of each expert",
        needs=EXPERTS,
        added=True,
        changes_numbers=False,
        reported=False,
    )
    qk_layernorm: bool = setting(
        False,
        "normalise queries and keys, as Qwen3 does; a dense model is then model/qwen3.py",
        added=True,
    )

    @property
    def experts(self) -> int:
        """Return the number of experts of a layer, 0 for a dense model."""
        return self.num_experts if self.num_experts > 1 else 0


@dataclass(frozen=True)
class Layout:
    """How the model and the batch are divided among the ranks."""

    world_size: int = 1
    tensor_model_parallel_size: int = setting(
        1,
        "cut every layer over this many ranks, t",
        "ranks",
        integer(1),
        off="1",
        start=True,
    )
    sequence_parallel: bool = setting(
        False, "cut the residual stream along the sequence over the t ranks"
    )
    expert_model_parallel_size: int = setting(
        1,
        "divide the experts over this many neighbouring ranks of a pipeline stage's tp x cp x dp "
        "ranks, ep",
        "ranks",
        integer(1),
        EXPERTS,
        off="1",
        stops=(
            Stop(
                "--expert-model-parallel-size",
                "--num-experts",
                "--expert-model-parallel-size {0} needs --num-experts: a dense model has no "
                "experts",
            ),
        ),
    )
    expert_tensor_parallel_size: int = setting(
        0,
        "ranks over which one expert is split: only 1 is available",
        "ranks",
        integer(1),
        EXPERTS,
        derived="--tensor-model-parallel-size, so --expert-tensor-parallel-size 1 must be given "
        "with more than 1",
    )
    context_parallel_size: int = setting(
        1,
        "cut every sample along the sequence over this many ranks, c, in all layers; attention "
        "exchanges keys and values",
        "ranks",
        integer(1),
        off="1",
    )
    cp_comm_type: str = setting(
        "p2p",
        "how attention exchanges keys and values over the ranks of --context-parallel-size: round "
        "a ring (p2p), gathered (all_gather), or an all-to-all of heads (a2a)",
        rule=one_of(*COMM_TYPES, lacking=(("a2a+p2p", "use p2p between nodes"),)),
    )
    pipeline_model_parallel_size: int = setting(
        1, "cut the layers into stages over this many ranks, p", "ranks", integer(1), off="1"
    )
    rank_order: str = setting(
        "-".join(ORDER),
        "number the ranks along the axes in this order; neighbouring ranks share a node",
        "axes, the fastest first",
        Order(names=ORDER),
        ours=True,
    )


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline, and the schedule of its micro-batches."""

    pipeline_schedule: str | None = setting(
        None,
        "order of a pipeline's forwards and backwards",
        rule=one_of(*SCHEDULES),
        derived="1f1b, or interleaved with virtual stages",
        ours=True,
    )
    num_virtual_stages_per_pipeline_rank: int | None = setting(
        None,
        "stages that each pipeline rank holds, v",
        "stages",
        integer(1, 1024),
        off="1",
        derived="2 with zb-v and v-half",
        excludes=("--num-layers-per-virtual-pipeline-stage",),
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = setting(
        None,
        "micro-batches run through one stage of a rank before its next stage (interleaved)",
        "micro-batches",
        integer(1),
        derived="p",
    )
    pipeline_model_parallel_layout: str | None = setting(
        None,
        "write the stages out: E embedding, t layer, L loss, a bar between stages, t*3 or "
        "(t...)*3 to repeat",
        "stages",
        off="left out, balanced by cost",
        excludes=("--num-layers-per-virtual-pipeline-stage",),
    )
    defer_embedding_wgrad_compute: bool = setting(
        False,
        "compute the output layer's weight gradients after all other backwards of its pipeline "
        "rank; the memory for this grows with the number of micro-batches",
    )


@dataclass(frozen=True)
class Zero:
    """ZeRO: what is sharded, and when it is communicated (docs/memory.md)."""

    zero_stage: int | None = setting(  # read ParallelConfig.zero instead
        None,
        "shard over the data-parallel ranks: 1 masters and moments, 2 gradients too, 3 weights too",
        rule=one_of("0", "1", "2", "3"),
        off="0, replicated",
        derived="1 with --use-distributed-optimizer, else 0",
        ours=True,
        stops=(
            Stop(
                "--zero-stage 0 & --use-distributed-optimizer",
                "",
                "--zero-stage 0 and --use-distributed-optimizer exclude each other: the "
                "latter is --zero-stage 1",
            ),
        ),
    )
    use_distributed_optimizer: bool = setting(
        False,
        "shard masters and moments over the data-parallel ranks: --zero-stage 1",
        off="left out, replicated",
    )
    num_distributed_optimizer_instances: int = setting(
        1,
        "shard inside a group of ranks, replicate over the groups",
        "groups of data-parallel ranks",
        integer(1),
        off="1",
    )
    overlap_grad_reduce: bool = setting(False, "reduce gradient buckets during backward")
    overlap_param_gather: bool = setting(
        False,
        "gather weights while the ranks compute: updated weights during the next forward; at "
        "--zero-stage 3, prefetch one block",
    )
    ddp_bucket_size: int | None = setting(
        None,
        "size of a bucket, the gradients that one collective reduces; at --zero-stage 3 a bucket "
        "is a transformer block",
        "elements",
        integer(1, lacking=(("auto", "sizes are no longer measured: leave the flag out"),)),
        derived="an eighth of the gradients, 2e6 to 40e6",
        reported=True,
    )
    zero_reduce_each_microbatch: bool = setting(
        False,
        "send gradients to their owners after each micro-batch: less memory, more bytes sent, "
        "other rounding, at --zero-stage 2 and 3 without a pipeline",
        off="left out, once a step",
        ours=True,
        reported=True,
        stops=(
            Stop(
                "--zero-reduce-each-microbatch & --pipeline-model-parallel-size",
                "",
                "--zero-reduce-each-microbatch needs --pipeline-model-parallel-size 1, not "
                "{1}: in a pipeline micro-batches interleave",
            ),
        ),
    )
    grad_reduce_in_bf16: bool = setting(
        False,
        "send gradients in bfloat16; their owner adds them up in fp32, in rank order",
        off="left out, in fp32",
        reported=True,
        excludes=("--fp64",),
    )
    main_grads_dtype: str = setting(
        "fp32",
        "dtype of a rank's own gradients until they are sent; sums over ranks stay fp32",
        rule=one_of("fp32", "bf16"),
        off="fp32",
        reported=True,
        excludes=("--fp64",),
    )
    optimizer_cpu_offload: bool = setting(
        False,
        "keep the optimizer's masters and moments in host memory, and update them there",
        off="left out, on the device",
        stops=(
            Stop(
                "--optimizer-cpu-offload & --optimizer-state-offload",
                "",
                "--optimizer-cpu-offload with --optimizer-state-offload: the first updates on"
                " the host and the second on the device; give one of them",
            ),
        ),
    )
    optimizer_state_offload: bool = setting(
        False,
        "keep the optimizer's masters and moments in host memory between steps: copy them to the "
        "device during the end of backward, update them there, and copy them back during the next "
        "forward",
        off="left out, on the device",
        ours=True,
    )


@dataclass(frozen=True)
class Recompute:
    """Activations that backward recomputes instead of keeping (docs/memory.md)."""

    recompute_granularity: str | None = setting(
        None,
        "recompute in backward, to save memory: core attention (selective) or whole layers (full)",
        rule=one_of("selective", "full"),
        off="left out, keep activations",
    )
    recompute_method: str | None = setting(
        None,
        "recompute all layers in chunks (uniform) or the first layers of each stage (block)",
        rule=one_of("uniform", "block"),
        derived="uniform, with full only",
        needs=("--recompute-granularity",),
        stops=(
            Stop(
                "--recompute-method",
                "--recompute-granularity full",
                "--recompute-method {0} needs --recompute-granularity full",
            ),
        ),
    )
    recompute_num_layers: int | None = setting(
        None,
        "layers of a chunk (uniform), or layers that each stage recomputes (block)",
        "layers",
        integer(),
        off="0 with block",
        derived="1",
        needs=("--recompute-granularity",),
        stops=(
            Stop(
                "--recompute-num-layers",
                "--recompute-granularity full",
                "--recompute-num-layers {0} needs --recompute-granularity full",
            ),
        ),
    )


@dataclass(frozen=True)
class Kernels:
    """The device and its kernels."""

    device: str | None = setting(
        None,
        "where the run computes",
        rule=one_of("cpu", "cuda"),
        derived="cuda if there is one",
        ours=True,
    )
    attention_backend: str = setting(
        "auto",
        "kernels of attention: flash (FlashAttention; 3 if its package is installed), fused "
        "(cuDNN), unfused (matrix products), local (csrc/attention.h on a CPU), te (ours: "
        "Transformer Engine's DotProductAttention), or auto, which lets torch choose",
        rule=one_of(*BACKENDS, other=(("torch", "auto"),)),  # of --core-attention-backend
        off="auto",
        stops=(
            Stop(
                "--attention-backend te & --context-parallel-size",
                "",
                "--attention-backend te at --context-parallel-size {1}: attention over ranks "
                "is Weft's own, so use auto",
            ),
            Stop(
                "--attention-backend te & --device cpu",
                "",
                "--attention-backend te needs --device cuda; on a CPU use auto",
            ),
        ),
    )
    flash_attention_version: int | None = setting(
        None,
        "version of FlashAttention: 2 is torch's own, 3 and 4 come from their packages",
        rule=one_of("2", "3", "4"),
        derived="3 on Hopper where flash_attn_interface is installed, else 2",
    )
    norm_backend: str = setting(
        "weft",
        "package whose kernels compute RMSNorm; apex and te need CUDA",
        rule=one_of("weft", "apex", "te"),
        off="weft",
        ours=True,
        stops=(
            Stop(
                "--norm-backend apex|te & --device cpu",
                "",
                "--norm-backend {0} needs --device cuda; on a CPU use weft",
            ),
        ),
    )
    optimizer_backend: str = setting(
        "torch",
        "package whose AdamW kernel updates the weights; apex and te need CUDA",
        rule=one_of("torch", "apex", "te", lacking=(("triton", "use torch"),)),
        off="torch",
        ours=True,
        stops=(
            Stop(
                "--optimizer-backend apex|te & --device cpu",
                "",
                "--optimizer-backend {0} needs --device cuda; on a CPU use torch",
            ),
            Stop(
                "--optimizer-backend apex|te & --optimizer-cpu-offload",
                "",
                "--optimizer-backend {0} with --optimizer-cpu-offload: the host updates, so "
                "use torch",
            ),
        ),
    )
    fused_linear_cross_entropy: bool = setting(
        False,
        "compute the output layer and the loss together, in chunks of the vocabulary, so that the "
        "logits are never stored whole; backward recomputes them",
        ours=True,
    )


@dataclass(frozen=True)
class Communication:
    """How ranks communicate."""

    distributed_backend: str | None = setting(
        None,
        "communication library",
        rule=one_of("nccl", "gloo"),
        derived="nccl on CUDA, gloo on CPU",
        stops=(
            Stop(
                "--distributed-backend nccl & --device cpu",
                "",
                "--distributed-backend nccl needs --device cuda; on a CPU use gloo",
            ),
        ),
    )
    distributed_timeout_minutes: int = setting(
        10, "longest wait in a collective before the run stops", "minutes", integer(1, 525600)
    )
    tp_comm_overlap: str = setting(
        "none",
        "communicate while linear layers compute (with --sequence-parallel): ring sends "
        "messages, symmetric uses memory that all ranks see, auto measures each matmul and "
        "takes the fastest",
        rule=one_of("none", "auto", "ring", "symmetric", bare="auto"),
        off="none",
        stops=(
            Stop(
                "--tp-comm-overlap",
                "--sequence-parallel",
                "--tp-comm-overlap {0} needs --sequence-parallel: without it every rank holds"
                " the whole sequence, and there is no communication to overlap with a matmul",
            ),
        ),
    )
    moe_token_dispatcher_type: str = setting(
        "allgather",
        "how tokens reach their experts: allgather (all tokens to all ranks of ep), alltoall (each "
        "token to its experts' ranks), or auto, the one that sends fewer bytes",
        "",
        one_of("allgather", "alltoall", "auto"),
        "--num-experts",
    )
    overlap_moe_expert_parallel_comm: bool = setting(
        False,
        "run the forward of one micro-batch together with the backward of another, so that the "
        "expert all-to-all of each overlaps the computation of the other",
        off="left out, one after the other",
        stops=(
            Stop(
                "--overlap-moe-expert-parallel-comm",
                "--num-experts",
                "--overlap-moe-expert-parallel-comm needs --num-experts: a dense model "
                "exchanges no rows",
            ),
            Stop(
                "--overlap-moe-expert-parallel-comm",
                "--expert-model-parallel-size",
                "--overlap-moe-expert-parallel-comm needs --expert-model-parallel-size of at "
                "least 2: with 1 no rows are exchanged",
            ),
            Stop(
                "--overlap-moe-expert-parallel-comm & --moe-token-dispatcher-type allgather|auto",
                "",
                "--overlap-moe-expert-parallel-comm needs --moe-token-dispatcher-type "
                "alltoall, not {1}: only its exchanges are started before they are waited for",
            ),
            Stop(
                "--overlap-moe-expert-parallel-comm & --cpu-offload-activations",
                "",
                "--overlap-moe-expert-parallel-comm is not available with "
                "--cpu-offload-activations, whose copies are timed for one micro-batch at a "
                "time",
            ),
        ),
    )
    nccl_communicator_config_path: str | None = setting(
        None,
        "YAML or JSON file of NCCL settings by group: min_ctas, max_ctas, cga_cluster_size, "
        "net_name, is_high_priority_stream; without effect on gloo",
        "file",
        FILE,
        off="left out, NCCL's own",
        local=True,
        changes_numbers=False,
    )
    no_shared_memory: bool = setting(
        False,
        "on a CPU, let the ranks of one host communicate through gloo instead of shared memory",
        ours=True,
    )


@dataclass(frozen=True)
class ParallelConfig(Communication, Kernels, Recompute, Zero, Pipeline, Layout):
    """How the ranks divide the model and the batch, communicate and compute."""

    @property
    def model_parallel_size(self) -> int:
        """Return the number of ranks that hold one copy of the model."""
        t, c = self.tensor_model_parallel_size, self.context_parallel_size
        return t * c * self.pipeline_model_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Return the number of copies of the model, D."""
        return self.world_size // self.model_parallel_size

    @property
    def gradient_ranks(self) -> int:
        """Return the number of ranks over which a gradient is summed, D x c."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def zero(self) -> int:
        """Return the ZeRO stage: 1 shards optimizer state, 2 gradients too, 3 weights too."""
        return int(self.use_distributed_optimizer) if self.zero_stage is None else self.zero_stage

    @property
    def shard_size(self) -> int:
        """Return the number of ranks that share one copy of the optimizer state, 1 at stage 0."""
        ranks = self.gradient_ranks if self.zero else 1
        return ranks // self.num_distributed_optimizer_instances

    @property
    def schedule(self) -> str:
        """Return the name of the pipeline schedule."""
        return self.pipeline_schedule or ("interleaved" if self.virtual_stages > 1 else "1f1b")

    @property
    def defers_output_layer(self) -> bool:
        """Return whether the output layer's weight gradients are computed after a rank's backwards.

        A split schedule defers all weight gradients, each until its own W.
        """
        return self.defer_embedding_wgrad_compute and self.schedule not in SPLIT

    @property
    def virtual_stages(self) -> int:
        """Return the number of stages a pipeline rank holds, v."""
        given = self.num_virtual_stages_per_pipeline_rank
        return given or (2 if self.pipeline_schedule in V_SHAPED else 1)


@dataclass(frozen=True)
class BatchConfig:
    """How many samples a step takes, and how long the run is.

    step_batch_size_schedule has (first sample, size) pairs; global_batch_size is the first size.
    """

    micro_batch_size: int = setting(
        1,
        "samples of one forward on one rank, b",
        "samples",
        integer(1, 65536),
        changes_numbers=False,
    )
    global_batch_size: int = setting(
        1,
        "samples of one step over all ranks",
        "samples",
        integer(1),
        derived="micro x data-parallel size",
        start=True,
        excludes=("--step-batch-size-schedule",),
    )
    step_batch_size_schedule: tuple[tuple[int, int], ...] | None = setting(
        None,
        'global batch size, changing at these token counts: "0:768 250B:1536"',
        '"TOKENS:SAMPLES ..."',
    )
    train_iters: int | None = setting(
        None,
        "length of the run",
        "steps",
        integer(1),
        off="left out, with --train-samples",
        start=True,
        excludes=(
            "--train-samples",
            "--lr-decay-samples",
            "--lr-wsd-decay-samples",
            "--lr-warmup-samples",
        ),
    )
    train_samples: int | None = setting(
        None,
        "length of the run",
        "samples",
        integer(1),
        off="left out, with --train-iters",
        excludes=("--lr-decay-iters", "--lr-wsd-decay-iters", "--lr-warmup-iters"),
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, gradient clipping, the learning-rate curve.

    A decay length of None is the run's.
    """

    optimizer: str = setting(  # a key of training.settings.update_rules.RULES
        "adam",
        "optimizer: adam is AdamW; muon is Muon for matrices and AdamW for the rest",
        rule=one_of("adam", "muon", other=(("dist_muon", "muon"),), lacking=OPTIMIZERS_ELSEWHERE),
        added=True,
    )
    lr: float = setting(3e-4, "peak learning rate", "per step", real(), required=True, start=True)
    min_lr: float = setting(0.0, "floor of the decay", "per step", real(), off="0")
    decoupled_lr: float | None = setting(
        None,
        "peak for the embedding and the output layer",
        "per step",
        real(),
        off="left out, --lr",
    )
    decoupled_min_lr: float | None = setting(
        None,
        "floor for the embedding and the output layer",
        "per step",
        real(),
        off="left out, --min-lr",
        needs="--decoupled-lr",
    )
    lr_decay_style: str = setting(
        "linear",
        "curve from --lr to --min-lr",
        rule=one_of("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        off="constant",
    )
    lr_wsd_decay_style: str = setting(
        "exponential",
        "curve of WSD's last part",
        rule=one_of("exponential", "linear", "cosine", "minus_sqrt"),
        needs="--lr-decay-style",
        needs_value="WSD",
    )
    lr_decay_iters: int | None = setting(
        None, "step at which the decay ends", "steps", integer(1), derived="--train-iters"
    )
    lr_decay_samples: int | None = setting(
        None, "sample at which the decay ends", "samples", integer(1), derived="--train-samples"
    )
    lr_wsd_decay_iters: int | None = setting(
        None,
        "length of WSD's last part",
        "steps",
        integer(1),
        needs="--lr-decay-style",
        needs_value="WSD",
    )
    lr_wsd_decay_samples: int | None = setting(
        None,
        "length of WSD's last part",
        "samples",
        integer(1),
        needs="--lr-decay-style",
        needs_value="WSD",
    )
    lr_warmup_iters: int = setting(0, "linear warm-up", "steps", integer(), off="0")
    lr_warmup_samples: int = setting(0, "linear warm-up", "samples", integer(), off="0")
    lr_warmup_fraction: float | None = setting(
        None,
        "linear warm-up",
        "of the decay's length",
        FRACTION,
        excludes=("--lr-warmup-iters", "--lr-warmup-samples"),
    )
    lr_warmup_init: float = setting(
        0.0, "learning rate at the start of the warm-up", "per step", real(), off="0"
    )
    weight_decay: float = setting(
        0.01, "decay of matrices; vectors have none", "per step, times lr", real(), off="0"
    )
    param_group: tuple[str, ...] = setting(
        (),
        "settings of the parameters whose names match a pattern (fnmatch; the model's name or "
        "Hugging Face's): 'embedding.*' 'layers.0.*' frozen; '*norm*' lr-mult=0.1 wd-mult=0 "
        "multiplies their learning rate and weight decay; may be repeated, and the last one counts",
        rule=PARAM_GROUP,
        ours=True,
        added=True,
    )
    adam_beta1: float = setting(0.9, "decay of the first moment", rule=FRACTION)
    adam_beta2: float = setting(0.999, "decay of the second moment", rule=FRACTION)
    adam_eps: float = setting(1e-8, "added to the root of the second moment", rule=POSITIVE)
    muon_momentum: float = setting(
        0.9, "Muon's momentum: the average keeps this share", rule=FRACTION, **MUON
    )
    muon_use_nesterov: bool = setting(
        False, "use Nesterov momentum in Muon", **MUON
    )
    muon_num_ns_steps: int = setting(
        5, "Newton-Schulz iterations of a matrix", "steps", integer(1, 99), **MUON
    )
    muon_coefficient_type: str = setting(
        "quintic",
        "coefficients of the Newton-Schulz iterations",
        rule=one_of(*"simple quintic polar_express cans aol cubic5 deepseekv4".split()),
        **MUON,
        stops=(
            Stop(
                "--muon-coefficient-type cubic5 & --muon-num-ns-steps",
                "",
                "--muon-num-ns-steps {1} with --muon-coefficient-type cubic5: its "
                "coefficients are those of 5 steps",
            ),
        ),
    )
    muon_scale_mode: str = setting(
        "spectral",
        "scale of the update of a matrix with o outputs and i inputs: sqrt(max(o, i)), "
        "sqrt(o / i), or sqrt(max(1, o / i))",
        rule=one_of("spectral", "unit_rms_norm", "shape_scaling"),
        **MUON,
    )
    muon_extra_scale_factor: float = setting(
        1.0, "extra factor of Muon's updates", rule=POSITIVE, **MUON
    )
    muon_no_split_qkv: bool = setting(
        False, "update the queries, keys and values of a layer as one matrix", **MUON
    )
    muon_no_split_gate_up: bool = setting(
        False,
        "update gate and up of an MLP as one matrix, as Megatron-LM does",
        ours=True,
        **MUON,
    )
    muon_fp32_matmul_prec: str = setting(
        "medium",
        "precision of the Newton-Schulz iterations: medium is bf16, high and highest are fp32",
        rule=one_of("medium", "high", "highest", lacking=(("low", "torch has no such precision"),)),
        **MUON,
    )
    qk_clip: bool = setting(
        False,
        "after each update, scale down the rows of W_q and W_k of each key/value group whose "
        "largest attention logit is above --qk-clip-threshold (MuonClip)",
        added=True,
    )
    qk_clip_alpha: float = setting(
        0.5,
        "share of W_q: W_q is multiplied by eta^alpha and W_k by eta^(1 - alpha), eta = threshold "
        "/ largest logit",
        "power",
        FRACTION,
        needs="--qk-clip",
        added=True,
    )
    qk_clip_threshold: float = setting(
        100.0, "attention logit above which --qk-clip scales", "logit", POSITIVE, "--qk-clip",
        added=True,
    )  # fmt: skip
    output_z_loss_coeff: float = setting(
        0.0,
        "z-loss: add this times the square of each token's logsumexp of the logits to the loss",
        "ratio",
        real(0, 0.1),
        off="0",
        ours=True,
        added=True,
    )
    clip_grad: float = setting(
        1.0, "scale the gradients down to at most this norm", "global norm", real(), off="0"
    )


@dataclass(frozen=True)
class DataConfig:
    """Which tokens are read, how documents end, and the tokenizer."""

    data_path: tuple[str, ...] = setting(
        (),
        "data sets to mix by weight, cut by --split",
        'prefixes of .bin/.idx pairs, or "weight prefix ..."',
        TEXTS,
        start=True,
        excludes=("--data-args-path", "--train-data-path", "--valid-data-path", "--test-data-path"),
    )
    train_data_path: tuple[str, ...] = setting(
        (),
        "data sets to mix for training",
        "as --data-path",
        TEXTS,
        excludes=("--data-args-path",),
    )
    data_stages: str | None = setting(
        None,
        "JSON file of the run's stages, in place of --train-data-path: for each stage its first "
        "token, its data sets with weights, and its sequence length",
        "file",
        FILE,
        ours=True,
        changes_numbers=False,
        excludes=("--mock-data", "--data-path", "--data-args-path", "--train-data-path", "--split"),
    )
    valid_data_path: tuple[str, ...] = setting(
        (),
        "data sets to mix for validation",
        "as --data-path",
        TEXTS,
        reported=True,
        excludes=("--data-args-path",),
    )
    test_data_path: tuple[str, ...] = setting(
        (),
        "data sets to mix for testing",
        "as --data-path",
        TEXTS,
        reported=True,
        excludes=("--data-args-path",),
    )
    split: str | None = setting(
        None,
        "training, validation, test shares of --data-path",
        "shares",
        derived="969,30,1",
        reported=True,
        excludes=("--train-data-path",),
    )
    multiple_validation_sets: bool = setting(
        False,
        "evaluate each prefix of --valid-data-path separately, with its own loss",
        changes_numbers=False,
        reported=True,
        stops=(
            Stop(
                "--multiple-validation-sets",
                "--valid-data-path",
                "--multiple-validation-sets needs --valid-data-path, whose prefixes are the sets",
            ),
        ),
    )
    full_validation: bool = setting(
        False,
        "evaluate on all validation tokens, each once, instead of on --eval-iters batches",
        changes_numbers=False,
        reported=True,
        stops=(
            Stop(
                "--full-validation & --mock-data",
                "",
                "--full-validation needs data with an end; --mock-data has none",
            ),
        ),
    )
    data_order: str = setting(
        "weft",
        "order of the samples: weft's has no end and does not depend on the run's length; "
        "megatron's is that of Megatron-LM's GPTDataset and BlendedDataset",
        rule=one_of("weft", "megatron"),
        ours=True,
        added=True,
    )
    data_cache_path: str | None = setting(
        None,
        "where index files are kept",
        "directory",
        DIRECTORY,
        derived="next to the data",
        local=True,
        changes_numbers=False,
    )
    mock_data: bool = setting(
        False,
        "train on made-up tokens and read no data file",
        start=True,
        excludes=(
            "--data-path",
            "--data-args-path",
            "--train-data-path",
            "--valid-data-path",
            "--test-data-path",
        ),
    )
    num_workers: int | None = setting(
        None,
        "threads of each rank that read data ahead",
        "threads",
        integer(0, 256),
        off="0, read when needed",
        derived="by measurement, at most 32",
        changes_numbers=False,
    )
    data_timeout: float = setting(
        300.0,
        "stop the run if a read of its data takes longer than this, and name the file and byte",
        "seconds",
        real(),
        off="0",
        ours=True,
        changes_numbers=False,
    )
    reset_position_ids: bool = setting(False, "count positions from 0 after each document")
    reset_attention_mask: bool = setting(
        False,
        "keep attention inside each document",
    )
    eod_mask_loss: bool = setting(False, "leave end-of-document tokens out of the loss")
    tokenizer_type: str | None = setting(
        None,
        "format of --tokenizer-model",
        rule=one_of(*TOKENIZERS),
        derived="NullTokenizer with --mock-data",
        start=True,
    )
    tokenizer_model: str | None = setting(
        None,
        "SentencePiece .model, Llama 3's tiktoken file, or tokenizer.json",
        "file",
        FILE,
        off="left out, with NullTokenizer and GPT2BPETokenizer",
        start=True,
    )
    merge_file: str | None = setting(
        None,
        "the merges of GPT2BPETokenizer, one a line",
        "file",
        FILE,
        derived="merges.txt next to --vocab-file",
        needs="--tokenizer-type",
        needs_value="GPT2BPETokenizer",
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Where the run is saved and resumed."""

    save: str | None = setting(None, "where checkpoints go", "directory", DIRECTORY, start=True)
    load: str | None = setting(
        None, "resume from the newest complete checkpoint there", "directory", DIRECTORY, start=True
    )
    pretrained_checkpoint: str | None = setting(
        None,
        "start from these weights (Weft's or Hugging Face's) if --load holds no checkpoint",
        "directory",
        DIRECTORY,
    )
    branch_from: str | None = setting(
        None,
        "if --load holds no checkpoint, continue the run in this directory, with its weights, "
        "optimizer and samples; that run is not changed, and each checkpoint of --save records "
        "where it branched off",
        "directory",
        DIRECTORY,
        needs="--save",
        ours=True,
        excludes=("--pretrained-checkpoint",),
        stops=(
            Stop(
                "--branch-from & --finetune",
                "",
                "--branch-from {0} and --finetune exclude each other: a branch continues the"
                " optimizer and the samples of its run",
            ),
        ),
    )
    save_interval: int | None = setting(
        None,
        "steps between two checkpoints",
        "steps",
        integer(),
        off="left out or 0, at the end only",
        needs="--save",
    )
    save_retain_interval: int | None = setting(
        None,
        "after a complete save, delete older checkpoints whose step is not a multiple of this",
        "steps",
        integer(1),
        off="left out, keep every one",
        needs="--save",
    )
    keep_last_k: int | None = setting(
        None,
        "after a complete save, delete older checkpoints until k complete ones are left",
        "checkpoints",
        integer(1),
        off="left out, keep every one",
        needs="--save",
        ours=True,
    )
    keep_best: str | None = setting(
        None,
        "save each step whose loss on this validation set is the lowest so far, and keep the best "
        "one whatever else is deleted; without a name, the first set",
        "name of a validation set",
        SET,
        off="left out, no step is saved for its loss",
        needs="--save",
        ours=True,
        stops=(
            Stop(
                "--keep-best",
                "--save",
                "--keep-best {0} needs --save, where the best checkpoint is kept",
            ),
            Stop(
                "--keep-best",
                "--eval-interval",
                "--keep-best {0} needs --eval-interval, whose losses it compares",
            ),
        ),
    )
    async_save: bool = setting(
        False,
        "copy the state, and write the copy to disk in the background",
        needs="--save",
    )
    save_hf: str | None = setting(
        None,
        "after each save, also write the weights to a Hugging Face folder in this directory, in "
        "the background",
        "directory",
        DIRECTORY,
        needs="--save",
        ours=True,
    )
    save_hf_dtype: str = setting(
        "bfloat16",
        "dtype of the weights of --save-hf",
        rule=one_of("bfloat16", "float16", "float32"),
        needs="--save-hf",
        ours=True,
    )
    save_hf_keep_last_k: int | None = setting(
        None,
        "delete older folders of --save-hf that this run wrote until k are left",
        "folders",
        integer(1),
        off="left out, keep every one",
        needs="--save-hf",
        ours=True,
    )
    on_save_failure: str = setting(
        "continue",
        "what to do after a failed save: continue, or end the run",
        rule=one_of("continue", "stop"),
        needs="--save",
        ours=True,
    )
    finetune: bool = setting(False, "load weights only and start at sample 0", needs="--load")
    no_load_optim: bool = setting(
        False,
        "load weights and position in the data, but start AdamW's moments at 0",
        needs="--load",
    )
    ckpt_step: int | None = setting(
        None,
        "load the checkpoint of this step",
        "step",
        integer(),
        off="left out, the newest",
        stops=(
            Stop(
                "--ckpt-step",
                "--load",
                "--ckpt-step {0} needs --load",
            ),
        ),
    )
    use_checkpoint_args: bool = setting(
        False, "take the model's sizes and the tokenizer from the checkpoint that will be loaded"
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False,
        "take peak, floor, warm-up, length and style of the learning rate, and the weight "
        "decay, from the checkpoint that the run resumes",
        off="left out, from the flags",
        needs="--load",
        excludes=("--override-opt-param-scheduler", "--override-opt_param-scheduler"),
    )
    allow_change: tuple[str, ...] = setting(
        (),
        "load a checkpoint although these differ from the run's; data includes the sequence "
        "length, rope is the base and the scaling of rotary positions",
        ", ".join(CHANGES),
        TEXTS,
        needs=("--load", "--pretrained-checkpoint"),
        ours=True,
    )
    exit_on_missing_checkpoint: bool = setting(
        False, "stop when --load holds no checkpoint", off="left out, start fresh", needs="--load"
    )
    trust_owner: tuple[str, ...] = setting(
        (),
        "also read checkpoints and data caches that belong to these users, not only those of this "
        "user and root",
        "names or numbers of users",
        TEXTS,
        ours=True,
    )


@dataclass(frozen=True)
class LogConfig:
    """What is logged, and how often."""

    log_interval: int = setting(10, "steps between two log lines", "steps", integer(1))
    log_json: str | None = setting(
        None, "also log to this file, one JSON object a line", "file", FILE, ours=True, local=True
    )
    tensorboard_dir: str | None = setting(
        None, "write TensorBoard events", "directory", DIRECTORY, local=True
    )
    wandb_project: str | None = setting(None, "report to this project of Weights & Biases", "name")
    wandb_exp_name: str | None = setting(
        None, "name of the run in W&B", "name", derived="W&B's own", needs="--wandb-project"
    )
    log_digests: int | None = setting(
        None,
        "every N steps write digests of the batch and of each tensor's gradient and weight; "
        "tools/bisect_runs.py finds in them the first step at which two runs differ",
        "steps",
        integer(1),
        ours=True,
    )
    log_params_norm: bool = setting(False, "log the norm of the parameters")
    log_max_attention_logit: bool = setting(
        False, "log the largest attention logit of the model; --qk-clip logs it, too"
    )
    log_layer_rms_interval: int | None = setting(
        None,
        "every N steps log the RMS of each block's activations and gradients; a multiple of "
        "--log-interval",
        "steps",
        integer(1),
        ours=True,
    )
    sample_interval: int | None = setting(
        None,
        "steps between two samples: print how the model continues a text",
        "steps",
        integer(1),
        ours=True,
    )
    sample_prompt: str | None = setting(
        None,
        "text that --sample-interval continues",
        "text",
        off="left out, the start of a held-out sample",
        needs="--sample-interval",
        ours=True,
    )
    profile: bool = setting(False, "write a trace of the torch profiler")
    profile_step_start: int = setting(
        10, "first step of the trace", "step", integer(), needs="--profile"
    )
    profile_step_end: int = setting(
        12, "first step after the trace", "step", integer(), needs="--profile"
    )
    profile_ranks: tuple[int, ...] = setting(
        (0,),
        "ranks that write a trace or a memory snapshot",
        "global ranks",
        WHOLES,
        needs=("--profile", "--record-memory-history"),
    )
    record_memory_history: bool = setting(
        False,
        "record the history of CUDA's allocator, and write it at the end of the run or when it "
        "fails, for pytorch.org/memory_viz",
    )
    memory_snapshot_path: str | None = setting(
        None,
        "file of --record-memory-history; each rank inserts its number before the extension",
        "file",
        FILE,
        off="left out, memory_rank0.pickle next to the profile",
        needs="--record-memory-history",
        local=True,
    )


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole: precision, randomness, evaluation, and when to stop."""

    seed: int = setting(1234, "seed of the initial weights and of the sample order", rule=integer())
    dtype: torch.dtype = torch.float32  # of weights and activations: float32, bfloat16 or float64
    deterministic_mode: bool = setting(False, "refuse kernels whose results differ from run to run")
    allow_tf32: bool = setting(
        False,
        "on CUDA, round the operands of fp32 matmuls to TF32 (10 bits of mantissa)",
        ours=True,
        reported=True,
    )
    eval_interval: int | None = setting(
        None, "steps between two evaluations", "steps", integer(), off="left out or 0"
    )
    eval_iters: int = setting(
        100, "global batches in one evaluation", "steps", integer(-1), off="0 or -1", reported=True
    )
    start_eval_at_iter: int | None = setting(
        None,
        "first step after which --eval-interval may evaluate",
        "step",
        integer(),
        off="left out or 0, from the start",
        needs="--eval-interval",
    )
    eval_at_start: bool = setting(
        False,
        "evaluate before the first step too, and print the loss there and at the end",
        ours=True,
    )
    skip_train: bool = setting(
        False, "evaluate the checkpoint of --load and end, without training or saving"
    )
    exit_interval: int | None = setting(
        None,
        "save and stop after a step that is a multiple of this",
        "steps",
        integer(),
        off="left out or 0",
    )
    exit_duration_in_mins: int | None = setting(
        None, "save and stop after this time", "minutes", integer(), off="left out or 0"
    )
    manual_gc: bool = setting(False, "collect Python's garbage at fixed steps, all ranks together")
    manual_gc_interval: int = setting(
        0,
        "steps between two collections of --manual-gc",
        "steps",
        integer(),
        off="0, around evaluation only",
        needs="--manual-gc",
    )
    on_nan: str = setting(
        "stop",
        "what to do after a step whose gradient norm is not finite, and whose update is skipped: "
        "end the run, continue, or go back to the last valid checkpoint and skip those samples",
        rule=one_of("stop", "skip", "rewind"),
        ours=True,
        reported=True,
        stops=(
            Stop(
                "--on-nan rewind",
                "--save",
                "--on-nan rewind needs --save: it goes back to a checkpoint there",
            ),
        ),
    )
    dry_run: bool = setting(
        False,
        "print layout, memory, FLOPs and traffic for this WORLD_SIZE, and stop",
        ours=True,
        start=True,
    )
    memory_picture: str | None = setting(
        None,
        "with --dry-run: draw the memory of a rank over a step, an .svg or a .png",
        "file",
        FILE,
        ours=True,
        stops=(
            Stop(
                "--memory-picture",
                "--dry-run",
                "--memory-picture {0} needs --dry-run, which computes the memory that it draws",
            ),
        ),
    )
    ignore_flags: tuple[str, ...] = setting(
        (),
        "ignore these flags of a fork of Megatron-LM, each with the COUNT values after it; flags "
        "of Weft and of Megatron-LM are refused here",
        "NAME:COUNT ...",
        TEXTS,
        ours=True,
    )


@dataclass(frozen=True)
class Float8Config:
    """Which layers compute in float8, and how they are scaled (docs/float8.md)."""

    fp8_format: str | None = setting(
        None,
        "run the layers' matmuls in float8: e4m3, or hybrid, with gradients in e5m2 and the rest "
        "in e4m3",
        rule=one_of("e4m3", "hybrid"),
    )
    fp8_recipe: str | None = setting(
        None,
        "elements that share a scale: a tensor (tensorwise), a row (rowwise), 128, of a weight "
        "128 x 128 (blockwise), or 32 (mxfp8); delayed scales a tensor by its amax (largest "
        "magnitude) in earlier steps",
        f"one of {', '.join(RECIPES)}",
        derived="delayed",
        needs="--fp8-format",
    )
    fp8_amax_history_len: int = setting(
        1,
        "steps of which the amax is stored",
        "steps",
        integer(1),
        needs="--fp8-recipe",
        needs_value="delayed",
        added=True,
    )
    fp8_amax_compute_algo: str = setting(
        "most_recent",
        "which amax of the history gives the scale: the newest or the largest",
        rule=one_of("most_recent", "max"),
        needs="--fp8-recipe",
        needs_value="delayed",
        added=True,
    )
    fp8_wgrad_bf16: bool = setting(
        False,
        "compute weight gradients in bf16, from activations and gradients that are sent and stored "
        "in bf16",
        off="left out, in float8",
        needs="--fp8-format",
        ours=True,
    )
    no_fp8_weight_cache: bool = setting(
        False,
        "convert weights to float8 again for each micro-batch, which saves 2 bytes per weight",
        off="left out, once a step, unless ZeRO stage 3 shards them",
        needs="--fp8-format",
        ours=True,
    )
    first_last_layers_bf16: bool = setting(
        False, "keep the first and last layers in bf16", needs="--fp8-format"
    )
    num_layers_at_start_in_bf16: int = setting(
        1, "number of first layers in bf16", "layers", integer(), needs="--first-last-layers-bf16"
    )
    num_layers_at_end_in_bf16: int = setting(
        1, "number of last layers in bf16", "layers", integer(), needs="--first-last-layers-bf16"
    )


@dataclass(frozen=True)
class GpuConfig:
    """Activation offload (docs/memory.md)."""

    cpu_offload_activations: bool = setting(
        False,
        "keep activations for backward in host memory, of all layers of a stage but the last, "
        "copied while layers compute",
        off="left out, keep activations on the device",
        ours=True,
    )
    offload_modules: tuple[str, ...] = setting(
        (),
        "offload only what these modules of a layer save, such as mlp or attention.qkv",
        "names in a layer",
        TEXTS,
        off="left out, all",
        needs="--cpu-offload-activations",
        stops=(
            Stop(
                "--offload-modules",
                "--cpu-offload-activations",
                "--offload-modules {0} needs --cpu-offload-activations",
            ),
            Stop(
                "--offload-modules & --recompute-granularity full",
                "",
                "--offload-modules {0} with --recompute-granularity full: a recomputed layer "
                "saves only its input, which belongs to none of its modules; leave out one of the "
                "two",
            ),
        ),
    )
    min_offloaded_tensor_size: int = setting(
        1 << 20,
        "smaller tensors stay on the device",
        "elements",
        integer(1),
        needs="--cpu-offload-activations",
        stops=(
            Stop(
                "--min-offloaded-tensor-size",
                "--cpu-offload-activations",
                "--min-offloaded-tensor-size {0} needs --cpu-offload-activations",
            ),
        ),
    )


@dataclass(frozen=True)
class FaultConfig:
    """How faults are detected and handled (docs/reliability.md)."""

    peer_timeout: float = setting(
        20.0,
        "how long a rank may send no heartbeat before the run ends and names it",
        "seconds",
        real(0.001, 1_000_000),
        ours=True,
    )
    hang_timeout: float | None = setting(
        None,
        "how long a rank may make no progress after set-up before the run ends and names it: more "
        "than the longest save, first step and micro-batch",
        "seconds",
        real(5, 1_000_000),
        off="left out, --distributed-timeout-minutes",
        ours=True,
    )
    check_replicas: int | None = setting(
        None,
        "every N steps and before each save, compare the tensors that several ranks share, bit for "
        "bit, and name the rank that differs",
        "steps",
        integer(1),
        ours=True,
    )
    on_replica_mismatch: str = setting(
        "stop",
        "what to do if replicas differ: end the run, or go back to the last valid checkpoint",
        rule=one_of("stop", "rewind"),
        needs="--check-replicas",
        ours=True,
        stops=(
            Stop(
                "--on-replica-mismatch rewind",
                "--save",
                "--on-replica-mismatch rewind needs --save: it goes back to a checkpoint there",
            ),
        ),
    )
    on_spike: str | None = setting(
        None,
        "what to do after a step whose loss or gradient norm is far above recent steps: report it, "
        "end the run, or go back and skip its samples",
        rule=one_of("report", "stop", "rewind"),
        ours=True,
        reported=True,
        stops=(
            Stop(
                "--on-spike rewind",
                "--save",
                "--on-spike rewind needs --save: it goes back to a checkpoint there",
            ),
        ),
    )
    spike_z_score: float = setting(
        10.0,
        "distance above the recent steps at which a step is a spike",
        "deviations from the median",
        POSITIVE,
        needs="--on-spike",
        ours=True,
    )
    iterations_to_skip: tuple[int, ...] = setting(
        (),
        "do not train on these iterations; they and their samples are still counted",
        "iterations, counted from 1",
        WHOLES,
        reported=True,
    )
    rerun_mode: str = setting(
        "validate_results",
        "after a gradient norm that is not finite, run the step again and name the first value "
        "that is not finite",
        rule=one_of("disabled", "validate_results"),
    )


@dataclass(frozen=True)
class RehearseConfig:
    """Which rank is rehearsed, on which device, and what is written (docs/rehearsal.md)."""

    rehearse: bool = setting(
        False,
        "run the steps of one rank of this WORLD_SIZE on a simulated device, on any machine, and "
        "report its launches, memory, transfers and waits",
        ours=True,
    )
    rehearse_rank: int = setting(
        0, "the rank that is rehearsed", "rank in the world", integer(), REHEARSE, ours=True
    )
    rehearse_all_ranks: bool = setting(
        False,
        "rehearse every rank of a world of at most 16, and match their messages",
        needs=REHEARSE,
        ours=True,
    )
    rehearse_device: str = setting(
        "h100",
        "GPU whose memory and speed --dry-run and --rehearse assume; a rehearsal also takes cpu",
        "a name such as h100, a100-40 or rtx-4090, or a file",
        needs=(REHEARSE, "--dry-run"),
        ours=True,
    )
    rehearse_steps: int = setting(
        2, "steps that run; the last one is reported", "steps", integer(1, 3), REHEARSE, ours=True
    )
    rehearse_expert_skew: float = setting(
        1.0,
        "with --rehearse or --dry-run: rows that the first rank of each ep group gets for its "
        "experts, divided by the mean; 1 is balanced",
        "ratio",
        POSITIVE,
        EXPERTS,
        ours=True,
    )
    rehearse_json: str | None = setting(
        None, "write the results of the rehearsal as JSON", "file", FILE, REHEARSE, ours=True
    )
    rehearse_trace: str | None = setting(
        None,
        "write the step's predicted timeline, for Perfetto or chrome://tracing",
        "file",
        FILE,
        REHEARSE,
        ours=True,
    )


# {group of --help: (its dataclass, the section of Config that has its fields)}, in the order in
# which a newcomer needs them
GROUPS: dict[str, tuple[Any, str]] = {
    "model": (ModelConfig, "model"),
    "data": (DataConfig, "data"),
    "batch": (BatchConfig, "batch"),
    "optimizer": (OptimizerConfig, "optimizer"),
    "run": (RunConfig, "run"),
    "checkpoint": (CheckpointConfig, "checkpoint"),
    "log": (LogConfig, "log"),
    "experts": (MoEConfig, "moe"),
    "layout": (Layout, "parallel"),
    "zero": (Zero, "parallel"),
    "pipeline": (Pipeline, "parallel"),
    "recompute": (Recompute, "parallel"),
    "communication": (Communication, "parallel"),
    "kernels": (Kernels, "parallel"),
    "float8": (Float8Config, "float8"),
    "gpu": (GpuConfig, "gpu"),
    "fault": (FaultConfig, "fault"),
    "rehearse": (RehearseConfig, "rehearse"),
}
# {group: {flag: row}} of flags that set a field of another name (training/flags/derived.py)
OTHER_FLAGS: dict[str, dict[str, Setting]] = {
    "pipeline": {
        "num_layers_per_virtual_pipeline_stage": Setting(
            "average number of layers in a stage, which gives "
            "--num-virtual-stages-per-pipeline-rank; the layers are cut so that the ranks are "
            "balanced by cost",
            "layers",
            integer(1, 1024),
        ),
    },
    "data": {
        "data_args_path": Setting(
            "file with the value of --data-path: a list of shards separated by lines or spaces; # "
            "starts a comment",
            "file",
            FILE,
        ),
        "vocab_file": Setting(
            "vocab.json: ids by token",
            "file",
            FILE,
            needs=("--tokenizer-type",),
            needs_value="GPT2BPETokenizer",
        ),
    },
    "run": {
        "bf16": Setting(
            "weights and activations in bfloat16, fp32 masters and gradients",
            rule=SWITCH,
            off="left out, fp32",
            start=True,
            excludes=("--fp64",),
        ),
        "fp64": Setting(
            "everything in double precision, for tests of exactness",
            rule=SWITCH,
            off="left out, fp32",
            ours=True,
        ),
    },
}
# {dotted name in Config: row}
SETTINGS: dict[str, Setting] = {
    f"{section}.{part.name}": part.metadata["setting"]
    for kind, section in GROUPS.values()
    for part in fields(kind)
    if part.metadata
}
