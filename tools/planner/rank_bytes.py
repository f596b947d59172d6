# SPDX-License-Identifier: Apache-2.0
"""Tell the bytes of layouts' pipeline ranks: of many at once, and of a few as --dry-run does.

`many` measures a layer, the first stage and the last one once for each tp, on meta tensors
(estimate/rank_profile.py), and multiplies. `exactly` is --dry-run's own arithmetic, rank by
rank; only the profile of a stage of many layers is told from those of two and of three.
"""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, fields, replace
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

import pretrain_llama
from estimate import activations
from estimate.buffers import matmul_workspaces
from estimate.dry_run import memories
from estimate.model_profile import rank_parameters
from estimate.rank_memory import NORM_BYTES
from estimate.rank_profile import RankProfile, StageProfile, rank_profile
from estimate.stages import rank_stages
from mpu.optim.interface import state_bytes
from mpu.pipeline.layout import Stage
from mpu.zero.layout import BLOCK, automatic_size
from tools.planner.layout import RECOMPUTE_FLAGS, Layout
from tools.planner.model import REST, Model, last_of_each
from tools.planner.runs import Array, Runs
from training import batch_size
from training.config import Config
from training.flags.parse import parse
from training.optimizer import optimizer_groups
from training.schedule import recomputed_layers, schedule_of

PROVIDER = pretrain_llama.model_provider
FEW, MORE = 2, 3  # layers from which a stage of any number is told
SOME = 3  # layers, and one more, from which a rank without a pipeline is told
Kinds = dict[str, float]  # bytes by kind of memory, as --dry-run names them
BUCKETS = 2 * 40_000_000  # elements of whole gradients at ZeRO stages 2 and 3 (mpu/zero/layout.py)


class Unit(NamedTuple):
    """Bytes of a rank for a micro-batch of one sequence, at a tp and a recomputation, cp 1.

    layer: kept of each layer. again: what B keeps of one layer that it recomputes. logits. first:
    what the first stage keeps beside its layers. working, end_working: of one operation, of a
    middle stage and of the last; more, end_more: for each sequence more.
    """

    layer: float
    again: float
    logits: float
    first: float
    working: float
    end_working: float
    more: float
    end_more: float


class Sizes(NamedTuple):
    """What does not depend on the recomputation: numbers of a layer and of both ends, at a tp.

    waits: bytes that a layer keeps from B to W, where the schedule separates them.
    """

    layer: float
    embedding: float
    head: float
    waits: float


def _config(flags: tuple[str, ...], tp: int, more: str) -> Config:
    argv = [*flags, *REST.split(), "--num-layers", "8", "--tensor-model-parallel-size", str(tp),
            "--pipeline-model-parallel-size", "2", *["--sequence-parallel"] * (tp > 1),
            "--micro-batch-size", "1", "--global-batch-size", "4", *more.split()]  # fmt: skip
    return parse(last_of_each(argv), 2 * tp)


def _profiled(config: Config, stage: Stage, split: bool = False) -> StageProfile:
    return rank_profile(config, PROVIDER, (stage,), int(stage.loss), split).stages[0]


@lru_cache(maxsize=256)
def unit(flags: tuple[str, ...], tp: int, recompute: str, dtype: str) -> Unit:
    """Return what is measured at a tp and a recomputation: "none", "selective" or "full"."""
    low = "" if dtype == "bf16" else f" --fp8-format hybrid --fp8-recipe {dtype}"
    config = _config(flags, tp, RECOMPUTE_FLAGS[recompute] + low)
    one, two = (_profiled(config, Stage(1, n)) for n in (2, 3))
    if recompute != "none":  # the ends do not depend on it
        ends = unit(flags, tp, "none", dtype)
        return ends._replace(
            layer=two.for_b - one.for_b, again=max(two.again, one.again),
            working=one.working, end_working=max(one.working, ends.end_working),
        )  # fmt: skip
    first, last = _profiled(config, Stage(0, 1, embedding=True)), _profiled(config, LAST)
    twice = replace(config, batch=replace(config.batch, micro_batch_size=2))
    both = [_profiled(twice, stage) for stage in (Stage(1, 2), LAST)]
    layer = two.for_b - one.for_b
    return Unit(
        layer=layer, again=0.0, logits=last.logits, first=first.for_b - layer,
        working=one.working, end_working=last.working, more=both[0].working - one.working,
        end_more=both[1].working - last.working,
    )  # fmt: skip


LAST = Stage(7, 8, loss=True)


@lru_cache(maxsize=64)
def sizes(flags: tuple[str, ...], tp: int) -> Sizes:
    """Return the numbers of a layer and of both ends at a tp, and what waits for W."""
    config = _config(flags, tp, "")

    def numbers(stage: Stage) -> int:
        found = rank_parameters(config, PROVIDER, (stage,), int(stage.loss))
        return sum(each.entry.numel for each in found.values())

    layer = numbers(Stage(1, 2))
    ends = [numbers(stage) - layer for stage in (Stage(0, 1, embedding=True), LAST)]
    return Sizes(layer, ends[0], ends[1], _profiled(config, Stage(1, 2), split=True).for_w)


def many(model: Model, found: Sequence[Layout], runs: Runs, host: float) -> Array:
    """Return the bytes of each layout's fullest rank, to a few percent of --dry-run's.

    host: bytes of a node's host memory for activations; a layout that needs more takes infinitely.
    """
    told = np.zeros(len(found))
    key = [(e.tp, e.recompute, e.dtype, e.offload) for e in found]
    order = sorted(range(len(found)), key=lambda n: (key[n], found[n].pp, found[n].virtual))
    groups = groupby(order, key=lambda n: (key[n], found[n].pp, found[n].virtual))
    for _, members in groups:
        at = np.array(list(members))
        told[at] = _group(model, [found[n] for n in at], runs[at], host)
    return told


def _group(model: Model, found: Sequence[Layout], r: Runs, host: float) -> Array:
    """Return the bytes of layouts with the same tp, recomputation, pipeline ranks and chunks."""
    e = found[0]
    own = sizes(model.flags, e.tp)
    kind = "full" if e.recompute == "block" else e.recompute
    u, plain = unit(model.flags, e.tp, kind, e.dtype), unit(model.flags, e.tp, "none", e.dtype)
    ranks = np.arange(e.pp)[None, :]
    layers = r.by_rank(r.cut)[:, : e.pp]
    stage = np.arange(r.cut.shape[1])[None, :]
    last = r.by_rank(np.broadcast_to(stage == e.pp * e.virtual - 1, r.cut.shape) * 1.0)[:, : e.pp]
    first = (ranks == 0) * np.ones_like(last)
    ends = first * own.embedding + last * own.head
    both = (r.tied > 0)[:, None] * first * last
    numbers = layers * own.layer + ends - both * own.head
    shard = (r.dp * r.cp)[:, None]
    zero = r.zero[:, None]
    whole = np.minimum(numbers, BUCKETS) * 4
    state = np.where(zero == 0, 18 * numbers, (6 + 12 / shard) * numbers)
    state = np.where(zero == 2, (2 + 16 / shard) * numbers + whole, state)
    gathered = 2 * (2 * own.layer + (own.embedding + own.head) * 0.5)
    state = np.where(zero >= 3, 18 / shard * numbers + whole + gathered, state)
    b = (r.micro_batch / r.cp)[:, None]
    held = waiting(found, r)
    kept = held * u.layer
    if e.recompute == "block":
        share = np.array([min(x.again * x.virtual, 1e9) for x in found])[:, None] / layers.clip(1)
        share = np.minimum(share, 1.0)
        kept = held * (share * u.layer + (1 - share) * plain.layer)
    if e.offload:
        away = (b * held * u.layer * r.node[:, None]).max(1)
        stay = held / np.maximum(layers / e.virtual, 1)  # the last layer of each stage
        kept = np.minimum(held, stay + 2) * u.layer
    flight = held / np.maximum(layers, 1)
    kept = kept + first * flight * u.first * (layers > 0)
    if e.split:
        late = ranks / e.pp if e.schedule == "zb-h1" else 0.5  # of them that wait for W
        kept = np.maximum(kept, (1 - late) * kept + late * held * own.waits)
    logits = last * u.logits
    work = np.where(last > 0, u.end_working + (b - 1) * u.end_more,
                    u.working + (b - 1) * u.more)  # fmt: skip
    told = np.asarray((state + b * (kept + u.again + logits) + work).max(1))
    told += matmul_workspaces(model.config)
    return np.where(away > host, np.inf, told) if e.offload else told


def waiting(found: Sequence[Layout], r: Runs) -> Array:
    """Return [runs, ranks]: layers of micro-batches in flight at each rank's fullest moment."""
    e = found[0]
    rank = np.arange(e.pp)[None, :]
    layers = r.by_rank(r.cut)[:, : e.pp] / e.virtual
    total = (r.micro_batches * r.virtual)[:, None]
    chunks = np.array([_in_flight(x) for x in found])[:, None]
    one = np.where(chunks > 0, chunks, e.pp - rank if e.virtual == 1 else
                   2 * (e.pp - rank - 1) + (e.virtual - 1) * e.pp + 1)  # fmt: skip
    return np.asarray(np.minimum(one, total) * layers)


def _in_flight(e: Layout) -> int:
    """Return the chunks that any rank of a split schedule holds; 0 where it depends on the rank."""
    return {"zb-h1": e.pp, "zb-v": 2 * e.pp, "v-half": 2 * ((e.pp + 2) // 2)}.get(e.schedule, 0)


class Exact(NamedTuple):
    """The bytes of a pipeline rank: on the device by kind, and what it keeps in host memory."""

    kinds: Kinds
    in_host: float


def exactly(model: Model, each: Layout) -> list[Exact]:
    """Return the bytes of each pipeline rank, as --dry-run has them but for buckets' padding.

    A pipeline is told of one data-parallel rank, and its state is shared among all by arithmetic.
    """
    words = shlex.split(" ".join([*model.flags, each.flags()]))
    if each.pp == 1:
        return [_alone(parse([*words, *REST.split()], each.tp * each.cp * each.dp))]
    few = min(each.micro_batches, 4 * each.pp)  # more are never in flight at once
    one = replace(each, dp=1, zero=0, each=False, micro_batches=few)
    words = shlex.split(" ".join([*model.flags, one.flags()]))
    config = parse([*words, *REST.split()], each.tp * each.cp * each.pp)

    def profiles(rank: int) -> list[StageProfile]:
        own = rank_stages(config, PROVIDER, rank)
        return [stage_profile(config, stage, rank, each.split) for stage in own]

    held = activations.held(config, PROVIDER, profiles)
    own, tied = sizes(model.flags, each.tp), not config.model.untie_embeddings_and_output_weights
    shard = each.dp * each.cp if each.zero else 1
    of_state = max(state_bytes(optimizer_groups(config), torch.float32).values())
    told = []
    for rank, kept in enumerate(held):
        stages = rank_stages(config, PROVIDER, rank)
        first, last = (any(getattr(s, end) for s in stages) for end in ("embedding", "loss"))
        numbers = own.layer * sum(len(s.layers) for s in stages)
        numbers += own.embedding * first + own.head * last - own.embedding * (tied and first * last)
        kinds: Kinds = {
            "parameters": 2 * numbers, "gradients": 4 * numbers, "masters": 4 * numbers / shard,
            "moments": of_state * numbers / shard, "norm's index": numbers / BLOCK * NORM_BYTES,
            "tied look-ups": 4 * own.embedding * (tied and first * last),
            "activations": kept.activations, "logits": kept.logits,
            "working memory": kept.working, "offloaded": kept.under_way,
            "workspaces": matmul_workspaces(config),
        }  # fmt: skip
        told.append(Exact(kinds, kept.in_host))
    return told


def _alone(config: Config) -> Exact:
    """Return the bytes of a rank without a pipeline: on a line in the number of layers."""
    p, layers = config.parallel, config.model.num_layers
    whole = Stage(0, layers, embedding=True, loss=True)
    again = recomputed_layers(config, whole)
    one = _numbers(config, SOME + 1) - _numbers(config, SOME)
    largest = _numbers(config, SOME) + (layers - SOME) * one
    size = p.ddp_bucket_size or automatic_size(largest)

    names = list[str]()

    def of(count: int, again: int) -> Array:
        """Return [moments, kinds and what is in host memory], and fill names."""
        block = p.recompute_method == "block"
        own = replace(p, ddp_bucket_size=size)
        own = replace(own, recompute_num_layers=again) if block else own
        model = replace(config.model, num_layers=count)
        asked = replace(config, model=model, parallel=own)
        (held,) = activations.held(asked, PROVIDER)
        every = memories(asked, PROVIDER, 0, held)
        names[:] = every[0]
        return np.array([[*(float(kinds[n]) for n in names), held.in_host] for kinds in every])

    if layers <= SOME + 1 or (p.zero >= 2 and one < size):  # layers that share a bucket: no line
        told = of(layers, again)
    elif p.recompute_method != "block":
        low = of(SOME, 0)
        told = low + (layers - SOME) * (of(SOME + 1, 0) - low)
    else:
        base = of(SOME, 1)
        plain, more = of(SOME + 1, 1) - base, of(SOME + 1, 2) - base
        told = base + (layers - again - SOME + 1) * plain + (again - 1) * more
    *kinds, in_host = map(float, told[told.sum(1).argmax()])
    return Exact(dict(zip(names, kinds, strict=True)), in_host)


def _numbers(config: Config, layers: int) -> int:
    config = replace(config, model=replace(config.model, num_layers=layers))
    whole = Stage(0, layers, embedding=True, loss=True)
    found = rank_parameters(config, PROVIDER, (whole,), 0)
    return sum(each.entry.numel for each in found.values())


def stage_profile(config: Config, stage: Stage, rank: int, split: bool) -> StageProfile:
    """Return what a stage keeps and sends; of many layers, from stages of FEW and MORE."""
    total = config.model.num_layers

    def of(layers: int, again: int = 0) -> StageProfile:
        first = total - layers if stage.loss else int(not stage.embedding)
        p = config.parallel
        if again:
            p = replace(p, recompute_num_layers=again)
        part = Stage(first, first + layers, stage.embedding, stage.loss)
        asked = replace(config, parallel=p)
        return rank_profile(asked, PROVIDER, (part,), rank, split).stages[0]

    ends = stage.embedding or stage.loss
    rank = rank if ends else 1  # of the others one is like another
    count, again = len(stage.layers), recomputed_layers(config, stage)
    if total <= MORE + 1:
        return rank_profile(config, PROVIDER, (stage,), rank, split).stages[0]
    if count <= MORE:
        return of(count)
    if config.parallel.recompute_method != "block":
        return _line(of(FEW), of(MORE), [(of(MORE), of(FEW), count - MORE)])
    base, plain = of(FEW, 1), of(MORE, 1)
    return _line(base, base, [(plain, base, count - again - 1), (of(MORE, 2), base, again - 1)])


def rank_profile_of(config: Config, rank: int) -> RankProfile:
    """Return what a pipeline rank sends, from stages of few layers where all layers are alike."""
    several = len(set(config.parallel.cp_comm_type)) > 1 or config.float8.fp8_format is not None
    if several or config.parallel.pipeline_model_parallel_size == 1:
        return activations.profile(config, PROVIDER, rank)
    split = schedule_of(config, batch_size.micro_batches(config, 0)).split
    own = rank_stages(config, PROVIDER, rank)
    found = tuple(stage_profile(config, stage, rank, split) for stage in own)
    return RankProfile(found, (), (), frozenset(), (), 0)


def _line(
    low: StageProfile, base: StageProfile, steps: Sequence[tuple[StageProfile, StageProfile, int]]
) -> StageProfile:
    """Return base plus, for each step, so many times the difference of its two profiles."""
    names = [field.name for field in fields(StageProfile) if field.name != "collectives"]
    values = dict(zip(names, astuple(base), strict=False))
    sent = Counter(base.collectives)
    for more, less, times in steps:
        for name in names:
            values[name] += times * (getattr(more, name) - getattr(less, name))
        for each, count in Counter(more.collectives).items():
            sent[each] += times * count
        for each, count in Counter(less.collectives).items():
            sent[each] -= times * count
    return replace(low, **values, collectives=tuple(sent.elements()))
