# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501 (one line a flag)
"""List the flags of Megatron-LM that are not live here: accepted or refused, and why.

Facts about Megatron-LM 0.20 (838 flags in 876 spellings), plus a few that older scripts carry.

A line of CHECKED is `flags | rule | allowed values | why`. Nothing is silently ignored: a value that
is not allowed stops the run with the reason. A reason that begins with "!" is printed when the flag
is given, since its effect is not what its name says. One that begins with "=" is the live flag that
this flag stands for. Any other is a fact that always holds here. An entry of REFUSED is (reason and
substitute, flags), one of DIFFERENCES, which --dry-run prints, (flag, Megatron-LM, here).
"""

CHECKED = """
--swiglu | switch | any | a Llama's feed-forward is SwiGLU
--normalization | text | RMSNorm,rmsnorm | a Llama's norm is RMSNorm; Megatron-DeepSpeed writes rmsnorm
--disable-bias-linear | switch | any | a Llama's linear layers have no bias
--position-embedding-type | text | rope | a Llama's positions are rotary
--use-rotary-position-embeddings | switch | any | a Llama's positions are rotary
--no-position-embedding | switch | any | a Llama has no learned positions
--rope-type | text | rope | a Llama's positions are rotary, without YaRN
--rotary-percent | float>0 | 1.0 | a Llama rotates the whole head
--rotary-seq-len-interpolation-factor | int>=1 | 1 | positions are not interpolated; see --use-rope-scaling
--group-query-attention | switch | any | key/value heads are counted by --num-query-groups
--attention-dropout | float>=0 | 0.0 | a Llama has no dropout
--hidden-dropout | float>=0 | 0.0 | a Llama has no dropout
--apply-layernorm-1p | switch | any | ! the norms hold gamma itself instead of gamma - 1; the same function and, as norms are not decayed, the same steps
--softmax-type | text | vanilla | a Llama's softmax has no sink
--glu-linear-offset | float>=0 | 0.0 | a Llama's SwiGLU has no offset
--encoder-num-layers | int>=1 | any | = --num-layers
--qk-layernorm | switch | any | = --model-file model/qwen3.py
--vocab-extra-ids | int>=0 | 0 | there are no span tokens
--num-experts | int>=1 | 1 | there are no experts
--expert-model-parallel-size --expert-tensor-parallel-size | int>=1 | 1 | there are no experts
--pipeline-model-parallel-comm-backend | text | nccl | ! pipeline messages go through --distributed-backend, like all communication
--no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush | switch | any | ! pipeline messages always travel while the ranks compute: the same numbers
--use-ring-exchange-p2p | switch | any | ! pipeline messages go from one rank to the other, not round a ring: the same numbers
--no-align-param-gather --no-align-grad-reduce --disable-align-grad-reduce | switch | any | pipeline stages never wait for one another to reduce: a bucket leaves when it is complete
--tp-comm-overlap-cfg | text | any | ! no file of methods and chunks is read: --tp-comm-overlap auto measures each projection, and --tp-comm-overlap-cache keeps its choices
--tp-comm-bootstrap-backend | text | any | there is no separate bootstrap: the ranks meet at the launcher's store and communicate by --distributed-backend
--no-tp-comm-bulk-wgrad --disable-tp-comm-bulk-wgrad --no-tp-comm-bulk-dgrad --disable-tp-comm-bulk-dgrad | switch | any | ! overlap has no switch for each collective, the numbers are the same without: --tp-comm-overlap auto leaves out what does not pay, none all of it
--no-tp-comm-overlap-ag --disable-tp-comm-overlap-ag --no-tp-comm-overlap-rs --disable-tp-comm-overlap-rs | switch | any | ! overlap has no switch for each collective, the numbers are the same without: --tp-comm-overlap auto leaves out what does not pay, none all of it
--no-tp-comm-split-ag --disable-tp-comm-split-ag --no-tp-comm-split-rs --disable-tp-comm-split-rs | switch | any | ! overlap has no switch for each collective, the numbers are the same without: --tp-comm-overlap auto leaves out what does not pay, none all of it
--tp-comm-overlap-rs-dgrad | switch | any | dgrad's reduce-scatter always runs during the weight gradient, whatever --tp-comm-overlap says
--no-async-tensor-model-parallel-allreduce --async-tensor-model-parallel-allreduce | switch | any | picks an implementation with the same numbers
--use-tp-pp-dp-mapping | switch | any | = --rank-order tp-cp-pp-dp
--ddp-pad-buckets-for-high-nccl-busbw | switch | any | ! buckets are not padded: the same numbers
--use-nccl-ub --disable-symmetric-registration --use-sharp | switch | any | ! NCCL buffer registration and SHARP are not used: the same numbers
--high-priority-stream-groups | texts | any | ! on NCCL the groups of tp, cp and pp have streams of high priority, those of dp plain ones: the same numbers
--disable-gloo-process-groups | switch | any | CPU groups are made only where they are needed
--local-rank --local_rank | int>=0 | any | the local rank is taken from the launcher's LOCAL_RANK
--distributed-timeout-seconds-after-init | int>=1 | any | ! --distributed-timeout-minutes holds for the whole run
--attention-backend | text | flash,fused,unfused,local,auto | torch's SDPA picks the kernel; each gives the same function
--flash-attention-version | int>=1 | 2,3,4 | torch's SDPA picks the kernel; each gives the same function
--use-flash-attn --use-flash-attn-v2 | switch | any | attention goes through torch's SDPA, which is flash attention where it can be
--transformer-impl | text | local,transformer_engine | the layers are written out here; either name gives the same Llama
--use-mcore-models --use-legacy-models | switch | any | the model is model/llama.py
--layernorm-epsilon | float>0 | any | = --norm-epsilon
--no-fp8-wgrad --disable-fp8-wgrad | switch | any | = --fp8-wgrad-bf16
--spec | texts | any | ! the model is model/llama.py; fork that file to change a layer
--attention-softmax-in-fp32 | switch | any | softmax is always computed in fp32 or better
--accumulate-allreduce-grads-in-fp32 | switch | any | gradients are accumulated and reduced in fp32 or better unless --grad-reduce-in-bf16 or --main-grads-dtype says otherwise
--ddp-reduce-scatter-with-fp32-accumulation | switch | any | the ranks' gradients are always added in fp32 or better, also where they travel in bf16
--main-params-dtype | text | fp32 | master weights are fp32
--exp-avg-dtype --exp-avg-sq-dtype | text | fp32 | moments are fp32
--use-precision-aware-optimizer | switch | any | ! masters and moments are fp32, its own defaults; main gradients are what --main-grads-dtype says
--output-logit-dtype | text | fp32 | the loss is computed in fp32 or better
--initial-loss-scale --loss-scale --min-loss-scale --loss-scale-window | float>0 | any | loss scaling belongs to --fp16; bf16 and fp32 need none
--hysteresis | int>=1 | any | loss scaling belongs to --fp16; bf16 and fp32 need none
--cross-entropy-loss-fusion | switch | any | the loss is one hand-written function
--calculate-per-token-loss | switch | any | the loss is always the mean over the tokens of the global batch
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion | switch | any | picks an implementation with the same mathematics
--no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm --disable-jit-fuser | switch | any | picks an implementation with the same mathematics
--no-gradient-reduce-div-fusion --fused-residual-rmsnorm --use-te-activation-func | switch | any | picks an implementation with the same mathematics
--use-transformer-engine-op-fuser --no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding | switch | any | picks an implementation with the same mathematics
--disable-bf16-reduced-precision-matmul | switch | any | ! torch's default for reduced precision in matmuls is kept
--batch-invariant-backend | text | any | there is no batch-invariant mode
--no-query-key-layer-scaling | switch | any | there is no query-key layer scaling
--use-torch-fsdp2 | switch | any | = --zero-stage 3
--ddp-average-in-collective | switch | any | ! ranks' gradients are added and scaled once: the same mean, other rounding
--use-custom-fsdp | switch | any | = --use-megatron-fsdp
--outer-dp-sharding-strategy | text | no_shard | --num-distributed-optimizer-instances shards inside each group of ranks and replicates over the groups
--megatron-fsdp-version | int>=1 | 1,2 | sharding is --zero-stage's own
--fsdp-double-buffer --fsdp-manual-registration --fsdp-db-use-persist-buf-on-alloc-fail --megatron-fsdp-max-pool-double-buffer | switch | any | ! buffers of gathered weights are --zero-stage 3's own, a block ahead with --overlap-param-gather: the same numbers
--suggested-communication-unit-size | int>=1 | any | ! --zero-stage 3 gathers a block, with --overlap-param-gather also the next one: the same numbers
--megatron-fsdp-main-params-dtype | text | fp32 | masters are fp32
--megatron-fsdp-main-grads-dtype --megatron-fsdp-grad-comm-dtype | text | fp32 | gradients are fp32 unless --main-grads-dtype or --grad-reduce-in-bf16 says otherwise
--DDP-impl | text | local,torch | gradients are reduced by our own buckets
--no-contiguous-buffers-in-local-ddp --use-contiguous-buffers-in-ddp --no-delay-grad-reduce --delay-param-gather | switch | any | gradients are reduced by our own buckets
--no-scatter-gather-tensors-in-pipeline | switch | any | ! under --sequence-parallel pipeline messages are shards already; else they travel whole: the same numbers
--recompute-activations | switch | any | = --recompute-granularity selective
--recompute-modules | texts | core_attn | selective recomputation repeats core attention
--fine-grained-activation-offloading | switch | any | = --cpu-offload-activations
--optimizer-offload-fraction | float>=0 | 1.0 | --optimizer-cpu-offload moves all masters and moments
--overlap-cpu-optimizer-d2h-h2d | switch | any | with --optimizer-cpu-offload copies and updates always overlap, a bucket at a time
--use-torch-optimizer-for-cpu-offload | switch | any | with --optimizer-cpu-offload the update on the host is torch's
--no-pin-cpu-grads --no-pin-cpu-params | switch | any | ! host memory of --optimizer-cpu-offload is pinned, so that copies overlap
--cuda-graph-impl | text | none | no layer is captured by itself: --cuda-graph captures a whole micro-batch
--enable-cuda-graph | switch | any | = --cuda-graph
--te-rng-tracker --use-cpu-initialization --init-model-with-meta-device | switch | any | initial weights are drawn per (seed, name), the same for every layout
--start-weight-decay --end-weight-decay | float>=0 | see --weight-decay | weight decay is constant: write --weight-decay
--weight-decay-incr-style | text | constant | weight decay is constant
--persistent-save-interval | int>=0 | any | = --save-interval
--dist-ckpt-strictness | text | assume_ok_unexpected,raise_unexpected,raise_all | a checkpoint is read by name and shape, all of it or not at all
--override-opt-param-scheduler --override-opt_param-scheduler --override-lr-scheduler | switch | any | the learning rate follows the flags unless --use-checkpoint-opt-param-scheduler is given
--use-checkpoint-opt_param-scheduler --use-checkpoint-lr-scheduler | switch | any | = --use-checkpoint-opt-param-scheduler
--eval-global-batch-size | int>=1 | see --global-batch-size | evaluation uses the training batch size
--eval-micro-batch-size | int>=1 | see --micro-batch-size | evaluation uses the training micro-batch size
--no-manual-gc-eval --disable-manual-gc-eval | switch | any | ! garbage is collected around an evaluation
--train-sync-interval | int>=1 | any | ! the loss is read once a --log-interval, which synchronises
--exit-signal-handler --exit-signal-handler-for-training | switch | any | SIGTERM always ends the run after the current step, saved
--exit-signal | text | SIGTERM,SIGINT,SIGUSR1 | each of these ends the run after the current step, saved
--dataloader-type | text | single | samples are read once, in one global order
--mmap-warmup | switch | any | ! files are read when needed: the same tokens
--no-mmap-bin-files | switch | any | ! .bin files are mapped into memory: the same tokens
--no-create-attention-mask-in-dataloader | switch | any | the loader never builds a mask
--num-dataset-builder-threads | int>=1 | any | each node builds an index once, with a compiled or vectorised builder
--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap | switch | any | a valid index in the cache is always mapped, never rebuilt
--mid-level-dataset-surplus | float>=0 | any | ! a blend asks each dataset for exactly the samples it needs
--dataloader-inter-document-masking | switch | any | = --reset-attention-mask
--data-impl | text | mmap,infer | files are Megatron's .bin/.idx
--tiktoken-pattern | text | v1,v2 | ! Llama 3's own pattern is used with its tiktoken file
--tokenizer-hf-no-use-fast --tokenizer-hf-no-include-special-tokens --tokenizer-sentencepiece-legacy | switch | any | ! tokens in .bin files are fixed already; tools/preprocess_data.py says how they are made
--null-tokenizer-pad-id | int>=-1 | any | there is no padding token
--no-use-tokenizer-model-from-checkpoint-args --disable-use-tokenizer-model-from-checkpoint-args | switch | any | a given --tokenizer-model always decides; --use-checkpoint-args takes the checkpoint's where it is left out
--no-initialization | switch | any | ! weights are drawn all the same, and a checkpoint that is loaded replaces them
--log-straggler --disable-straggler-on-startup | switch | any | ! a rank or a link that slows the others down is always looked for, and named
--straggler-minmax-count | int>=1 | any | ! the slowest rank is named, where it is slower than chance
--no-save-tokenizer-assets --disable-save-tokenizer-assets | switch | any | ! a checkpoint always holds the files of --tokenizer-model
--ckpt-format --dist-ckpt-format | text | any | ! checkpoints are safetensors and JSON; Megatron's come in through Hugging Face
--use-dist-ckpt --auto-detect-ckpt-format --ckpt-fully-parallel-save --ckpt-fully-parallel-load | switch | any | each rank writes and reads what it owns
--no-ckpt-fully-parallel-save --ckpt-assume-constant-structure --dist-ckpt-optim-fully-reshardable | switch | any | each rank writes and reads what it owns
--use-persistent-ckpt-worker | switch | any | --async-save writes in a thread of each rank
--async-strategy | text | nvrx,mcore | --async-save writes in a thread of each rank
--verify-integrity | switch | any | sums are always kept and compared: XXH3-128 at a load, SHA-256 by tools/checkpoint.py verify
--no-save-rng --no-load-rng | switch | any | no random state is needed: every draw is a function of the seed and the sample number
--no-save-optim | switch | any | ! the optimizer state is saved all the same; --no-load-optim leaves it out when loading
--replication-factor --replication-jump | int>=1 | any | there is no local checkpoint to replicate
--log-throughput --log-progress | switch | any | tokens/s, ms a step and FLOP/s are on every line
--log-timers-to-tensorboard --log-memory-to-tensorboard --log-world-size-to-tensorboard | switch | any | ! TensorBoard gets what a log line holds: loss, norm, lr, tokens/s, step time, memory
--log-validation-ppl-to-tensorboard --log-device-memory-used --log-batch-size-to-tensorboard | switch | any | ! TensorBoard gets what a log line holds: loss, norm, lr, tokens/s, step time, memory
--log-learning-rate-to-tensorboard --no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard --disable-log-loss-scale-to-tensorboard | switch | any | there is no loss scale; the learning rate is always logged
--log-num-zeros-in-grad | switch | any | ! zeros in gradients are not counted
--log-memory-interval | int>=1 | any | peak memory is on every line
--timing-log-level | int>=0 | 0,1,2 | ! step time and data wait are logged; --profile gives the rest
--timing-log-option | text | max,minmax,all | step time and data wait are logged; --profile gives the rest
--no-barrier-with-level-1-timing | switch | any | there is no barrier in timing
--tensorboard-log-interval | int>=1 | any | ! events are written every --log-interval
--tensorboard-queue-size | int>=1 | any | events are flushed at every --log-interval
--wandb-save-dir --wandb-entity | text | any | ! W&B takes its directory and entity from WANDB_DIR and WANDB_ENTITY
--logging-level | int>=0 | any | there are no log levels: every line is printed
--use-pytorch-profiler | switch | any | --profile always writes a torch trace
--pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack --record-shapes --nvtx-ranges | switch | any | ! the torch trace of --profile holds operator names and times
--no-one-logger --disable-msc | switch | any | nothing is reported anywhere unless asked for
--one-logger-project --one-logger-run-name --app-tag-run-name --app-tag-run-version | text | any | ! One Logger is not used: nothing is reported anywhere unless asked for
--error-injection-rate | int>=0 | 0 | faults are not injected
--error-injection-type | text | any | faults are not injected
--check-weight-hash-across-dp-replicas-interval | int>=1 | any | = --check-replicas
--check-for-spiky-loss --check-for-large-grads | switch | any | = --on-spike report
--inference-batch-times-seqlen-threshold --max-tokens-to-oom | int>=-1 | any | used by inference only, there as here
--enable-experimental | switch | any | nothing here depends on it
"""

REFUSED = (
    (
        "this program pretrains; it does not do reinforcement learning",
        """
--perform-rl-step --rl-prompts-per-eval --grpo-prompts-per-step --grpo-group-size
--rl-generation-lag --rl-max-inflight-requests --rl-submission-granularity
--rl-consumption-granularity --rl-durable-rollout-bank --rl-rollout-bank-dir
--rl-rollout-bank-max-bytes --grpo-iterations --grpo-clamp-eps-lower
--grpo-clamp-eps-upper --grpo-kl-beta --grpo-entropy-term-weight
--grpo-filter-groups-with-same-reward --langrl-env-config --rl-default-temperature
--rl-default-top-p --rl-default-top-k --rl-offload-optimizer-during-inference
--rl-kv-cache-management-mode --rl-persist-cuda-graphs --no-rl-persist-cuda-graphs
--rl-partial-rollouts --no-rl-partial-rollouts --rl-inference-logprobs-is-correction
--no-rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef
--rl-use-sequence-packing --no-rl-use-sequence-packing
--rl-sequence-packing-max-sequences-per-bin --rl-sequence-packing-algo
--rl-training-cuda-graphs --no-rl-training-cuda-graphs
--rl-inference-tensor-model-parallel-size --rl-inference-pipeline-model-parallel-size
--rl-inference-expert-model-parallel-size --rl-inference-expert-tensor-model-parallel-size
--rl-inference-model-unified-memory-level --rl-offload-inference-model-weights-when-idle
--no-rl-offload-inference-model-weights-when-idle --refit-method
--rl-verify-model-weights-swap --no-rl-verify-model-weights-swap --rl-skip-bos-token
--no-rl-skip-bos-token --rl-profile --rl-profile-dir --rl-inference-parsers
        """,
    ),
    (
        "this program pretrains; to sample from a checkpoint use tools/generate.py",
        """
--moe-pad-experts-for-cuda-graph-inference --inference-cuda-graph-scope --flash-decode
--symmetric-ar-type --nccl-all-reduce-for-prefill --inference-fuse-tp-communication
--inference-disable-triton-nvls-kernels --inference-grouped-gemm-backend
--inference-moe-disable-fused-quant-kernels --inference-moe-token-dispatcher-type
--mlp-chunks-for-prefill --onnx-safe --inference-rng-tracker --output-bert-embeddings
--bert-embedder-type --use-legacy-static-engine --inference-max-requests
--inference-max-seq-length --inference-dynamic-batching
--inference-dynamic-batching-buffer-size-gb
--inference-dynamic-batching-paused-buffer-size-gb
--inference-dynamic-batching-mamba-memory-ratio --inference-dynamic-batching-block-size
--inference-dynamic-batching-max-requests --inference-dynamic-batching-max-tokens
--inference-dynamic-batching-num-cuda-graphs
--inference-dynamic-batching-track-paused-request-events
--inference-dynamic-batching-track-generated-token-events --decode-only-cuda-graphs
--inference-cuda-graph-all-prefills --inference-cuda-graph-max-tokens
--inference-dynamic-batching-unified-memory-level --enable-chunked-prefill
--num-speculative-tokens --inference-dynamic-batching-prefix-caching
--no-inference-dynamic-batching-prefix-caching
--inference-dynamic-batching-prefix-caching-eviction-policy
--inference-dynamic-batching-prefix-caching-coordinator-policy
--inference-dynamic-batching-prefix-caching-routing-alpha
--inference-dynamic-batching-prefix-caching-mamba-gb
--inference-dynamic-batching-cuda-graph-mixed-prefill-count
--inference-dynamic-batching-cuda-graph-sizing-distribution
--inference-dynamic-batching-sampling-backend --use-same-sampling-seed-across-dp-ranks
--inference-dynamic-batching-async-sched-mode --inference-dynamic-batching-logprobs-mode
--inference-logging-step-interval --inference-text-gen-server-logging
--no-inference-text-gen-server-logging --inference-wandb-logging
--no-inference-wandb-logging --inference-coordinator-port
--mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype
--inference-use-synchronous-zmq-collectives --no-inference-use-synchronous-zmq-collectives
--inference-disable-ep-consensus --no-inference-disable-ep-consensus --inference-shards
        """,
    ),
    (
        "there is no batch-invariant mode; with --deterministic-mode a run repeats its results bit by bit",
        """
--batch-invariant-mode
        """,
    ),
    (
        "recompute activations instead of cutting the sequence in chunks",
        """
--mlp-chunks-for-training
        """,
    ),
    (
        "fp16 needs loss scaling, which is not here; use --bf16",
        """
--fp16 --fp16-lm-cross-entropy
        """,
    ),
    (
        "write --recompute-granularity full with --recompute-method",
        """
--checkpoint-activations --checkpoint-num-layers --activations-checkpoint-method
--activations-checkpoint-num-layers
        """,
    ),
    (
        "use --sequence-parallel: a layer input saved under it is already a shard",
        """
--distribute-saved-activations --distribute-checkpointed-activations
        """,
    ),
    (
        'use --step-batch-size-schedule "0:SAMPLES TOKENS:SAMPLES ..."; Megatron-LM 0.20 ignores this flag',
        """
--rampup-batch-size
        """,
    ),
    (
        "write --micro-batch-size and --global-batch-size",
        """
--batch-size
        """,
    ),
    (
        "the global batch size is never changed; give a multiple of micro-batch size x data-parallel size",
        """
--decrease-batch-size-if-needed
        """,
    ),
    (
        "write --lr-warmup-iters",
        """
--warmup
        """,
    ),
    (
        "write --tensor-model-parallel-size",
        """
--model-parallel-size
        """,
    ),
    (
        "write --num-layers and --seq-length; a Llama is a decoder",
        """
--decoder-num-layers --encoder-seq-length --decoder-seq-length
        """,
    ),
    (
        "--pipeline-schedule zb-h1, zb-v and v-half put off weight gradients; leave it out",
        """
--delay-wgrad-compute
        """,
    ),
    (
        "use --overlap-param-gather: gathers start when the whole update is done",
        """
--overlap-param-gather-with-optimizer-step
        """,
    ),
    (
        "predicting several tokens ahead is not a Llama's training",
        """
--mtp-num-layers --mtp-loss-scaling-factor --mtp-use-repeated-layer --mtp-detach-heads
--mtp-hsm --mtp-hybrid-override-pattern --mtp-standalone
        """,
    ),
    (
        "every rank of --context-parallel-size takes the same part of each sample, and samples are packed "
        "to --seq-length",
        """
--max-seqlen-per-dp-cp-rank --hybrid-context-parallel
        """,
    ),
    (
        "a Llama has no experts; leave the mixture-of-experts flags out",
        """
--expert-tensor-parallel-num-weight-shards --overlap-moe-expert-parallel-comm
--overlap-dispatch-backward-with-experts-wgrad --ep-overlap-early-attn-memory-release
--high-priority-a2a-comm-stream --moe-shared-expert-intermediate-size
--moe-shared-expert-gate --moe-shared-expert-overlap --use-grouped-gemm-for-shared-expert
--moe-shared-expert-glu-interleave-size --moe-ffn-hidden-size --moe-router-topk
--moe-enable-routing-replay --moe-router-padding-for-quantization
--moe-router-padding-for-fp8 --moe-router-num-groups --moe-router-group-topk
--moe-router-pre-softmax --moe-router-topk-scaling-factor --moe-router-score-function
--moe-router-dtype --moe-router-enable-expert-bias --moe-router-bias-update-rate
--moe-router-quantile-balancing-ema --moe-router-force-load-balancing
--moe-router-force-biased --use-grouped-gemm-for-dense-mlp --moe-grouped-gemm
--moe-use-grouped-tensor --moe-single-grouped-weight --moe-single-grouped-bias
--moe-z-loss-coeff --moe-input-jitter-eps --moe-token-dispatcher-type --moe-enable-deepep
--moe-flex-dispatcher-backend --moe-permute-fusion-into-hybridep
--moe-hybridep-pad-uneven-dispatch-inputs --moe-per-layer-logging
--moe-expert-capacity-factor --moe-pad-expert-input-to-capacity --moe-token-drop-policy
--moe-layer-recompute --moe-permute-fusion --moe-router-fusion --moe-apply-probs-on-input
--moe-latent-size --moe-flex-dispatcher-num-sms --moe-deepep-num-sms
--moe-hybridep-num-sms --moe-hybridep-num-blocks-permute
--moe-hybridep-num-blocks-unpermute --moe-hybridep-num-sms-preprocessing
--moe-ncclep-zero-copy --moe-dispatch-fwd-dtype --moe-combine-bwd-dtype
--moe-mlp-glu-interleave-size --moe-expert-rank-capacity-factor --moe-paged-stash
--moe-paged-stash-page-size --moe-paged-stash-buffer-size-factor-cuda
--moe-paged-stash-buffer-size-factor-cpu --save-tokens-per-expert-interval
--gtp-expert-remat-nccl-ub --moe-layer-freq --moe-use-upcycling
--moe-router-load-balancing-type --moe-aux-loss-coeff --moe-upcycling-granularity
--moe-routing-trace-path --moe-routing-trace-max-training-iters
--moe-routing-trace-capture-logits --moe-routing-trace-capture-hidden-states
--moe-routing-trace-dump-weights
        """,
    ),
    (
        "there is no fp4 in this version; use --fp8-format and --fp8-recipe, or --bf16",
        """
--fp4-format --fp4-recipe --fp4-quantizer-factory --fp4-param-gather
        """,
    ),
    (
        "write --fp8-format e4m3 or hybrid, with --fp8-recipe",
        """
--fp8-e4m3 --fp8-hybrid
        """,
    ),
    (
        "it belongs to --fp8-recipe delayed, which is not here: every recipe here scales by the tensor at hand; leave it out",
        """
--fp8-margin --fp8-interval --fp8-amax-history-len --fp8-amax-compute-algo
        """,
    ),
    (
        "weights gathered in float8 have memory of their own, and w^T is made of w at each use; leave it out",
        """
--reuse-grad-buf-for-mxfp8-param-ag --keep-fp8-transpose-cache
        """,
    ),
    (
        "the output layer is never in float8; leave it out",
        """
--fp8-output-proj
        """,
    ),
    (
        "write --fp8-recipe, and --first-last-layers-bf16 for layers that are not in float8",
        """
--fp8-quantizer-factory --te-precision-config-file
        """,
    ),
    (
        "weights are cut by --tensor-model-parallel-size only",
        """
--tensor-parallel-num-weight-shards --gtp-remat-opt-in-modules
--gtp-remat-reduce-scatter-with-fp32-accumulation --gtp-remat-nccl-ub
        """,
    ),
    (
        "sharding is --zero-stage: no_shard is 0, optim 1, optim_grads 2, optim_grads_params 3",
        """
--no-use-layer-wise-param-layout --create-all-gather-group
        """,
    ),
    (
        "--num-distributed-optimizer-instances shards inside each group of ranks and replicates over the groups",
        """
--enable-full-sharding-in-hsdp
        """,
    ),
    (
        "--zero-stage 3 gathers a block, with --overlap-param-gather also the next one, and frees it after its use",
        """
--torch-fsdp2-no-reshard-after-forward --megatron-fsdp-enable-fine-grained-param-gather
        """,
    ),
    (
        "checkpoints are read by name and shape, all of them or not at all",
        """
--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load
        """,
    ),
    (
        "buckets are counted in elements by --ddp-bucket-size",
        """
--ddp-num-buckets
        """,
    ),
    (
        "reductions are sums, scaled once; the numbers would differ",
        """
--ddp-param-name-patterns-for-fp32-local-accumulation
        """,
    ),
    (
        "it makes another architecture than a Llama; fork model/llama.py for that",
        """
--fp32-residual-connection --apply-residual-connection-post-layernorm --add-qkv-bias
--activation-func-clamp-value --rotary-interleaved --qk-l2-norm
--attention-output-gate --apply-query-key-layer-scaling --use-fused-weighted-squared-relu
--enable-mhc-connections --mhc-num-residual-streams --mhc-sinkhorn-iterations
--mhc-init-gating-factor --mhc-recompute-layer-num --mrope-section --window-size
--window-attn-skip-freq --yarn-original-max-position-embeddings --yarn-beta-fast
--yarn-beta-slow --yarn-correction-range-round-to-int
--no-yarn-correction-range-round-to-int --relative-attention-num-buckets
--relative-attention-max-distance --no-rope-freq --openai-gelu --squared-relu
--quick-geglu
        """,
    ),
    (
        "it belongs to another attention than a Llama's",
        """
--qk-clip --qk-clip-alpha --qk-clip-threshold --multi-latent-attention
--experimental-attention-variant --dsa-indexer-n-heads --dsa-indexer-head-dim
--dsa-indexer-topk --dsa-indexer-topk-freq --dsa-indexer-skip-topk-offset
--dsa-indexer-loss-coeff --dsa-indexer-use-sparse-loss --dsa-kernel-backend
--dsa-indexer-rope-interleaved --no-dsa-indexer-rotate-activation
--disable-dsa-indexer-rotate-activation --no-dsa-indexer-scoring-relu
--disable-dsa-indexer-scoring-relu --dsa-indexer-k-norm-epsilon --dsa-indexer-k-norm-fp32
--linear-conv-kernel-dim --linear-key-head-dim --linear-value-head-dim
--linear-num-key-heads --linear-num-value-heads --use-kitchen-attention
--kitchen-attention-backend --q-lora-rank --kv-lora-rank --qk-head-dim
--qk-pos-emb-head-dim --v-head-dim --rotary-scaling-factor --mscale --mscale-all-dim
--cache-mla-latents --mla-down-proj-fusion --linear-attention-freq
        """,
    ),
    (
        "state-space and hybrid models are not Llamas",
        """
--is-hybrid-model --mamba-state-dim --mamba-head-dim --mamba-num-groups --mamba-num-heads
--gdp-num-householder --disable-mamba-mem-eff-path --gdp-cutedsl-kernel
--gdp-num-chunk-states-to-recompute --mamba-training-ssm-states-dtype
--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json
--hybrid-layer-pattern --hybrid-override-pattern
        """,
    ),
    (
        "weights are drawn from one normal distribution of --init-method-std; no other",
        """
--embedding-init-method-std --use-mup --mup-width-mult
--mup-base-hidden-size --mup-embedding-mult --mup-output-mult --mup-base-head-dim
--mup-attn-scale-power --data-parallel-random-init --init-method-xavier-uniform
        """,
    ),
    (
        "--cuda-graph captures a whole micro-batch: no layer by itself, and no optimizer",
        """
--external-cuda-graph --delay-offload-until-cuda-graph
--optimizer-cuda-graph --cuda-graph-scope --cuda-graph-modules
        """,
    ),
    (
        "--cpu-offload-activations moves a layer's tensors while the next one computes, in pinned memory that is used again; --cpu-offloading-num-layers and --offload-modules say how much",
        """
--cpu-offloading-retain-pinned-cpu-buffers --delta-offload-bytes-across-pp-ranks
--activation-offload-fraction --fine-grained-offloading-max-inflight-offloads
        """,
    ),
    (
        "the optimizer is AdamW; leave the flags of other optimizers out",
        """
--sgd-momentum --muon-momentum --muon-no-split-qkv --muon-nesterov --muon-scale-mode
--muon-fp32-matmul-prec --muon-coefficient-type --muon-num-ns-steps --muon-tp-mode
--muon-use-syrk --muon-extra-scale-factor --muon-scalar-optimizer --lion-beta1
--lion-beta2 --dump-param-to-param-group-map
        """,
    ),
    (
        "weight decay falls on matrices and not on norms",
        """
--apply-wd-to-qk-layernorm --no-weight-decay-cond-type
        """,
    ),
    (
        "use --profile, which writes a torch trace",
        """
--pytorch-profiler-collect-chakra
        """,
    ),
    (
        "loader workers leave signals to the trainer; leave it out",
        """
--exit-signal-handler-for-dataloader
        """,
    ),
    (
        "it is not in this version: no test of the devices runs, and faults are told in the log",
        """
--gpu-sniff-test-interval --result-rejected-tracker-filename --phase-transition-iterations
        """,
    ),
    (
        "all layers train",
        """
--freeze-all-layers
        """,
    ),
    (
        "the layout always comes from the flags: any layout loads any checkpoint",
        """
--use-mp-args-from-checkpoint-args
        """,
    ),
    (
        "use --load with --finetune",
        """
--load-main-params-from-ckpt
        """,
    ),
    (
        "there is one kind of checkpoint: a directory with the whole state, written every --save-interval",
        """
--save-params-interval --non-persistent-save-interval --non-persistent-ckpt-type
--non-persistent-global-ckpt-dir --non-persistent-local-ckpt-dir
--non-persistent-local-ckpt-algo --async-ckpt-cpu-priority --async-ckpt-io-priority
--async-ckpt-use-cpu-shm --replication --override-ckpt-iteration
        """,
    ),
    (
        "it is not in this version; use --log-params-norm or --profile to look inside a step",
        """
--save-activations-interval --save-wgrads-interval --save-dgrads-interval
--log-max-attention-logit --log-energy
        """,
    ),
    (
        "checkpoints are safetensors and JSON; convert with tools/checkpoint.py",
        """
--ckpt-convert-format --ckpt-convert-save --ckpt-convert-update-legacy-dist-opt-format
--ckpt-fully-parallel-load-exchange-algo --ckpt-fully-parallel-load-per-rank-objects
--ckpt-fully-parallel-save-process-group --ckpt-fully-parallel-load-process-group
--ckpt-pg-tensors-cache-path --ckpt-pg-tensors-cache-create
--no-ckpt-load-validate-sharding-integrity --disable-ckpt-load-validate-sharding-integrity
--dist-ckpt-save-pre-mcore-014
--distrib-optim-fully-reshardable-mem-efficient --dist-ckpt-workers
--ckpt-drop-redundant-extra-state
        """,
    ),
    (
        "ranks wait at most --distributed-timeout-minutes; NCCL's own variables set the rest",
        """
--lazy-mpu-init --nccl-communicator-config-path --sharp-enabled-group
--flight-recorder-dump-path --flight-recorder-trace-buffer-size
--no-flight-recorder-dump-on-timeout --disable-flight-recorder-dump-on-timeout
--flight-recorder-include-stack-trace --no-flight-recorder-include-only-active
--disable-flight-recorder-include-only-active --no-flight-recorder-extra-dump-on-exec
--disable-flight-recorder-extra-dump-on-exec
        """,
    ),
    (
        "use --dry-run, which needs no process group",
        """
--fake-process-group
        """,
    ),
    (
        "evaluation takes --eval-iters batches of the validation split every --eval-interval",
        """
--start-eval-at-iter --skip-train --test-mode --full-validation --multiple-validation-sets
--validation-set-names
        """,
    ),
    (
        "give prefixes to --data-path or to the --train-, --valid- and --test-data-path flags",
        """
--per-split-data-args-path --per-dataset-sequences-path
--object-storage-cache-path --enable-msc
        """,
    ),
    (
        "every sample is plain next-token text",
        """
--sample-rate --mask-prob --short-seq-prob --allow-ambiguous-pad-tokens --fim-data
--fim-rate --fim-spm-rate --fim-split-sample --fim-fragment-rate --fim-no-prefix
--fim-prefix-token --fim-middle-token --fim-suffix-token --fim-pad-token --fim-eod-token
--chat-template --sft --sft-tokenizer-prompt-format
        """,
    ),
    (
        "give --vocab-size and --make-vocab-size-divisible-by",
        """
--padded-vocab-size --no-pad-vocab-size --disable-pad-vocab-size
        """,
    ),
    (
        "use SentencePieceTokenizer, TikTokenizer or HuggingFaceTokenizer with one file in --tokenizer-model",
        """
--tokenizer-metadata --tokenizer-special-tokens
--tiktoken-num-special-tokens --no-tokenizer-sentencepiece-ignore-extra-whitespaces
--disable-tokenizer-sentencepiece-ignore-extra-whitespaces --use-gigatoken
        """,
    ),
    (
        "a tokenizer is a data file; code that comes with one is never run",
        """
--trust-remote-code
        """,
    ),
    (
        "the last token of a NullTokenizer is its end of document",
        """
--null-tokenizer-eod-id
        """,
    ),
    (
        "settings are flags; there is no configuration file",
        """
--config-logger-dir --yaml-cfg
        """,
    ),
    (
        "nothing is reported or served unless asked for; use --log-json, TensorBoard or W&B",
        """
--otel-enabled --otel-service-name --otel-span-groups --straggler-ctrlr-port
--run-workload-inspector-server --one-logger-async
        """,
    ),
    (
        "restarts belong to the launcher: torchrun --max-restarts or SLURM's requeue",
        """
--adlr-autoresume --adlr-autoresume-interval --inprocess-restart
--inprocess-max-iterations --inprocess-monitor-thread-interval
--inprocess-monitor-process-interval --inprocess-progress-watchdog-interval
--inprocess-heartbeat-interval --inprocess-soft-timeout --inprocess-hard-timeout
--inprocess-heartbeat-timeout --inprocess-barrier-timeout --inprocess-completion-timeout
--inprocess-last-call-wait --inprocess-termination-grace-time --inprocess-granularity
--inprocess-active-world-size --inprocess-empty-cuda-cache --enable-ft-package
--calc-ft-timeouts --ft-num-warmup-iters
        """,
    ),
    (
        "faults are injected by the tests, not by a flag",
        """
--fault-injector-ranks --fault-injector-num-ranks --fault-injector-fault-types
--fault-injector-fault-probabilities --fault-injector-fault-delay
--fault-injector-delay-start-iteration --fault-injector-mtti-seconds
--fault-injector-offset-seconds --fault-injector-seed
        """,
    ),
    (
        "this program pretrains; it does not distil",
        """
--logits-save-top-k --logits-save-top-p --logits-save-top-p-min-k --logits-save-dir
--logits-save-dtype --logits-load-dir --logits-load-decode-threads
--logits-load-prefetch-factor --logits-load-msc-prefetch-depth --logits-load-kd-loss-alpha
--logits-load-ignore-errors
        """,
    ),
    (
        "it belongs to another model than a Llama (BERT, retrieval, vision)",
        """
--bert-no-binary-head --ict-head-size --biencoder-projection-dim
--biencoder-shared-query-context-model --ict-load --bert-load --titles-data-path
--query-in-block-prob --use-one-sent-docs --evidence-data-path
--retriever-report-topk-accuracies --retriever-score-scaling --block-data-path
--embedding-path --indexer-batch-size --indexer-log-interval --num-classes --img-h --img-w
--num-channels --patch-dim --classes-fraction --data-per-class-fraction --no-data-sharding
--head-lr-mult --vision-pretraining --vision-pretraining-type --vision-backbone-type
--swin-backbone-type --mask-type --mask-factor --iter-per-epoch --dino-local-img-size
--dino-local-crops-number --dino-head-hidden-size --dino-bottleneck-size
--dino-freeze-last-layer --dino-norm-last-layer --dino-warmup-teacher-temp
--dino-teacher-temp --dino-warmup-teacher-temp-epochs
        """,
    ),
)

DIFFERENCES = (
    (
        "--calculate-per-token-loss",
        "off: the mean of the micro-batches' means",
        "always on: the mean over the tokens of the global batch that count",
    ),
    (
        "--make-vocab-size-divisible-by",
        "padded entries take part in the softmax, so tp can change the loss",
        "padded entries are masked out; the loss does not depend on tp",
    ),
    (
        "--seed",
        "the initial weights depend on tp and pp",
        "they do not: each weight depends on (seed, its name), data order on seed and data alone",
    ),
    (
        "without --swiglu, --normalization, --position-embedding-type, --disable-bias-linear",
        "a GPT: GELU, LayerNorm, learned positions, biases",
        "a Llama, as with them",
    ),
    ("without --hidden-dropout, --attention-dropout", "0.1", "0, and nothing else"),
    ("--apply-layernorm-1p", "norms hold gamma - 1", "norms hold gamma; the same function"),
    ("--max-position-embeddings", "required", "--seq-length where left out"),
    ("--micro-batch-size", "required", "1 where left out"),
    ("--log-interval", "100 steps", "10 steps"),
    ("--distributed-backend", "nccl", "nccl on CUDA, gloo on a CPU"),
    (
        "--tp-comm-overlap",
        "a switch; Transformer Engine's user buffers, methods from --tp-comm-overlap-cfg",
        "auto (bare), ring or symmetric; auto takes what is measured fastest for each projection",
    ),
    (
        "--use-checkpoint-args",
        "takes many arguments, the layout's among them by another flag",
        "takes the model's sizes and the tokenizer, also from a Hugging Face config.json",
    ),
    (
        "--pipeline-model-parallel-size",
        "cuts evenly: --num-layers must divide over the stages",
        "balances the ranks by the cost of layers and head, unless a flag cuts otherwise",
    ),
    (
        "--microbatch-group-size-per-virtual-pipeline-stage",
        "ignored without virtual stages",
        "refused without them",
    ),
    (
        "--grad-reduce-in-bf16",
        "micro-batches and ranks add up in bf16",
        "gradients travel in bf16 and add up in fp32, the ranks' in rank order",
    ),
    (
        "--main-grads-dtype",
        "bf16 needs --use-precision-aware-optimizer, and ranks add up in bf16",
        "bf16 needs --zero-stage 1 or more; sums over the ranks are fp32",
    ),
    (
        "--ddp-bucket-size",
        "max(40e6, 1e6 x data-parallel size) where left out",
        "an eighth of the gradients, 2e6 to 40e6; at --zero-stage 3 a block",
    ),
    (
        "--offload-modules",
        "names of its own: attn_norm, qkv_linear, core_attn, ...",
        "the modules' names in a layer of the model's file: attention_norm, attention.qkv, attention, ...",
    ),
    (
        "--enable-cuda-graph",
        "captures each layer",
        "--cuda-graph: a whole micro-batch",
    ),
    (
        "--cpu-offloading-num-layers",
        "layers of the model; no pipeline, no recomputation",
        "layers of each stage, but never its last; 0 is off",
    ),
    (
        "--recompute-granularity",
        "full needs --recompute-method",
        "full alone is uniform, one layer a chunk",
    ),
    (
        "--train-iters with --step-batch-size-schedule",
        "the learning rate counts micro-batch x data-parallel samples a step",
        "it counts the samples those steps consume",
    ),
    (
        "--lr-decay-style, other --lr-* flags, --weight-decay",
        "a resume compares them with the checkpoint's, and stops where they differ",
        "they may change from run to run; --use-checkpoint-opt-param-scheduler takes the checkpoint's",
    ),
    ("--save-interval", "needed with --save", "left out: one checkpoint at the end"),
    (
        "--use-megatron-fsdp",
        "turns --use-distributed-optimizer on; main gradients are bf16 where no flag says otherwise",
        "--data-parallel-sharding-strategy alone says what is sharded; main gradients are fp32",
    ),
    (
        "--ckpt-format",
        "torch_dist",
        "safetensors and JSON; through Hugging Face to and from Megatron",
    ),
    (
        "--exit-signal-handler",
        "off: SIGTERM kills",
        "always on: SIGTERM, SIGUSR1 or Ctrl-C saves after the current step",
    ),
    (
        "--no-check-for-nan-in-loss-and-grad",
        "NaN raises before the update",
        "the update is skipped on every rank, and the run stops one step later; given, as with --on-nan skip, it goes on",
    ),
    (
        "--check-for-spiky-loss",
        "a loss 10 times the largest of the first 100 samples is told, after a rerun",
        "--on-spike report: loss and gradient norm by their z-scores over the last 128 steps",
    ),
    (
        "--check-for-large-grads",
        "a gradient 10 times the largest of the first 100 is told, after a rerun",
        "--on-spike report: loss and gradient norm by their z-scores over the last 128 steps",
    ),
    (
        "--rerun-mode",
        "validate_results: a bad step is run again before its update, then from a checkpoint elsewhere",
        "validate_results: a step whose norm is not finite is run again once to name the first such value; report_stats is refused",
    ),
    (
        "--check-weight-hash-across-dp-replicas-interval",
        "weights over data-parallel ranks",
        "--check-replicas: weights, masters and moments over every axis with replicas, and before each save",
    ),
    ("--profile", "nsys, or torch with --use-pytorch-profiler", "always a torch trace"),
    ("--num-query-groups", "ignored without --group-query-attention", "refused without it"),
    ("--rampup-batch-size", "ignored", "refused"),
)
