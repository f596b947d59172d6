#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 8B at 131,072 tokens a sample, CP 8 on nodes of 8 GPUs of 80 GB, from weights of 8,192.
#
#   8.03e9 parameters, 1.48e11 FLOPs a token, 70 % of them attention's; 32 x 131,072 = 4.2e6 tokens
#   a step: 6.2e17 FLOPs, 194 s at 400 TFLOP/s on each of 8 GPUs, and a fifth more as 20 of 32 layers
#   run again in backward. 1,000 steps = 4.2e9 tokens: 6.2e20 FLOPs, 2.2 days, or 2.7 with that fifth.
#   Memory of a GPU, ZeRO 3 over a node: 8.03e9 parameters x (2 + 4 + 12 bytes) / 8 = 18 GB,
#   + 4.2 GB of unsharded gradients, + 1.5 GB of gathered weights, + 32.3 GB activations
#   + 0.7 GB at work in one action = 57 GB.
#   A layer's attention sends 294 MB (a2a: fewer bytes than gathered keys, and each rank has full
#   rows of 4 query heads, so that documents are cut by one flash kernel).
#
#   FROM=checkpoint-or-HF-directory DATA=prefix TOKENIZER=tokenizer.model bash examples/llama3_8b_128k.sh
#   WORLD_SIZE=8 LAUNCH=python3 bash examples/llama3_8b_128k.sh --dry-run
#   4 nodes: NODES=4 LAUNCH="torchrun --nnodes 4 --nproc-per-node 8 --rdzv-endpoint HOST:29500
#   --rdzv-backend c10d" on each; samples are shared by nodes, a sample by the ranks of a node.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x .venv/bin/torchrun ]; then PATH=$PWD/.venv/bin:$PATH; fi

LAUNCH=${LAUNCH:-torchrun --standalone --nproc-per-node 8}
OUT=${OUT:-runs/llama3_8b_128k}

exec $LAUNCH pretrain_llama.py \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
    --seq-length 131072 --max-position-embeddings 131072 --rotary-base 500000 \
    --use-rope-scaling --rope-scaling-factor 8 \
    --untie-embeddings-and-output-weights --vocab-size 128256 --bf16 \
    --context-parallel-size 8 --cp-comm-type a2a \
    --zero-stage 3 --num-distributed-optimizer-instances "${NODES:-1}" \
    --overlap-grad-reduce --overlap-param-gather \
    --zero-reduce-each-microbatch --fused-linear-cross-entropy \
    --recompute-granularity full --recompute-method block --recompute-num-layers 20 \
    --micro-batch-size 1 --global-batch-size 32 --train-iters 1000 \
    --lr 1e-5 --min-lr 1e-6 --lr-decay-style cosine --lr-warmup-iters 20 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --reset-position-ids --reset-attention-mask --eod-mask-loss \
    --data-path "${DATA:-data/corpus}" --split 99,1,0 \
    --tokenizer-type TikTokenizer --tokenizer-model "${TOKENIZER:-data/tokenizer.model}" \
    --pretrained-checkpoint "${FROM:-runs/llama3_8b/checkpoints}" --allow-change rope \
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 50 \
    --log-interval 1 --manual-gc --manual-gc-interval 20 \
    --log-json "$OUT/log.jsonl" --tensorboard-dir "$OUT/tensorboard" "$@"
