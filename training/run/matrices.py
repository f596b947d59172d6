# SPDX-License-Identifier: Apache-2.0
"""Describe an optimizer of full matrices in a run: its parameters, and the owners' load."""

from collections.abc import Iterator, Sequence

from mpu.grid import DATA, Grid
from mpu.optim.interface import UpdateRule, rules_of
from mpu.optim.muon import Muon
from mpu.optim.optimizer import Optimizer
from mpu.optim.owners import FullMatrix, Plan, matrices_of
from mpu.param import model_group
from training.run.model_profile import ModelProvider, ParameterProfile, rank_parameters
from training.run.pipeline_stages import rank_stages
from training.settings.config import Config, UsageError
from training.settings.update_rules import optimizer_groups

Planned = tuple[UpdateRule, str, ParameterProfile, list[FullMatrix]]


def _planned(config: Config, provider: ModelProvider) -> Iterator[Planned]:
    """Yield (rule, name, profile, matrices) of each trained parameter of each pipeline rank.

    A parameter that a vector rule updates has no matrices. Raises UsageError if a parameter is
    not a matrix, or its sections are not known.
    """
    groups = optimizer_groups(config)
    for rank in range(config.parallel.pipeline_model_parallel_size):
        stages = rank_stages(config, provider, rank)
        for name, p in rank_parameters(config, provider, stages, rank).items():
            rule, group = groups[p.entry.group].rule, p.entry.group
            made: list[FullMatrix] = []
            if rule.needs_full_matrices and not p.frozen:
                try:
                    made = matrices_of(name, p.place, p.shape, rule.split, group)
                except ValueError as error:
                    text = f"--optimizer {config.optimizer.optimizer}: {error}"
                    raise UsageError(text) from None
            if not p.frozen:
                yield rule, name, p, made


def _any_rule(config: Config) -> bool:
    """Return whether any update rule needs full matrices."""
    return any(rule.needs_full_matrices for rule in rules_of(optimizer_groups(config)))


def check(config: Config, provider: ModelProvider) -> None:
    """Raise UsageError if the optimizer splits QKV weights and the model names no sections."""
    if not _any_rule(config):
        return
    sizes = config.model
    heads = sizes.num_attention_heads + 2 * (sizes.num_query_groups or sizes.num_attention_heads)
    rows = heads * (sizes.kv_channels or sizes.hidden_size // sizes.num_attention_heads)
    found = [(rule, name, p) for rule, name, p, made in _planned(config, provider) if made]
    if any(p.place.qkv for _, _, p in found):
        return
    for rule, name, p in found:
        fused = p.place.shape == (rows, sizes.hidden_size) and len(p.place.sections) < 2
        if rule.split.qkv and fused:
            raise UsageError(
                f"--optimizer {config.optimizer.optimizer}: {name}, of shape "
                f"{list(p.place.shape)}, looks like a fused QKV weight, but its Placement has no "
                "sections: create it with qkv_linear (mpu/layers/qkv.py), or give "
                "--muon-no-split-qkv"
            )


def lines(
    config: Config, provider: ModelProvider, ranks: Sequence[tuple[Grid, Optimizer]]
) -> list[str]:
    """Return lines on the parameters of each rule, the owners' load, and the scale of Muon.

    Frozen parameters are left out. ranks: grids and optimizers of the pipeline ranks whose load is
    known.
    """
    if not _any_rule(config):
        return []
    names: dict[tuple[str, str], dict[str, int]] = {}
    for rule, name, p, made in _planned(config, provider):
        kind = "matrix" if made else model_group(p.entry.group).partition("_")[0]
        labels = [matrix.label for matrix in made] or [""]
        _count(names, (rule.name, kind), name, labels)
    out = []
    for (rule_name, kind), counts in sorted(names.items(), key=lambda item: item[0][1] != "matrix"):
        listed = ", ".join(name + f" x {n}" * (n > 1) for name, n in counts.items())
        out.append(f"{rule_name}, group {kind}: {listed}")
    found = [
        (grid.pp.rank, rule, plan)
        for grid, optimizer in ranks for rule, plan in optimizer.plans.items()
    ]  # fmt: skip
    out += [_load(config, rank, rule, plan) for rank, rule, plan in found]
    return [*out, *_scale(found)]


def _count(
    names: dict[tuple[str, str], dict[str, int]],
    key: tuple[str, str],
    name: str,
    labels: Sequence[str],
) -> None:
    starred = ".".join("*" if part.isdigit() else part for part in name.split("."))
    if labels != [""]:
        some = labels if len(labels) <= 4 else [*labels[:2], "...", labels[-1]]
        starred += f"[{', '.join(some)}]"
    own = names.setdefault(key, {})
    own[starred] = own.get(starred, 0) + 1


def _load(config: Config, rank: int, rule: UpdateRule, plan: Plan) -> str:
    """Return a line on one pipeline rank: its number of matrices, and the fullest owner's load."""
    loads = [0] * max(len(members) for members in plan.members.values())
    for load in plan.loads.values():
        for i, work in enumerate(load):
            loads[i] += work
    used = {cut for cut in DATA if cut in plan.cuts}
    count = max((len(plan.members[cut]) for cut in used), default=1)
    even = sum(loads) / count
    at = f"pipeline rank {rank}: " if config.parallel.pipeline_model_parallel_size > 1 else ""
    line = f"{at}{rule.name} has {len(plan.matrices):,} matrices"
    if count == 1 or not even:  # a stage may have no layers
        return line
    more = 100 * (max(loads) / even - 1)
    return f"{line} on {count:,} ranks; the fullest has {more:.1f} % more than an even share"


def _scale(found: Sequence[tuple[int, UpdateRule, Plan]]) -> list[str]:
    rule = next((rule for _, rule, _ in found if isinstance(rule, Muon)), None)
    if rule is None or rule.scale_mode != "spectral":
        return []
    if rule.extra_scale == 0.2:
        return ["Muon's scale is 0.2 x spectral: torch.optim.Muon's match_rms_adamw"]
    return [
        f"Muon's scale is {rule.extra_scale:g} x spectral; --muon-extra-scale-factor 0.2 would be "
        f"match_rms_adamw, an update {rule.extra_scale / 0.2:g} times smaller, whose RMS is "
        "about AdamW's"
    ]
