# SPDX-License-Identifier: Apache-2.0
"""Compute the samples at which the stages of a run begin, and the stage of a sample.

A stage of --data-stages begins with the first step before which its start_tokens are consumed.
Batch size, sequence length and data are constant between two such steps, so plan() need not
simulate steps. Samples are the run's clock, as everywhere; tokens are computed from them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from training.settings.arguments import SETTINGS
from training.settings.config import Config, Stage, UsageError

LENGTH = "seq_length"
# with LENGTH, the fields of ModelConfig that a stage may set besides its data
ROPE = (
    "rotary_base use_rope_scaling rope_scaling_factor rotary_seq_len_interpolation_factor "
    "position_embedding_type rotary_scaling_factor yarn_original_max_position_embeddings "
    "yarn_beta_fast yarn_beta_slow no_yarn_correction_range_round_to_int mscale mscale_all_dim"
).split()
Sizes = tuple[tuple[int, int], ...]  # (from this token or sample on, samples of a step)


def plan(file: str, stages: Sequence[Stage], sizes: Sizes) -> tuple[list[Stage], Sizes]:
    """Return the stages with first_sample and first_token, and the batch sizes by sample.

    sizes: (threshold in tokens, batch size), from 0 on. As in Megatron-LM, a threshold is rounded
    down to whole samples, and its size holds from the first step before which they are consumed.
    Raises UsageError for a stage that has no step.
    """
    placed, by_sample = [stages[0]], [(0, sizes[0][1])]
    samples = tokens = 0
    waiting, later = list(stages[1:]), list(sizes[1:])
    while waiting or later:
        length, size = placed[-1].length, by_sample[-1][1]
        steps = []
        if later:
            steps.append(-(-max(0, (later[0][0] - tokens) // length) // size))
        if waiting:
            missing = -(-max(0, waiting[0].start_tokens - tokens) // length)
            steps.append(-(-missing // size))
        taken = min(steps)
        samples, tokens = samples + taken * size, tokens + taken * size * length
        if later and steps[0] == taken:
            now = (samples, later.pop(0)[1])
            by_sample = [*by_sample[: -1 if by_sample[-1][0] == samples else None], now]
        if waiting and steps[-1] == taken:
            after = replace(waiting.pop(0), first_sample=samples, first_token=tokens)
            if after.first_sample == placed[-1].first_sample:
                raise UsageError(
                    f"--data-stages {file}: stage {placed[-1].name!r} has no step of "
                    f"{size * length:,} tokens before stage {after.name!r} starts at "
                    f"{after.start_tokens:,}"
                )
            placed.append(after)
    return placed, tuple(by_sample)


def stage_at(stages: Sequence[Stage], samples: int) -> int:
    """Return the index of the stage of the step that starts after `samples` samples."""
    return max(i for i, stage in enumerate(stages) if stage.first_sample <= samples)


def begun(stages: Sequence[Stage], samples: int) -> list[Stage]:
    """Return the stages that begin within the first `samples` samples."""
    return [stage for stage in stages if stage.first_sample < samples]


def tokens_at(config: Config, samples: int) -> int:
    """Return the number of tokens in the first `samples` samples."""
    if not config.stages:
        return samples * config.model.seq_length
    stage = config.stages[stage_at(config.stages, samples)]
    return stage.first_token + (samples - stage.first_sample) * stage.length


def name_at(config: Config, samples: int) -> str:
    """Return the name of the stage of the step after `samples` samples, "" without stages."""
    return config.stages[stage_at(config.stages, samples)].name if config.stages else ""


def waits_for(config: Config, samples: int) -> Stage | None:
    """Return the stage of the step after `samples` samples if this process cannot run it.

    It cannot if the stage has another sequence length or other rotary settings. Else None.
    """
    if not config.stages:
        return None
    stage = config.stages[stage_at(config.stages, samples)]
    return stage if stage.settings != settings_of(config) else None


def stage_of(config: Config) -> int:
    """Return the index of the first stage that this process can run."""
    mine = settings_of(config)
    return next(i for i, stage in enumerate(config.stages) if stage.settings == mine)


def settings_of(config: Config) -> tuple[tuple[str, Any], ...]:
    """Return (field, value in this process) for each field that a stage may set."""
    return tuple((name, getattr(config.model, name)) for name in (LENGTH, *ROPE))


def saved_settings(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return {field: value} of the same fields in a checkpoint's settings, else the defaults."""
    names = {name: f"model.{name}" for name in (LENGTH, *ROPE)}
    return {name: flat.get(key, SETTINGS[key].default) for name, key in names.items()}


def record(stages: Sequence[Stage], corpora: Sequence[str]) -> list[dict[str, Any]]:
    """Return the stages as stored in a checkpoint. corpora: the digest of each stage's data."""
    return [
        {
            "name": stage.name,
            "start_tokens": stage.start_tokens,
            "first_sample": stage.first_sample,
            "corpus": corpus,
            **dict(stage.settings),
        }
        for stage, corpus in zip(stages, corpora, strict=True)
    ]
