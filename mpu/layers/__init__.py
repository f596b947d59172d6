# SPDX-License-Identifier: Apache-2.0
"""Hand-written parallel layers: explicit partitioning and communication, forward and backward.

linear                 ColumnParallelLinear, RowParallelLinear; Recipe, how they multiply
embedding, cross_entropy, linear_cross_entropy, softmax_rows    input and output vocabulary
qkv                    q, k and v, also where ranks share a key/value head
attention              core attention: documents, windows, context parallelism
context_attention      attention under context parallelism; selects a layer's core attention
packed_seq_params      document boundaries
fused, fused_gpu, rope, norm_backends    RMSNorm, RoPE, SwiGLU on CPUs and GPUs
experts, dispatch, expert_load    mixtures of experts
float8                 the recipes of float8
"""
