# SPDX-License-Identifier: Apache-2.0
"""Work out what a rank keeps for backward while a schedule runs.

What one micro-batch of a stage keeps is measured (training/plan/rank_profile.py); the schedule says
how many of them are kept at once. Buffers of collectives, of the allocator and of the kernels come
on top.
"""

from dataclasses import dataclass

from mpu.pipeline.simulate import simulate
from training.config import Config
from training.plan import batch_size, pipeline
from training.plan.model_profile import ModelProvider
from training.plan.rank_profile import RankProfile, StageProfile, rank_profile


@dataclass(frozen=True)
class Held:
    """What one pipeline rank keeps for backward at the fullest moment of a step, in bytes.

    for_b and for_w: left by F's for their B's and by B's for their W's, each at its own fullest
    moment; activations: both at once, with what a recomputed layer needs on top; logits: apart.
    """

    for_b: int
    for_w: int
    activations: int
    logits: int


def profile(config: Config, provider: ModelProvider, pp_rank: int = 0) -> RankProfile:
    """Measure a micro-batch on a pipeline rank, as the run's schedule executes it."""
    stages = pipeline.rank_stages(config, provider, pp_rank)
    split = pipeline.schedule_of(config, batch_size.micro_batches(config, 0)).split
    return rank_profile(config, provider, stages, pp_rank, split)


def held(config: Config, provider: ModelProvider) -> list[Held]:
    """Follow the schedule, at the run's largest batch; return what each pipeline rank keeps."""
    ranks = range(config.parallel.pipeline_model_parallel_size)
    own = [profile(config, provider, rank).stages for rank in ranks]
    stages: dict[int, StageProfile] = {}
    for rank in ranks:
        stages |= zip(pipeline.own_stages(config, rank), own[rank], strict=True)
    cut = [stages[number] for number in sorted(stages)]
    schedule = pipeline.schedule_of(config, max(pipeline.micro_batch_counts(config)))
    costs = pipeline.costs(config, provider)
    kept = simulate(schedule, costs, [s.for_b for s in cut], [s.for_w for s in cut])
    of_loss = [stage.logits for stage in cut]
    apart = simulate(schedule, costs, of_loss, of_loss)  # their gradient waits for the head's W
    return [
        Held(
            int(kept.peak_for_b[rank]),
            int(kept.peak_for_w[rank]),
            int(kept.peak[rank]) + max(stage.again for stage in own[rank]),
            int(apart.peak[rank]),
        )
        for rank in ranks
    ]
