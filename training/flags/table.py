# SPDX-License-Identifier: Apache-2.0
"""Classify every flag: live (it does something), checked (accepted as it stands) or refused.

A newcomer finds here what a flag means, its unit and its off-value; a Megatron-LM user finds every
flag of that program, so that none is silently ignored. This file holds the live flags, one a line,
and reads the others from `training.flags.megatron`; `training.flags.parse` builds argparse from
both. Adding a live flag is a decision: a test freezes the list.

A line of the live table is `flag | rule | unit and off-value | what it does`. A rule is `switch`,
or a type with its bound: `int>=1`, `int[1,1024]`, `float>0`, `float[0,1)`, `text`, `texts`, `ints`,
`one of a,b`, `int>=1 or auto` (auto is 0). A whole number fits into 64 bits. A flag of
`one of a,b; bare b` may be given without a value, and then means b.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from training.config import UsageError
from training.data.tokenizer import OTHER_TYPE
from training.flags.megatron import ACCEPTED, REFUSED
from training.flags.numbers import read_number

# A heading names the dataclass of training/config.py that holds the flags under it.
LIVE = """
[model] The Llama
--num-layers | int[1,1024] | layers; required | transformer blocks
--hidden-size | int[1,1048576] | channels; required | width of the residual stream, h
--ffn-hidden-size | int[1,8388608] | channels; default: 8/3 h rounded down to a multiple of 64 | width of the SwiGLU unit, f
--num-attention-heads | int[1,65536] | heads; required | query heads, a
--num-query-groups | int[1,65536] | heads; off: as many as query heads | key/value heads of --group-query-attention, k
--kv-channels | int[1,65536] | channels; default: h / a | size of one head, d
--seq-length | int[1,8388608] | tokens; required | length of a sample, s
--max-position-embeddings | int[1,1099511627776] | tokens; default: --seq-length | number of positions the model is meant for
--vocab-size | int[1,2147483647] | tokens; default: the tokenizer's | vocabulary before padding, V
--make-vocab-size-divisible-by | int[1,2147483647] | tokens; off: 1 | pad the vocabulary to a multiple of this x tp
--norm-epsilon | float>0 | no unit | added under RMSNorm's root
--rotary-base | float>0 | no unit | base of the rotary frequencies
--use-rope-scaling | switch | off: left out | scale the rotary frequencies as Llama 3.1 does
--rope-scaling-factor | float>0 | ratio | factor of --use-rope-scaling (3.1: 8, 3.2: 32)
--untie-embeddings-and-output-weights | switch | off: left out, one tied matrix | give the output layer its own weights
--model-file | text | file; default: model/llama.py | Python file of the model: model/qwen3.py, or your changed copy of model/llama.py (ours, not Megatron's)
--init-method-std | float>0 | standard deviation | spread of the initial weights, drawn from a normal distribution around 0
[parallel] The layout
--tensor-model-parallel-size | int>=1 | ranks; off: 1 | cut every layer over this many ranks, t
--context-parallel-size | int>=1 | ranks; off: 1 | cut every sample along the sequence over this many ranks, in all layers; attention exchanges keys and values, c
--cp-comm-type | texts | p2p, all_gather, a2a, a2a+p2p; one, or one for each layer | how attention's keys and values reach the ranks of --context-parallel-size: round a ring, gathered, by heads (a2a), or by heads inside of groups and round a ring of groups
--hierarchical-context-parallel-sizes | ints | ranks, ranks; off: left out | sizes of --cp-comm-type a2a+p2p: of a group of neighbours (a2a), and how many groups (p2p); their product is --context-parallel-size
--pipeline-model-parallel-size | int>=1 | ranks; off: 1 | cut the layers into stages over this many ranks, p
--rank-order | text | axes, the fastest first; default: tp-cp-dp-pp | count the ranks along the axes in this order: ranks that are near in it share a node (ours; Megatron has tp-cp-dp-pp, and tp-cp-pp-dp as --use-tp-pp-dp-mapping)
--pipeline-schedule | one of gpipe,1f1b,interleaved,zb-h1,zb-v,v-half | default: 1f1b, or interleaved with virtual stages | order of a pipeline's forwards and backwards (ours, not Megatron's)
--num-virtual-stages-per-pipeline-rank | int[1,1024] | stages; off: 1; default: 2 with zb-v and v-half | stages that each pipeline rank holds, v
--num-layers-per-virtual-pipeline-stage | int[1,1024] | layers; off: left out | put exactly this many layers on every stage, which gives v
--microbatch-group-size-per-virtual-pipeline-stage | int>=1 | micro-batches; default: p | run this many through one of a rank's stages before the next of its stages (interleaved)
--pipeline-model-parallel-layout | text | stages; off: left out, balanced by cost | write the stages out: E embedding, t layer, L loss, a bar between stages, t*3 or (t...)*3 to repeat
--decoder-first-pipeline-num-layers | int>=1 | layers; off: left out | layers of the first pipeline rank; the others share the rest evenly
--decoder-last-pipeline-num-layers | int>=1 | layers; off: left out | layers of the last pipeline rank; the others share the rest evenly
--account-for-embedding-in-pipeline-split | switch | off: left out | cut evenly, the embedding counted as one layer
--account-for-loss-in-pipeline-split | switch | off: left out | cut evenly, the head with the loss counted as one layer
--defer-embedding-wgrad-compute | switch | off: left out | compute the output layer's weight gradients when its pipeline rank has nothing else left to do; the memory they wait in grows with the micro-batches
--wgrad-deferral-limit | int>=0 | micro-batches; off: 0, all | put off only the first so many micro-batches' weight gradients (with --defer-embedding-wgrad-compute)
--sequence-parallel | switch | off: left out | cut the residual stream along the sequence over the t ranks
--distributed-backend | one of nccl,gloo | default: nccl on CUDA, gloo on CPU | communication library
--distributed-timeout-minutes | int[1,525600] | minutes | longest wait in a collective before the run stops
--no-shared-memory | switch | off: left out | on a CPU, let the ranks of one host communicate through gloo instead of shared memory (ours, not Megatron's)
--tp-comm-overlap | one of none,auto,ring,symmetric; bare auto | off: none; default: none, bare: auto | communicate while the linear layers multiply (with --sequence-parallel): ring sends messages, symmetric uses memory that all ranks see, auto measures each matmul and takes the fastest
--recompute-granularity | one of selective,full | off: left out, keep activations | run again in backward, to save memory: core attention (selective) or whole layers (full)
--recompute-method | one of uniform,block | default: uniform; with full only | recompute all layers in chunks (uniform) or the first layers of each stage (block)
--recompute-num-layers | int>=0 | layers; default: 1; off: 0 with block | layers of a chunk (uniform), or layers that each stage recomputes (block)
--fused-linear-cross-entropy | switch | off: left out | multiply by the output layer and take the loss in chunks of the vocabulary: whole logits never exist; its product is computed again in backward (ours; --cross-entropy-loss-fusion --cross-entropy-fusion-impl linear)
--cross-entropy-fusion-impl | one of native,te,linear | default: native; with --cross-entropy-loss-fusion | linear is --fused-linear-cross-entropy; native and te are the same hand-written loss
--use-distributed-optimizer | switch | off: left out, replicated | shard masters and moments over the data-parallel ranks: --zero-stage 1
--zero-stage | one of 0,1,2,3 | off: 0, replicated; default: 1 with --use-distributed-optimizer, else 0 | shard over the data-parallel ranks: 1 masters and moments, 2 gradients too, 3 weights too (ours, not Megatron's)
--zero-reduce-each-microbatch | switch | off: left out, once a step | send gradients to their owners after each micro-batch: less memory, more bytes sent, other rounding (ours; --zero-stage 2 and 3, no pipeline)
--num-distributed-optimizer-instances | int>=1 | groups of data-parallel ranks; off: 1 | shard inside a group of ranks, replicate over the groups
--use-megatron-fsdp | switch | off: left out | let --data-parallel-sharding-strategy give the --zero-stage
--data-parallel-sharding-strategy | one of no_shard,optim,optim_grads,optim_grads_params | default: no_shard; with --use-megatron-fsdp only | another name of --zero-stage 0, 1, 2, 3
--overlap-grad-reduce | switch | off: left out | reduce a gradient bucket while backward goes on
--overlap-param-gather | switch | off: left out | gather weights while the ranks compute: updated weights during the next forward; at --zero-stage 3 one block ahead
--ddp-bucket-size | int>=1 or auto | elements; default: an eighth of the gradients, 2e6 to 40e6 | gradients reduced in one collective; auto measures backward and links at the start and takes the size that hides most; at --zero-stage 3 a bucket is a transformer block
--grad-reduce-in-bf16 | switch | off: left out, in fp32 | send gradients in bfloat16; their owner adds them up in fp32, in rank order
--main-grads-dtype | one of fp32,bf16 | off: fp32 | dtype of a rank's own gradients until they are sent; sums over ranks stay fp32
--optimizer-cpu-offload | switch | off: left out, on the device | keep the optimizer's masters and moments in host memory, and update them there
--optimizer-backend | one of torch,triton,apex,te | off: torch | package whose AdamW kernel updates the weights; triton (our kernel, which rounds them to bf16 in the same pass), apex and te need CUDA (ours, not Megatron's)
--norm-backend | one of weft,apex,te | off: weft | package whose kernels compute RMSNorm; apex and te need CUDA (ours, not Megatron's)
--core-attention-backend | one of torch,te | off: torch | package that computes attention; te is Transformer Engine's DotProductAttention, on CUDA (ours, not Megatron's)
--device | one of cpu,cuda | default: cuda where there is one | where the run computes (ours, not Megatron's)
[batch] Batches and length
--micro-batch-size | int[1,65536] | samples | samples of one forward on one rank, b
--global-batch-size | int>=1 | samples; default: micro x data-parallel size | samples of one step over all ranks
--step-batch-size-schedule | text | "TOKENS:SAMPLES ..."; off: left out | global batch size, changing at these token counts: "0:768 250B:1536"
--train-iters | int>=1 | steps; this or --train-samples | length of the run
--train-samples | int>=1 | samples; this or --train-iters | length of the run
[optimizer] The optimizer and the learning rate
--optimizer | one of adam | off: adam, which is AdamW | what updates the weights
--lr | float>=0 | per step; required | peak learning rate
--min-lr | float>=0 | per step; off: 0 | floor of the decay
--decoupled-lr | float>=0 | per step; off: left out, --lr | peak for the embedding and the output layer
--decoupled-min-lr | float>=0 | per step; off: left out, --min-lr | floor for the embedding and the output layer
--lr-decay-style | one of constant,linear,cosine,inverse-square-root,WSD | off: constant | curve from --lr to --min-lr
--lr-wsd-decay-style | one of exponential,linear,cosine,minus_sqrt | with WSD only | curve of WSD's last part
--lr-decay-iters | int>=1 | steps; default: --train-iters | where the decay ends
--lr-decay-samples | int>=1 | samples; default: --train-samples | where the decay ends
--lr-wsd-decay-iters | int>=1 | steps; with WSD and --train-iters | length of WSD's last part
--lr-wsd-decay-samples | int>=1 | samples; with WSD and --train-samples | length of WSD's last part
--lr-warmup-iters | int>=0 | steps; off: 0 | linear warm-up
--lr-warmup-samples | int>=0 | samples; off: 0 | linear warm-up
--lr-warmup-fraction | float[0,1) | of the decay's length; off: left out | linear warm-up
--lr-warmup-init | float>=0 | per step; off: 0 | learning rate at sample 0 of the warm-up
--weight-decay | float>=0 | per step, times lr; off: 0 | AdamW's decay, of matrices only, not of norms
--adam-beta1 | float[0,1) | no unit | decay of the first moment
--adam-beta2 | float[0,1) | no unit | decay of the second moment
--adam-eps | float>0 | no unit | added to the root of the second moment
--clip-grad | float>=0 | global norm; off: 0 | scale the gradients down to at most this norm
[data] Data and tokenizer
--data-path | texts | prefixes of .bin/.idx pairs, or "weight prefix ..."; off: left out | data sets to mix by weight, cut by --split
--data-args-path | text | file; off: left out | file that holds what --data-path would: a shard list, by lines or spaces, # begins a remark
--train-data-path | texts | as --data-path; off: left out | data sets to mix for training
--valid-data-path | texts | as --data-path; off: left out | data sets to mix for validation
--test-data-path | texts | as --data-path; off: left out | data sets to mix for testing
--split | text | shares; default: 969,30,1 | training, validation, test shares of --data-path
--data-cache-path | text | directory; default: beside the data | where index files are kept
--data-local-copy | text | directory; off: left out | copy the data there first, once a host, and read the copy (ours, not Megatron's)
--mock-data | switch | off: left out | train on made-up tokens and read no data file
--num-workers | int[0,256] | threads; off: 0, read when needed; default: by measurement, at most 32 | threads of each rank that read data ahead
--data-timeout | float>=0 | seconds; off: 0 | stop a run whose data is not read by then, with file and byte (ours, not Megatron's)
--reset-position-ids | switch | off: left out | count positions from 0 after each document
--reset-attention-mask | switch | off: left out | let no token attend to another document
--eod-mask-loss | switch | off: left out | leave end-of-document tokens out of the loss
--tokenizer-type | one of SentencePieceTokenizer,GPTSentencePieceTokenizer,Llama2Tokenizer,TikTokenizer,HuggingFaceTokenizer,GPT2BPETokenizer,NullTokenizer | default: NullTokenizer with --mock-data | format of --tokenizer-model
--tokenizer-model | text | file; off: left out, with NullTokenizer and GPT2BPETokenizer | SentencePiece .model, Llama 3's tiktoken file, or tokenizer.json
--vocab-file | text | file; off: left out, with GPT2BPETokenizer only | vocab.json: ids by token
--merge-file | text | file; default: merges.txt beside --vocab-file | the merges of GPT2BPETokenizer, one a line
[checkpoint] Checkpoints
--save | text | directory; off: left out | where checkpoints go
--load | text | directory; off: left out | resume from the newest complete checkpoint there
--pretrained-checkpoint | text | directory; off: left out | start from these weights (Weft's or Hugging Face's) while --load holds no checkpoint
--save-interval | int>=0 | steps; off: left out or 0, at the end only | steps between two checkpoints
--save-retain-interval | int>=1 | steps; off: left out, keep every one | after a complete save, delete older checkpoints whose step is no multiple of this
--keep-last-k | int>=1 | checkpoints; off: left out, keep every one | after a complete save, delete older checkpoints until k complete ones are left (ours, not Megatron's)
--async-save | switch | off: left out | copy the state, and write the copy in the background while training goes on
--on-save-failure | one of continue,stop | default: continue | what to do after a failed save: go on, or end the run (ours, not Megatron's)
--finetune | switch | off: left out | load weights only and start at sample 0
--no-load-optim | switch | off: left out | load weights and position in the data, but start AdamW's moments at 0
--ckpt-step | int>=0 | step; off: left out, the newest | load the checkpoint of this step
--use-checkpoint-args | switch | off: left out | take the model's sizes and the tokenizer from the checkpoint that will be loaded
--allow-change | texts | seed, data, tokenizer, batch, rope; off: left out | load although these differ from the checkpoint's; data includes the sequence length, rope is base and scaling of rotary positions (ours, not Megatron's)
--use-checkpoint-opt-param-scheduler | switch | off: left out, from the flags | take peak, floor, warm-up, length and style of the learning rate, and the weight decay, from the checkpoint of --load
--exit-on-missing-checkpoint | switch | off: left out, start fresh | stop when --load holds no checkpoint
[log] Log and profile
--log-interval | int>=1 | steps | steps between two log lines
--log-json | text | file; off: left out | also log to this file, one JSON object a line (ours, not Megatron's)
--tensorboard-dir | text | directory; off: left out | write TensorBoard events
--wandb-project | text | name; off: left out | report to this project of Weights & Biases
--wandb-exp-name | text | name; default: W&B's own | name of the run there
--log-params-norm | switch | off: left out | log the norm of the parameters
--sample-interval | int>=1 | steps; off: left out | steps between two samples: print how the model goes on with a text (ours, not Megatron's)
--sample-prompt | text | text; off: left out, the start of a held-out sample | text that --sample-interval goes on with (ours, not Megatron's)
--profile | switch | off: left out | write a trace of the torch profiler
--profile-step-start | int>=0 | step | first step of the trace
--profile-step-end | int>=0 | step | first step after the trace
--profile-ranks | ints | global ranks | ranks that write a trace or a memory snapshot
--record-memory-history | switch | off: left out | record what CUDA's allocator does, and write it at the end of the run or when it fails, for pytorch.org/memory_viz
--memory-snapshot-path | text | file; off: left out, memory_rank0.pickle beside the profile | where --record-memory-history writes; each rank puts its number before the ending
[run] The run
--seed | int>=0 | no unit | seed of the initial weights and of the sample order
--bf16 | switch | off: left out, fp32 | weights and activations in bfloat16, fp32 masters and gradients
--fp64 | switch | off: left out, fp32 | everything in double precision, for tests of exactness (ours, not Megatron's)
--deterministic-mode | switch | off: left out | refuse kernels whose results differ from run to run
--eval-interval | int>=0 | steps; off: left out or 0 | steps between two evaluations
--eval-iters | int>=-1 | steps; off: 0 or -1 | global batches in one evaluation
--exit-interval | int>=0 | steps; off: left out or 0 | save and stop after a step that is a multiple of this
--exit-duration-in-mins | int>=0 | minutes; off: left out or 0 | save and stop after this time
--manual-gc | switch | off: left out | collect Python's garbage at fixed steps, all ranks together
--manual-gc-interval | int>=0 | steps; off: 0, around evaluation only | steps between two collections of --manual-gc
--on-nan | one of stop,skip,rewind | default: stop | what to do where the gradient norm is not finite and the update was skipped: end the run, go on, or go back to the last sound checkpoint and pass over those samples (ours, not Megatron's)
--no-check-for-nan-in-loss-and-grad | switch | off: left out, stop | the same as --on-nan skip
--ignore-flags | texts | NAME:COUNT ...; off: left out | leave out these flags of somebody's fork with the COUNT values after each; Weft and Megatron-LM must not know them (ours, not Megatron's)
--dry-run | switch | off: left out | print layout, memory, FLOPs and traffic for this WORLD_SIZE, and stop (ours, not Megatron's)
[float8] Matmuls in float8 (docs/float8.md)
--fp8-format | one of e4m3,hybrid | off: left out | let the layers' matmuls take float8: hybrid has gradients in e5m2, the rest in e4m3
--fp8-recipe | text | tensorwise, rowwise, blockwise or mxfp8; with --fp8-format | what has a scale: a tensor, a row, 128 numbers (128 x 128 of a weight), or 32
--fp8-wgrad-bf16 | switch | off: left out, in float8 | multiply weight gradients from activations and gradients as they are; these travel and stay in memory in bf16 (ours; Megatron's --no-fp8-wgrad)
--fp8-param-gather | switch | off: left out, in their own dtype | let ZeRO gather the weights that are used in float8 as float8, from --zero-stage 1 on
--fp8-auto | switch | off: left out, all of them | measure each projection at the start, in bf16 and in float8, and leave in bf16 what is not faster; a checkpoint keeps the choices (ours, not Megatron's)
--first-last-layers-bf16 | switch | off: left out | keep the first and last layers out of float8
--num-layers-at-start-in-bf16 | int>=0 | layers; with --first-last-layers-bf16 | how many first ones
--num-layers-at-end-in-bf16 | int>=0 | layers; with --first-last-layers-bf16 | how many last ones
[gpu] What a GPU does beside computing (docs/activations.md)
--cpu-offload-activations | switch | off: left out, keep activations on the device | keep what backward needs of a layer in host memory, copied beside the layers that compute (ours; Megatron's --fine-grained-activation-offloading)
--cpu-offloading-num-layers | int>=0 | layers; off: 0; default: all but the last of each stage; with --cpu-offload-activations | offload the first so many layers of each stage
--offload-modules | texts | names in a layer; off: left out, all; with --cpu-offload-activations | offload only what these modules of a layer save, such as mlp or attention.qkv
--min-offloaded-tensor-size | int>=1 | elements; with --cpu-offload-activations | smaller tensors stay on the device
--cuda-graph | switch | off: left out, the host launches each kernel | run forward and backward of each micro-batch from a CUDA graph, which costs the host one launch (ours; Megatron's --enable-cuda-graph captures layers)
--cuda-graph-warmup-steps | int>=1 | steps; with --cuda-graph | steps that are eager, before the capture
[fault] Faults
--peer-checkpoint | int>=1 | steps; off: left out | under tools/supervise.py, copy the state into the memory of the supervisors after every so many steps: a restart begins there (ours, not Megatron's)
--check-replicas | int>=1 | steps; off: left out | compare what several ranks must hold bit for bit every so many steps and before each save, and name the rank that differs (ours, not Megatron's)
--on-replica-mismatch | one of stop,rewind | default: stop | what to do where replicas differ: end the run, or go back to the last sound checkpoint (ours, not Megatron's)
--on-spike | one of report,stop,rewind | off: left out | what to do after a step whose loss or gradient norm is far above those before: say so, end the run, or go back and pass over its samples (ours, not Megatron's)
--spike-z-score | float>0 | deviations from the median | how far above the recent steps a spike is (ours, not Megatron's)
--iterations-to-skip | ints | iterations, counted from 1; off: left out | count these iterations and their samples, and do not train on them
--rerun-mode | one of disabled,validate_results | default: validate_results | run a step again whose gradient norm was not finite, to name the first value that is not
--peer-timeout | float[0.001,1000000] | seconds | how long a rank may give no sign of life before the run ends and names it (ours, not Megatron's)
--hang-timeout | float[5,1000000] | seconds; off: left out, --distributed-timeout-minutes | how long a rank may stand still after set-up before the run ends and names it: more than the longest save, first step and micro-batch (ours, not Megatron's)
--empty-unused-memory-level | one of 0,1,2 | off: 0 | give CUDA's unused memory back before each update and in evaluations (1), after each update too (2)
[rehearse] The rehearsal
--rehearse | switch | off: left out | run the steps of one rank of this WORLD_SIZE on a device without memory, on any machine: what it launches, keeps, sends and waits for (ours, not Megatron's)
--rehearse-rank | int>=0 | rank in the world; default: 0 | the rank that is rehearsed (ours, not Megatron's)
--rehearse-all-ranks | switch | off: left out | rehearse every rank of a world of at most 16, and match what they send each other (ours, not Megatron's)
--rehearse-device | text | a name in tools/rehearsal/devices, a file like those, or cpu; default: h100 | device whose memory and speed are assumed (ours, not Megatron's)
--rehearse-steps | int[1,3] | steps; default: 2 | steps that run; the last one is reported (ours, not Megatron's)
--rehearse-full | switch | off: left out | run every micro-batch of the last step, and replay none (ours, not Megatron's)
--rehearse-json | text | file; off: left out | write what was found (ours, not Megatron's)
--rehearse-trace | text | file; off: left out | write the step's predicted timeline, for Perfetto or chrome://tracing (ours, not Megatron's)
"""  # noqa: E501

OTHERS = {  # what to write for a value that other programs have
    "--tokenizer-type": OTHER_TYPE,
}
REMOVED = {  # flags that this program had, and what to do instead
    "--checksum-messages": "TCP checks what it carries, and --check-replicas compares the results; "
    "leave it out",
    "--tp-comm-overlap-cache": "a checkpoint records what --tp-comm-overlap auto chose; leave it "
    "out, or name a method for the same bits in every run",
}
LIVE_KIND, CHECKED_KIND, REFUSED_KIND, REMOVED_KIND = "live", "checked", "refused", "removed"


@dataclass(frozen=True)
class Flag:
    """One flag; a live one has a `group`, its section of Config, a checked one `allowed` values."""

    name: str
    kind: str
    rule: str = "switch"
    group: str = ""
    unit: str = ""
    text: str = ""  # what it does, if live; else why it is accepted, or is not
    allowed: tuple[str, ...] = ()  # empty: any
    printed: bool = False  # checked: print `text` when it is given

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    @property
    def usable(self) -> bool:
        """Return whether a command line may have the flag."""
        return self.kind in (LIVE_KIND, CHECKED_KIND)

    @property
    def stands_for(self) -> list[str]:
        """Return the live flag that this one is another name of, and its value if it has none."""
        return self.text.removeprefix("= ").split() if self.text.startswith("= ") else []

    @property
    def nargs(self) -> str | int | None:
        """Return argparse's nargs, 0 for a switch: "?" if it may be bare, None for one value."""
        counts: dict[str, str | int] = {"switch": 0, "texts": "*", "ints": "*"}
        return counts.get(self.rule, "?" if self.bare else None)

    @property
    def bare(self) -> str | None:
        """Return what the flag means without a value; None where it needs one."""
        return self.rule.partition("; bare ")[2] or None

    def convert(self, values: Any) -> Any:
        """Return the value of the text given. Raises UsageError naming flag, value and rule."""
        if self.rule == "switch":
            return True
        if self.rule == "texts":
            return tuple(values)
        if self.rule == "ints":
            return tuple(read_number(self.name, v, "int>=0") for v in values)
        if self.rule == "text":
            if not values.strip():
                raise UsageError(f"{self.name} is empty: leave the flag out instead")
            return values
        if self.rule.startswith("one of "):
            choices = self.rule.removeprefix("one of ").partition(";")[0].split(",")
            if values not in choices:
                what = f"must be one of {', '.join(choices)}"
                other = f"; {OTHERS[self.name]}" if self.name in OTHERS else ""
                raise UsageError(f"{self.name} {values}: {what}{other}")
            return int(values) if values.isdigit() else values
        if self.rule.endswith(" or auto") and values == "auto":
            return 0
        return read_number(self.name, values, self.rule.removesuffix(" or auto"))


def _rows(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.split("|")] for line in text.strip().splitlines()]


@cache
def known_flags() -> dict[str, Flag]:
    """Return every known flag by its name."""
    flags, group = list[Flag](), ""
    for row in _rows(LIVE):
        if row[0].startswith("["):
            group = row[0][1:].split("]")[0]
            continue
        name, rule, unit, text = row
        flags.append(Flag(name, LIVE_KIND, rule, group, unit, text))
    for names, rule, allowed, text in ACCEPTED:
        values = () if allowed == "any" else tuple(allowed.split(","))
        printed, text = text.startswith("! "), text.removeprefix("! ")
        for name in names.split():
            flags.append(Flag(name, CHECKED_KIND, rule, text=text, allowed=values, printed=printed))
    flags += [Flag(name, REFUSED_KIND, text=why) for name, why in REFUSED.items()]
    flags += [Flag(name, REMOVED_KIND, text=why) for name, why in REMOVED.items()]
    out = {flag.name: flag for flag in flags}
    assert len(out) == len(flags), "a flag is twice in the table"
    return out


def headings() -> dict[str, str]:
    """Return {config section: heading} of the live table, in order."""
    return dict(re.findall(r"^\[(\w+)\] (.*)$", LIVE, re.MULTILINE))


def live() -> list[Flag]:
    """Return the flags that do something."""
    return [flag for flag in known_flags().values() if flag.kind == LIVE_KIND]
