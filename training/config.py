# SPDX-License-Identifier: Apache-2.0
"""Define every setting of a run, in frozen dataclasses: parsed once, then only read.

A field has the name of its Megatron-LM flag with underscores; its default turns the feature off.
argparse, --help and the rules of single values are made from the fields (training/setting.py).
`training.flags.parse.parse` makes a `Config` from a command line and checks it. Nothing here uses
argparse, files or ranks.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from mpu.layers.attention.backends import BACKENDS
from mpu.pipeline.schedules import V_SHAPED
from training.setting import (
    DIRECTORY,
    FILE,
    FRACTION,
    POSITIVE,
    TEXTS,
    WHOLES,
    Setting,
    one_of,
    real,
    section,
    setting,
    whole,
)


class UsageError(ValueError):
    """A mistake in the command line; the message names the flag, its value and the rule."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the full Llama; they do not depend on the layout."""

    num_layers: int = setting(..., "transformer blocks", "layers; required", whole(1, 1024))
    hidden_size: int = setting(
        ..., "width of the residual stream, h", "channels; required", whole(1, 1_048_576)
    )
    num_attention_heads: int = setting(..., "query heads, a", "heads; required", whole(1, 65536))
    seq_length: int = setting(..., "length of a sample, s", "tokens; required", whole(1, 8_388_608))
    ffn_hidden_size: int = setting(
        0,
        "width of the SwiGLU unit, f",
        "channels; default: 8/3 h rounded down to a multiple of 64",
        whole(1, 8_388_608),
    )
    num_query_groups: int = setting(
        0,
        "key/value heads of --group-query-attention, k",
        "heads; off: as many as query heads",
        whole(1, 65536),
    )
    kv_channels: int = setting(
        0, "size of one head, d", "channels; default: h / a", whole(1, 65536)
    )
    max_position_embeddings: int = setting(
        0,
        "number of positions the model is meant for",
        "tokens; default: --seq-length",
        whole(1, 1_099_511_627_776),
    )
    vocab_size: int | None = setting(
        None,
        "vocabulary before padding, V",
        "tokens; default: the tokenizer's",
        whole(1, 2_147_483_647),
    )
    make_vocab_size_divisible_by: int = setting(
        128,
        "pad the vocabulary to a multiple of this x tp",
        "tokens; off: 1",
        whole(1, 2_147_483_647),
    )
    norm_epsilon: float = setting(1e-5, "added under RMSNorm's root", "no unit", POSITIVE)
    rotary_base: float = setting(10000.0, "base of the rotary frequencies", "no unit", POSITIVE)
    use_rope_scaling: bool = setting(
        False, "scale the rotary frequencies as Llama 3.1 does", "off: left out"
    )
    rope_scaling_factor: float = setting(
        8.0, "factor of --use-rope-scaling (3.1: 8, 3.2: 32)", "ratio", POSITIVE
    )
    untie_embeddings_and_output_weights: bool = setting(
        False, "give the output layer its own weights", "off: left out, one tied matrix"
    )
    init_method_std: float = setting(
        0.02,
        "spread of the initial weights, drawn from a normal distribution around 0",
        "standard deviation",
        POSITIVE,
    )
    model_file: str = setting(
        "model/llama.py",
        "Python file of the model: model/qwen2.py, model/qwen3.py, or your changed copy of "
        "model/llama.py (ours, not Megatron's)",
        "file; default: model/llama.py",
        FILE,
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


@dataclass(frozen=True)
class ParallelConfig:
    """How the model and the batch are divided among the ranks, and how ranks communicate."""

    world_size: int = 1
    tensor_model_parallel_size: int = setting(
        1, "cut every layer over this many ranks, t", "ranks; off: 1", whole(1)
    )
    context_parallel_size: int = setting(
        1,
        "cut every sample along the sequence over this many ranks, in all layers; attention "
        "exchanges keys and values, c",
        "ranks; off: 1",
        whole(1),
    )
    cp_comm_type: tuple[str, ...] = setting(
        ("p2p",),
        "how attention's keys and values reach the ranks of --context-parallel-size: round a "
        "ring, gathered, by heads (a2a), or by heads inside of groups and round a ring of groups",
        "p2p, all_gather, a2a, a2a+p2p; one, or one for each layer",
        TEXTS,
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = setting(
        None,
        "sizes of --cp-comm-type a2a+p2p: of a group of neighbours (a2a), and how many groups "
        "(p2p); their product is --context-parallel-size",
        "ranks, ranks; off: left out",
        WHOLES,
    )
    pipeline_model_parallel_size: int = setting(
        1, "cut the layers into stages over this many ranks, p", "ranks; off: 1", whole(1)
    )
    rank_order: str = setting(
        "tp-cp-dp-pp",
        "count the ranks along the axes in this order: ranks that are near in it share a node "
        "(ours; Megatron has tp-cp-dp-pp, and tp-cp-pp-dp as --use-tp-pp-dp-mapping)",
        "axes, the fastest first; default: tp-cp-dp-pp",
    )
    pipeline_schedule: str | None = setting(
        None,
        "order of a pipeline's forwards and backwards (ours, not Megatron's)",
        "default: 1f1b, or interleaved with virtual stages",
        one_of("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "v-half"),
    )
    num_layers_per_virtual_pipeline_stage: int | None = setting(
        None,
        "put exactly this many layers on every stage, which gives v",
        "layers; off: left out",
        whole(1, 1024),
    )
    num_virtual_stages_per_pipeline_rank: int | None = setting(
        None,
        "stages that each pipeline rank holds, v",
        "stages; off: 1; default: 2 with zb-v and v-half",
        whole(1, 1024),
    )
    microbatch_group_size_per_virtual_pipeline_stage: int | None = setting(
        None,
        "run this many through one of a rank's stages before the next of its stages (interleaved)",
        "micro-batches; default: p",
        whole(1),
    )
    pipeline_model_parallel_layout: str | None = setting(
        None,
        "write the stages out: E embedding, t layer, L loss, a bar between stages, t*3 or "
        "(t...)*3 to repeat",
        "stages; off: left out, balanced by cost",
    )
    decoder_first_pipeline_num_layers: int | None = setting(
        None,
        "layers of the first pipeline rank; the others share the rest evenly",
        "layers; off: left out",
        whole(1),
    )
    decoder_last_pipeline_num_layers: int | None = setting(
        None,
        "layers of the last pipeline rank; the others share the rest evenly",
        "layers; off: left out",
        whole(1),
    )
    account_for_embedding_in_pipeline_split: bool = setting(
        False, "cut evenly, the embedding counted as one layer", "off: left out"
    )
    account_for_loss_in_pipeline_split: bool = setting(
        False, "cut evenly, the head with the loss counted as one layer", "off: left out"
    )
    defer_embedding_wgrad_compute: bool = setting(
        False,
        "compute the output layer's weight gradients when its pipeline rank has nothing else "
        "left to do; the memory they wait in grows with the micro-batches",
        "off: left out",
    )
    wgrad_deferral_limit: int = setting(
        0,
        "put off only the first so many micro-batches' weight gradients (with "
        "--defer-embedding-wgrad-compute)",
        "micro-batches; off: 0, all",
        whole(),
    )
    sequence_parallel: bool = setting(
        False, "cut the residual stream along the sequence over the t ranks", "off: left out"
    )
    distributed_backend: str | None = setting(
        None, "communication library", "default: nccl on CUDA, gloo on CPU", one_of("nccl", "gloo")
    )
    nccl_communicator_config_path: str | None = setting(
        None,
        "YAML or JSON file of NCCL settings by group: min_ctas, max_ctas, cga_cluster_size, "
        "net_name, is_high_priority_stream",
        "file; off: left out, NCCL's own; without effect on gloo",
        FILE,
        local=True,
        changes_numbers=False,
    )
    distributed_timeout_minutes: int = setting(
        10, "longest wait in a collective before the run stops", "minutes", whole(1, 525600)
    )
    no_shared_memory: bool = setting(
        False,
        "on a CPU, let the ranks of one host communicate through gloo instead of shared memory "
        "(ours, not Megatron's)",
        "off: left out",
    )
    tp_comm_overlap: str = setting(
        "none",
        "communicate while the linear layers multiply (with --sequence-parallel): ring sends "
        "messages, symmetric uses memory that all ranks see, auto measures each matmul and takes"
        " the fastest",
        "off: none; default: none, bare: auto",
        one_of("none", "auto", "ring", "symmetric", bare="auto"),
    )
    recompute_granularity: str | None = setting(
        None,
        "run again in backward, to save memory: core attention (selective) or whole layers (full)",
        "off: left out, keep activations",
        one_of("selective", "full"),
    )
    recompute_method: str | None = setting(
        None,
        "recompute all layers in chunks (uniform) or the first layers of each stage (block)",
        "default: uniform; with full only",
        one_of("uniform", "block"),
    )
    recompute_num_layers: int | None = setting(
        None,
        "layers of a chunk (uniform), or layers that each stage recomputes (block)",
        "layers; default: 1; off: 0 with block",
        whole(),
    )
    fused_linear_cross_entropy: bool = setting(
        False,
        "multiply by the output layer and take the loss in chunks of the vocabulary: whole "
        "logits never exist; its product is computed again in backward (ours; "
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl linear)",
        "off: left out",
    )
    use_distributed_optimizer: bool = setting(
        False,
        "shard masters and moments over the data-parallel ranks: --zero-stage 1",
        "off: left out, replicated",
    )
    zero_stage: int | None = setting(  # 0 to 3; None: see the flag above. Read `zero` instead
        None,
        "shard over the data-parallel ranks: 1 masters and moments, 2 gradients too, 3 weights "
        "too (ours, not Megatron's)",
        "off: 0, replicated; default: 1 with --use-distributed-optimizer, else 0",
        one_of("0", "1", "2", "3"),
    )
    zero_reduce_each_microbatch: bool = setting(
        False,
        "send gradients to their owners after each micro-batch: less memory, more bytes sent, "
        "other rounding (ours; --zero-stage 2 and 3, no pipeline)",
        "off: left out, once a step",
    )
    num_distributed_optimizer_instances: int = setting(
        1,
        "shard inside a group of ranks, replicate over the groups",
        "groups of data-parallel ranks; off: 1",
        whole(1),
    )
    overlap_grad_reduce: bool = setting(
        False, "reduce a gradient bucket while backward goes on", "off: left out"
    )
    overlap_param_gather: bool = setting(
        False,
        "gather weights while the ranks compute: updated weights during the next forward; at "
        "--zero-stage 3 one block ahead",
        "off: left out",
    )
    ddp_bucket_size: int | None = setting(
        None,
        "gradients reduced in one collective; auto measures backward and links at the start and "
        "takes the size that hides most; at --zero-stage 3 a bucket is a transformer block",
        "elements; default: an eighth of the gradients, 2e6 to 40e6",
        whole(1, auto=True),
    )
    grad_reduce_in_bf16: bool = setting(
        False,
        "send gradients in bfloat16; their owner adds them up in fp32, in rank order",
        "off: left out, in fp32",
    )
    main_grads_dtype: str = setting(
        "fp32",
        "dtype of a rank's own gradients until they are sent; sums over ranks stay fp32",
        "off: fp32",
        one_of("fp32", "bf16"),
    )
    optimizer_cpu_offload: bool = setting(
        False,
        "keep the optimizer's masters and moments in host memory, and update them there",
        "off: left out, on the device",
    )
    optimizer_backend: str = setting(
        "torch",
        "package whose AdamW kernel updates the weights; triton (our kernel, which rounds them "
        "to bf16 in the same pass), apex and te need CUDA (ours, not Megatron's)",
        "off: torch",
        one_of("torch", "triton", "apex", "te"),
    )
    norm_backend: str = setting(
        "weft",
        "package whose kernels compute RMSNorm; apex and te need CUDA (ours, not Megatron's)",
        "off: weft",
        one_of("weft", "apex", "te"),
    )
    attention_backend: str = setting(
        "auto",
        "kernels of attention: flash is FlashAttention (3 where its package is installed), fused "
        "cuDNN's, unfused matrix products, local csrc/attention.h on a CPU, te (ours) Transformer "
        "Engine's DotProductAttention; auto takes what torch chooses",
        "off: auto",
        one_of(*BACKENDS, other=(("torch", "auto"),)),  # of --core-attention-backend
    )
    flash_attention_version: int | None = setting(
        None,
        "version of FlashAttention: 2 is torch's own, 3 and 4 come from their packages",
        "default: 3 on Hopper where flash_attn_interface is installed, else 2",
        one_of("2", "3", "4"),
    )
    device: str | None = setting(
        None,
        "where the run computes (ours, not Megatron's)",
        "default: cuda where there is one",
        one_of("cpu", "cuda"),
    )

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
        """Return how many ranks a gradient is summed over, D x c."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def zero(self) -> int:
        """Return the ZeRO stage: 1 shards optimizer state, 2 gradients too, 3 weights too."""
        return int(self.use_distributed_optimizer) if self.zero_stage is None else self.zero_stage

    @property
    def shard_size(self) -> int:
        """Return how many ranks share one optimizer state, 1 at stage 0."""
        ranks = self.gradient_ranks if self.zero else 1
        return ranks // self.num_distributed_optimizer_instances

    @property
    def schedule(self) -> str:
        """Return the name of the pipeline schedule."""
        return self.pipeline_schedule or ("interleaved" if self.virtual_stages > 1 else "1f1b")

    @property
    def virtual_stages(self) -> int:
        """Return the number of stages a pipeline rank holds, v."""
        given = self.num_virtual_stages_per_pipeline_rank
        return given or (2 if self.pipeline_schedule in V_SHAPED else 1)


@dataclass(frozen=True)
class BatchConfig:
    """How many samples a step takes, and how long the run is: train_iters or train_samples.

    step_batch_size_schedule has (first sample, size) pairs; global_batch_size is the first size.
    """

    micro_batch_size: int = setting(
        1,
        "samples of one forward on one rank, b",
        "samples",
        whole(1, 65536),
        changes_numbers=False,
    )
    global_batch_size: int = setting(
        1,
        "samples of one step over all ranks",
        "samples; default: micro x data-parallel size",
        whole(1),
    )
    step_batch_size_schedule: tuple[tuple[int, int], ...] | None = setting(
        None,
        'global batch size, changing at these token counts: "0:768 250B:1536"',
        '"TOKENS:SAMPLES ..."; off: left out',
    )
    train_iters: int | None = setting(
        None, "length of the run", "steps; this or --train-samples", whole(1)
    )
    train_samples: int | None = setting(
        None, "length of the run", "samples; this or --train-iters", whole(1)
    )


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, gradient clipping, the learning-rate curve.

    A decay length of None is the run's.
    """

    optimizer: str = setting(  # a key of training.optimizer.RULES
        "adam", "what updates the weights", "off: adam, which is AdamW", one_of("adam")
    )
    lr: float = setting(3e-4, "peak learning rate", "per step; required", real())
    min_lr: float = setting(0.0, "floor of the decay", "per step; off: 0", real())
    decoupled_lr: float | None = setting(
        None, "peak for the embedding and the output layer", "per step; off: left out, --lr", real()
    )
    decoupled_min_lr: float | None = setting(
        None,
        "floor for the embedding and the output layer",
        "per step; off: left out, --min-lr",
        real(),
    )
    lr_decay_style: str = setting(
        "linear",
        "curve from --lr to --min-lr",
        "off: constant",
        one_of("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_wsd_decay_style: str = setting(
        "exponential",
        "curve of WSD's last part",
        "with WSD only",
        one_of("exponential", "linear", "cosine", "minus_sqrt"),
    )
    lr_decay_iters: int | None = setting(
        None, "where the decay ends", "steps; default: --train-iters", whole(1)
    )
    lr_decay_samples: int | None = setting(
        None, "where the decay ends", "samples; default: --train-samples", whole(1)
    )
    lr_wsd_decay_iters: int | None = setting(
        None, "length of WSD's last part", "steps; with WSD and --train-iters", whole(1)
    )
    lr_wsd_decay_samples: int | None = setting(
        None, "length of WSD's last part", "samples; with WSD and --train-samples", whole(1)
    )
    lr_warmup_iters: int = setting(0, "linear warm-up", "steps; off: 0", whole())
    lr_warmup_samples: int = setting(0, "linear warm-up", "samples; off: 0", whole())
    lr_warmup_fraction: float | None = setting(
        None, "linear warm-up", "of the decay's length; off: left out", FRACTION
    )
    lr_warmup_init: float = setting(
        0.0, "learning rate at sample 0 of the warm-up", "per step; off: 0", real()
    )
    weight_decay: float = setting(
        0.01, "AdamW's decay, of matrices only, not of norms", "per step, times lr; off: 0", real()
    )
    adam_beta1: float = setting(0.9, "decay of the first moment", "no unit", FRACTION)
    adam_beta2: float = setting(0.999, "decay of the second moment", "no unit", FRACTION)
    adam_eps: float = setting(1e-8, "added to the root of the second moment", "no unit", POSITIVE)
    clip_grad: float = setting(
        1.0, "scale the gradients down to at most this norm", "global norm; off: 0", real()
    )


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
class DataConfig:
    """Which tokens are read, and how the end of a document is treated."""

    data_path: tuple[str, ...] = setting(
        (),
        "data sets to mix by weight, cut by --split",
        'prefixes of .bin/.idx pairs, or "weight prefix ..."; off: left out',
        TEXTS,
    )
    train_data_path: tuple[str, ...] = setting(
        (), "data sets to mix for training", "as --data-path; off: left out", TEXTS
    )
    valid_data_path: tuple[str, ...] = setting(
        (), "data sets to mix for validation", "as --data-path; off: left out", TEXTS
    )
    test_data_path: tuple[str, ...] = setting(
        (), "data sets to mix for testing", "as --data-path; off: left out", TEXTS
    )
    split: str | None = setting(
        None, "training, validation, test shares of --data-path", "shares; default: 969,30,1"
    )
    data_cache_path: str | None = setting(
        None,
        "where index files are kept",
        "directory; default: beside the data",
        DIRECTORY,
        local=True,
        changes_numbers=False,
    )
    data_local_copy: str | None = setting(
        None,
        "copy the data there first, once a host, and read the copy (ours, not Megatron's)",
        "directory; off: left out",
        DIRECTORY,
        local=True,
        changes_numbers=False,
    )
    mock_data: bool = setting(
        False, "train on made-up tokens and read no data file", "off: left out"
    )
    num_workers: int | None = setting(
        None,
        "threads of each rank that read data ahead",
        "threads; off: 0, read when needed; default: by measurement, at most 32",
        whole(0, 256),
        changes_numbers=False,
    )
    data_timeout: float = setting(
        300.0,
        "stop a run whose data is not read by then, with file and byte (ours, not Megatron's)",
        "seconds; off: 0",
        real(),
        changes_numbers=False,
    )
    reset_position_ids: bool = setting(
        False, "count positions from 0 after each document", "off: left out"
    )
    reset_attention_mask: bool = setting(
        False, "let no token attend to another document", "off: left out"
    )
    eod_mask_loss: bool = setting(
        False, "leave end-of-document tokens out of the loss", "off: left out"
    )
    tokenizer_type: str | None = setting(
        None,
        "format of --tokenizer-model",
        "default: NullTokenizer with --mock-data",
        one_of(*TOKENIZERS),
    )
    tokenizer_model: str | None = setting(
        None,
        "SentencePiece .model, Llama 3's tiktoken file, or tokenizer.json",
        "file; off: left out, with NullTokenizer and GPT2BPETokenizer",
        FILE,
    )
    merge_file: str | None = setting(
        None,
        "the merges of GPT2BPETokenizer, one a line",
        "file; default: merges.txt beside --vocab-file",
        FILE,
    )


@dataclass(frozen=True)
class CheckpointConfig:
    """Where the run is saved and resumed."""

    save: str | None = setting(None, "where checkpoints go", "directory; off: left out", DIRECTORY)
    load: str | None = setting(
        None,
        "resume from the newest complete checkpoint there",
        "directory; off: left out",
        DIRECTORY,
    )
    pretrained_checkpoint: str | None = setting(
        None,
        "start from these weights (Weft's or Hugging Face's) while --load holds no checkpoint",
        "directory; off: left out",
        DIRECTORY,
    )
    save_interval: int | None = setting(
        None, "steps between two checkpoints", "steps; off: left out or 0, at the end only", whole()
    )
    save_retain_interval: int | None = setting(
        None,
        "after a complete save, delete older checkpoints whose step is no multiple of this",
        "steps; off: left out, keep every one",
        whole(1),
    )
    keep_last_k: int | None = setting(
        None,
        "after a complete save, delete older checkpoints until k complete ones are left (ours, "
        "not Megatron's)",
        "checkpoints; off: left out, keep every one",
        whole(1),
    )
    async_save: bool = setting(
        False,
        "copy the state, and write the copy in the background while training goes on",
        "off: left out",
    )
    on_save_failure: str = setting(
        "continue",
        "what to do after a failed save: go on, or end the run (ours, not Megatron's)",
        "default: continue",
        one_of("continue", "stop"),
    )
    finetune: bool = setting(False, "load weights only and start at sample 0", "off: left out")
    no_load_optim: bool = setting(
        False,
        "load weights and position in the data, but start AdamW's moments at 0",
        "off: left out",
    )
    ckpt_step: int | None = setting(
        None, "load the checkpoint of this step", "step; off: left out, the newest", whole()
    )
    use_checkpoint_args: bool = setting(
        False,
        "take the model's sizes and the tokenizer from the checkpoint that will be loaded",
        "off: left out",
    )
    use_checkpoint_opt_param_scheduler: bool = setting(
        False,
        "take peak, floor, warm-up, length and style of the learning rate, and the weight decay,"
        " from the checkpoint of --load",
        "off: left out, from the flags",
    )
    allow_change: tuple[str, ...] = setting(
        (),
        "load although these differ from the checkpoint's; data includes the sequence length, "
        "rope is base and scaling of rotary positions (ours, not Megatron's)",
        "seed, data, tokenizer, batch, rope; off: left out",
        TEXTS,
    )
    exit_on_missing_checkpoint: bool = setting(
        False, "stop when --load holds no checkpoint", "off: left out, start fresh"
    )


@dataclass(frozen=True)
class LogConfig:
    """What is logged, and how often."""

    log_interval: int = setting(10, "steps between two log lines", "steps", whole(1))
    log_json: str | None = setting(
        None,
        "also log to this file, one JSON object a line (ours, not Megatron's)",
        "file; off: left out",
        FILE,
        local=True,
    )
    tensorboard_dir: str | None = setting(
        None, "write TensorBoard events", "directory; off: left out", DIRECTORY, local=True
    )
    wandb_project: str | None = setting(
        None, "report to this project of Weights & Biases", "name; off: left out"
    )
    wandb_exp_name: str | None = setting(None, "name of the run there", "name; default: W&B's own")
    log_params_norm: bool = setting(False, "log the norm of the parameters", "off: left out")
    sample_interval: int | None = setting(
        None,
        "steps between two samples: print how the model goes on with a text (ours, not Megatron's)",
        "steps; off: left out",
        whole(1),
    )
    sample_prompt: str | None = setting(
        None,
        "text that --sample-interval goes on with (ours, not Megatron's)",
        "text; off: left out, the start of a held-out sample",
    )
    profile: bool = setting(False, "write a trace of the torch profiler", "off: left out")
    profile_step_start: int = setting(10, "first step of the trace", "step", whole())
    profile_step_end: int = setting(12, "first step after the trace", "step", whole())
    profile_ranks: tuple[int, ...] = setting(
        (0,), "ranks that write a trace or a memory snapshot", "global ranks", WHOLES
    )
    record_memory_history: bool = setting(
        False,
        "record what CUDA's allocator does, and write it at the end of the run or when it fails,"
        " for pytorch.org/memory_viz",
        "off: left out",
    )
    memory_snapshot_path: str | None = setting(
        None,
        "where --record-memory-history writes; each rank puts its number before the ending",
        "file; off: left out, memory_rank0.pickle beside the profile",
        FILE,
        local=True,
    )


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole: precision, randomness, evaluation, and when to stop."""

    seed: int = setting(
        1234, "seed of the initial weights and of the sample order", "no unit", whole()
    )
    dtype: torch.dtype = torch.float32  # of weights and activations: float32, bfloat16 or float64
    deterministic_mode: bool = setting(
        False, "refuse kernels whose results differ from run to run", "off: left out"
    )
    eval_interval: int | None = setting(
        None, "steps between two evaluations", "steps; off: left out or 0", whole()
    )
    eval_iters: int = setting(
        100, "global batches in one evaluation", "steps; off: 0 or -1", whole(-1)
    )
    exit_interval: int | None = setting(
        None,
        "save and stop after a step that is a multiple of this",
        "steps; off: left out or 0",
        whole(),
    )
    exit_duration_in_mins: int | None = setting(
        None, "save and stop after this time", "minutes; off: left out or 0", whole()
    )
    manual_gc: bool = setting(
        False, "collect Python's garbage at fixed steps, all ranks together", "off: left out"
    )
    manual_gc_interval: int = setting(
        0,
        "steps between two collections of --manual-gc",
        "steps; off: 0, around evaluation only",
        whole(),
    )
    on_nan: str = setting(
        "stop",
        "what to do where the gradient norm is not finite and the update was skipped: end the "
        "run, go on, or go back to the last sound checkpoint and pass over those samples (ours, "
        "not Megatron's)",
        "default: stop",
        one_of("stop", "skip", "rewind"),
    )
    dry_run: bool = setting(
        False,
        "print layout, memory, FLOPs and traffic for this WORLD_SIZE, and stop (ours, not "
        "Megatron's)",
        "off: left out",
    )
    ignore_flags: tuple[str, ...] = setting(
        (),
        "leave out these flags of somebody's fork with the COUNT values after each, or all that a "
        "tree such as pai has of its own; Weft and Megatron-LM must not know them (ours, not "
        "Megatron's)",
        "NAME:COUNT or TREE ...; off: left out",
        TEXTS,
    )


@dataclass(frozen=True)
class Float8Config:
    """Which layers multiply in float8, and how they scale; see docs/float8.md."""

    fp8_format: str | None = setting(
        None,
        "let the layers' matmuls take float8: hybrid has gradients in e5m2, the rest in e4m3",
        "off: left out",
        one_of("e4m3", "hybrid"),
    )
    fp8_recipe: str | None = setting(
        None,
        "what has a scale: a tensor, a row, 128 numbers (128 x 128 of a weight), 32, or, delayed, "
        "a tensor by its largest numbers in earlier steps",
        "tensorwise, rowwise, blockwise, mxfp8 or delayed, the default; with --fp8-format",
    )
    fp8_amax_history_len: int = setting(
        1, "how many steps' largest numbers are kept", "steps; with --fp8-recipe delayed", whole(1)
    )
    fp8_amax_compute_algo: str = setting(
        "most_recent",
        "which of them a scale follows from: the newest or the largest",
        "with --fp8-recipe delayed",
        one_of("most_recent", "max"),
    )
    fp8_margin: int = setting(
        0,
        "how often a scale is doubled beyond what they ask for",
        "times; with --fp8-recipe delayed",
        whole(0, 64),
    )
    fp8_wgrad_bf16: bool = setting(
        False,
        "multiply weight gradients from activations and gradients as they are; these travel and "
        "stay in memory in bf16 (ours; Megatron's --no-fp8-wgrad)",
        "off: left out, in float8",
    )
    fp8_param_gather: bool = setting(
        False,
        "let ZeRO gather the weights that are used in float8 as float8, from --zero-stage 1 on",
        "off: left out, in their own dtype",
    )
    first_last_layers_bf16: bool = setting(
        False, "keep the first and last layers out of float8", "off: left out"
    )
    num_layers_at_start_in_bf16: int = setting(
        1, "how many first ones", "layers; with --first-last-layers-bf16", whole()
    )
    num_layers_at_end_in_bf16: int = setting(
        1, "how many last ones", "layers; with --first-last-layers-bf16", whole()
    )


@dataclass(frozen=True)
class GpuConfig:
    """Where activations wait for backward, and who launches a step; see docs/activations.md."""

    cpu_offload_activations: bool = setting(
        False,
        "keep what backward needs of a layer in host memory, copied beside the layers that "
        "compute (ours; Megatron's --fine-grained-activation-offloading)",
        "off: left out, keep activations on the device",
    )
    cpu_offloading_num_layers: int | None = setting(
        None,
        "offload the first so many layers of each stage",
        "layers; off: 0; default: all but the last of each stage; with --cpu-offload-activations",
        whole(),
    )
    offload_modules: tuple[str, ...] = setting(
        (),
        "offload only what these modules of a layer save, such as mlp or attention.qkv",
        "names in a layer; off: left out, all; with --cpu-offload-activations",
        TEXTS,
    )
    min_offloaded_tensor_size: int = setting(
        1 << 20,
        "smaller tensors stay on the device",
        "elements; with --cpu-offload-activations",
        whole(1),
    )
    cuda_graph: bool = setting(
        False,
        "run forward and backward of each micro-batch from a CUDA graph, which costs the host "
        "one launch (ours; Megatron's --enable-cuda-graph captures layers)",
        "off: left out, the host launches each kernel",
    )
    cuda_graph_warmup_steps: int = setting(
        3, "steps that are eager, before the capture", "steps; with --cuda-graph", whole(1)
    )


@dataclass(frozen=True)
class FaultConfig:
    """How faults are noticed and answered; see docs/reliability.md."""

    peer_checkpoint: int | None = setting(
        None,
        "under tools/supervise.py, copy the state into the memory of the supervisors after every"
        " so many steps: a restart begins there (ours, not Megatron's)",
        "steps; off: left out",
        whole(1),
    )
    peer_timeout: float = setting(
        20.0,
        "how long a rank may give no sign of life before the run ends and names it (ours, not "
        "Megatron's)",
        "seconds",
        real(0.001, 1_000_000),
    )
    hang_timeout: float | None = setting(
        None,
        "how long a rank may stand still after set-up before the run ends and names it: more "
        "than the longest save, first step and micro-batch (ours, not Megatron's)",
        "seconds; off: left out, --distributed-timeout-minutes",
        real(5, 1_000_000),
    )
    empty_unused_memory_level: int = setting(
        0,
        "give CUDA's unused memory back before each update and in evaluations (1), after each "
        "update too (2)",
        "off: 0",
        one_of("0", "1", "2"),
    )
    check_replicas: int | None = setting(
        None,
        "compare what several ranks must hold bit for bit every so many steps and before each "
        "save, and name the rank that differs (ours, not Megatron's)",
        "steps; off: left out",
        whole(1),
    )
    on_replica_mismatch: str = setting(
        "stop",
        "what to do where replicas differ: end the run, or go back to the last sound checkpoint "
        "(ours, not Megatron's)",
        "default: stop",
        one_of("stop", "rewind"),
    )
    on_spike: str | None = setting(
        None,
        "what to do after a step whose loss or gradient norm is far above those before: say so, "
        "end the run, or go back and pass over its samples (ours, not Megatron's)",
        "off: left out",
        one_of("report", "stop", "rewind"),
    )
    spike_z_score: float = setting(
        10.0,
        "how far above the recent steps a spike is (ours, not Megatron's)",
        "deviations from the median",
        POSITIVE,
    )
    iterations_to_skip: tuple[int, ...] = setting(
        (),
        "count these iterations and their samples, and do not train on them",
        "iterations, counted from 1; off: left out",
        WHOLES,
    )
    rerun_mode: str = setting(
        "validate_results",
        "run a step again whose gradient norm was not finite, to name the first value that is not",
        "default: validate_results",
        one_of("disabled", "validate_results"),
    )


@dataclass(frozen=True)
class RehearseConfig:
    """Which rank is rehearsed, on which device, and what is written; see docs/rehearsal.md."""

    rehearse: bool = setting(
        False,
        "run the steps of one rank of this WORLD_SIZE on a device without memory, on any "
        "machine: what it launches, keeps, sends and waits for (ours, not Megatron's)",
        "off: left out",
    )
    rehearse_rank: int = setting(
        0,
        "the rank that is rehearsed (ours, not Megatron's)",
        "rank in the world; default: 0",
        whole(),
    )
    rehearse_all_ranks: bool = setting(
        False,
        "rehearse every rank of a world of at most 16, and match what they send each other "
        "(ours, not Megatron's)",
        "off: left out",
    )
    rehearse_device: str = setting(
        "h100",
        "device whose memory and speed are assumed (ours, not Megatron's)",
        "a name in tools/rehearsal/devices, a file like those, or cpu; default: h100",
    )
    rehearse_steps: int = setting(
        2,
        "steps that run; the last one is reported (ours, not Megatron's)",
        "steps; default: 2",
        whole(1, 3),
    )
    rehearse_full: bool = setting(
        False,
        "run every micro-batch of the last step, and replay none (ours, not Megatron's)",
        "off: left out",
    )
    rehearse_json: str | None = setting(
        None, "write what was found (ours, not Megatron's)", "file; off: left out", FILE
    )
    rehearse_trace: str | None = setting(
        None,
        "write the step's predicted timeline, for Perfetto or chrome://tracing (ours, not "
        "Megatron's)",
        "file; off: left out",
        FILE,
    )


# The settings that define a run's numbers, but for those of `changes_numbers=False`. Layout, output
# paths and logging do not.
_MATHEMATICS = ("model", "batch", "optimizer", "data", "run.seed", "run.dtype")
# Settings that older checkpoints lack: left out at their default, which keeps digests as they were.
_LATER = {
    "optimizer.optimizer": "adam",
    "float8.fp8_amax_history_len": 1,
    "float8.fp8_amax_compute_algo": "most_recent",
    "float8.fp8_margin": 0,
}


@dataclass(frozen=True)
class Config:
    """Every setting of a run; `notes`: to print; `extra`: of a fork; `given`: flags as typed."""

    model: ModelConfig = field(metadata={"heading": "The Llama"})
    parallel: ParallelConfig = section(ParallelConfig, "The layout")
    batch: BatchConfig = section(BatchConfig, "Batches and length")
    optimizer: OptimizerConfig = section(OptimizerConfig, "The optimizer and the learning rate")
    data: DataConfig = section(DataConfig, "Data and tokenizer")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "Checkpoints")
    log: LogConfig = section(LogConfig, "Log and profile")
    run: RunConfig = section(RunConfig, "The run")
    float8: Float8Config = section(Float8Config, "Matmuls in float8 (docs/float8.md)")
    gpu: GpuConfig = section(GpuConfig, "What a GPU does beside computing (docs/activations.md)")
    fault: FaultConfig = section(FaultConfig, "Faults")
    rehearse: RehearseConfig = section(RehearseConfig, "The rehearsal")
    extra: tuple[tuple[str, Any], ...] = ()
    notes: tuple[str, ...] = field(default=(), compare=False)
    given: tuple[str, ...] = field(default=(), compare=False)

    @property
    def expert_model_parallel_size(self) -> int:
        """Return the ranks of the axis ep, 0 where the model has no experts.

        A fork's own flag of this name sets it (docs/forking.md).
        """
        return int(dict(self.extra).get("expert_model_parallel_size", 0))

    def flat(self) -> dict[str, Any]:
        """Return every setting under its dotted name ("model.hidden_size"), in JSON's types."""
        out: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name == "extra":
                out |= {f"extra.{k}": v for k, v in value}
            elif part.name not in ("notes", "given"):
                out |= {f"{part.name}.{k}": v for k, v in asdict(value).items()}
        return {k: _plain(v) for k, v in out.items() if k not in _LATER or v != _LATER[k]}

    def digest(self) -> str:
        """Return the SHA-256 of the settings that define the numbers of the run, in hex."""
        starts = tuple(m if "." in m else f"{m}." for m in _MATHEMATICS)
        without = {name for name, told in SETTINGS.items() if not told.changes_numbers}
        found = self.flat().items()
        taken = {k: v for k, v in found if k.startswith(starts) and k not in without}
        return hashlib.sha256(_json(taken).encode()).hexdigest()

    def canonical_json(self) -> str:
        """Return every setting that all ranks of a run must share, as JSON with sorted keys."""
        local = {name for name, told in SETTINGS.items() if told.local}
        return _json({k: v for k, v in self.flat().items() if k not in local})

    def with_vocab(self, tokenizer_vocab: int) -> "Config":
        """Return the config for a tokenizer of that many entries; a larger --vocab-size is kept.

        Raises UsageError where the tokenizer has more entries than --vocab-size allows.
        """
        stated = self.model.vocab_size or tokenizer_vocab
        if stated < tokenizer_vocab:
            raise UsageError(
                f"--vocab-size {stated} is smaller than the tokenizer, which has {tokenizer_vocab} "
                "entries: give at least that many, or leave --vocab-size out"
            )
        return replace(self, model=replace(self.model, vocab_size=stated))


# Which dataclass holds the settings of a section, its heading, and each setting by dotted name.
SECTIONS: dict[str, Any] = {
    part.name: part.type for part in fields(Config) if "heading" in part.metadata
}
HEADINGS = {name: Config.__dataclass_fields__[name].metadata["heading"] for name in SECTIONS}
SETTINGS: dict[str, Setting] = {
    f"{section}.{part.name}": part.metadata["setting"]
    for section, kind in SECTIONS.items()
    for part in fields(kind)
    if "setting" in part.metadata
}


def _plain(value: Any) -> Any:
    """Return dtypes as names and tuples as lists, so that JSON gives the same value back."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))
