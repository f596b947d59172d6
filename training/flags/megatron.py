# SPDX-License-Identifier: Apache-2.0
"""The flags of Megatron-LM that are not live here, and where the same flag means something else.

Facts about Megatron-LM 0.20 (838 flags in 876 spellings), and the flags of the releases before it:
755 that the argument parsers of its tags v1.0 to core_v0.19.0 add.
docs/flags.md shows these tables.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

from training.settings.arguments import EXPERTS, OptimizerConfig
from training.settings.setting import SWITCH, TEXT, TEXTS, Rule


@dataclass(frozen=True)
class Accepted:
    """Flags that are accepted as they stand, and why. Nothing is silently ignored."""

    flags: str  # their names
    why: str  # a fact that always holds here, or what `says` prints
    rule: Rule = SWITCH
    only: tuple[str, ...] = ()  # any other value stops the run with `why`; empty: any value
    note_for: str | bool = False  # print `why` where a flag is given (True), or has this value


@dataclass(frozen=True)
class Idle:
    """Flags that change nothing in Megatron-LM without a feature that is not available here."""

    needs: str  # what switches the feature on
    switches: str  # names of flags without a value
    values: str = ""  # of those with one
    lists: str = ""  # of those with several

    @property
    def accepted(self) -> tuple[Accepted, ...]:
        """Return the same as rows of ACCEPTED."""
        why = f"belongs to {self.needs}, without which it changes nothing, there as here"
        rules = ((self.switches, SWITCH), (self.values, TEXT), (self.lists, TEXTS))
        return tuple(Accepted(flags, why, rule) for flags, rule in rules)


@dataclass(frozen=True)
class Refused:
    """Flags that are refused: a feature that is not available here, and what to do instead."""

    feature: str
    flags: str  # their names
    instead: str = ""

    @property
    def why(self) -> str:
        """Return what the user reads."""
        return f"{self.feature} is not available here" + f"; {self.instead}" * bool(self.instead)


# What stops a run with --num-experts, which alone gives these flags of Megatron-LM an effect
WITH_EXPERTS = {
    "--moe-shared-expert-gate": "the shared expert has no gate",
    "--moe-router-padding-for-quantization": "experts are not in float8",
    "--moe-router-padding-for-fp8": "experts are not in float8",
    "--moe-enable-deepep": "the dispatchers are allgather and alltoall",
    "--moe-flex-dispatcher-backend": "the dispatchers are allgather and alltoall",
    "--moe-deepep-num-sms": "the dispatchers are allgather and alltoall",
    "--moe-apply-probs-on-input": "weights multiply the outputs of experts",
    "--moe-input-jitter-eps": "nothing here draws random numbers",
    "--moe-extended-tp": "give --expert-tensor-parallel-size, which cuts experts",
    "--moe-token-dropping": "give --moe-expert-capacity-factor, which drops tokens",
    "--moe-router-topk-limited-devices": "give --moe-router-num-groups, --moe-router-group-topk",
}


class Difference(NamedTuple):
    """What a flag, or its absence, means in Megatron-LM and here; --dry-run prints it."""

    flags: str  # their names
    there: str
    here: str
    given: Literal["one", "all", "not all"] = "one"  # of the flags, for the difference to count
    name: str = ""

    def touches(self, given: Collection[str]) -> bool:
        """Return whether the difference counts for a command line with these flags."""
        found = [name in given for name in self.flags.split()]
        return {"one": any(found), "all": all(found), "not all": not all(found)}[self.given]

    @property
    def title(self) -> str:
        """Return how the line begins."""
        if self.given == "all":
            return " with ".join(self.flags.split())
        return self.name or "without " * (self.given == "not all") + ", ".join(self.flags.split())


# {flag: the flags and the value that it stands for; its own value follows}
SPELLED = {
    "--add-qkv-bias": ("--model-file", "model/qwen2.py"),
    "--use-tp-pp-dp-mapping": ("--rank-order", "tp-cp-pp-dp"),
    "--fp8-e4m3": ("--fp8-format", "e4m3"),
    "--fp8-hybrid": ("--fp8-format", "hybrid"),
    "--use-torch-fsdp2": ("--zero-stage", "3"),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--checkpoint-activations": (
        "--recompute-granularity",
        "full",
        "--recompute-method",
        "uniform",
    ),
    "--activations-checkpoint-method": ("--recompute-granularity", "full", "--recompute-method"),
    "--offload-optimizer-states": ("--optimizer-state-offload",),
    "--check-for-spiky-loss": ("--on-spike", "report"),
    "--check-for-large-grads": ("--on-spike", "report"),
}
ACCEPTED = (
    Accepted("--swiglu", "a Llama's feed-forward is SwiGLU"),
    Accepted(
        "--delay-wgrad-compute",
        "during a forward (--overlap-moe-expert-parallel-comm) a backward computes its own weight "
        "gradients; --pipeline-schedule zb-h1, zb-v and v-half defer them",
        note_for=True,
    ),
    Accepted(
        "--normalization",
        "a Llama's norm is RMSNorm; Megatron-DeepSpeed writes rmsnorm",
        TEXT,
        only=("RMSNorm", "rmsnorm"),
    ),
    Accepted("--disable-bias-linear", "a Llama's linear layers have no bias"),
    Accepted("--yarn-correction-range-round-to-int", "so it is here without this flag"),
    Accepted("--use-rotary-position-embeddings", "a Llama's positions are rotary"),
    Accepted("--no-position-embedding", "a Llama has no learned positions"),
    Accepted(
        "--rope-type",
        "it belongs to multi-head latent attention; see --position-embedding-type",
        TEXT,
        only=("rope",),
    ),
    Accepted("--rotary-percent", "a Llama rotates the whole head", TEXT, only=("1.0",)),
    Accepted(
        "--rotary-seq-len-interpolation-factor",
        "positions are not interpolated; see --use-rope-scaling",
        TEXT,
        only=("1",),
    ),
    Accepted(
        "--encoder-tensor-model-parallel-size --encoder-pipeline-model-parallel-size",
        "a Llama has no encoder",
        TEXT,
        only=("0",),
    ),
    Accepted(
        "--hybrid-attention-ratio --hybrid-mlp-ratio",
        "every layer of a Llama has attention and a feed-forward",
        TEXT,
        only=("0.0",),
    ),
    Accepted("--group-query-attention", "key/value heads are counted by --num-query-groups"),
    Accepted("--attention-dropout", "a Llama has no dropout", TEXT, only=("0.0",)),
    Accepted("--hidden-dropout", "a Llama has no dropout", TEXT, only=("0.0",)),
    Accepted(
        "--apply-layernorm-1p",
        "the norms hold gamma itself instead of gamma - 1; the same function and, as norms "
        "are not decayed, the same steps",
        note_for=True,
    ),
    Accepted("--softmax-type", "a Llama's softmax has no sink", TEXT, only=("vanilla",)),
    Accepted("--glu-linear-offset", "a Llama's SwiGLU has no offset", TEXT, only=("0.0",)),
    Accepted(
        "--no-pad-vocab-size --disable-pad-vocab-size",
        "rows that pad the vocabulary are masked out: the function is the same without them",
    ),
    Accepted(
        "--apply-query-key-layer-scaling",
        "a layer's scores are not divided by its number and multiplied again, which fp16 needs: "
        "the same function",
        note_for=True,
    ),
    Accepted(
        "--trust-remote-code",
        "code that comes with a tokenizer never runs: its data files alone are read",
        note_for=True,
    ),
    Accepted("--vocab-extra-ids", "there are no span tokens", TEXT, only=("0",)),
    Accepted(
        "--moe-grouped-gemm --moe-use-legacy-grouped-gemm",
        "the matrices of a rank's experts are one parameter, always",
    ),
    Accepted("--moe-permute-fusion", "the permutation of tokens is one gather, always"),
    Accepted(
        "--moe-shared-expert-overlap",
        "alltoall always sends tokens while the shared expert computes",
    ),
    Accepted(
        "--overlap-dispatch-backward-with-experts-wgrad",
        "alltoall always sends gradients back while the experts' first weight gradient is computed",
    ),
    Accepted(
        "--moe-router-fusion", "the router is torch's operations: the same function", note_for=True
    ),
    Accepted(
        "--moe-router-dtype",
        "the router computes in fp32, or with --fp64 in fp64",
        TEXT,
        only=("fp32",),
    ),
    Accepted(
        "--pipeline-model-parallel-comm-backend",
        "pipeline messages go through --distributed-backend, like all communication",
        TEXT,
        only=("nccl",),
        note_for=True,
    ),
    Accepted(
        "--no-overlap-p2p-communication --overlap-p2p-communication "
        "--overlap-p2p-communication-warmup-flush",
        "pipeline messages always travel while the ranks compute: the same numbers",
        note_for=True,
    ),
    Accepted(
        "--use-ring-exchange-p2p",
        "pipeline messages go from one rank to the other, not round a ring: the same numbers",
        note_for=True,
    ),
    Accepted(
        "--align-param-gather --no-align-param-gather --no-align-grad-reduce "
        "--disable-align-grad-reduce",
        "stages never wait for one another to reduce: a bucket is sent when it is complete",
    ),
    Accepted(
        "--tp-comm-overlap-cfg",
        "no file of methods and chunks is read: --tp-comm-overlap auto measures each projection",
        TEXT,
        note_for=True,
    ),
    Accepted(
        "--tp-comm-bootstrap-backend",
        "there is no separate bootstrap: the ranks meet at the launcher's store and "
        "communicate by --distributed-backend",
        TEXT,
    ),
    Accepted(
        "--no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad "
        "--disable-tp-comm-bulk-dgrad",
        "overlap has no switch for each collective, the numbers are the same without: "
        "--tp-comm-overlap auto overlaps what gains time, and none nothing",
        note_for=True,
    ),
    Accepted(
        "--no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs "
        "--disable-tp-comm-overlap-rs",
        "overlap has no switch for each collective, the numbers are the same without: "
        "--tp-comm-overlap auto overlaps what gains time, and none nothing",
        note_for=True,
    ),
    Accepted(
        "--no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs "
        "--disable-tp-comm-split-rs",
        "overlap has no switch for each collective, the numbers are the same without: "
        "--tp-comm-overlap auto overlaps what gains time, and none nothing",
        note_for=True,
    ),
    Accepted(
        "--tp-comm-overlap-rs-dgrad",
        "dgrad's reduce-scatter always runs during the weight gradient, whatever "
        "--tp-comm-overlap says",
    ),
    Accepted(
        "--no-async-tensor-model-parallel-allreduce --async-tensor-model-parallel-allreduce",
        "picks an implementation with the same numbers",
    ),
    Accepted(
        "--ddp-pad-buckets-for-high-nccl-busbw",
        "buckets are not padded: the same numbers",
        note_for=True,
    ),
    Accepted(
        "--use-nccl-ub --disable-symmetric-registration --use-sharp",
        "NCCL buffer registration and SHARP are not used: the same numbers",
        note_for=True,
    ),
    Accepted(
        "--high-priority-stream-groups",
        "on NCCL the groups of tp, cp and pp have streams of high priority, those of dp plain"
        " ones: the same numbers",
        TEXTS,
        note_for=True,
    ),
    Accepted("--disable-gloo-process-groups", "CPU groups are made only where they are needed"),
    Accepted(
        "--local-rank --local_rank", "the local rank is taken from the launcher's LOCAL_RANK", TEXT
    ),
    Accepted(
        "--distributed-timeout-seconds-after-init",
        "--distributed-timeout-minutes holds for the whole run",
        TEXT,
        note_for=True,
    ),
    Accepted(
        "--use-flash-attn --use-flash-attn-v2",
        "--attention-backend chooses the kernel; auto takes FlashAttention, or cuDNN's kernel"
        " of the same algorithm",
        note_for=True,
    ),
    Accepted(
        "--transformer-impl",
        "the layers are written out here; either name gives the same Llama",
        TEXT,
        only=("local", "transformer_engine"),
    ),
    Accepted("--use-mcore-models --use-legacy-models", "the model is model/llama.py"),
    Accepted(
        "--fp8-param-gather",
        "weights are gathered in their own dtype, and each rank makes the same float8 numbers of"
        " them",
        note_for=True,
    ),
    Accepted(
        "--fp8-interval", "scales follow every step, whatever it says, as in Megatron-LM", TEXT
    ),
    Accepted(
        "--spec", "the model is model/llama.py; fork that file to change a layer", TEXTS,
        note_for=True,
    ),
    Accepted("--attention-softmax-in-fp32", "softmax is always computed in fp32 or better"),
    Accepted(
        "--accumulate-allreduce-grads-in-fp32 --fp32-allreduce",
        "gradients are accumulated and reduced in fp32 or better unless --grad-reduce-in-bf16"
        " or --main-grads-dtype says otherwise",
    ),
    Accepted(
        "--ddp-reduce-scatter-with-fp32-accumulation",
        "the ranks' gradients are always added in fp32 or better, also where they are sent in bf16",
    ),
    Accepted("--main-params-dtype", "master weights are fp32", TEXT, only=("fp32",)),
    Accepted("--exp-avg-dtype --exp-avg-sq-dtype", "moments are fp32", TEXT, only=("fp32",)),
    Accepted(
        "--use-precision-aware-optimizer",
        "masters and moments are fp32, its own defaults; main gradients are what "
        "--main-grads-dtype says",
        note_for=True,
    ),
    Accepted(
        "--output-logit-dtype", "the loss is computed in fp32 or better", TEXT, only=("fp32",)
    ),
    Accepted(
        "--initial-loss-scale --loss-scale --min-loss-scale --min-scale --loss-scale-window",
        "loss scaling belongs to --fp16; bf16 and fp32 need none",
        TEXT,
    ),
    Accepted("--hysteresis", "loss scaling belongs to --fp16; bf16 and fp32 need none", TEXT),
    Accepted("--cross-entropy-loss-fusion", "the loss is one hand-written function"),
    Accepted(
        "--calculate-per-token-loss",
        "the loss is always the mean over the tokens of the global batch",
    ),
    Accepted(
        "--no-masked-softmax-fusion --no-scaled-masked-softmax-fusion --no-bias-gelu-fusion "
        "--no-bias-swiglu-fusion "
        "--no-bias-dropout-fusion",
        "picks an implementation with the same mathematics",
    ),
    Accepted(
        "--no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm "
        "--disable-jit-fuser",
        "picks an implementation with the same mathematics",
    ),
    Accepted(
        "--no-gradient-reduce-div-fusion --fused-residual-rmsnorm --use-te-activation-func",
        "picks an implementation with the same mathematics",
    ),
    Accepted(
        "--use-transformer-engine-op-fuser --no-clone-scatter-output-in-embedding "
        "--disable-clone-scatter-output-in-embedding",
        "picks an implementation with the same mathematics",
    ),
    Accepted(
        "--disable-bf16-reduced-precision-matmul",
        "the parts of a split product are always added in fp32, never in bf16",
    ),
    Accepted(
        "--scaled-upper-triang-masked-softmax-fusion",
        "picks an implementation with the same mathematics",
        TEXT,
    ),
    Accepted("--batch-invariant-backend", "there is no batch-invariant mode", TEXT),
    Accepted("--no-query-key-layer-scaling", "there is no query-key layer scaling"),
    Accepted(
        "--ddp-average-in-collective",
        "ranks' gradients are added and scaled once: the same mean, other rounding",
        note_for=True,
    ),
    Accepted(
        "--outer-dp-sharding-strategy",
        "--num-distributed-optimizer-instances shards inside each group of ranks and "
        "replicates over the groups",
        TEXT,
        only=("no_shard",),
    ),
    Accepted("--megatron-fsdp-version", "sharding is --zero-stage's own", TEXT, only=("1", "2")),
    Accepted(
        "--fsdp-double-buffer --fsdp-manual-registration "
        "--fsdp-db-use-persist-buf-on-alloc-fail --megatron-fsdp-max-pool-double-buffer",
        "buffers of gathered weights are --zero-stage 3's own, a block ahead with "
        "--overlap-param-gather: the same numbers",
        note_for=True,
    ),
    Accepted(
        "--suggested-communication-unit-size",
        "--zero-stage 3 gathers a block, with --overlap-param-gather also the next one: the "
        "same numbers",
        TEXT,
        note_for=True,
    ),
    Accepted("--megatron-fsdp-main-params-dtype", "masters are fp32", TEXT, only=("fp32",)),
    Accepted(
        "--megatron-fsdp-main-grads-dtype --megatron-fsdp-grad-comm-dtype",
        "gradients are fp32 unless --main-grads-dtype or --grad-reduce-in-bf16 says otherwise",
        TEXT,
        only=("fp32",),
    ),
    Accepted(
        "--DDP-impl", "gradients are reduced by our own buckets", TEXT, only=("local", "torch")
    ),
    Accepted(
        "--no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp "
        "--no-delay-grad-reduce --delay-param-gather",
        "gradients are reduced by our own buckets",
    ),
    Accepted(
        "--no-scatter-gather-tensors-in-pipeline",
        "under --sequence-parallel pipeline messages are shards already; else they are sent in "
        "full: the same numbers",
        note_for=True,
    ),
    Accepted(
        "--recompute-modules",
        "selective recomputation repeats core attention",
        TEXTS,
        only=("core_attn",),
    ),
    Accepted(
        "--optimizer-offload-fraction",
        "--optimizer-cpu-offload moves all masters and moments",
        TEXT,
        only=("1.0",),
    ),
    Accepted(
        "--overlap-cpu-optimizer-d2h-h2d",
        "with --optimizer-cpu-offload copies and updates always overlap, a bucket at a time",
    ),
    Accepted(
        "--use-torch-optimizer-for-cpu-offload",
        "with --optimizer-cpu-offload the update on the host is torch's",
    ),
    Accepted(
        "--no-pin-cpu-grads --no-pin-cpu-params",
        "host memory of --optimizer-cpu-offload is pinned, so that copies overlap",
        note_for=True,
    ),
    Accepted("--cuda-graph-impl", "no CUDA graph is captured", TEXT, only=("none",)),
    Accepted(
        "--enable-cuda-graph",
        "no CUDA graph is captured: the host launches each kernel, with the same numbers",
        note_for=True,
    ),
    Accepted(
        "--te-rng-tracker --use-cpu-initialization --init-model-with-meta-device",
        "initial weights are drawn per (seed, name), the same for every layout",
    ),
    Accepted(
        "--start-weight-decay --end-weight-decay",
        "weight decay is constant: write --weight-decay",
        TEXT,
        only=("see --weight-decay",),
    ),
    Accepted("--weight-decay-incr-style", "weight decay is constant", TEXT, only=("constant",)),
    Accepted(
        "--dist-ckpt-strictness",
        "a checkpoint is read by name and shape, all of it or not at all",
        TEXT,
        only=("assume_ok_unexpected", "raise_unexpected", "raise_all"),
    ),
    Accepted(
        "--override-opt-param-scheduler --override-opt_param-scheduler --override-lr-scheduler",
        "the learning rate follows the flags unless --use-checkpoint-opt-param-scheduler is given",
    ),
    Accepted(
        "--eval-global-batch-size",
        "evaluation uses the training batch size",
        TEXT,
        only=("see --global-batch-size",),
    ),
    Accepted(
        "--eval-micro-batch-size",
        "evaluation uses the training micro-batch size",
        TEXT,
        only=("see --micro-batch-size",),
    ),
    Accepted(
        "--no-manual-gc-eval --disable-manual-gc-eval",
        "garbage is collected around an evaluation",
        note_for=True,
    ),
    Accepted(
        "--train-sync-interval",
        "the loss is read once a --log-interval, which synchronises",
        TEXT,
        note_for=True,
    ),
    Accepted(
        "--exit-signal-handler --exit-signal-handler-for-training",
        "SIGTERM always ends the run after the current step, saved",
    ),
    Accepted(
        "--exit-signal",
        "each of these ends the run after the current step, saved",
        TEXT,
        only=("SIGTERM", "SIGINT", "SIGUSR1"),
    ),
    Accepted(
        "--dataloader-type",
        "the samples of each epoch come in a new random order, as with single; the order is "
        "ours and not Megatron-LM's",
        TEXT,
        only=("single", "cyclic"),
        note_for="cyclic",
    ),
    Accepted("--no-data-sharding", "the ranks share out one global order of samples"),
    Accepted("--mmap-warmup", "files are read when needed: the same tokens", note_for=True),
    Accepted(
        "--no-mmap-bin-files", ".bin files are mapped into memory: the same tokens", note_for=True
    ),
    Accepted("--no-create-attention-mask-in-dataloader", "the loader never builds a mask"),
    Accepted(
        "--num-dataset-builder-threads",
        "each node builds an index once, with a compiled or vectorised builder",
        TEXT,
    ),
    Accepted(
        "--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap",
        "a valid index in the cache is always mapped, never rebuilt",
    ),
    Accepted(
        "--mid-level-dataset-surplus",
        "a blend asks each dataset for exactly the samples it needs",
        TEXT,
        note_for=True,
    ),
    Accepted(
        "--renormalize-blend-weights",
        "a blend asks each dataset for exactly the samples it needs",
        note_for=True,
    ),
    Accepted("--data-impl", "files are Megatron's .bin/.idx", TEXT, only=("mmap", "infer")),
    Accepted(
        "--tiktoken-pattern",
        "Llama 3's own pattern is used with its tiktoken file",
        TEXT,
        only=("v1", "v2"),
        note_for=True,
    ),
    Accepted(
        "--tokenizer-hf-no-use-fast --tokenizer-hf-use-fast --legacy-tokenizer "
        "--tokenizer-hf-no-include-special-tokens --tokenizer-hf-include-special-tokens "
        "--tokenizer-sentencepiece-legacy",
        "tokens in .bin files are fixed already; tools/preprocess_data.py says how they are made",
        note_for=True,
    ),
    Accepted("--null-tokenizer-pad-id", "there is no padding token", TEXT),
    Accepted(
        "--no-use-tokenizer-model-from-checkpoint-args "
        "--disable-use-tokenizer-model-from-checkpoint-args",
        "a given --tokenizer-model always decides; --use-checkpoint-args takes the "
        "checkpoint's by default",
    ),
    Accepted(
        "--no-initialization",
        "weights are drawn all the same, and a checkpoint that is loaded replaces them",
        note_for=True,
    ),
    Accepted(
        "--log-straggler --disable-straggler-on-startup",
        "a rank or a link that slows the others down is always looked for, and named",
        note_for=True,
    ),
    Accepted(
        "--straggler-minmax-count",
        "the slowest rank is named, where it is slower than chance",
        TEXT,
        note_for=True,
    ),
    Accepted(
        "--no-save-tokenizer-assets --disable-save-tokenizer-assets",
        "a checkpoint always holds the files of --tokenizer-model",
        note_for=True,
    ),
    Accepted(
        "--ckpt-format --dist-ckpt-format",
        "checkpoints are safetensors and JSON; Megatron's come in through Hugging Face",
        TEXT,
        note_for=True,
    ),
    Accepted(
        "--use-dist-ckpt --auto-detect-ckpt-format --ckpt-fully-parallel-save "
        "--ckpt-fully-parallel-load",
        "each rank writes and reads what it owns",
    ),
    Accepted(
        "--no-ckpt-fully-parallel-save --ckpt-assume-constant-structure "
        "--dist-ckpt-optim-fully-reshardable",
        "each rank writes and reads what it owns",
    ),
    Accepted("--use-persistent-ckpt-worker", "--async-save writes in a thread of each rank"),
    Accepted(
        "--async-strategy",
        "--async-save writes in a thread of each rank",
        TEXT,
        only=("nvrx", "mcore"),
    ),
    Accepted(
        "--verify-integrity",
        "checksums are always stored and compared: XXH3-128 at a load, SHA-256 by "
        "tools/checkpoint.py verify",
    ),
    Accepted(
        "--no-save-rng --no-load-rng",
        "no random state is needed: every draw is a function of the seed and the sample number",
    ),
    Accepted(
        "--no-save-optim",
        "the optimizer state is saved all the same; --no-load-optim leaves it out when loading",
        note_for=True,
    ),
    Accepted(
        "--replication-factor --replication-jump", "local checkpoints are not available", TEXT
    ),
    Accepted("--log-throughput --log-progress", "tokens/s, ms a step and FLOP/s are on every line"),
    Accepted(
        "--log-timers-to-tensorboard --log-memory-to-tensorboard --log-world-size-to-tensorboard",
        "TensorBoard gets what a log line holds: loss, norm, lr, tokens/s, step time, memory",
        note_for=True,
    ),
    Accepted(
        "--log-validation-ppl-to-tensorboard --log-device-memory-used "
        "--log-batch-size-to-tensorboard",
        "TensorBoard gets what a log line holds: loss, norm, lr, tokens/s, step time, memory",
        note_for=True,
    ),
    Accepted(
        "--log-learning-rate-to-tensorboard --no-log-learnig-rate-to-tensorboard "
        "--no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard",
        "there is no loss scale; the learning rate is always logged",
    ),
    Accepted("--log-num-zeros-in-grad", "zeros in gradients are not counted", note_for=True),
    Accepted("--log-memory-interval", "peak memory is on every line", TEXT),
    Accepted(
        "--timing-log-level",
        "step time and data wait are logged; --profile gives the rest",
        TEXT,
        only=("0", "1", "2"),
        note_for=True,
    ),
    Accepted(
        "--timing-log-option",
        "step time and data wait are logged; --profile gives the rest",
        TEXT,
        only=("max", "minmax", "all"),
    ),
    Accepted("--no-barrier-with-level-1-timing", "there is no barrier in timing"),
    Accepted(
        "--tensorboard-log-interval", "events are written every --log-interval", TEXT, note_for=True
    ),
    Accepted("--tensorboard-queue-size", "events are flushed at every --log-interval", TEXT),
    Accepted(
        "--wandb-save-dir --wandb-entity",
        "W&B takes its directory and entity from WANDB_DIR and WANDB_ENTITY",
        TEXT,
        note_for=True,
    ),
    Accepted("--logging-level", "there are no log levels: every line is printed", TEXT),
    Accepted("--use-pytorch-profiler", "--profile always writes a torch trace"),
    Accepted(
        "--pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack --record-shapes "
        "--nvtx-ranges",
        "the torch trace of --profile holds operator names and times",
        note_for=True,
    ),
    Accepted(
        "--no-one-logger --enable-one-logger --disable-msc",
        "nothing is reported anywhere unless asked for",
    ),
    Accepted(
        "--one-logger-project --one-logger-entity --one-logger-run-name --app-tag-run-name "
        "--app-tag-run-version",
        "One Logger is not used: nothing is reported anywhere unless asked for",
        TEXT,
        note_for=True,
    ),
    Accepted("--error-injection-rate", "faults are not injected", TEXT, only=("0",)),
    Accepted("--error-injection-type", "faults are not injected", TEXT),
    Accepted(
        "--inference-batch-times-seqlen-threshold --max-tokens-to-oom",
        "used by inference only, there as here",
        TEXT,
    ),
    Accepted("--enable-experimental", "nothing here depends on it"),
    Accepted(
        "--mup-width-mult",
        "it is computed, there as here: --hidden-size / --mup-base-hidden-size",
        TEXT,
    ),
    Accepted(
        "--muon-tp-mode",
        "each matrix is complete on one rank, as in duplicated and distributed; blockwise is "
        "refused: "
        "its update depends on the number of tensor-parallel ranks",
        TEXT,
        only=("duplicated", "distributed"),
    ),
    Accepted(
        "--muon-scalar-optimizer",
        "parameters that are not matrices are updated by AdamW",
        TEXT,
        only=("adam",),
    ),
)
IDLE = (
    Idle(
        EXPERTS,
        """--moe-shared-expert-gate
        --moe-router-padding-for-quantization --moe-router-padding-for-fp8
        --moe-enable-deepep
        --moe-apply-probs-on-input --moe-extended-tp --moe-token-dropping""",
        values="""--moe-input-jitter-eps --moe-router-topk-limited-devices
        --moe-deepep-num-sms --moe-flex-dispatcher-backend""",
    ),
    Idle(
        "--optimizer lion or sgd", "", values="""--sgd-momentum --lion-beta1 --lion-beta2"""
    ),
    Idle("--mtp-num-layers", "", values="""--mtp-loss-scaling-factor"""),
    Idle(
        "--multi-latent-attention",
        "",
        values="""--q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim""",
    ),
    Idle("--window-size", "", values="""--window-attn-skip-freq"""),
    Idle(
        "--position-embedding-type relative",
        "",
        values="""--relative-attention-num-buckets --relative-attention-max-distance""",
    ),
    Idle(
        "--fim-data",
        "",
        values="""--fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix
        --fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token
        --fim-eod-token""",
    ),
    Idle(
        "--hybrid-layer-pattern",
        "",
        values="""--mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads""",
    ),
    Idle("--enable-cuda-graph", "", values="""--cuda-graph-warmup-steps"""),
    Idle("--fp4-format", "", values="""--fp4-recipe"""),
    Idle(
        "--inprocess-restart",
        """--inprocess-empty-cuda-cache""",
        values="""--inprocess-max-iterations --inprocess-monitor-thread-interval
        --inprocess-monitor-process-interval --inprocess-progress-watchdog-interval
        --inprocess-heartbeat-interval --inprocess-soft-timeout --inprocess-hard-timeout
        --inprocess-heartbeat-timeout --inprocess-barrier-timeout
        --inprocess-completion-timeout --inprocess-last-call-wait
        --inprocess-termination-grace-time --inprocess-granularity
        --inprocess-active-world-size""",
    ),
    Idle("--adlr-autoresume", "", values="""--adlr-autoresume-interval"""),
    Idle(
        "--retro-add-retriever",
        """--retro-no-verify-neighbor-count --retro-return-doc-ids""",
        values="""--retro-attention-gate --retro-cyclic-train-iters
        --retro-encoder-attention-dropout --retro-encoder-hidden-dropout --retro-encoder-layers
        --retro-num-neighbors --retro-num-retrieved-chunks --retro-project-dir --retro-workdir""",
    ),
    Idle("--biencoder-projection-dim", "", values="""--retriever-seq-length"""),
    Idle("an encoder", "", values="""--pipeline-model-parallel-split-rank"""),
    Idle("BERT", """--bert-no-binary-head""", values="""--mask-prob --short-seq-prob"""),
)
REFUSED = (
    Refused(
        "reinforcement learning",
        """--perform-rl-step --rl-prompts-per-eval --grpo-prompts-per-step --grpo-group-size
        --rl-generation-lag --rl-max-inflight-requests --rl-submission-granularity
        --rl-consumption-granularity --rl-durable-rollout-bank --rl-rollout-bank-dir
        --rl-rollout-bank-max-bytes --grpo-iterations --grpo-clamp-eps-lower
        --grpo-clamp-eps-upper --grpo-kl-beta --grpo-entropy-term-weight
        --grpo-filter-groups-with-same-reward --langrl-env-config --rl-default-temperature
        --rl-default-top-p --rl-default-top-k --rl-offload-optimizer-during-inference
        --rl-kv-cache-management-mode --rl-persist-cuda-graphs --no-rl-persist-cuda-graphs
        --rl-partial-rollouts --no-rl-partial-rollouts
        --rl-inference-logprobs-is-correction --no-rl-inference-logprobs-is-correction
        --rl-importance-sampling-truncation-coef --rl-use-sequence-packing
        --no-rl-use-sequence-packing --rl-sequence-packing-max-sequences-per-bin
        --rl-sequence-packing-algo --rl-training-cuda-graphs --no-rl-training-cuda-graphs
        --rl-inference-tensor-model-parallel-size
        --rl-inference-pipeline-model-parallel-size
        --rl-inference-expert-model-parallel-size
        --rl-inference-expert-tensor-model-parallel-size
        --rl-inference-model-unified-memory-level
        --rl-offload-inference-model-weights-when-idle
        --no-rl-offload-inference-model-weights-when-idle --refit-method
        --rl-verify-model-weights-swap --no-rl-verify-model-weights-swap
        --rl-skip-bos-token --no-rl-skip-bos-token --rl-profile --rl-profile-dir
        --rl-inference-parsers --grpo-default-temperature --grpo-default-top-p
        --langrl-external-server --langrl-inference-server-type
        --langrl-inference-server-conversation-template --rl-calculate-intra-group-similarity
        --rl-generation-batch-size --rl-num-parallel-generation-batches
        --rl-num-parallel-generations --rl-offload-kv-cache-during-training
        --rl-parallel-generation-tasks --rl-remove-kv-cache-during-training
        --rl-reset-cuda-graphs --rl-sequence-packing-bin-size""",
    ),
    Refused(
        "inference",
        """--moe-pad-experts-for-cuda-graph-inference --inference-cuda-graph-scope --flash-decode
        --symmetric-ar-type --nccl-all-reduce-for-prefill
        --inference-fuse-tp-communication --inference-disable-triton-nvls-kernels
        --inference-grouped-gemm-backend --inference-moe-disable-fused-quant-kernels
        --inference-moe-token-dispatcher-type --mlp-chunks-for-prefill --onnx-safe
        --inference-rng-tracker --output-bert-embeddings --bert-embedder-type
        --use-legacy-static-engine --inference-max-requests --inference-max-seq-length
        --inference-dynamic-batching --inference-dynamic-batching-buffer-size-gb
        --inference-dynamic-batching-paused-buffer-size-gb
        --inference-dynamic-batching-mamba-memory-ratio
        --inference-dynamic-batching-block-size --inference-dynamic-batching-max-requests
        --inference-dynamic-batching-max-tokens
        --inference-dynamic-batching-num-cuda-graphs
        --inference-dynamic-batching-track-paused-request-events
        --inference-dynamic-batching-track-generated-token-events
        --decode-only-cuda-graphs --inference-cuda-graph-all-prefills
        --inference-cuda-graph-max-tokens
        --inference-dynamic-batching-unified-memory-level --enable-chunked-prefill
        --num-speculative-tokens --inference-dynamic-batching-prefix-caching
        --no-inference-dynamic-batching-prefix-caching
        --inference-dynamic-batching-prefix-caching-eviction-policy
        --inference-dynamic-batching-prefix-caching-coordinator-policy
        --inference-dynamic-batching-prefix-caching-routing-alpha
        --inference-dynamic-batching-prefix-caching-mamba-gb
        --inference-dynamic-batching-cuda-graph-mixed-prefill-count
        --inference-dynamic-batching-cuda-graph-sizing-distribution
        --inference-dynamic-batching-sampling-backend
        --use-same-sampling-seed-across-dp-ranks
        --inference-dynamic-batching-async-sched-mode
        --inference-dynamic-batching-logprobs-mode --inference-logging-step-interval
        --inference-text-gen-server-logging --no-inference-text-gen-server-logging
        --inference-wandb-logging --no-inference-wandb-logging
        --inference-coordinator-port --mamba-inference-conv-states-dtype
        --mamba-inference-ssm-states-dtype --inference-use-synchronous-zmq-collectives
        --no-inference-use-synchronous-zmq-collectives --inference-disable-ep-consensus
        --no-inference-disable-ep-consensus --inference-shards
        --disable-chunked-prefill --initialize-socket-comms --inference-max-batch-size
        --inference-dynamic-batching-buffer-guaranteed-fraction
        --inference-dynamic-batching-buffer-overflow-factor
        --inference-dynamic-batching-chunk-size
        --inference-dynamic-batching-cuda-graph-max-tokens
        --inference-dynamic-batching-max-requests-override
        --inference-dynamic-batching-max-tokens-override""",
        "use tools/generate.py to sample from a checkpoint",
    ),
    Refused(
        "a batch-invariant mode",
        "--batch-invariant-mode",
        "use --deterministic-mode, with which a run repeats its results bit by bit",
    ),
    Refused(
        "a sequence in chunks",
        "--mlp-chunks-for-training",
        "use --recompute-granularity to save memory",
    ),
    Refused("fp16 with its loss scaling", "--fp16 --fp16-lm-cross-entropy", "use --bf16"),
    Refused(
        "sharding of saved activations",
        "--distribute-saved-activations --distribute-checkpointed-activations",
        "use --sequence-parallel, under which a saved layer input is a shard",
    ),
    Refused(
        "a ramp of the batch size",
        "--rampup-batch-size",
        'use --step-batch-size-schedule "0:SAMPLES TOKENS:SAMPLES ..."; Megatron-LM 0.20 '
        "ignores this flag",
    ),
    Refused(
        "a batch size that the program changes",
        "--decrease-batch-size-if-needed",
        "use a --global-batch-size that is a multiple of micro-batch size x data-parallel size",
    ),
    Refused("this older name", "--warmup", "use --lr-warmup-iters"),
    Refused(
        "an encoder",
        "--decoder-num-layers --encoder-seq-length --decoder-seq-length",
        "use --num-layers and --seq-length",
    ),
    Refused(
        "a gather that starts during the update",
        "--overlap-param-gather-with-optimizer-step",
        "use --overlap-param-gather",
    ),
    Refused(
        "multi-token prediction",
        """--mtp-num-layers --mtp-use-repeated-layer --mtp-detach-heads --mtp-hsm
        --mtp-hybrid-override-pattern --mtp-standalone""",
    ),
    Refused(
        "a sequence in parts of different sizes",
        "--max-seqlen-per-dp-cp-rank --hybrid-context-parallel",
        "--context-parallel-size gives every rank the same part, and samples are packed to "
        "--seq-length",
    ),
    Refused(
        "this part of a mixture of experts",
        """--expert-tensor-parallel-num-weight-shards
        --ep-overlap-early-attn-memory-release --high-priority-a2a-comm-stream
        --use-grouped-gemm-for-shared-expert --moe-shared-expert-glu-interleave-size
        --moe-enable-routing-replay --moe-router-quantile-balancing-ema
        --moe-router-force-biased --use-grouped-gemm-for-dense-mlp
        --moe-use-grouped-tensor --moe-single-grouped-weight --moe-single-grouped-bias
        --moe-permute-fusion-into-hybridep --moe-hybridep-pad-uneven-dispatch-inputs
        --moe-layer-recompute --moe-latent-size --moe-flex-dispatcher-num-sms
        --moe-hybridep-num-sms --moe-hybridep-num-blocks-permute
        --moe-hybridep-num-blocks-unpermute --moe-hybridep-num-sms-preprocessing
        --moe-ncclep-zero-copy --moe-dispatch-fwd-dtype --moe-combine-bwd-dtype
        --moe-mlp-glu-interleave-size --moe-expert-rank-capacity-factor --moe-paged-stash
        --moe-paged-stash-page-size --moe-paged-stash-buffer-size-factor-cuda
        --moe-paged-stash-buffer-size-factor-cpu --save-tokens-per-expert-interval
        --gtp-expert-remat-nccl-ub --moe-use-upcycling --moe-upcycling-granularity
        --moe-routing-trace-path --moe-routing-trace-max-training-iters
        --moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states
        --moe-routing-trace-dump-weights""",
    ),
    Refused(
        "fp4",
        "--fp4-format --fp4-quantizer-factory --fp4-param-gather",
        "use --fp8-format and --fp8-recipe, or --bf16",
    ),
    Refused(
        "memory that float8 weights share",
        """--reuse-grad-buf-for-mxfp8-param-ag --keep-fp8-transpose-cache
        --keep-fp8-transpose-cache-when-using-custom-fsdp""",
        "weights are gathered in their own dtype, and w^T is made once a step",
    ),
    Refused("an embedding in another precision than the layers", "--embedding-weights-in-fp32"),
    Refused(
        "a pipeline stage for the embedding alone",
        "--standalone-embedding-stage",
        "use --pipeline-model-parallel-layout, which says what each stage has",
    ),
    Refused("retrieval (RETRO)", "--retro-add-retriever"),
    Refused("an output layer in float8", "--fp8-output-proj"),
    Refused(
        "a file of float8 recipes",
        """--fp8-quantizer-factory --te-precision-config-file --kitchen-config-file
        --kitchen-recipe-number""",
        "use --fp8-recipe, and --first-last-layers-bf16 for layers that are not in float8",
    ),
    Refused(
        "another cut of the weights",
        """--tensor-parallel-num-weight-shards --gtp-remat-opt-in-modules
        --gtp-remat-reduce-scatter-with-fp32-accumulation --gtp-remat-nccl-ub""",
        "use --tensor-model-parallel-size",
    ),
    Refused(
        "another layout of the sharded state",
        "--no-use-layer-wise-param-layout --create-all-gather-group",
        "use --zero-stage: no_shard is 0, optim 1, optim_grads 2, optim_grads_params 3",
    ),
    Refused(
        "sharding over the groups of --num-distributed-optimizer-instances",
        "--enable-full-sharding-in-hsdp",
        "it shards inside each group of ranks and replicates over the groups",
    ),
    Refused(
        "another unit of gathered weights",
        "--torch-fsdp2-no-reshard-after-forward --megatron-fsdp-enable-fine-grained-param-gather",
        "--zero-stage 3 gathers a block, with --overlap-param-gather also the next one, and "
        "frees it after its use",
    ),
    Refused(
        "a checkpoint that is read in part",
        "--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load",
        "a checkpoint is read by name and shape, all of it or not at all",
    ),
    Refused("a number of buckets", "--ddp-num-buckets", "use --ddp-bucket-size, in elements"),
    Refused(
        "another sum of gradients",
        "--ddp-param-name-patterns-for-fp32-local-accumulation",
        "reductions are sums, scaled once",
    ),
    Refused(
        "another architecture than a Llama",
        """--fp32-residual-connection --apply-residual-connection-post-layernorm
        --activation-func-clamp-value --rotary-interleaved --qk-l2-norm
        --attention-output-gate --use-fused-weighted-squared-relu --enable-mhc-connections
        --mhc-num-residual-streams --mhc-sinkhorn-iterations --mhc-init-gating-factor
        --mhc-recompute-layer-num --mrope-section --window-size --no-rope-freq
        --openai-gelu --squared-relu --quick-geglu""",
        "fork model/llama.py for that",
    ),
    Refused(
        "another attention than a Llama's",
        """--experimental-attention-variant --dsa-indexer-n-heads
        --dsa-indexer-head-dim --dsa-indexer-topk --dsa-indexer-topk-freq
        --dsa-indexer-skip-topk-offset --dsa-indexer-loss-coeff
        --dsa-indexer-use-sparse-loss --dsa-kernel-backend --dsa-indexer-rope-interleaved
        --no-dsa-indexer-rotate-activation --disable-dsa-indexer-rotate-activation
        --no-dsa-indexer-scoring-relu --disable-dsa-indexer-scoring-relu
        --dsa-indexer-k-norm-epsilon --dsa-indexer-k-norm-fp32 --linear-conv-kernel-dim
        --linear-key-head-dim --linear-value-head-dim --linear-num-key-heads
        --linear-num-value-heads --use-kitchen-attention --kitchen-attention-backend
        --linear-attention-freq""",
        "fork model/llama.py for that",
    ),
    Refused(
        "another attention than a Llama's",
        "--multi-latent-attention --cache-mla-latents --mla-down-proj-fusion",
        "--model-file examples/forks/deepseek.py has multi-head latent attention",
    ),
    Refused(
        "a state-space or hybrid model",
        """--is-hybrid-model --gdp-num-householder --disable-mamba-mem-eff-path --gdp-cutedsl-kernel
        --gdp-num-chunk-states-to-recompute --mamba-training-ssm-states-dtype
        --heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json
        --hybrid-layer-pattern --hybrid-override-pattern""",
    ),
    Refused(
        "another distribution of the initial weights",
        """--embedding-init-method-std --data-parallel-random-init
        --init-method-xavier-uniform""",
        "use --init-method-std, for one normal distribution",
    ),
    Refused(
        "a CUDA graph of a layer or of the optimizer",
        """--external-cuda-graph --delay-offload-until-cuda-graph --optimizer-cuda-graph
        --cuda-graph-scope --cuda-graph-modules""",
    ),
    Refused(
        "another way to offload activations",
        """--cpu-offloading-retain-pinned-cpu-buffers --delta-offload-bytes-across-pp-ranks
        --activation-offload-fraction --fine-grained-offloading-max-inflight-offloads""",
        "use --cpu-offload-activations; --cpu-offloading-num-layers and --offload-modules say"
        " how much",
    ),
    Refused(
        "another optimizer than AdamW",
        """--dump-param-to-param-group-map""",
    ),
    Refused(
        "another choice of decayed parameters",
        "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type",
        "weight decay falls on matrices and not on norms",
    ),
    Refused(
        "a Chakra trace",
        "--pytorch-profiler-collect-chakra",
        "use --profile, which writes a torch trace",
    ),
    Refused(
        "a signal handler in the loader",
        "--exit-signal-handler-for-dataloader",
        "loader workers leave signals to the trainer",
    ),
    Refused(
        "a test of the devices during the run",
        "--gpu-sniff-test-interval --result-rejected-tracker-filename",
        "faults are reported in the log",
    ),
    Refused(
        "another blend from an iteration on, given at a restart",
        "--phase-transition-iterations",
        "--data-stages has the blend of every stage",
    ),
    Refused(
        "a flag that freezes all layers",
        "--freeze-all-layers",
        "--param-group 'layers.*' frozen freezes all layers (docs/optimizers.md)",
    ),
    Refused(
        "a layout from a checkpoint",
        "--use-mp-args-from-checkpoint-args",
        "any layout loads any checkpoint: use the flags of the layout",
    ),
    Refused(
        "loading of masters alone", "--load-main-params-from-ckpt", "use --load with --finetune"
    ),
    Refused(
        "another kind of checkpoint",
        """--save-params-interval --non-persistent-save-interval --non-persistent-ckpt-type
        --non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir
        --non-persistent-local-ckpt-algo --async-ckpt-cpu-priority
        --async-ckpt-io-priority --async-ckpt-use-cpu-shm --replication
        --override-ckpt-iteration""",
        "use --save-interval: each checkpoint is a directory with the whole state",
    ),
    Refused(
        "a record of tensors inside a step",
        """--save-activations-interval --save-wgrads-interval --save-dgrads-interval
        --log-energy""",
        "use --log-params-norm or --profile",
    ),
    Refused(
        "a checkpoint in Megatron-LM's format",
        """--ckpt-convert-format --ckpt-convert-save --ckpt-convert-update-legacy-dist-opt-format
        --ckpt-fully-parallel-load-exchange-algo
        --ckpt-fully-parallel-load-per-rank-objects
        --ckpt-fully-parallel-save-process-group --ckpt-fully-parallel-load-process-group
        --ckpt-pg-tensors-cache-path --ckpt-pg-tensors-cache-create
        --no-ckpt-load-validate-sharding-integrity
        --disable-ckpt-load-validate-sharding-integrity --dist-ckpt-save-pre-mcore-014
        --distrib-optim-fully-reshardable-mem-efficient --dist-ckpt-workers
        --ckpt-drop-redundant-extra-state
        --load-model-opt-format""",
        "checkpoints are safetensors and JSON: convert with tools/checkpoint.py",
    ),
    Refused(
        "a setting of NCCL or its flight recorder",
        """--lazy-mpu-init --sharp-enabled-group --flight-recorder-dump-path
        --flight-recorder-trace-buffer-size --no-flight-recorder-dump-on-timeout
        --disable-flight-recorder-dump-on-timeout --flight-recorder-include-stack-trace
        --no-flight-recorder-include-only-active
        --disable-flight-recorder-include-only-active
        --no-flight-recorder-extra-dump-on-exec
        --disable-flight-recorder-extra-dump-on-exec""",
        "use --distributed-timeout-minutes; NCCL's own variables set the rest",
    ),
    Refused(
        "a fake process group",
        "--fake-process-group",
        "use --dry-run, which needs no process group",
    ),
    Refused(
        "another way to evaluate",
        "--test-mode",
        "use --skip-train, which evaluates what --load holds",
    ),
    Refused(
        "data in an object store or listed in a file for each split",
        """--per-split-data-args-path --per-dataset-sequences-path --object-storage-cache-path
        --enable-msc --s3-cache-path""",
        "use --data-path or the --train-, --valid- and --test-data-path flags, with prefixes",
    ),
    Refused(
        "another objective than next-token prediction on plain text",
        "--sample-rate --allow-ambiguous-pad-tokens --fim-data",
    ),
    Refused(
        "reading conversations as they are",
        "--sft --sft-tokenizer-prompt-format --sft-mock-dataset-config-json --chat-template",
        "write prompts and answers as texts of JSON lines, of which tools/preprocess_data.py "
        "--loss-on makes data whose loss counts answers alone",
    ),
    Refused(
        "another setting of the tokenizer",
        """--tokenizer-metadata --tokenizer-special-tokens --tiktoken-num-special-tokens
        --tiktoken-special-tokens
        --no-tokenizer-sentencepiece-ignore-extra-whitespaces
        --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --use-gigatoken""",
        "use SentencePieceTokenizer, TikTokenizer or HuggingFaceTokenizer with one file in "
        "--tokenizer-model",
    ),
    Refused(
        "another end of document for NullTokenizer",
        "--null-tokenizer-eod-id",
        "it is the last token",
    ),
    Refused("a configuration file", "--config-logger-dir --yaml-cfg", "use flags"),
    Refused(
        "reporting to another service",
        """--otel-enabled --otel-service-name --otel-span-groups --straggler-ctrlr-port
        --run-workload-inspector-server --one-logger-async""",
        "use --log-json, TensorBoard or W&B",
    ),
    Refused(
        "a restart inside the process",
        """--adlr-autoresume --inprocess-restart --enable-ft-package --calc-ft-timeouts
        --ft-num-warmup-iters""",
        "use torchrun --max-restarts or the requeue of SLURM",
    ),
    Refused(
        "fault injection",
        """--fault-injector-ranks --fault-injector-num-ranks --fault-injector-fault-types
        --fault-injector-fault-probabilities --fault-injector-fault-delay
        --fault-injector-delay-start-iteration --fault-injector-mtti-seconds
        --fault-injector-offset-seconds --fault-injector-seed""",
    ),
    Refused(
        "distillation",
        """--logits-save-top-k --logits-save-top-p --logits-save-top-p-min-k --logits-save-dir
        --logits-save-dtype --logits-load-dir --logits-load-decode-threads
        --logits-load-prefetch-factor --logits-load-msc-prefetch-depth
        --logits-load-kd-loss-alpha --logits-load-ignore-errors""",
    ),
    Refused(
        "another model than a Llama (BERT, retrieval, vision)",
        """--ict-head-size --biencoder-projection-dim --biencoder-shared-query-context-model
        --ict-load --bert-load --titles-data-path --query-in-block-prob
        --use-one-sent-docs --evidence-data-path --retriever-report-topk-accuracies
        --retriever-score-scaling --block-data-path --embedding-path --indexer-batch-size
        --indexer-log-interval --num-classes --img-h --img-w --num-channels --patch-dim
        --classes-fraction --data-per-class-fraction --head-lr-mult --vision-pretraining
        --vision-pretraining-type --vision-backbone-type --swin-backbone-type --mask-type
        --mask-factor --iter-per-epoch --dino-local-img-size --dino-local-crops-number
        --dino-head-hidden-size --dino-bottleneck-size --dino-freeze-last-layer
        --dino-norm-last-layer --dino-warmup-teacher-temp --dino-teacher-temp
        --dino-warmup-teacher-temp-epochs --img-dim --faiss-use-gpu
        --report-topk-accuracies""",
    ),
)
LR = tuple(
    "--" + part.name.replace("_", "-")
    for part in fields(OptimizerConfig)
    if part.name.startswith("lr_")
)
DIFFERENCES = (
    Difference(
        "--calculate-per-token-loss",
        "off: the mean of the micro-batches' means",
        "always on: the mean over the tokens of the global batch that count",
    ),
    Difference(
        "--make-vocab-size-divisible-by",
        "padded entries take part in the softmax, so tp can change the loss",
        "padded entries are masked out; the loss does not depend on tp",
    ),
    Difference(
        "--seed",
        "the initial weights depend on tp and pp",
        "they do not: each weight depends on (seed, its name), data order on seed and data alone",
    ),
    Difference(
        "--swiglu --normalization --position-embedding-type --disable-bias-linear",
        "a GPT: GELU, LayerNorm, learned positions, biases",
        "always a Llama, as with these flags",
        given="not all",
    ),
    Difference(
        "--hidden-dropout --attention-dropout", "0.1", "0, and nothing else", given="not all"
    ),
    Difference(
        "--attention-backend",
        "chooses among Transformer Engine's kernels by its environment variables; local needs"
        " --spec local",
        "chooses among torch's kernels and Weft's; local is csrc/attention.h on a CPU; the "
        'line "attention:" of the log says which runs',
    ),
    Difference(
        "--apply-layernorm-1p", "norms hold gamma - 1", "norms hold gamma; the same function"
    ),
    Difference("--max-position-embeddings", "required", "--seq-length by default"),
    Difference("--micro-batch-size", "required", "1 by default"),
    Difference("--log-interval", "100 steps", "10 steps"),
    Difference("--distributed-backend", "nccl", "nccl on CUDA, gloo on a CPU"),
    Difference(
        "--tp-comm-overlap",
        "a switch; Transformer Engine's user buffers, methods from --tp-comm-overlap-cfg",
        "auto (bare), ring or symmetric; auto takes what is measured fastest for each projection",
    ),
    Difference(
        "--use-checkpoint-args",
        "takes many arguments, the layout's among them by another flag",
        "takes the model's sizes and the tokenizer, also from a Hugging Face config.json",
    ),
    Difference(
        "--pipeline-model-parallel-size",
        "cuts evenly: --num-layers must divide over the stages",
        "balances the ranks by the cost of layers and head, unless a flag cuts otherwise",
    ),
    Difference(
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "ignored without virtual stages",
        "refused without them",
    ),
    Difference(
        "--grad-reduce-in-bf16",
        "micro-batches and ranks add up in bf16",
        "gradients travel in bf16 and add up in fp32, the ranks' in rank order",
    ),
    Difference(
        "--main-grads-dtype",
        "bf16 needs --use-precision-aware-optimizer, and ranks add up in bf16",
        "bf16 needs --zero-stage 1 or more; sums over the ranks are fp32",
    ),
    Difference(
        "--ddp-bucket-size",
        "max(40e6, 1e6 x data-parallel size) by default",
        "an eighth of the gradients, 2e6 to 40e6; at --zero-stage 3 a block",
    ),
    Difference(
        "--offload-modules",
        "names of its own: attn_norm, qkv_linear, core_attn, ...",
        "the modules' names in a layer of the model's file: attention_norm, attention.qkv, "
        "attention, ...",
    ),
    Difference(
        "--cpu-offloading-num-layers",
        "layers of the model; no pipeline, no recomputation",
        "layers of each stage, but never its last; 0 is off",
    ),
    Difference(
        "--recompute-granularity",
        "full needs --recompute-method",
        "full alone is uniform, one layer a chunk",
    ),
    Difference(
        "--train-iters --step-batch-size-schedule",
        "the learning rate counts micro-batch x data-parallel samples a step",
        "it counts the samples those steps consume",
        given="all",
    ),
    Difference(
        " ".join(("--weight-decay", *LR)),
        "a resume compares them with the checkpoint's, and stops where they differ",
        "they may change from run to run; --use-checkpoint-opt-param-scheduler takes the "
        "checkpoint's",
        name="--lr-decay-style, other --lr-* flags, --weight-decay",
    ),
    Difference("--save-interval", "needed with --save", "default: one checkpoint at the end"),
    Difference(
        "--use-megatron-fsdp",
        "turns --use-distributed-optimizer on; main gradients are bf16 where no flag says "
        "otherwise",
        "--data-parallel-sharding-strategy alone says what is sharded; main gradients are fp32",
    ),
    Difference(
        "--ckpt-format",
        "torch_dist",
        "safetensors and JSON; through Hugging Face to and from Megatron",
    ),
    Difference(
        "--exit-signal-handler",
        "off: SIGTERM kills",
        "always on: SIGTERM, SIGUSR1 or Ctrl-C saves after the current step",
    ),
    Difference(
        "--no-check-for-nan-in-loss-and-grad",
        "NaN raises before the update",
        "the update is skipped on every rank, and the run stops one step later; given, as "
        "with --on-nan skip, it continues",
    ),
    Difference(
        "--check-for-spiky-loss",
        "a loss 10 times the largest of the first 100 samples is reported, after a rerun",
        "--on-spike report: loss and gradient norm by their z-scores over the last 128 steps",
    ),
    Difference(
        "--check-for-large-grads",
        "a gradient 10 times the largest of the first 100 is reported, after a rerun",
        "--on-spike report: loss and gradient norm by their z-scores over the last 128 steps",
    ),
    Difference(
        "--rerun-mode",
        "validate_results: a bad step is run again before its update, then from a checkpoint "
        "elsewhere",
        "validate_results: a step whose norm is not finite is run again once to name the "
        "first such value; report_stats is refused",
    ),
    Difference(
        "--check-weight-hash-across-dp-replicas-interval",
        "weights over data-parallel ranks",
        "--check-replicas: weights, masters and moments over every axis with replicas, and "
        "before each save",
    ),
    Difference("--profile", "nsys, or torch with --use-pytorch-profiler", "always a torch trace"),
    Difference(
        "--num-query-groups", "ignored without --group-query-attention", "refused without it"
    ),
    Difference("--rampup-batch-size", "ignored", "refused"),
)
