# SPDX-License-Identifier: Apache-2.0
"""A small Llama's command line, and its model, for the tests of what a dry run computes."""

import shlex

import torch

from mpu.context import LayerContext
from pretrain_llama import model_provider
from training.flags.parse import parse
from training.run.model_profile import grid_of
from training.run.pipeline_stages import rank_stages
from training.settings.layer_options import recompute_of

SMALL = (
    "--num-layers 3 --hidden-size 64 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --ffn-hidden-size 96 --seq-length 32 --micro-batch-size 2 --lr 1e-3 "
    "--train-iters 10 --vocab-size 300 --make-vocab-size-divisible-by 16 --mock-data --dry-run"
)
PIPELINE = "--pipeline-model-parallel-size 4 --num-layers 8 --vocab-size 16 --global-batch-size"
TIES = ("", "--untie-embeddings-and-output-weights")


def read(more="", world=1, base=SMALL):
    return parse(shlex.split(base + " " + more), world)


def build(config, device, pp_rank=0):
    """Build the model of a pipeline rank."""
    p = config.parallel
    grid = grid_of(config, pp_rank)
    ctx = LayerContext(grid, p.sequence_parallel, config.run.dtype, device=torch.device(device))
    recompute = recompute_of(config, torch.device(device))
    stages = rank_stages(config, model_provider, pp_rank)
    return model_provider(config, ctx, recompute, stages)
