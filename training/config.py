# SPDX-License-Identifier: Apache-2.0
"""Define every setting of a run, in frozen dataclasses: parsed once, then only read.

A field has the name of its Megatron-LM flag with underscores; its default turns the feature off.
`training.flags.parse.parse` makes a `Config` from a command line and checks it. Nothing here uses
argparse, files or ranks.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch

from mpu.pipeline.schedules import V_SHAPED


class UsageError(ValueError):
    """A mistake in the command line; the message names the flag, its value and the rule."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the full Llama; they do not depend on the layout."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int  # tokens a sample
    ffn_hidden_size: int = 0  # 0: 8/3 h, rounded down to a multiple of 64
    num_query_groups: int = 0  # key/value heads; 0: one for each query head
    kv_channels: int = 0  # head size; 0: hidden_size / num_attention_heads
    max_position_embeddings: int = 0  # 0: seq_length
    vocab_size: int | None = None  # None until the tokenizer is read
    make_vocab_size_divisible_by: int = 128
    norm_epsilon: float = 1e-5
    rotary_base: float = 10000.0
    use_rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    untie_embeddings_and_output_weights: bool = False
    init_method_std: float = 0.02
    model_file: str = "model/llama.py"

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
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    cp_comm_type: tuple[str, ...] = ("p2p",)  # of every layer, or one for each of the model's
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = None  # a2a, p2p of "a2a+p2p"
    pipeline_model_parallel_size: int = 1
    rank_order: str = "tp-cp-dp-pp"  # how ranks count along the axes, the fastest first
    pipeline_schedule: str | None = None  # None: 1f1b, or interleaved with virtual stages
    num_layers_per_virtual_pipeline_stage: int | None = None
    num_virtual_stages_per_pipeline_rank: int | None = None  # None: 1, or 2 in V-shaped schedules
    microbatch_group_size_per_virtual_pipeline_stage: int | None = None  # None: p
    pipeline_model_parallel_layout: str | None = None  # "Ett|tttL"; None: balanced
    decoder_first_pipeline_num_layers: int | None = None
    decoder_last_pipeline_num_layers: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    defer_embedding_wgrad_compute: bool = False
    wgrad_deferral_limit: int = 0  # micro-batches; 0: all
    sequence_parallel: bool = False
    distributed_backend: str | None = None  # "nccl", "gloo"; None: nccl on CUDA, gloo on CPU
    distributed_timeout_minutes: int = 10
    no_shared_memory: bool = False
    tp_comm_overlap: str = "none"  # the method: or "ring", "symmetric", "auto"
    recompute_granularity: str | None = None  # None, "selective", "full"
    recompute_method: str | None = None  # None, "uniform", "block": with "full" only
    recompute_num_layers: int | None = None
    fused_linear_cross_entropy: bool = False
    use_distributed_optimizer: bool = False  # ZeRO stage 1
    zero_stage: int | None = None  # 0 to 3; None: see the flag above. Read `zero` instead
    zero_reduce_each_microbatch: bool = False
    num_distributed_optimizer_instances: int = 1  # groups of ranks; each shards over its own
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    ddp_bucket_size: int | None = None  # elements; None: an eighth, 2e6 to 40e6; 0: auto
    grad_reduce_in_bf16: bool = False
    main_grads_dtype: str = "fp32"  # "fp32" (fp64 under --fp64) or "bf16"; ranks' sums stay wide
    optimizer_cpu_offload: bool = False
    optimizer_backend: str = "torch"  # "torch", "triton", "apex", "te": whose AdamW kernel
    norm_backend: str = "weft"  # "weft", "apex", "te": whose RMSNorm
    core_attention_backend: str = "torch"  # "torch", "te": whose attention
    device: str | None = None  # "cpu", "cuda"; None: cuda where there is one

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

    micro_batch_size: int = 1
    global_batch_size: int = 1
    step_batch_size_schedule: tuple[tuple[int, int], ...] | None = None
    train_iters: int | None = None
    train_samples: int | None = None


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, gradient clipping, the learning-rate curve.

    A decay length of None is the run's.
    """

    optimizer: str = "adam"  # a key of training.optimizer.RULES
    lr: float = 3e-4
    min_lr: float = 0.0
    decoupled_lr: float | None = None  # peak for the embedding and the output layer; None: lr
    decoupled_min_lr: float | None = None  # their floor; None: min_lr
    lr_decay_style: str = "linear"  # constant, linear, cosine, inverse-square-root, WSD
    lr_wsd_decay_style: str = "exponential"  # exponential, linear, cosine, minus_sqrt
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0
    lr_warmup_fraction: float | None = None
    lr_warmup_init: float = 0.0
    weight_decay: float = 0.01
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0  # 0: no clipping


@dataclass(frozen=True)
class DataConfig:
    """Which tokens are read, and how the end of a document is treated."""

    data_path: tuple[str, ...] = ()
    train_data_path: tuple[str, ...] = ()
    valid_data_path: tuple[str, ...] = ()
    test_data_path: tuple[str, ...] = ()
    split: str | None = None  # "969,30,1": train, validation, test shares of data_path
    data_cache_path: str | None = None
    data_local_copy: str | None = None  # a directory of this host; None: read where the data is
    mock_data: bool = False
    num_workers: int | None = None  # as many as the reads are measured to need
    data_timeout: float = 300.0  # seconds; 0: none
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    tokenizer_type: str | None = None
    tokenizer_model: str | None = None  # or --vocab-file
    merge_file: str | None = None  # None: merges.txt beside --vocab-file


@dataclass(frozen=True)
class CheckpointConfig:
    """Where the run is saved and resumed."""

    save: str | None = None
    load: str | None = None
    pretrained_checkpoint: str | None = None  # initial weights while `load` is empty
    save_interval: int | None = None  # steps; None or 0: at the end only
    save_retain_interval: int | None = None  # steps; None: keep every one
    keep_last_k: int | None = None  # None: keep every one
    async_save: bool = False
    on_save_failure: str = "continue"  # or "stop"
    finetune: bool = False  # load weights only, start at sample 0
    no_load_optim: bool = False
    ckpt_step: int | None = None  # None: the newest complete one
    use_checkpoint_args: bool = False
    use_checkpoint_opt_param_scheduler: bool = False
    allow_change: tuple[str, ...] = ()  # of seed, data, tokenizer, batch, rope
    exit_on_missing_checkpoint: bool = False


@dataclass(frozen=True)
class LogConfig:
    """What is logged, and how often."""

    log_interval: int = 10  # steps
    log_json: str | None = None
    tensorboard_dir: str | None = None
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    log_params_norm: bool = False
    sample_interval: int | None = None  # steps; None: never
    sample_prompt: str | None = None  # None: the start of a held-out sample
    profile: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    profile_ranks: tuple[int, ...] = (0,)
    record_memory_history: bool = False
    memory_snapshot_path: str | None = None  # None: beside the profile


@dataclass(frozen=True)
class RunConfig:
    """The run as a whole: precision, randomness, evaluation, and when to stop."""

    seed: int = 1234
    dtype: torch.dtype = torch.float32  # of weights and activations: float32, bfloat16 or float64
    deterministic_mode: bool = False
    eval_interval: int | None = None  # steps; None or 0: never
    eval_iters: int = 100
    exit_interval: int | None = None  # steps; None or 0: never
    exit_duration_in_mins: int | None = None  # None or 0: no limit
    manual_gc: bool = False
    manual_gc_interval: int = 0  # steps; 0: only around evaluation
    on_nan: str = "stop"  # or "skip": what to do where the gradient norm is not finite
    dry_run: bool = False
    ignore_flags: tuple[str, ...] = ()  # "name:count" of another program's flags


@dataclass(frozen=True)
class Float8Config:
    """Which layers multiply in float8, and how they scale; see docs/float8.md."""

    fp8_format: str | None = None  # "e4m3", "hybrid"; None: no float8
    fp8_recipe: str | None = None  # "tensorwise", "rowwise", "blockwise", "mxfp8"
    fp8_wgrad_bf16: bool = False
    fp8_param_gather: bool = False
    fp8_auto: bool = False
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1  # with first_last_layers_bf16
    num_layers_at_end_in_bf16: int = 1


@dataclass(frozen=True)
class GpuConfig:
    """Where activations wait for backward, and who launches a step; see docs/activations.md."""

    cpu_offload_activations: bool = False
    cpu_offloading_num_layers: int | None = None  # of each stage; None: all but its last unit
    offload_modules: tuple[str, ...] = ()  # of a layer; empty: all
    min_offloaded_tensor_size: int = 1 << 20  # elements
    cuda_graph: bool = False
    cuda_graph_warmup_steps: int = 3


@dataclass(frozen=True)
class FaultConfig:
    """How faults are noticed and answered; see docs/reliability.md."""

    peer_checkpoint: int | None = None  # steps between copies into the supervisor's memory
    peer_timeout: float = 20.0  # seconds without a sign of life after which a rank counts as lost
    hang_timeout: float | None = None  # seconds without movement after which a run ends
    empty_unused_memory_level: int = 0  # CUDA's cache emptied: 1 before, 2 after an update, too
    check_replicas: int | None = None  # steps between two comparisons of replicas; None: never
    on_replica_mismatch: str = "stop"  # or "rewind"
    on_spike: str | None = None  # "report", "stop", "rewind"; None: nobody looks
    spike_z_score: float = 10.0
    iterations_to_skip: tuple[int, ...] = ()  # counted, and not trained on
    rerun_mode: str = "validate_results"  # or "disabled": no step is run again


@dataclass(frozen=True)
class RehearseConfig:
    """Which rank is rehearsed, on which device, and what is written; see docs/rehearsal.md."""

    rehearse: bool = False
    rehearse_rank: int = 0
    rehearse_all_ranks: bool = False
    rehearse_device: str = "h100"  # or another file of tools/rehearsal/devices, a path, "cpu"
    rehearse_steps: int = 2
    rehearse_full: bool = False
    rehearse_json: str | None = None
    rehearse_trace: str | None = None


# The settings that define a run's numbers. Layout, output paths and logging do not.
_MATHEMATICS = ("model", "batch", "optimizer", "data", "run.seed", "run.dtype")
_NOT_MATHEMATICS = {"batch.micro_batch_size", "data.num_workers", "data.data_cache_path"}
_NOT_MATHEMATICS |= {"data.data_timeout", "data.data_local_copy"}
_NOT_MATHEMATICS |= {"model.model_file"}  # a path
# Settings that older checkpoints lack: left out at their default, which keeps digests as they were.
_LATER = {"optimizer.optimizer": "adam"}
# Settings that may differ between the ranks of a run: places that are local to a node.
_LOCAL = {"log.log_json", "log.tensorboard_dir", "log.memory_snapshot_path"}
_LOCAL |= {"data.data_cache_path", "data.data_local_copy"}


@dataclass(frozen=True)
class Config:
    """Every setting of a run; `notes`: to print; `extra`: of a fork; `given`: flags as typed."""

    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    run: RunConfig = field(default_factory=RunConfig)
    float8: Float8Config = field(default_factory=Float8Config)
    gpu: GpuConfig = field(default_factory=GpuConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    rehearse: RehearseConfig = field(default_factory=RehearseConfig)
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
        found = self.flat().items()
        taken = {k: v for k, v in found if k.startswith(starts) and k not in _NOT_MATHEMATICS}
        return hashlib.sha256(_json(taken).encode()).hexdigest()

    def canonical_json(self) -> str:
        """Return every setting that all ranks of a run must share, as JSON with sorted keys."""
        return _json({k: v for k, v in self.flat().items() if k not in _LOCAL})

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


# Which dataclass holds the settings of a section.
SECTIONS: dict[str, Any] = {
    part.name: part.type for part in fields(Config) if is_dataclass(part.type)
}


def _plain(value: Any) -> Any:
    """Return dtypes as names and tuples as lists, so that JSON gives the same value back."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return [_plain(v) for v in value] if isinstance(value, (tuple, list)) else value


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))
