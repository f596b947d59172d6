#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Llama 3 8B from scratch on one node of 8 GPUs of 80 GB: TP 4 with sequence parallelism x DP 2.
#
#   8.03e9 parameters, 5.15e10 FLOPs a token; 128 x 8,192 = 1.05e6 tokens a step: 5.4e16 FLOPs,
#   17 s a step at 400 TFLOP/s a GPU. 47,684 steps = 5e10 tokens: 2.6e21 FLOPs, 9.3 days.
#   Memory of a GPU: 2.0e9 parameters x (2 + 4 bytes for weight and gradient, 12 / 2 for master and
#   moments, shared by 2 data-parallel ranks) = 24 GB, + 9.2 GB activations + 0.5 GB logits
#   + 0.2 GB for what one action has at work = 34 GB.
#
#   --numa-binding=node (torchrun's) keeps a rank's threads on the cores near its GPU. After a fault
#   --max-restarts 3 starts the ranks again, which go on at the newest checkpoint.
#
#   DATA=prefix TOKENIZER=tokenizer.model bash examples/llama3_8b_one_node.sh
#   WORLD_SIZE=8 LAUNCH=python3 bash examples/llama3_8b_one_node.sh --dry-run
# tools/plan.py predicts another layout to be faster: docs/planning.md, "The examples", compares them.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x .venv/bin/torchrun ]; then PATH=$PWD/.venv/bin:$PATH; fi

LAUNCH=${LAUNCH:-torchrun --standalone --nproc-per-node 8 --max-restarts 3 --numa-binding=node}
OUT=${OUT:-runs/llama3_8b}

exec $LAUNCH pretrain_llama.py \
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 \
    --num-attention-heads 32 --group-query-attention --num-query-groups 8 \
    --seq-length 8192 --max-position-embeddings 8192 --rotary-base 500000 \
    --untie-embeddings-and-output-weights --vocab-size 128256 \
    --tensor-model-parallel-size 4 --sequence-parallel --bf16 \
    --micro-batch-size 1 --global-batch-size 128 --train-iters 47684 \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000 \
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 \
    --data-path "${DATA:-data/corpus}" --split 99,1,0 \
    --tokenizer-type TikTokenizer --tokenizer-model "${TOKENIZER:-data/tokenizer.model}" \
    --save "$OUT/checkpoints" --load "$OUT/checkpoints" --save-interval 500 \
    --device cuda --eval-interval 500 --eval-iters 8 --log-interval 10 --manual-gc --manual-gc-interval 100 \
    --log-json "$OUT/log.jsonl" --tensorboard-dir "$OUT/tensorboard" "$@"
