# SPDX-License-Identifier: Apache-2.0
"""A small Llama's command line, and its model, for the tests of what a dry run works out."""

import shlex

import torch

from model.llama import Llama, LlamaConfig
from mpu.context import LayerContext
from mpu.grid import Grid, Launch
from mpu.recompute import Recompute
from training import pipeline
from training.arguments import parse

SMALL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --ffn-hidden-size 96 --seq-length 32 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --vocab-size 300 --make-vocab-size-divisible-by 16 --mock-data --dry-run"
)
PIPELINE = "--pipeline-model-parallel-size 4 --num-layers 8 --vocab-size 16 --global-batch-size"
TIES = ("", "--untie-embeddings-and-output-weights")


def read(more="", world=1, base=SMALL):
    return parse(shlex.split(base + " " + more), world)


def llama_config(config):
    m = config.model
    return LlamaConfig(
        m.vocab_size,
        m.hidden_size,
        m.ffn_hidden_size,
        m.num_layers,
        m.num_attention_heads,
        m.num_query_groups,
        m.kv_channels,
        tied=not m.untie_embeddings_and_output_weights,
        make_vocab_size_divisible_by=m.make_vocab_size_divisible_by,
    )


def build(config, device, pp_rank=0):
    p = config.parallel
    t, pp = p.tensor_model_parallel_size, p.pipeline_model_parallel_size
    first = pp_rank * t * p.data_parallel_size  # of this pipeline rank
    grid = Grid(p.world_size, t, pp_size=pp, launch=Launch(first, p.world_size))
    ctx = LayerContext(grid, p.sequence_parallel, config.run.dtype, device=torch.device(device))
    recompute = Recompute(p.recompute_granularity, p.recompute_method, p.recompute_num_layers or 1)
    return Llama(llama_config(config), ctx, recompute, pipeline.rank_stages(config, pp_rank))
