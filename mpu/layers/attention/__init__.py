# SPDX-License-Identifier: Apache-2.0
"""Attention: one rank's core, blocks of it for documents and windows, and context parallelism.

backends             which kernel computes it: --attention-backend
core                 causal attention of one rank's heads
blocks               which queries look at which keys, as a list of rectangles: there is no mask
block_attention      attention over such a list
max_logits           the largest logit of each head, and QK-clip
shards               which tokens of a row each context-parallel rank has, and which blocks it does
kv_exchange          how keys and values come to the queries: gathered, or round a ring
transformer_engine   core attention by Transformer Engine, where a flag asks for it
"""
