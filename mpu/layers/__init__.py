# SPDX-License-Identifier: Apache-2.0
"""Hand-written parallel layers: what is cut, what is gathered, and when, forward and backward.

linear                 ColumnParallelLinear, RowParallelLinear; Recipe, how they multiply
embedding, cross_entropy, linear_cross_entropy, softmax_rows    both ends of the vocabulary
qkv                    q, k and v, where ranks share a key/value head, too
attention              core attention: documents, windows, context parallelism
context_attention      chooses the attention of a layer under context parallelism
packed_seq_params      where documents begin and end
fused, fused_gpu, rope, norm_backends    RMSNorm, RoPE, SwiGLU on CPUs and GPUs
experts, dispatch, expert_load    mixtures of experts
float8                 the recipes of float8
"""
