# SPDX-License-Identifier: Apache-2.0
"""Say what an optimizer of full matrices does in a run: which parameters, owners, bytes, FLOPs.

A run asks the same plan (mpu/optim/owners.py), so the bytes are those of a trace. `lines` is for a
start and for a dry run.
"""

from collections.abc import Sequence
from functools import lru_cache

from estimate import rank_memory
from estimate.model_profile import ModelProvider, grid_of
from mpu.grid import DATA
from mpu.optim.interface import UpdateRule, rules_of
from mpu.optim.muon import Muon
from mpu.optim.owners import Plan, members_of, plan_of
from mpu.param import model_group
from training.config import Config, UsageError
from training.update_rules import optimizer_groups


@lru_cache(maxsize=16)
def plans(config: Config, provider: ModelProvider, pp_rank: int = 0) -> dict[UpdateRule, Plan]:
    """Return the owners of matrices of a pipeline rank, for each rule of full matrices.

    Raises UsageError where a parameter is no matrix, or its sections are not known.
    """
    groups, found = optimizer_groups(config), dict[UpdateRule, Plan]()
    rules = [rule for rule in rules_of(groups) if rule.needs_full_matrices]
    if not rules:
        return found
    named = rank_memory.parameters(config, provider, pp_rank)
    placements = {name: (p.place, p.shape) for name, p in named.items()}
    members = members_of(grid_of(config, pp_rank))
    flats = rank_memory.trained(config, provider, pp_rank)
    for rule in rules:
        of_rule = {name for name, group in groups.items() if group.rule == rule}
        try:
            found[rule] = plan_of(flats, placements, of_rule, rule.split, members)
        except ValueError as error:
            raise UsageError(f"--optimizer {config.optimizer.optimizer}: {error}") from None
    return found


def check(config: Config, provider: ModelProvider) -> None:
    """Raise UsageError where the optimizer needs matrices that the model does not name."""
    sizes = config.model
    heads = sizes.num_attention_heads + 2 * (sizes.num_query_groups or sizes.num_attention_heads)
    for rank in range(config.parallel.pipeline_model_parallel_size):
        for rule, plan in plans(config, provider, rank).items():
            planned = {matrix.parameter for matrix in plan.matrices}
            every = rank_memory.parameters(config, provider, rank)
            named = {name: p for name, p in every.items() if name in planned}
            if not rule.split.qkv or any(p.place.qkv for p in named.values()):
                continue
            rows = heads * (sizes.kv_channels or sizes.hidden_size // sizes.num_attention_heads)
            for name, p in named.items():
                if p.place.shape == (rows, sizes.hidden_size) and len(p.place.sections) < 2:
                    raise UsageError(
                        f"--optimizer {config.optimizer.optimizer}: {name}, of shape "
                        f"{list(p.place.shape)}, has as many rows as queries, keys and values "
                        "together, and its Placement names no sections: make it by qkv_linear "
                        "(mpu/layers/qkv.py), or give --muon-no-split-qkv"
                    )


def lines(config: Config, provider: ModelProvider) -> list[str]:
    """Return which parameters go where, the owners' load, and what the flags of Muon come to.

    Of parameters that train, as a run has no others to update.
    """
    groups = optimizer_groups(config)
    if not any(rule.needs_full_matrices for rule in rules_of(groups)):
        return []
    names: dict[tuple[str, str], dict[str, int]] = {}
    found = []
    for rank in range(config.parallel.pipeline_model_parallel_size):
        for rule, plan in plans(config, provider, rank).items():
            found.append((rank, rule, plan))
            labels: dict[str, list[str]] = {}
            for matrix in plan.matrices:
                labels.setdefault(matrix.parameter, []).append(matrix.label)
            for name, own in labels.items():
                _count(names, (rule.name, "matrix"), name, own)
        for name, p in rank_memory.parameters(config, provider, rank).items():
            group = groups[p.entry.group]
            if not p.frozen and not group.rule.needs_full_matrices:
                kind = model_group(p.entry.group).partition("_")[0]
                _count(names, (group.rule.name, kind), name, [""])
    out = []
    for (rule_name, kind), counts in names.items():
        listed = ", ".join(name + f" x {n}" * (n > 1) for name, n in counts.items())
        out.append(f"{rule_name}, group {kind}: {listed}")
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
    """Return the line of one pipeline rank: its matrices, and the fullest owner's share of work."""
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
