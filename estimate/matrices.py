# SPDX-License-Identifier: Apache-2.0
"""Say what an optimizer of full matrices does in a run: which parameters, owners, bytes, FLOPs.

A run asks the same plan (mpu/optim/owners.py), so the bytes are those of a trace. `lines` is for a
start and for a dry run.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from estimate import rank_memory
from estimate.model_profile import ModelProvider, grid_of
from mpu.grid import DATA, Grid
from mpu.optim.interface import UpdateRule, rules_of
from mpu.optim.muon import Muon
from mpu.optim.owners import Plan, Round, members_of, plan_of
from mpu.param import model_group
from training.config import Config, UsageError
from training.layer_options import accumulate_dtype
from training.update_rules import optimizer_groups


class Exchange(NamedTuple):
    """One all-to-all of a rank: its bytes, and those of them that leave the rank."""

    axis: str
    bucket: int
    bytes: int
    sent: int


def plans(
    config: Config, provider: ModelProvider, pp_rank: int = 0, frozen: bool = False
) -> dict[UpdateRule, Plan]:
    """Return the owners of matrices of a pipeline rank, for each rule of full matrices.

    frozen: leave out frozen parameters, as a run does; else they count as trained. Raises
    UsageError where a parameter is no matrix, or its sections are not known.
    """
    return _plans(config, provider, pp_rank, frozen)


@lru_cache(maxsize=16)
def _plans(
    config: Config, provider: ModelProvider, pp_rank: int, frozen: bool
) -> dict[UpdateRule, Plan]:
    groups, found = optimizer_groups(config), dict[UpdateRule, Plan]()
    rules = [rule for rule in rules_of(groups) if rule.needs_full_matrices]
    if not rules:
        return found
    named = rank_memory.parameters(config, provider, pp_rank)
    placements = {name: (p.place, p.shape) for name, p in named.items()}
    members = members_of(grid_of(config, pp_rank))
    flats = rank_memory.flats(config, provider, pp_rank, frozen)
    flats = [flat for flat in flats if not flat.frozen]
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


def exchanges(
    config: Config, provider: ModelProvider, pp_rank: int, grid: Grid
) -> Iterator[Exchange]:
    """Yield what a rank of a grid sends for its optimizer: matrices to owners, and updates back."""
    for rule, plan in plans(config, provider, pp_rank).items():
        size = rule.wire(accumulate_dtype(config)).itemsize
        for round_ in plan.rounds:
            axis = grid.instance(round_.cut)
            for splits in (plan.splits(round_, axis.rank), plan.back(round_, axis.rank)):
                total = sum(splits.input)
                sent = total - splits.input[axis.rank]
                yield Exchange(axis.name, round_.bucket, total * size, sent * size)


def memory(
    config: Config,
    provider: ModelProvider,
    pp_rank: int,
    grid: Grid | None = None,
    frozen: bool = False,
) -> int:
    """Return the most bytes that an update has of matrices on a rank, beside its state.

    grid: the rank's; None: of the rank that has most. frozen: as `plans` takes it. It is
    a walk through MatrixUpdater.step (mpu/optim/matrix_exchange.py).
    """
    acc, most = accumulate_dtype(config).itemsize, 0
    for rule, plan in plans(config, provider, pp_rank, frozen).items():
        members = {round_.cut: len(plan.members[round_.cut]) for round_ in plan.rounds}
        if not members:
            continue  # a stage without layers
        everyone = [dict.fromkeys(members, n) for n in range(max(members.values()))]
        if len({*members.values()}) > 1:  # other ranks share the parameters of the other axis
            everyone = [{c: n % size for c, size in members.items()} for n in range(len(everyone))]
        if grid is not None:
            everyone = [{cut: grid.instance(cut).rank for cut in members}]
        item = rule.wire(accumulate_dtype(config)).itemsize
        most = max([most, *(_walk(rule, plan, me, item, acc) for me in everyone)])
    return most


def _walk(rule: UpdateRule, plan: Plan, me: Mapping[str, int], item: int, acc: int) -> int:
    """Return the most bytes of matrices on one member. me: its place, by the cutting axis.

    A bucket's slices come (`came`) while what left for the next bucket is kept until it is there
    (`left`). Its matrices are made one by one, each from a copy of its parts; updates are kept
    until the next bucket has its own, and what travels back until all are done: what left until it
    is waited for, what came until the end.
    """
    kept = before = 0  # bytes of what travels back; of the last bucket's updates
    rounds, ends = plan.rounds, list[tuple[int, int]]()
    sends = [_leaving(rule, plan, round_, me[round_.cut], item, acc) for round_ in rounds]
    most = sends[0][0]  # the others' slices leave before the round ahead of them
    for round_, (_, left, came), following in zip(
        rounds, sends, [*sends[1:], (0, 0, 0)], strict=True
    ):
        place = me[round_.cut]
        alone = len(plan.members[round_.cut]) == 1  # nothing travels: what arrives is what left
        now = kept + before + came
        most = max(most, now + (0 if alone else left) + following[0])
        now += following[1] + (0 if alone else following[2])
        mine = [n for n in round_.matrices if plan.owners[n] == place]
        made = copies = 0
        for number in mine:
            m = plan.matrices[number]
            size, gram = m.rows * m.columns, min(m.rows, m.columns) ** 2
            most = max(most, now + made + item * (4 * size + 2 * gram))
            made += item * size
            copies += item * sum(part.high - part.low for part in m.parts)
        back = plan.back(round_, place)
        out, come = item * sum(back.input), item * sum(back.output) * (not alone)
        most = max(most, now - before + made + out + max(copies, come))
        kept, before = kept + out + come, made
        ends.append((0 if alone else out, _largest(plan, round_, place)))
    for n, (out, largest) in enumerate(ends, 1):  # a bucket's updates are there, and are made
        kept -= out if n < len(ends) else 0  # what left of the last one has a name until the end
        most = max(most, kept + before + largest * (acc + acc * (item != acc)))
    return most


def _leaving(
    rule: UpdateRule, plan: Plan, round_: Round, me: int, item: int, acc: int
) -> tuple[int, int, int]:
    """Return the most bytes while a bucket's slices leave, those that leave, and those that come.

    A rule prepares slices in the masters' dtype, one by one, and keeps them until all have left.
    """
    there, members = plan.splits(round_, me), plan.members[round_.cut]
    slices: dict[str, int] = {}
    for number in round_.matrices:
        matrix = plan.matrices[number]
        low, high = plan.range_of(matrix, members[me])
        slices[matrix.parameter] = slices.get(matrix.parameter, 0) + high - low
    last = [size for size in slices.values() if size][-1:] or [0]
    more = 1 + (isinstance(rule, Muon) and rule.nesterov)  # its gradient, and the new momentum
    left, came = item * sum(there.input), item * sum(there.output)
    ready = acc * (sum(slices.values()) + more * last[0])
    return ready + left + (came if len(members) > 1 else 0), left, came


def _largest(plan: Plan, round_: Round, me: int) -> int:
    """Return the elements of the largest slice of a matrix of a bucket that a member holds."""
    member = plan.members[round_.cut][me]
    ranges = (plan.range_of(plan.matrices[n], member) for n in round_.matrices)
    return max((high - low for low, high in ranges), default=0)


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
        for rule, plan in plans(config, provider, rank, frozen=True).items():
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
    most = max(memory(config, provider, rank, frozen=True) for rank, _, _ in found)
    out += [_load(config, rank, rule, plan) for rank, rule, plan in found]
    moving = f"an update has at most {most / 1e6:,.1f} MB of matrices on a rank, besides the state"
    return [*out, moving, *_scale(found)]


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
