# SPDX-License-Identifier: Apache-2.0
"""Work out what a rank keeps for backward while a schedule runs.

training/plan/rank_profile.py measures what one micro-batch of a stage keeps; the schedule gives how
many micro-batches are kept at once. Not counted are the buffers of collectives, of the allocator
and of the kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mpu.pipeline.simulate import peak_activations
from training.config import Config
from training.plan import batch_size, pipeline
from training.plan.model_profile import ModelProvider
from training.plan.rank_profile import RankProfile, StageProfile, rank_profile


@dataclass(frozen=True)
class Held:
    """What one pipeline rank keeps for backward at the fullest moment of a step, in bytes.

    for_b: kept from F to B; for_w: kept from B to W; each at its own fullest moment. activations:
    both at their common fullest moment, plus what a recomputed layer needs. logits: not in these.
    under_way: of what is offloaded, on its way. in_host: of that, in host memory at most.
    working: what one action has beside all that, and the messages that come and go under it.
    """

    for_b: int
    for_w: int
    activations: int
    logits: int
    working: int
    under_way: int
    in_host: int


def profile(config: Config, provider: ModelProvider, pp_rank: int = 0) -> RankProfile:
    """Return what a micro-batch keeps and sends on a pipeline rank, under the run's schedule."""
    stages = pipeline.rank_stages(config, provider, pp_rank)
    split = pipeline.schedule_of(config, batch_size.micro_batches(config, 0)).split
    return rank_profile(config, provider, stages, pp_rank, split)


def held(
    config: Config,
    provider: ModelProvider,
    profile_of: Callable[[int], Sequence[StageProfile]] | None = None,
) -> list[Held]:
    """Return what each pipeline rank keeps in a step of the run's largest batch.

    profile_of: the profiles of a pipeline rank's stages, where they are known otherwise.
    """
    ranks = range(config.parallel.pipeline_model_parallel_size)
    tell = profile_of or (lambda rank: profile(config, provider, rank).stages)
    own = [tell(rank) for rank in ranks]
    stages: dict[int, StageProfile] = {}
    for rank in ranks:
        stages |= zip(pipeline.own_stages(config, rank), own[rank], strict=True)
    cut = [stages[number] for number in sorted(stages)]
    schedule = pipeline.schedule_of(config, max(pipeline.micro_batch_counts(config)))
    kept = peak_activations(schedule, [s.for_b for s in cut], [s.for_w for s in cut])
    waits = [stage.logits if stage.for_w else 0 for stage in cut]  # their gradients, for W
    apart = peak_activations(schedule, [s.logits for s in cut], waits)
    away = peak_activations(schedule, [s.offloaded for s in cut], [0] * len(cut))
    return [
        Held(
            int(kept[rank][0]),
            int(kept[rank][1]),
            activations=int(kept[rank][2]) + max(stage.again for stage in own[rank]),
            logits=int(apart[rank][2]),
            working=max(stage.working for stage in own[rank]),
            under_way=max(stage.under_way for stage in own[rank]),
            in_host=int(away[rank][2]),
        )
        for rank in ranks
    ]
