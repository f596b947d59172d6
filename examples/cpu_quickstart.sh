#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# A Llama of 3.3 million parameters on 2 CPU ranks, tensor parallelism with sequence parallelism.
#
#   3.3e6 parameters, 1.65e7 FLOPs a token; 8 x 256 = 2,048 tokens a step: 3.4e10 FLOPs a step.
#   100 steps = 2e5 tokens: 3.4e12 FLOPs, about a minute on two cores. Memory of a rank: 1.7e6
#   parameters x 16 bytes = 27 MB + 52 MB activations + 17 MB logits + 5 MB at
#   work in one action = 101 MB.
#
#   bash examples/cpu_quickstart.sh                      made-up tokens, to show that it runs
#   DATA=prefix TOKENIZER=file.model bash examples/cpu_quickstart.sh --train-iters 1000
#   WORLD_SIZE=2 LAUNCH=python3 bash examples/cpu_quickstart.sh --dry-run
# `make train` does all of it, from text to samples, with a smaller model and a recipe of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x .venv/bin/torchrun ]; then PATH=$PWD/.venv/bin:$PATH; fi

LAUNCH=${LAUNCH:-torchrun --standalone --nproc-per-node 2}
if [ -n "${DATA:-}" ]; then
    TOKENS=(--data-path "$DATA" --tokenizer-model "$TOKENIZER"
        --tokenizer-type SentencePieceTokenizer)
else
    TOKENS=(--mock-data --tokenizer-type NullTokenizer --vocab-size 4096)
fi

exec $LAUNCH pretrain_llama.py \
    --num-layers 4 --hidden-size 192 --num-attention-heads 6 --ffn-hidden-size 512 \
    --seq-length 256 --norm-epsilon 1e-5 --untie-embeddings-and-output-weights \
    --tensor-model-parallel-size 2 --sequence-parallel --device cpu \
    --micro-batch-size 8 --global-batch-size 8 --train-iters 100 \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 10 \
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 \
    "${TOKENS[@]}" --num-workers 0 --log-interval 10 "$@"
