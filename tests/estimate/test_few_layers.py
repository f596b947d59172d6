# SPDX-License-Identifier: Apache-2.0
"""A rank of many layers, worked out from stages of few, is what all of it is measured to be."""

from collections import Counter
from dataclasses import replace

import pytest

from estimate import few_layers
from estimate.model_profile import model_profile, rank_parameters
from estimate.pipeline_stages import rank_stages
from estimate.rank_profile import rank_profile
from pretrain_llama import model_provider
from tests.training.small_llama import read
from training import batch_size
from training.pipeline_schedule import schedule_of

SP = "--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap ring "
FULL = "--recompute-granularity full --recompute-method "
RUNS = [  # flags, ranks
    ("--num-layers 9", 1),
    (f"--num-layers 9 {FULL}uniform --recompute-num-layers 2", 1),
    (f"--num-layers 14 {SP}--pipeline-model-parallel-size 2 --pipeline-schedule zb-v", 4),
    ("--num-layers 13 --pipeline-model-parallel-size 3 --pipeline-schedule zb-h1 "
     "--untie-embeddings-and-output-weights", 3),
    ("--num-layers 24 --pipeline-model-parallel-size 3 --recompute-granularity selective "
     "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 12", 3),
    (f"--num-layers 26 --pipeline-model-parallel-size 2 {FULL}block --recompute-num-layers 5 "
     "--num-virtual-stages-per-pipeline-rank 2 --global-batch-size 8", 2),
    (f"--num-layers 8 --pipeline-model-parallel-size 4 {FULL}block --recompute-num-layers 1", 4),
    ("--num-layers 9 --device cuda --cpu-offload-activations --bf16", 1),
]  # fmt: skip


@pytest.mark.parametrize(("flags", "world"), RUNS)
def test_the_line_is_the_whole_rank(flags, world):
    config = read(flags, world)
    split = schedule_of(config, batch_size.micro_batches(config, 0)).split
    assert few_layers.alike(config, model_provider)
    for rank in range(config.parallel.pipeline_model_parallel_size):
        stages = rank_stages(config, model_provider, rank)
        told = few_layers.profile_of(config, model_provider, stages, rank, split)
        whole = rank_profile(config, model_provider, stages, rank, split)
        for mine, other in zip(told.stages, whole.stages, strict=True):
            assert Counter(mine.collectives) == Counter(other.collectives)
            assert replace(mine, collectives=()) == replace(other, collectives=())
        assert told.gradients == whole.gradients and told.looked_up == whole.looked_up
        if config.parallel.pipeline_model_parallel_size == 1:
            assert told.uses == whole.uses
        assert told.live_bytes == whole.live_bytes or (len(stages) > 1 and not told.live_bytes)
        assert few_layers.whole_profile(config, model_provider, stages, rank, split) == whole
        named = few_layers.parameters_of(config, model_provider, stages, rank)
        measured = rank_parameters(config, model_provider, stages, rank)
        assert alone(named) == alone(measured)


def alone(named):
    """Return the parameters with the part that each is, without the transport of its axis."""
    return [
        (name, p._replace(place=(p.place.shape, p.place.dim, p.place.axis.name, p.place.sections)))
        for name, p in named.items()
    ]


class Uneven:
    """A model whose third layer has a setting of its own."""

    def __call__(self, config, ctx, recompute=None, stages=None):
        model = model_provider(config, ctx, recompute, stages)
        for name, layer in model.layers.items():
            layer.attention.window = 8 if name == "2" else 0
        return model


def test_layers_that_differ_are_measured_each():
    config = read("--num-layers 9", 1)
    assert model_profile(config, model_provider).alike
    assert not model_profile(config, Uneven()).alike
