# SPDX-License-Identifier: Apache-2.0
"""Cut the model into pipeline stages by the cost of its parts, and report the bubble.

p pipeline ranks, v virtual stages a rank, m micro-batches a step
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from mpu.pipeline.simulate import Costs, simulate
from mpu.pipeline.stage_layout import Stage
from training.run.model_profile import ModelProvider, model_profile
from training.settings.config import Config
from training.settings.pipeline_schedule import (
    cut,
    head_again,
    micro_batch_counts,
    own_stages,
    recomputed_layers,
    schedule_of,
)


def stages_of(config: Config, provider: ModelProvider) -> tuple[Stage, ...]:
    """Return the p v stages in order, by default balanced by the cost of the model's parts.

    Raises UsageError, naming the flags, if the layers do not add up.
    """
    layers = config.model.num_layers
    if config.parallel.pipeline_model_parallel_size == 1:  # nothing to balance
        return cut(config, 0.0, (1.0,) * layers, 0.0)
    model = model_profile(config, provider)
    more = sum(head_again(config)) / 3  # a cost covers forward, dgrad and wgrad
    return cut(config, model.embedding, model.layers, model.head * (1 + more))


def rank_stages(config: Config, provider: ModelProvider, pp_rank: int) -> tuple[Stage, ...]:
    """Return the stages of a pipeline rank, in the order of its chunks."""
    stages = stages_of(config, provider)
    return tuple(stages[stage] for stage in own_stages(config, pp_rank))


def uses_of(config: Config, provider: ModelProvider, pp_rank: int) -> dict[str, tuple[str, ...]]:
    """Return {parameter: the lines of its uses in a forward of this pipeline rank}.

    Raises ValueError, on every rank, for a weight that stages of several ranks use, as each rank
    would train a copy of its own. An embedding weight that is tied to the head is allowed.
    """
    last, places = config.model.num_layers + 1, dict[int, int]()  # {part: its pipeline rank}
    stages = stages_of(config, provider)
    for rank in range(config.parallel.pipeline_model_parallel_size):
        for stage in (stages[number] for number in own_stages(config, rank)):
            here = [layer + 1 for layer in stage.layers]
            here += [0] * stage.embedding + [last] * stage.loss
            places |= dict.fromkeys(here, rank)
    found, parts = dict[str, tuple[str, ...]](), dict[str, list[int]]()
    for part, uses in enumerate(model_profile(config, provider).uses):
        for name, lines in uses.items():
            parts.setdefault(name, []).append(part)
            if places[part] == pp_rank:
                found[name] = found.get(name, ()) + lines
    for name, some in parts.items():
        if len({places[part] for part in some}) > 1 and some != [0, last]:
            of = (f"layer {part - 1}" if 0 < part < last else "an end" for part in some)
            raise ValueError(
                f"--model-file {config.model.model_file}: {name} is used in {', '.join(of)}, which "
                "are on different pipeline ranks, and each rank would train its own copy: place "
                "them on one rank (--pipeline-model-parallel-layout), or omit "
                "--pipeline-model-parallel-size"
            )
    return found


def check_made_here(
    config: Config, provider: ModelProvider, names: Iterable[str], uses: Container[str]
) -> None:
    """Raise ValueError for a parameter of this rank, of `names`, that only other pipeline ranks
    use: this rank's copy would not be trained, and a checkpoint has room for one. uses: `uses_of`.
    """
    used = {name for part in model_profile(config, provider).uses for name in part}
    for name in names:
        if name in used and name not in uses:
            raise ValueError(
                f"--model-file {config.model.model_file}: {name} is made on a pipeline rank that "
                "does not use it: make it only where self.stages has the stage that does (its "
                "layers, embedding or loss), as Llama.__init__ does"
            )


def costs(config: Config, provider: ModelProvider, ends: bool = True) -> Costs:
    """Return the FLOPs per token of every stage: F = B = W, plus what B and W recompute.

    ends: include the embedding and the head.
    """
    model, stages = model_profile(config, provider), stages_of(config, provider)
    if not ends:
        model = replace(model, embedding=0.0, head=0.0)
    forward = [
        sum(model.layers[s.first : s.last]) + s.loss * model.head + s.embedding * model.embedding
        for s in stages
    ]
    again = [sum(model.layers[s.first :][: recomputed_layers(config, s)]) for s in stages]
    if config.parallel.recompute_granularity == "selective":
        again = [sum(model.core[s.first : s.last]) for s in stages]
    in_b, in_w = ([s.loss * part * model.head for s in stages] for part in head_again(config))
    b = [sum(each) for each in zip(forward, again, in_b, strict=True)]
    return Costs(forward, b, [f + w for f, w in zip(forward, in_w, strict=True)])


def lines(config: Config, provider: ModelProvider) -> list[str]:
    """Return lines on the stages of each pipeline rank and on the bubble; rank 0 prints them."""
    p = config.parallel
    size, v = p.pipeline_model_parallel_size, p.virtual_stages
    if size == 1:
        return []
    cost = costs(config, provider)
    parts = (cost.forward, cost.input_gradient, cost.weight_gradient)
    own = [own_stages(config, rank) for rank in range(size)]
    work = [sum(part[s] for part in parts for s in stages) for stages in own]
    more = 100 * (max(work) * size / sum(work) - 1)
    stages = f", {v} stages each" if v > 1 else ""
    out = [
        f"pipeline {p.schedule}: {size} ranks{stages}; the slowest has {more:.1f} % more work "
        "than the mean"
    ]
    of_ranks = [rank_stages(config, provider, rank) for rank in range(size)]
    out += [
        f"pipeline rank {rank}: {describe_stages(stages)}" for rank, stages in enumerate(of_ranks)
    ]
    for count in micro_batch_counts(config):
        waits = simulate(schedule_of(config, count), cost)
        ideal = simulate(schedule_of(config, count), even(cost))
        out.append(
            f"{count} micro-batches: bubble {100 * waits.bubble / waits.step:.2f} % of a step, "
            f"{100 * ideal.bubble / ideal.step:.2f} % if all stages were equal"
        )
    return out


def describe_stages(stages: Sequence[Stage]) -> str:
    """Return a rank's stages as text: "embedding + layers 0-1 | layers 8-9"."""
    return " | ".join(_describe(stage) for stage in stages)


def _describe(stage: Stage) -> str:
    parts = ["embedding"] * stage.embedding
    if len(stage.layers) == 1:
        parts.append(f"layer {stage.first}")
    elif stage.layers:
        parts.append(f"layers {stage.first}-{stage.last - 1}")
    return " + ".join(parts + ["head"] * stage.loss) or "nothing"


def even(cost: Costs) -> Costs:
    """Return the costs of stages that divide the same total work equally."""

    def share(part: Sequence[float]) -> list[float]:
        return [sum(part) / len(part)] * len(part)

    return Costs(share(cost.forward), share(cost.input_gradient), share(cost.weight_gradient))
