# SPDX-License-Identifier: Apache-2.0
"""Names that other programs have for the flags of this one, and for what it has instead.

Facts about nanoGPT, Hugging Face's Trainer and accelerate, torchtitan, litgpt, NeMo, DeepSpeed and
the trees derived from Megatron-LM (training/flags/trees.py). A name is written here with dashes; in
a command line _ may stand for -. training/flags/foreign.py acts on these tables.
"""

# {flag: the words of this program}. It is obeyed, its value follows, and a line says so.
SYNONYMS = {
    name: tuple(words.split())
    for words, names in {
        # the model's sizes
        "--num-layers": "--n-layer --n-layers --num-hidden-layers",
        "--hidden-size": "--n-embd --d-model --dim --model-dim --embed-dim",
        "--num-attention-heads": "--n-head --n-heads --num-heads",
        "--group-query-attention --num-query-groups": """--num-key-value-heads --n-kv-head
            --n-kv-heads --num-kv-heads --num-attention-heads-kv --n-head-kv""",
        "--ffn-hidden-size": "--intermediate-size --ffn-dim --d-ff",
        "--kv-channels": "--head-dim --head-size",
        "--seq-length": """--block-size --seq-len --sequence-length --max-seq-len
            --max-seq-length --max-sequence-length --context-length --n-ctx --cutoff-len
            --model-max-length --tokens-per-sample --training.seq-len""",
        "--rotary-base": "--rope-theta --rope-base --rotary-position-embeddings-theta",
        "--rotary-percent": "--partial-rotary-factor",
        "--norm-epsilon": "--rms-norm-eps --layernorm-eps",
        "--num-experts": "--n-experts --num-local-experts --moe-num-experts",
        "--moe-router-topk": "--num-experts-per-tok --n-experts-per-tok --experts-per-token",
        "--moe-ffn-hidden-size": "--moe-intermediate-size",
        "--normalization RMSNorm": "--RMSNorm --use-rms-norm",
        "--position-embedding-type rope": """--use-llama2-rotary-position-embeddings
            --use-mistral-rotary-position-embeddings --use-rotary-pos-emb""",
        "--disable-bias-linear": "--no-bias --no-add-bias",
        "--untie-embeddings-and-output-weights": "--no-tie-embed-logits --no-tie-embedding-weights",
        # the batch, and how long a run is
        "--train-iters": """--max-iters --max-steps --max-train-steps --num-steps --num-iterations
            --max-iterations --iterations --total-steps --steps --max-update --training.steps""",
        "--micro-batch-size": """--per-device-train-batch-size --train-micro-batch-size-per-gpu
            --device-batch-size --device-train-microbatch-size --mbs --local-batch-size
            --training.local-batch-size""",
        "--global-batch-size": "--gbs --train-batch-size",
        # the update
        "--lr": "--learning-rate --max-lr",
        "--min-lr": """--lr-min --final-lr --lr-end --min-learning-rate --learning-rate-min
            --eta-min""",
        "--lr-warmup-iters": """--warmup-iters --warmup-steps --num-warmup-steps --lr-warmup-steps
            --warmup-updates""",
        "--lr-decay-iters": "--total-num-update",
        "--lr-warmup-fraction": "--warmup-ratio --warmup-fraction",
        "--lr-decay-style": """--lr-scheduler-type --lr-scheduler --lr-schedule
            --learning-rate-schedule""",
        "--optimizer": "--optim",
        "--adam-beta1": "--beta1",
        "--adam-beta2": "--beta2",
        "--adam-eps": "--adam-epsilon",
        "--clip-grad": "--grad-clip --max-grad-norm --gradient-clipping --grad-norm-clip",
        "--weight-decay": "--wd",
        # ranks and memory
        "--tensor-model-parallel-size": """--tp --tp-size --tensor-parallel-size
            --tensor-parallel-degree --tensor-parallel --parallelism.tensor-parallel-degree""",
        "--pipeline-model-parallel-size": """--pp --pp-size --pipeline-parallel-size
            --pipeline-parallel-degree --pipeline-parallel --pipe-parallel-size
            --parallelism.pipeline-parallel-degree""",
        "--context-parallel-size": """--cp --cp-size --context-parallel-degree
            --parallelism.context-parallel-degree""",
        "--cp-comm-type a2a --context-parallel-size": "--ds-sequence-parallel-size",
        "--expert-model-parallel-size": """--ep --ep-size --expert-parallel-size
            --expert-parallel-degree --parallelism.expert-parallel-degree""",
        "--disable-gloo-process-groups": "--disable-gloo-group",
        "--pipeline-schedule zb-h1": "--enable-zbh1-pipeline",
        "--recompute-granularity": "--activations-checkpoint-granularity",
        "--recompute-granularity full": """--gradient-checkpointing --activation-checkpointing
            --use-gradient-checkpointing --grad-checkpointing""",
        "--bf16": "--use-bf16",
        "--allow-tf32": "--tf32",
        # data, files and the log
        "--tokenizer-model": """--tokenizer-name-or-path --tokenizer-name --tokenizer-path
            --hf-tokenizer-path""",
        "--num-workers": "--dataloader-num-workers",
        "--save": "--out-dir --output-dir",
        "--save-interval": "--save-steps --save-every --save-freq --save-iters",
        "--keep-last-k": "--save-total-limit",
        "--eval-interval": "--eval-steps --eval-every --eval-freq --val-interval --val-every",
        "--eval-iters": "--eval-batches --val-batches",
        "--log-interval": """--logging-steps --log-every --log-freq --log-steps --log-every-n-steps
            --print-freq""",
        "--tensorboard-dir": "--logging-dir",
        "--wandb-exp-name": "--wandb-name --wandb-run-name --run-name",
    }.items()
    for name in names.split()
}
TRUE, FALSE = "true", "false"  # values of a switch in other programs
SPELT = {"1": TRUE, "yes": TRUE, "0": FALSE, "no": FALSE}  # as Hugging Face's Trainer reads them
# {(flag, value in lower case): the words in place of both}
VALUES: dict[tuple[str, str], tuple[str, ...]] = {
    **{
        ("--tokenizer-type", name): ("--tokenizer-type", "HuggingFaceTokenizer")
        for name in "pretrainedfromhf hftokenizer autotokenizer hfpretrainedtokenizer".split()
    },
    **{
        ("--optimizer", name): ("--optimizer", "adam")
        for name in """adamw fusedadamw fused-adam fusedadam apex-fused-adam adamw_torch adamw_hf
        adamw_torch_fused adamw_apex_fused""".split()
    },
    **{
        ("--lr-decay-style", name): ("--lr-decay-style", here)
        for name, here in {
            "constant_with_warmup": "constant",
            "inverse_sqrt": "inverse-square-root",
            "warmup_stable_decay": "WSD",
            "wsd": "WSD",
        }.items()
    },
    **{
        (flag, value): ("--bf16",)
        for flag in ("--dtype", "--torch-dtype", "--precision", "--mixed-precision", "--amp-dtype")
        for value in "bfloat16 bf16 torch.bfloat16 bf16-mixed bf16-true".split()
    },
    **{
        (flag, value): ()
        for flag in ("--dtype", "--torch-dtype", "--precision", "--mixed-precision", "--amp-dtype")
        for value in "float32 fp32 torch.float32 32 32-true no".split()
    },
    **{
        ("--attn-implementation", name): ("--attention-backend", here)
        for name, here in {"flash_attention_2": "flash", "sdpa": "auto", "eager": "unfused"}.items()
    },
    **{
        (flag, FALSE): ()
        for flag in """--compile --torch-compile --ddp --push-to-hub --bias --lora --do-eval
        --always-save-checkpoint --do-predict --overwrite-output-dir --load-best-model-at-end
        --streaming --packing --use-peft --use-lora --group-by-length""".split()
    },
    **{(flag, zero): () for flag in ("--dropout", "--attn-dropout") for zero in ("0", "0.0")},
    ("--decay-lr", "true"): ("--lr-decay-style", "cosine"),
    ("--decay-lr", "false"): ("--lr-decay-style", "constant"),
    ("--tie-word-embeddings", "true"): (),
    ("--tie-word-embeddings", "false"): ("--untie-embeddings-and-output-weights",),
    ("--init-from", "scratch"): (),
    ("--report-to", "none"): (),
    ("--position-embedding-type", "rotary"): ("--position-embedding-type", "rope"),
    ("--glu-activation", "swiglu"): ("--swiglu",),
    ("--rope-scaling-type", "llama3"): ("--use-rope-scaling",),
    ("--context-parallel-algo", "megatron_cp_algo"): ("--cp-comm-type", "p2p"),
    ("--context-parallel-algo", "ulysses_cp_algo"): ("--cp-comm-type", "a2a"),
    **{  # of Pai: the tokenizer in the Hugging Face folder of --load
        ("--patch-tokenizer-type", f"{name}tokenizer"): ("--tokenizer-type", "HuggingFaceTokenizer")
        for name in "llama llama2 llama3 mistral mixtral qwen qwen2 qwen3 yi baichuan".split()
    },
}
# {names, * for any letters: what there is instead}; {} is the value that is given
_INSTEAD = {
    "--lora* --qlora* --use-lora --*-lora --peft* --use-peft --adapter-* --dora* --*-lora-*": """
        Weft has no LoRA: train a part of the weights itself by --param-group 'PATTERN' frozen,
        which names those that stay as they are""",
    "--freeze* --unfreeze* --frozen* --trainable* --*-freeze --finetuning-type": """
        --param-group 'PATTERN' frozen keeps the parameters whose name matches as they are""",
    "--lr-mult* --layerwise-lr* --layer-lr* --llrd* --*-lr-mult --embedding-lr* --lm-head-lr":
        "--param-group 'PATTERN' lr-mult=X gives parameters a learning rate of their own",
    "--eval-only --evaluate-only --only-eval --val-only": "--skip-train evaluates and stops",
    """--eval-on-start --eval.initial-validation --eval-first --val-at-start --eval-before-train*
        --val-before-train*""":
        "--eval-at-start evaluates before the first step",
    """--load-best-model-at-end --metric-for-best-model --save-best* --keep-best-* --early-stop*
        --greater-is-better --save-top-k --always-save-checkpoint --save-only-best""":
        "--keep-best keeps the checkpoint with the lowest held-out loss beside the newest ones",
    """--mask-prompt* --train-on-inputs --train-on-prompt* --completion-only-loss
        --assistant-only-loss --loss-on-targets-only --answer-only-loss --only-loss-on*""": """
        tools/preprocess_data.py --loss-on says which texts of instruction data the loss counts""",
    "--compile* --torch-compile* --use-torch-compile --use-compile --no-compile --*.compile": """
        nothing is compiled here, so leave it out""",
    """--gradient-accumulation-steps --grad-accum* --gradient-accumulation --accumulate-grad-batches
        --accumulation-steps --num-accumulation-steps --gradient-accumulate* --update-freq
        --*accumulate-gradient-steps""": """give
        --global-batch-size: {} x --micro-batch-size x the number of data-parallel ranks""",
    "--num-train-epochs --num-epochs --epochs --epoch --max-epochs --n-epochs --train-epochs": """
        give --train-samples, {} x the samples of --seq-length tokens in the data, which is read
        again in another order at its end; or --train-iters, in steps""",
    "--max-duration": "give --train-iters, in steps, or --train-samples: tokens / --seq-length",
    "--train-tokens --max-tokens --total-tokens --num-tokens --train.max-tokens --token-budget": """
        give --train-samples: {} / --seq-length""",
    "--total-batch-size --batch-size-tokens --tokens-per-batch --global-batch-tokens": """give
        --global-batch-size, in samples: {} / --seq-length, if that is a number of tokens""",
    "--batch --bs --bsz": """give --micro-batch-size, of one rank at a time, or --global-batch-size,
        of a step""",
    "--moe --use-moe": "give --num-experts, and --moe-router-topk for those of a token",
    "--lr-warmup-tokens --warmup-tokens": "give --lr-warmup-samples: {} / --seq-length",
    "--lr-decay-tokens": "give --lr-decay-samples: {} / --seq-length",
    "--max-train-samples": "give --train-samples, or fewer texts to tools/preprocess_data.py",
    "--hidden-dim": "give --hidden-size, or for the width of the SwiGLU unit --ffn-hidden-size",
    "--hidden-act --activation --activation-function": "a Llama's feed-forward is SwiGLU",
    "--multiple-of --ffn-dim-multiplier": "give the width itself: --ffn-hidden-size",
    "--dropout --attn-dropout --resid-dropout --embd-dropout --attn-pdrop --resid-pdrop": """a Llama
        has no dropout: leave it out""",
    "--bias": "a Llama's linear layers have no bias; fork model/llama.py for that",
    "--tie-word-embeddings --*tie-embeddings": """embeddings are tied unless
        --untie-embeddings-and-output-weights""",
    "--rope-scaling": "give --use-rope-scaling, or --position-embedding-type yarn",
    "--sliding-window*": "fork model/llama.py for another attention",
    """--training.mixed-precision-reduce --grad-reduce-dtype --reduce-dtype --fsdp-reduce-dtype""":
        "gradients are summed in fp32 unless --grad-reduce-in-bf16",
    """--dtype --*.dtype --*mixed-precision-param --torch-dtype --precision --mixed-precision --amp
        --amp-dtype --use-amp""": """
        give --bf16 for bfloat16, and nothing for fp32""",
    "--load-in-8bit --load-in-4bit --quantization* --bnb-*": """weights are bf16 or fp32;
        --fp8-format lets matmuls take float8""",
    "--attn-implementation --use-flash-attention* --flash-attention --flash-attn* --attn-impl": """
        --attention-backend chooses the kernel; auto takes FlashAttention where it can""",
    "--optimizer-type --optimizer-name --optimizer.name --optimizer.type": """give
        --optimizer adam or muon""",
    "--decay-lr": "give --lr-decay-style: cosine, linear, constant or WSD",
    """--lr-decay-ratio --lr-scheduler.decay-ratio --warmdown* --cooldown-*
        --lr-cooldown*""": """--lr-decay-style WSD with
        --lr-wsd-decay-iters decays in the last steps""",
    "--ddp --fsdp* --use-fsdp --sharding-strategy --shard-strategy --fully-shard --hsdp*": """
        data-parallel ranks are those that the other sizes leave; --zero-stage 3 shards what FSDP
        does, 2 gradients and state, 1 the optimizer's state""",
    """--dp --dp-size --data-parallel-size --data-parallel --data-parallel-degree
        --data-parallel-shard-degree --data-parallel-replicate-degree --dp-degree""": """do not give
        it: data-parallel ranks are the number of processes / (tp x cp x pp); --zero-stage shards
        over them""",
    "--deepspeed --deepspeed-config --ds-config": """DeepSpeed is not used and its file is not read:
        give --zero-stage 1, 2 or 3, --micro-batch-size, --global-batch-size and --bf16""",
    "--accelerator --strategy --plugins --mesh --mesh-dim":
        "--zero-stage and the sizes of the axes give the layout",
    "--cpu-offload --offload --offload-optimizer* --optimizer-offload --fsdp-offload*": """
        --optimizer-cpu-offload moves optimizer state to the host, --cpu-offload-activations
        activations""",
    """--nproc-per-node --nproc --nnodes --node-rank --master-addr --master-port --num-gpus --gpus
        --num-processes --num-nodes --devices --hostfile --world-size --n-gpus --gpus-per-node
        --rdzv-*""": """the launcher starts the ranks: torchrun --nproc-per-node N pretrain_llama.py
        FLAGS""",
    "--activation-checkpoint* --deepspeed-activation-checkpoint* --ac-mode":
        "give --recompute-granularity full or selective",
    """--model-name-or-path --model-name --model --pretrained-model* --base-model --hf-model*
        --init-from --model-id --checkpoint-name --initial-checkpoint* --hf-assets-path
        --model.hf-assets-path --model.name --model.flavor --model-size --model-type
        --config-overrides --load-*-config --checkpoint.initial-load*""": """for weights give the
        folder of a downloaded Hugging Face model:
        --pretrained-checkpoint DIRECTORY --use-checkpoint-args; for sizes --num-layers,
        --hidden-size and the others""",
    "--resume* --resume-from-checkpoint --load-checkpoint --ckpt-path --auto-resume --load-from":
        "give --load DIRECTORY, that of --save: a run goes on at its newest checkpoint",
    """--save-dir --checkpoint-dir --checkpoint-path --ckpt-dir --checkpoint.folder --ckpt
        --checkpoint""": """
        --save DIRECTORY writes checkpoints, --load DIRECTORY reads them""",
    """--checkpoint.interval --checkpoint-interval --checkpoint-every --checkpoint.enable*
        --ckpt-freq""":
        "--save DIRECTORY with --save-interval N writes a checkpoint every N steps",
    """--dataset --dataset-name --dataset-config-name --dataset-path --data-dir --data --data.*
        --train-file --validation-file --train-data --val-data --train-dataset --data-prefix
        --data-root --dataset-dir --dataset-split --train-path --dataset-text-field --text-column
        --input-bin --input-val-bin --train-bin --val-bin --training.dataset*""": """text becomes
        tokens by tools/preprocess_data.py --input FILE --output-prefix PREFIX, and --data-path
        takes PREFIX_text_document""",
    "--tokenizer-dir --tokenizer": """give --tokenizer-type HuggingFaceTokenizer --tokenizer-model
        DIRECTORY""",
    "--streaming --preprocessing-num-workers --packing --sample-packing --group-by-length": """
        texts are tokenized once, by tools/preprocess_data.py, and packed to --seq-length""",
    "--config* --cfg --yaml* --job.config-file --job-config* --hparams* --module": """a
        configuration file is not read: give its settings as flags""",
    "--val-set-size --validation-split* --eval-split --val-split --val-fraction": """give --split,
        shares of training, validation and test such as 98,2,0""",
    "--do-train": "a run always trains: leave it out",
    """--do-eval --eval-strategy --evaluation-strategy --validate --eval --do-predict --do-test
        --validation.enable""": """
        --eval-interval N evaluates every N steps""",
    "--eval.interval --val-check-interval --validator.freq --validation.freq": """give
        --eval-interval, in steps""",
    """--eval.max-iters --limit-val-batches --validator.steps --validation.steps
        --max-eval-samples --max-val-samples""": "give --eval-iters, in batches",
    "--per-device-eval-batch-size --eval-batch-size --val-batch-size": """evaluation takes
        --micro-batch-size: leave it out""",
    "--overwrite-output-dir --overwrite": """nothing is overwritten: give another --save, or --load
        with the same one to go on""",
    "--save-strategy --save-checkpoint*": "--save-interval N saves every N steps",
    "--train.save-interval": "give --save-interval, in steps",
    "--train.lr-warmup-steps --lr-scheduler.warmup-steps": "give --lr-warmup-iters, in steps",
    "--report-to --logger --logger-name --loggers": """--wandb-project NAME or --tensorboard-dir
        DIRECTORY reports there""",
    "--wandb --use-wandb --wandb-log --*-wandb --metrics.enable-wandb": """
        --wandb-project NAME reports to W&B, and without it nothing is reported there""",
    "--wandb-mode --wandb-api-key --wandb-group --wandb-tags --wandb-id --wandb-resume": """W&B
        takes its settings from WANDB_MODE, WANDB_API_KEY, WANDB_RUN_GROUP and others""",
    "--tensorboard --use-tensorboard --metrics.enable-tensorboard": """
        give --tensorboard-dir DIRECTORY""",
    "--push-to-hub* --hub-*": """nothing is uploaded: --save-hf DIRECTORY writes Hugging Face's
        folders""",
    "--ddp-timeout --comm.*-timeout-seconds": """give --distributed-timeout-minutes: {} seconds /
        60""",
    "--use-cpu --no-cuda --cpu": "give --device cpu",
    "--fp16* --half-precision*": "fp16 is not available here: give --bf16",
    "--bf16-full-eval": "evaluation computes as training does: leave it out",
    "--betas --optimizer.betas --adam-betas": "give --adam-beta1 and --adam-beta2",
    "--optimizer.eps": "give --adam-eps",
    "--lr-scheduler.decay-type": "give --lr-decay-style: cosine, linear, constant or WSD",
    "--lr-scheduler.min-lr-factor --min-lr-ratio --lr-min-ratio": "give --min-lr: {} x --lr",
    "--float8.* --fp8-recipe-name --model.converters": "--fp8-format lets matmuls take float8",
    "--*enable-async-tensor-parallel --async-tp": """--tp-comm-overlap runs the collectives of
        tensor parallelism under matmuls""",
    "--*enable-loss-parallel": "the loss is always computed on shards of the vocabulary",
    "--*pipeline-parallel-schedule": "give --pipeline-schedule",
    "--*pipeline-parallel-microbatch*": """micro-batches are counted by --global-batch-size, which
        is --micro-batch-size x micro-batches x data-parallel ranks""",
    "--checkpoint.async-mode": "give --async-save",
    "--checkpoint.last-save-model-only --save-only-model": """--save-hf DIRECTORY writes the weights
        alone""",
    "--checkpoint.load-step": "give --ckpt-step",
    "--job.dump-folder": "give --save, and --tensorboard-dir for the log",
    "--logging-strategy --logging-first-step": "--log-interval N prints every N steps",
    "--enable-profiling --profiling.enable*": "give --profile",
    "--context-parallel-algo": "here and in Megatron-LM it is --cp-comm-type",
}
ELSEWHERE = {
    name: " ".join(text.split()) for names, text in _INSTEAD.items() for name in names.split()
}
