# SPDX-License-Identifier: Apache-2.0
"""The flags of trees that are derived from Megatron-LM.

Facts about their argument parsers, read at the commits that are next to them.
"""


def _tree(switches: str, others: str) -> dict[str, bool]:
    """Return {flag: whether it has values} of a tree, in its own order of names."""
    return dict.fromkeys(switches.split(), False) | dict.fromkeys(others.split(), True)


# {tree: {flag: whether it has values}}: what neither Megatron-LM nor this program has, and
# --ignore-flags TREE leaves out
TREES = {
    "argonne": _tree(  # argonne-lcf/Megatron-DeepSpeed ffa3456d68b6
        """--adjust-word-embedding-init --blend-sample-in-corpus --checkpoint-in-cpu
            --contigious-checkpointing --cpu-optimizer --cpu_torch_adam --create-moe-param-group
            --data-efficiency-curriculum-learning --deepscale --deepspeed
            --deepspeed-activation-checkpointing --deepspeed_mpi --disable-mem-efficient-ln
            --disable-moe-token-dropping --disable-moe-top2-2nd-expert-sampling --ds-inference
            --ds_fused_adam --enable-expert-tensor-parallelism --enable-zbh1-exact-semantics
            --force-ds-sequence-parallel --inference --kd --log-optimizer-states-to-tensorboard
            --lr-finder --lr_constant_plus_cooldown --memory-centric-tiled-linear --mos
            --no-load-lr-state --no-pipeline-parallel --partition-activations --profile-backward
            --random-ltd --repeated-dataloader --reset-iteration --return-data-index
            --scattered-embeddings --schedulefree-for-each --shuffle-sample-in-corpus
            --split-transformers --synchronize-each-layer --universal-checkpoint
            --use-flash-attn-builder --use-flash-attn-triton --use-flash-attn-v1 --use-mics
            --use-pin-memory --use-tutel --zero-contigious-gradients --zero-reduce-scatter""",
        """--aml-data-download-path --constant-lr --data-file-list --deepscale_config
            --deepspeed_config --dshampooadamw-eps --dshampooadamw-max-preconditioner-dim
            --dshampooadamw-precondition-freq --dshampooadamw-use-decoupled-weight-decay
            --expert-interval --hidden-size-teacher --kd-alpha-ce --kd-beta-ce --kd-temp
            --kill-switch-file --load-tag --load-teacher --lr-constant-fraction
            --lr-constant-tokens --lr-cooldown-fraction --lr-cooldown-tokens --lr-decay-tokens
            --lr-warmup-tokens --lr_constant_plus_cooldown_frac --mlp-type
            --moe-eval-capacity-factor --moe-expert-parallel-size --moe-loss-coeff
            --moe-min-capacity --moe-train-capacity-factor --multiprocessing-context
            --muon-ns-steps --muonadamw-beta1 --muonadamw-beta2 --muonadamw-eps --muonclip-alpha
            --muonclip-t --num-attention-heads-teacher --num-experts-switch --num-experts-teacher
            --num-layers-teacher --profile_steps --remote-device --sophiag-beta1 --sophiag-beta2
            --sophiag-rho --tile-factor --timescale --topk --trace-dir
            --train-data-exact-num-epochs --train-desc-path --train-doc-idx-path --train-idx-path
            --train-iters-to-skip --train-range-to-skip --train-sample-idx-path
            --train-shuffle-idx-path --train-tokens --use-dataset-only --word-embedding-init-std
            --zero-allgather-bucket-size --zero-reduce-bucket-size""",
    ),
    "bigscience": _tree(  # bigscience-workshop/Megatron-DeepSpeed 8387ae17c470
        """--abort-on-unmet-fused-kernel-constraints --checkpoint-in-cpu
            --contigious-checkpointing --cpu-optimizer --cpu_torch_adam --deepscale --deepspeed
            --deepspeed-activation-checkpointing --deepspeed_mpi --embed-layernorm --inference
            --loss-on-targets-only --memory-centric-tiled-linear --partition-activations
            --profile-backward --reweight-loss-based-on-position-frequency
            --scattered-embeddings --split-transformers --sync-tp-duplicated-parameters
            --synchronize-each-layer --universal-checkpoint --use-bnb-optimizer --use-pin-memory
            --zero-contigious-gradients --zero-reduce-scatter""",
        """--codecarbon-dir --deepscale_config --deepspeed_config --eval-only --kill-switch-path
            --log-level --log-level-replica --log-path --lr-decay-tokens --mean-noise-span-length
            --noise-density --pad-vocab-size-to --pp-partition-method --remote-device
            --skip-train-iteration-range --test-weighted-split-paths
            --test-weighted-split-paths-path --tile-factor --train-tokens
            --train-weighted-split-paths --train-weighted-split-paths-path --valid-num-workers
            --valid-weighted-split-paths --valid-weighted-split-paths-path
            --zero-allgather-bucket-size --zero-reduce-bucket-size""",
    ),
    "deepspark": _tree(
        # Deep-Spark/DeepSparkHub 1338302894e9 (toolbox/Megatron-DeepSpeed)
        """--RLHF --checkpoint-in-cpu --contigious-checkpointing --cpu-optimizer --cpu_torch_adam
            --create-moe-param-group --data-efficiency-curriculum-learning --deepscale --deepspeed
            --deepspeed-activation-checkpointing --deepspeed_mpi --disable-mem-efficient-ln
            --disable-moe-token-dropping --disable-moe-top2-2nd-expert-sampling --ds-inference
            --ds_fused_adam --enable-expert-tensor-parallelism --enable-zbh1-exact-semantics
            --force-ds-sequence-parallel --inference --log-optimizer-states-to-tensorboard
            --memory-centric-tiled-linear --no-load-lr-state --no-pipeline-parallel
            --partition-activations --pp-delay --profile-backward --random-ltd
            --repeated-dataloader --return-data-index --scattered-embeddings --split-transformers
            --synchronize-each-layer --universal-checkpoint --use-flash-attn-builder
            --use-flash-attn-triton --use-flash-attn-v1 --use-pin-memory --use-tutel
            --zero-contigious-gradients --zero-reduce-scatter""",
        """--actor-learning-rate --actor-weight-decay --actor_model_name_or_path
            --aml-data-download-path --critic-learning-rate --critic-weight-decay
            --critic_model_name_or_path --custom-partition --custom-recompute-layers-per-stage
            --deepscale_config --deepspeed_config --ds-num-experts --expert-interval
            --kill-switch-file --load-tag --lr-decay-tokens --lr-warmup-tokens
            --max-prompt-seq-len --mlp-type --moe-eval-capacity-factor --moe-expert-parallel-size
            --moe-loss-coeff --moe-min-capacity --moe-train-capacity-factor --num-experts-switch
            --partition-method --pp-split-size --ppo-epoches --remote-device --rlhf-train-mbs
            --special-tokens-file --tile-factor --topk --train-data-exact-num-epochs
            --train-desc-path --train-doc-idx-path --train-idx-path --train-sample-idx-path
            --train-shuffle-idx-path --train-tokens --use-dataset-only
            --zero-allgather-bucket-size --zero-reduce-bucket-size""",
    ),
    "epfllm": _tree(  # epfLLM/Megatron-LLM 806a83302cbf
        """--barrier_with_L1_time --eval_only --lima_dropout --no_new_tokens --parallel_attn
            --parallel_layernorm --standalone_embedding_stage --use_bias --use_post_ln
            --variable_seq_lengths --wandb_logger""",
        """--data_type --load_iters --log_loss_scale_to_tensorboard --metrics --model_name
            --model_type --pipeline_model_parallel_split_rank --retriever_seq_length
            --scalar_loss_mask --skip_iters --sliding_window_size --vocab_extra_ids_list
            --wandb_api_key --wandb_id --wandb_resume""",
    ),
    "flagscale": _tree(
        # FlagOpen/FlagScale da4935ec6019
        """--apply-sft-dataset-separated-loss-mask-if-existed --auto-skip-spiky-loss --auto-tune
            --enable-hetero --hetero-use-cpu-communication --moe-fb-overlap --no-shared-fs
            --qk-layernorm-hidden-dim --save-when-num-microbatches-change --use-dualpipev
            --use-partial-reduce-for-shared-embedding --wandb-log-model""",
        """--expert-tensor-parallel-size-per-process-mesh --extra-eval-interval
            --extra-valid-data-path --finetune-dataset-type
            --hetero-current-device-type --hetero-device-types
            --hetero-pipeline-layer-split --hetero-process-meshes
            --hidden-dim-multiplier --lora-alpha --lora-dim --lora-dropout
            --lora-dropout-position --lora-in-init-method --lora-out-init-method
            --lora-target-modules --lr-decay-stablelm2-alpha --lr-decay-stablelm2-beta
            --lr-decay-stablelm2-cosine-max-lr
            --lr-decay-stablelm2-cosine-period-samples
            --lr-decay-stablelm2-cosine-samples --lr-decay-stablelm2-decay-samples
            --lr-decay-stablelm2-rsqrt-samples --mtp-loss-coeff --multiple-of
            --norm-init-weight --num-mtp-predictor --peft-type --rampup-save-interval
            --recompute-granularity-per-stage-micro-batch
            --recompute-method-per-stage-micro-batch
            --recompute-num-layers-per-stage-micro-batch --skip-iters-range
            --skip-samples-range --special-tokens-file --spiky-loss-threshold
            --wandb-api-key --wandb-log-model-interval --wandb-mode""",
    ),
    "habana": _tree(  # HabanaAI/Megatron-LM 13c28deafab0, HabanaAI/Megatron-DeepSpeed 891d6db95279
        """--apply-norm-post-sub-block --attention-per-layer-logging --check-tp-norm
            --checkpoint-in-cpu --contigious-checkpointing --cpu-optimizer --cpu_torch_adam
            --create-moe-param-group --data-efficiency-curriculum-learning --deepscale --deepspeed
            --deepspeed-activation-checkpointing --deepspeed_mpi --disable-doc-shuffling
            --disable-mem-efficient-ln --disable-moe-token-dropping
            --disable-moe-top2-2nd-expert-sampling --do-norm-bias-weight-decay --ds-inference
            --ds_fused_adam --embed-layernorm --enable-expert-tensor-parallelism --eval-add-bos
            --eval-hf-rope --export-force-local-attention --export-kv-cache-quant
            --export-legacy-megatron --export-moe-apply-probs-on-input --export-qk-l2-norm
            --export-te-mcore-model --fix-position-emb-redundant-alloc
            --force-ds-sequence-parallel --fp8-amax-reduce --fp8-e5m2 --fp8-smooth-swiglu
            --inference --kd --log-bwd-grads --log-fwd-activations --log-model-inputs
            --log-optimizer-states-to-tensorboard --mask-tensor-adding
            --memory-centric-tiled-linear --moe-dynamic-hpu --moe-fused-weights
            --moe-permuted-weights --moe-router-fp32 --moe-token-distribution-logging --mos
            --no-load-lr-state --no-load-strict --no-pipeline-parallel --no-scaled-init
            --no-seq-len-plus-one-tokens --partition-activations --profile-backward
            --pytorch-activation-checkpointing --random-ltd --repeated-dataloader
            --reset-iteration --return-data-index --scattered-embeddings
            --shuffle-each-epoch-separately --split-transformers --synchronize-each-layer
            --universal-checkpoint --use-alibi-position-embeddings --use-flash-attn-builder
            --use-flash-attn-triton --use-flash-attn-v1 --use-pin-memory --use-tutel
            --verify-checkpoint --zero-contigious-gradients --zero-reduce-scatter""",
        """--allow-unspec-int-on-nn-module --aml-data-download-path --attention-z-loss-coeff
            --batch-sched-samples --cache-fp8-weight --cache-fp8-weight-fwd --cache-size-limit
            --check-tp-norm-type --compile-from-sec-mini-batch --compiled-autograd-fallback-mode
            --deepscale_config --deepspeed_config --end-check-tp-norm-iter --eval-loss-exit-value
            --expert-interval --export-draft-vocab-size --export-eagle-algorithm
            --export-freeze-mtp --export-kd-cfg --export-kd-teacher-ckpt-format
            --export-kd-teacher-load --export-model-type --export-num-eagle-layers
            --export-num-medusa-heads --export-num-mtp --export-quant-cfg --export-real-quant-cfg
            --finetune-data-split --finetune-hf-dataset --fp8-coverage --fp8-manual-mode
            --hidden-size-teacher --kd-alpha-ce --kd-beta-ce --kd-temp --kill-switch-file
            --kill-switch-path --load-distrib-optimizer-method --load-tag --load-teacher
            --lr-decay-tokens --lr-warmup-tokens --micro-batch-sync-interval --mlp-type
            --moe-capacity-bins --moe-capacity-bins-alignment --moe-capacity-bins-exp-base
            --moe-capacity-bins-max-overhead-factor --moe-capacity-bins-num
            --moe-capacity-bins-optimize-interval --moe-capacity-bins-optimize-max-group
            --moe-configured-bins --moe-eval-capacity-factor --moe-expert-parallel-size
            --moe-loss-coeff --moe-min-capacity --moe-num-capacity-bins
            --moe-token-distribution-logging-interval --moe-train-capacity-factor
            --num-attention-heads-teacher --num-experts-switch --num-experts-teacher
            --num-layers-teacher --profile-steps --profile-type --remote-device
            --save-distrib-optimizer-method --scheduler-batch-size --start-check-tp-norm-iter
            --stop-after-num-samples --tensor-logger-end-iter --tensor-logger-path
            --tensor-logger-start-iter --tile-factor --topk --torch-compile-dynamic
            --train-data-exact-num-epochs --train-desc-path --train-doc-idx-path --train-idx-path
            --train-sample-idx-path --train-shuffle-idx-path --train-tokens --use-dataset-only
            --use-fast-softmax --use-fused-rmsnorm --use-fused-sdpa
            --use-fused-sdpa-with-recompute --use-regional-compilation --use-te-custom-op
            --use-torch-compile --use-torch-compiled-autograd --verify-checkpoint-model-type
            --zero-allgather-bucket-size --zero-reduce-bucket-size""",
    ),
    "llm-jp": _tree(
        # llm-jp/Megatron-LM ea80de7979dc, and what the scripts of llm-jp/scripts
        # 0a703870cc26 give
        """--export-force-local-attention --export-kd-finalize --export-kv-cache-quant
            --export-legacy-megatron --export-te-mcore-model --use-mpi --use-z-loss""",
        """--export-kd-cfg --export-kd-teacher-load --export-model-type --export-num-eagle-layers
            --export-num-medusa-heads --export-quant-cfg --export-real-quant-cfg
            --finetune-hf-dataset --z-loss-strength""",
    ),
    "lumi": _tree(  # LumiOpen/Megatron-LM-lumi e0ce1d999dee
        """--expert-parallel""",
        """--model-spec --wandb-step-offset""",
    ),
    "megatron-deepspeed": _tree(  # deepspeedai/Megatron-DeepSpeed 4efb479d5317
        """--checkpoint-in-cpu --contigious-checkpointing --cpu-optimizer --cpu_torch_adam
            --create-moe-param-group --data-efficiency-curriculum-learning --deepscale --deepspeed
            --deepspeed-activation-checkpointing --deepspeed_mpi --disable-mem-efficient-ln
            --disable-moe-token-dropping --disable-moe-top2-2nd-expert-sampling --ds-inference
            --ds-sequence-parallel-fpdt --ds-sequence-parallel-fpdt-offloading --ds_fused_adam
            --enable-expert-tensor-parallelism --enable-zbh1-exact-semantics
            --force-ds-sequence-parallel --inference --kd --log-optimizer-states-to-tensorboard
            --memory-centric-tiled-linear --mos --no-load-lr-state --no-pipeline-parallel
            --partition-activations --profile-backward --random-ltd --repeated-dataloader
            --reset-iteration --return-data-index --scattered-embeddings --split-transformers
            --synchronize-each-layer --universal-checkpoint --use-flash-attn-builder
            --use-flash-attn-triton --use-flash-attn-v1 --use-pin-memory --use-tutel
            --zero-contigious-gradients --zero-reduce-scatter""",
        """--aml-data-download-path --deepscale_config --deepspeed_config
            --ds-sequence-parallel-fpdt-chunk-size --expert-interval --hidden-size-teacher
            --kd-alpha-ce --kd-beta-ce --kd-temp --kill-switch-file --load-tag --load-teacher
            --lr-decay-tokens --lr-warmup-tokens --mlp-type --moe-eval-capacity-factor
            --moe-expert-parallel-size --moe-loss-coeff --moe-min-capacity
            --moe-train-capacity-factor --num-attention-heads-teacher --num-experts-switch
            --num-experts-teacher --num-layers-teacher --profile_steps --remote-device
            --tile-factor --topk --train-data-exact-num-epochs --train-desc-path
            --train-doc-idx-path --train-idx-path --train-sample-idx-path --train-shuffle-idx-path
            --train-tokens --use-dataset-only --zero-allgather-bucket-size
            --zero-reduce-bucket-size""",
    ),
    "megatron-llama": _tree(  # alibaba/Megatron-LLaMA 25306de84d30
        """--causal-lm --distributed-checkpointing --overlapped-distributed-optimizer
            --verify-grad-order""",
        """--checkpoint-dir-name --job-name --last-bucket-split-count --reduce-bucket-size""",
    ),
    "mindspeed": _tree(  # Ascend/MindSpeed-LLM c77308a14bfc, Ascend/MindSpeed 028de58ca629
        """--adaptive-cp-dynamic-attn-mask --adaptive-cp-manually-set-mask-list
            --adaptive-cp-only-reschedule --adaptive-cp-without-coarse
            --adaptive-memory-optimization --adaptive-recompute-device-swap --add-dense-bias
            --add-output-layer-bias --add-rmsnorm-offset --aiqos --aiqos-enable-roce
            --alibi-diagonal-opposite --alternative-prompt --ampipe-tp-sp-comm-overlap
            --append-eod --apply-rope-no-in-complex --async-log-allreduce
            --attention-mask-on-cpu --auto-settings --automated-pipeline
            --automated-pipeline-perf --balanced-moe-experts --broadcast --chain-of-thought
            --coc-fused-kernel --compress-optimizer --cut-max-seqlen --dist-train
            --distributed-optimizer-no-replica --dualpipev-dw-detach --ema_model
            --enable-backward-overlap-ag-with-matmul --enable-dsa-indexer
            --enable-elastic-training --enable-expert-placement
            --enable-fine-grained-expert-placement --enable-hbmfault-repair
            --enable-hf2mg-convert --enable-high-availability --enable-mg2hf-convert
            --enable-mhc --enable-mla-absorb --enable-mla-scale-kv-lora
            --enable-mla-scale-q-lora --enable-overlap-ag-with-matmul
            --enable-overlap-matmul-with-rs --enable-recompute-layers-per-pp-rank
            --enable-seq1f1b --enable-share-memory --enable-token-rearrange-opt
            --enable-worker-reboot --enable-zero3 --fill-neg-inf --fix-router --for_release
            --fp8-reuse-quantized-weight --full-shuffle-instruction-dataset --geglu --gelu-tanh
            --gemm-gradient-accumulation-fusion --greedy --hccl-group-buffer-adaptive
            --hf-chat-template --index-share-for-mtp-iteration --init-norm-weight-in-fp32
            --input-embeds-norm --input-jitter --input-layernorm-in-fp32
            --is-instruction-dataset --is-pairwise-dataset --jit-compile --keep-newlines
            --kv-compress --kv-head-repeat-before-uly-alltoall
            --layerwise-disaggregated-training --layerzero --load-checkpoint-loosely
            --lora-ckpt-filter --lora-fusion --megatron-cp-in-bnsd --mla-fa-divide-qk
            --mla-fa-without-pad --mla-mm-split --mla-swap-core-attn-out
            --mla-up-proj-tp-overlap --mla-zero-memory --moe-adaptive-recompute-activation
            --moe-allgather-overlap-comm --moe-alltoall-mc2 --moe-alltoall-overlap-comm
            --moe-bmm-mc2 --moe-dynamic-padding --moe-fb-overlap --moe-no-drop
            --moe-permutation-async-comm --moe-revert-type-after-topk --moe-tp-extend-ep
            --moe-unperm2-mem-optim-swap --moe-use-sinkhorn --mtp-mem-efficient-logits
            --multi-head-latent-attention --neat-pack --no-chat-template --no-checking
            --no-cut-token --no-enable-linear-qkv --no-pad-to-seq-lengths --no-post-layer-norm
            --no-qad-enable --no-shared-storage --no-shuffle --no-use-gmm-fp8 --no-use-rts
            --no-use-sparse-c8-indexer --norm-topk-prob --npu-datadump --npu-deterministic
            --o2-gradient --o2-optimizer --only-convert-last-checkpoint --op-cal-tflops
            --optimize-send-recv-comm --optimize-vpp-send-recv-comm --optimized-mbs-mode
            --origin-postprocess --overwrite-cache --pack --padded-samples --patch
            --pipe-experts-multi-stream --post-norm --print-expert-load
            --profile-data-simplification --profile-record-shapes --profile-with-cpu
            --profile-with-memory --profile-with-stack --qad-enable --quant-grads
            --recompute-activation-function --recompute-in-advance --recompute-in-bubble
            --recompute-mla-up-proj --recompute-norm --reset-bucket-group-order
            --reuse-fp32-param --reverse --rmsnorm-weight-in-fp32 --router-gating-in-fp32
            --save-layer-by-layer --save-lora-to-hf --seq-aux --share-kvstates
            --shared-expert-gate --skip-bias-add --smart-swap --split-sentences
            --square-alibi-mask --streaming --swap-attention --swap-layer-input --swap-optimizer
            --te-comparison-with-bf16 --te-comparison-with-cpu --tokenizer-not-use-fast
            --topk-softmax-in-fp32 --tp-2d --ttp-enabled --ttp-save-optimizer --ttp-save-rng
            --unaligned-linear --use-ascend-coc --use-ascend-mc2 --use-cp-send-recv-overlap
            --use-deter-comp --use-dsa-absorb --use-ema --use-fused-lightning-indexer
            --use-fused-lightning-indexer-kl-loss --use-fused-lightning-indexer-loss
            --use-fused-mhc --use-fused-moe-token-permute-and-unpermute
            --use-fused-ring-attention-update --use-fused-rmsnorm --use-fused-rotary-pos-emb
            --use-fused-sparse-flash-attention --use-fused-swiglu --use-fusion-attn-v2
            --use-glm-rope --use-global-aux-loss --use-kv-cache --use-mc2 --use-moba-attn
            --use-multiparameter-pipeline-model-parallel --use-nanopipe --use-nanopipe-swap
            --use-nd-matmul --use-pipe-experts --use-sparse-flash-attn --use-triton-gdn
            --use-triton-mhc --use-triton-swiglu-limit --use-ulysses-allgather-kv --use-wandb
            --variable-seq-lengths""",
        """--adaptive-recompute-device-size --adaptive-recompute-profiling-step --add-eos-token
            --additional-config --ai-framework --aiqos-mode --aiqos-schedule
            --alibi-fusion-attn-type --ampipe-degree --attention-mask-type
            --attn-logit-softcapping --auto-settings-log-level --auto-settings-ranks
            --auto-settings-type --auto-settings-work-dir --balanced-moe-hot-expert-num
            --beta-fast --beta-slow --cache-dir --ckpt-cfg-path --cla-share-factor --coc-mode
            --coc-parallel-num --compress-activation --compress-dense --compress-ratios
            --compress-rope-theta --context-parallel-algo --context-parallel-cache-interval
            --context-parallel-kv-cache-policy --cp-attention-mask-type --cp-window-size
            --cvt-type --dataset-additional-keys --dataset-dir --dataset-impl --datasets
            --dim-model-base --dpo-beta --dpo-label-smoothing --dpo-loss-type --drop-thinking
            --dynamic-factor --ema-decay --embedding-multiplier-scale --enable-a2avc
            --enable-thinking --eval-language --evaluation-batch-size --expert-interval
            --expert-placement-freq --fc-type --fine-grained-expert-placement-thre
            --first-k-dense-replace --fix-sub-seq-length --fsdp2-config-path
            --full-attention-interval --handler-name --hc-eps --hc-mult --hc-sinkhorn-iters
            --hccl-ep-group-buffer-adaptive-factor --hccl-group-buffer --hccl-op-mode
            --hccl-slice-size --hf-cfg-dir --hf-datasets-params --hf-dir --hf-save-dir
            --high-freq-factor --history-turns --index-head-dim --index-n-heads
            --index-skip-topk-offset --index-topk --index-topk-freq --index-topk-pattern
            --indexer-loss-coeff --indexer-qk-quant-scheme --input --input_folder
            --instruction-template --interleave-probs --interleave-sliding-window --iteration
            --json-keys --kl-loss-reduction --kl-loss-weight --kl-temperature --layerzero-config
            --load-dir --load-dir-cloud --load-dir-edge --load-model-type --loader --long-factor
            --long-mscale --longrope-freqs-type --lora-alpha --lora-load --lora-modules-to-save
            --lora-r --lora-register-forward-hook --lora-target-modules --loss-chunk-size
            --loss-compute-mode --low-freq-factor --lu-lora-final-layer-index --lu-lora-lr
            --lu-lora-lr-ratio --mamba-chunk-size --mamba-d-conv --mamba-d-ssm --mamba-expand
            --map-keys --master-addr --master-port --max-batch-size --max-eval-samples
            --max-length --max-new-tokens --max-queue-size --max-samples --mbs-idx
            --merge-cloud-stages --merge-group-keys --merge-stages --mg-dir --mg-save-dir
            --middle-ranks --middle-stages --mix-strategy --moba-calc-method --moba-chunk-size
            --moba-topk --model-config-file --model-configs --model-index-file --model-name
            --model-name-or-path --model-type --model-type-hf
            --moe-adaptive-recompute-activation-scale --moe-comm-aux-loss-coeff
            --moe-device-level-aux-loss-coeff --moe-model-type
            --moe-train-capacity-factor --moe-zero-memory --moe-zero-memory-num-layers
            --mtp-spec --n-group --n-hash-layers --n-shared-experts --n-subs --nd1-dim1-size
            --nd2-dim1-size --next-tockens --nnodes --node-rank --noisy-gate-policy
            --noop-layers --nproc-per-node --num-cloud-vpp-chunks --num-layer-list
            --num-zero-experts --o-groups --o-lora-rank --optimization-level
            --optimized-mbs-list --optimizer-selection --original-max-position-embeddings
            --original-seq-len --output-layer-slice-num --output-logit-softcapping
            --output-multiplier-scale --output-prefix --output_folder --pad-to-multiple-of
            --pad-vocab-size-to --padded-base-length --param-and-grad-buffer-pad
            --pipe-experts-multi-data --pipeline-num-transformer-layers
            --pp-schedule-list --pre-tockens --pref-ftx --prefix --prof-file
            --profile-export-type --profile-level --profile-save-path --prompt-type
            --prompt-type-path --qad-teacher-load --qat-quant-block-size --qat-scheme
            --qk-nope-head-dim --qk-rope-head-dim --quant-states --query-pre-attn-scalar
            --reasoning-effort --recompute-activation-function-num-layers
            --recompute-module-list --recompute-norm-num-layers --recompute-type --ref-model
            --refer-model-iter --reward-tokens --rope-factor --rope-scaling-beta-fast
            --rope-scaling-beta-slow --rope-scaling-mscale --rope-scaling-mscale-all-dim
            --rope-scaling-original-max-position-embeddings --rope-scaling-type
            --routed-scaling-factor --save-dir --save-dir-cloud --save-dir-edge
            --save-memory-ratio --save-model-type --saver --scale-depth --scale-emb --scale-fmt
            --schedules-method --script-data-dir --seq1f1b-balance-method --seq1f1b-splits
            --shape-order --shard-size --shared-expert-gate-output-dimension --short-factor
            --short-mscale --sliding-window --sliding-window-size --sparse-mode
            --split-cloud-rank --split-rank --stage --swap-modules --swap-optimizer-times
            --swiglu-limit --target-expert-parallel-size --target-nnodes
            --target-pipeline-parallel-size --target-tensor-parallel-size --target_pp
            --target_tp --task --task-data-path --te-gmm-mode --temperature
            --tokenizer-padding-side --top-k --top-p --topk-group --tp-x --tp-y
            --trans-hot-expert-group-num --ttp-dump-dir --ttp-dump-timeout-seconds
            --ttp-heartbeat-interval-ms --ttp-heartbeat-timeout-ms --ttp-max-dump-ckpt-to-keep
            --ttp-max-missed-count --ttp-server-ip --ttp-server-port
            --ttp-wait-dump-file-timeout --ulysses-degree-in-cp --virtual-optimizer --workers
            --yarn-scaling-factor""",
    ),
    "musa": _tree(
        # MooreThreads/MT-MegatronLM e53585ccb7a4
        """--moe-complementary-seq-aux-loss --moe-device-level-capacity
            --moe-router-norm-topk-prob --moe-router-use-sigmoid --q-rms-recompute
            --use-multi-token-prediction""",
        """--moe-comm-aux-loss-coeff --moe-device-level-aux-loss-coeff --moe-noaux-gamma
            --moe-router-num-node-group --mtp-coeff --mtp-depth""",
    ),
    "pai": _tree(  # alibaba/Pai-Megatron-Patch a098ca5acbde
        """--adaptive-seq-len --allow-missing-vision-projection-checkpoint
            --convert-checkpoint-from-megatron-to-transformers --cpu-offloading
            --cvcuda-image-processing --disable-bias-attn-fc --disable-bias-linear-fc
            --disable-parallel-output --disable-vision-class-token --embed-layernorm
            --enable-shared-expert --eval-dev --eval-fp32 --freeze-LM --freeze-ViT
            --freeze-clip-vision-tower --freeze-llm --keep-last --mm-use-im-patch-token
            --mm-use-im-start-end --moe --moe-input-feature-slicing --position-encoding-2d
            --time --transformer-timers --tune-mm-mlp-adapter --use-alibi-mask --use-normhead
            --use-te --use-thumbnail --use-tiling --use-tutel""",
        """--attention-head-type --data-dir --dataloader-save --dataloader-seq-length --dataset
            --dataset-config --epochs --expert-interval --extra-vocab-size --generation-length
            --image-aspect-ratio --image-folder --image-size --image-tag-type --input-len
            --language-model-type --max-num-tiles --max-padding-length --mm-projector-type
            --mm-vision-select-layer --moe-eval-capacity-factor --moe-expert-parallel-size
            --moe-loss-coeff --moe-min-capacity --moe-topk --moe-train-capacity-factor
            --num-fewshot --num-frames --num-shared-experts --online-evaluation-config
            --optimizer-offload-auto-threshold --optimizer-offload-chunk-size
            --optimizer-offload-policy --out-seq-length --patch-tokenizer-type --prompt-path
            --qk-nope-head-dim --qk-rope-head-dim --repetition-penalty --repetition_penalty
            --rotary-scale-factor --router-type --shared-moe-ffn-hidden-size --sliding-window
            --source-seq-len --special-tokens --target-seq-len --task-list --temperature
            --text-generate-gt-file --text-generate-input-file --text-generate-output-file
            --tokenizer-prompt-format --top-k --top-p --train-data --train-mode
            --transformer-type --valid-data --verbosity --version --vision-model-type
            --vision-tower --z-loss-weight""",
    ),
    "rocm": _tree(  # ROCm/Megatron-LM 2b855bafe238
        """--disable-te-fused-rope --export-legacy-megatron --export-te-mcore-model""",
        """--export-quant-cfg""",
    ),
    "swiss-ai": _tree(
        # swiss-ai/Megatron-LM 81d44dbe25c2, haeggee/Megatron-LM 3d4cf43ba706
        """--differential-attention --export-kd-finalize --export-legacy-megatron
            --export-te-mcore-model --final-layernorm-no-gain --fix-old-xielu
            --fp8-dot-product-attention --goldfish-loss --hypersphere-embeddings
            --hypersphere-no-update --hypersphere-no-update-embeddings --hypersphere-project
            --hypersphere-soft --hypersphere-split-heads --hypersphere-split-heads-update
            --internals-weights-on-gpu --log-activation-stats --log-angular-metrics --log-delta-y
            --log-gradient-stats --log-model-internals --log-params-norm-per-param
            --log-relative-updates --log-update-step-stats --no-attn-layernorm
            --no-final-layernorm --no-learnable-norms --no-mlp-layernorm --no-pre-norm
            --no-use-orthogonal-embeddings --poor-mans-ortho --post-block-norm --post-layer-norm
            --post-norm --post-norm-no-gain --qk-layernorm-frozen --use-orthogonal-updates
            --use-stream-minus-residual --xielu --xiprelu --xiprelup --xssslur2""",
        """--ademamix-alpha --ademamix-alpha-warmup --ademamix-beta3 --ademamix-beta3-warmup
            --embedding-lr-multiplier --export-kd-cfg --export-kd-teacher-load --export-quant-cfg
            --fixed-layer-scale --goldfish-h --goldfish-k --hypersphere-embedding-mode
            --hypersphere-kind --hypersphere-mode --hypersphere-radius
            --input-embeddings-multiplier --internals-log-interval --internals-log-layers
            --layer-scale --layer-scale-scale --layernorm-init --logits-layer-scale
            --logits-layer-scale-scale --mlp-layer-scale --mlp-layer-scale-gate-scale
            --mlp-out-scale --muon-lr-factor --qk-layer-scale --qk-layer-scale-scale --qknorm-impl
            --residual-layer-scale --residual-layer-scale-scale --seednorm-activation
            --seednorm-init --softmax-scale --trigger-path --upscale-embedding
            --weight-decay-method""",
    ),
    "zero-bubble": _tree(
        # sail-sg/zero-bubble-pipeline-parallelism 39f2c186a275, Cuiym715/zero-
        # bubble-pipeline-parallelism c1b9372e5544
        """--allow-padding-num-layers --cpu-offload --enable-chimera --enable-dynamic-pp
            --enable-exactly-numeric-match --enable-gpipe --enable-optimizer-post-validation
            --enable-zero-bubble --measure-activation-memory --no-paired-barrier
            --offload-continuous-buffers --recompute-lgd --zero-bubble-v-schedule""",
        """--num-seq-splits --num-waves-per-pipeline --timers-save
            --zero-bubble-adaptive-memory-limit-percentile --zero-bubble-max-pending-backward
            --zero-bubble-pipeline-timers-end-iter --zero-bubble-pipeline-timers-start-iter
            --zero-bubble-v-schedule-mem-setup""",
    ),
}
