# SPDX-License-Identifier: Apache-2.0
"""Attention: the core attention of a rank, blocks for documents and windows, context parallelism.

backends             which kernel computes it: --attention-backend
core                 causal attention of one rank's heads
blocks               which queries attend to which keys, as a list of rectangles instead of a mask
block_attention      attention over such a list
max_logits           the largest logit of each head, and QK-clip
shards               the tokens of a row and the attention blocks of each context-parallel rank
kv_exchange          exchange of keys and values between ranks: all-gather or ring
transformer_engine   core attention by Transformer Engine, if requested by a flag
"""
