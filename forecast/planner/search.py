# SPDX-License-Identifier: Apache-2.0
"""Estimate time and memory of every layout of a model on a cluster, and record the best ones.

layout.py lists the layouts, rank_bytes.py estimates their memory, step_time.py their time. Printed
numbers are not estimates but come from recordings (recorded.py). --cp-comm-type and
--tp-comm-overlap are chosen once for each tp, cp and micro-batch size, so that a layer takes the
least time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from forecast.device_file import read_device
from forecast.planner.cluster import Cluster
from forecast.planner.constants import own
from forecast.planner.layout import (
    MICRO_BATCHES,
    Choice,
    Layout,
    choices,
    float8_flags,
    grids,
    layouts,
)
from forecast.planner.model import Model
from forecast.planner.pipeline import SCHEDULES, paired
from forecast.planner.rank_bytes import many, of_layers, sizes
from forecast.planner.recorded import Recorded
from forecast.planner.runs import COMMS, DISPATCHERS, Array, Runs
from forecast.planner.step_time import (
    Constants,
    Times,
    carried,
    host_layer,
    layer,
    updated_on_host,
)
from forecast.planner.step_time import times as times_of_runs
from forecast.planner.units import unit_config
from mpu.layers.float8.cuda import CAPABLE, lacks
from mpu.pipeline import stage_layout
from training.run.waiting import Progress
from training.settings.config import UsageError

NEARLY = 1.1  # layouts with estimates up to this factor above the limit are recorded, too
LOOKED = 25  # most recordings of layouts that turn out not to fit
# median error of a comparison of two layouts, as benchmarks/plan_accuracy.py prints it
COMPARISON_ERROR = 0.048
RISK = 0.05  # share of a GPU's memory; a plan that leaves less is risky
SPARE = 0.1  # share of a GPU's memory; a slower layout that leaves this much more is of interest


class PlanError(ValueError):
    """The requested plan does not exist. The message has the reason."""


@dataclass(frozen=True)
class Plans:
    """Layouts and their predictions, in the same order.

    bytes: of the fullest rank, to a few percent. progress: counts the layouts found by `chosen`.
    """

    model: Model
    cluster: Cluster
    layouts: list[Layout]
    runs: Runs
    times: Times
    bytes: Array
    progress: Progress = field(default_factory=Progress, compare=False)

    @property
    def limit(self) -> float:
        """Return the bytes of a GPU's memory that are available to a plan."""
        return self.cluster.limit

    @property
    def fits(self) -> npt.NDArray[np.bool_]:
        return self.bytes <= self.limit

    @cached_property
    def _known(self) -> dict[int, Recorded]:
        return {}

    def recorded(self, n: int) -> Recorded:
        """Return layout n for recording."""
        if n not in self._known:
            each = self.layouts[n]
            self._known[n] = Recorded(self.model, self.cluster, each.flags(), each.mechanisms)
        return self._known[n]

    def chosen(self, top: int) -> Iterator[Recorded]:
        """Yield `top` layouts that fit: the fastest by the estimates, then the fastest ones with an
        advantage over each one before.

        An advantage is fewer mechanisms, SPARE more of the memory free, or at least RISK of it free
        where the other leaves less. If there are not enough of these, the fastest others follow.
        """
        order = np.lexsort((self.bytes, self.times.step))
        near = [int(n) for n in order if self.bytes[n] <= NEARLY * self.limit]
        self.progress.begin("computing the memory of the fastest layouts:", top, "layouts")
        found, others, failures = list[int](), list[int](), 0
        for n in near:
            if len(found) == top:
                return
            if not all(self._has_advantage(n, m) for m in found):
                others.append(n)
            elif failures == LOOKED and not self.fits[n]:
                continue
            elif self._takes(n, found):
                yield self.recorded(n)
            else:
                failures += 1
        for n in others[: LOOKED + top - len(found)]:
            if len(found) < top and self._takes(n, found):
                yield self.recorded(n)

    def _takes(self, n: int, found: list[int]) -> bool:
        """Add a layout to `found` if its recording fits; return whether it does."""
        if fits := self.recorded(n).fits:
            found.append(n)
            self.progress.add()
        return fits

    def _has_advantage(self, n: int, over: int) -> bool:
        """Return whether a layout is simpler than another, or leaves clearly more memory."""
        a, b = (self.bytes[each] / self.cluster.memory for each in (n, over))
        limit = self.limit / self.cluster.memory
        risky = b > limit - RISK >= a
        return bool(risky or b - a > SPARE
                    or self.layouts[n].mechanisms < self.layouts[over].mechanisms)  # fmt: skip


def recommended(runs: Sequence[Recorded]) -> Recorded:
    """Return the recommended one of some played runs.

    It is the simplest one within COMPARISON_ERROR of the fastest; of equally simple ones, that with
    the most memory free. Runs with less than RISK of the memory free come last.
    """
    fastest = min(run.played.step_seconds for run in runs)
    near = [run for run in runs if run.played.step_seconds <= (1 + COMPARISON_ERROR) * fastest]
    return min(near, key=lambda run: (run.free < RISK, run.mechanisms, run.bytes))


def cut_of(model: Model, each: Layout, costs: tuple[float, float, float]) -> list[int]:
    """Return the number of layers of each stage, as balanced by pretrain_llama.py."""
    embedding, one, head = costs
    layers = (one,) * model.config.model.num_layers
    if each.pp == 1:
        return [len(layers)]
    ends = {"embedding_cost": embedding, "head_cost": head}
    stages = stage_layout.stages(layers, each.pp, each.virtual, each.v_shape, **ends)
    return [len(stage.layers) for stage in stages]


def runs_of(model: Model, cluster: Cluster, found: list[Layout]) -> Runs:
    """Return layouts as Runs."""
    m, costs = model.config.model, model.costs()
    heads = m.num_attention_heads
    cuts: dict[tuple[int, int, bool], list[int]] = {}
    for e in found:
        key = (e.pp, e.virtual, e.v_shape)
        if key not in cuts:
            cuts[key] = cut_of(model, e, costs)
    longest = max(map(len, cuts.values()))
    padded = {key: np.pad(np.array(cut, float), (0, longest - len(cut)))
              for key, cut in cuts.items()}  # fmt: skip
    same = {
        "layers": m.num_layers, "hidden": m.hidden_size, "heads": heads,
        "kv_heads": m.num_query_groups or heads, "ffn": _ffn(model), "vocab": m.vocab_size,
        "sequence": m.seq_length, "gated": 1, "tied": not m.untie_embeddings_and_output_weights,
        "node": cluster.node, "network": cluster.network,
        **dict.fromkeys(("experts", "topk", "expert_ffn"), 0), **model.own(),
    }  # fmt: skip
    columns: dict[str, list[float]] = {
        "tp": [e.tp for e in found], "cp": [e.cp for e in found], "dp": [e.dp for e in found],
        "pp": [e.pp for e in found], "virtual": [e.virtual for e in found],
        "micro_batch": [e.micro_batch for e in found],
        "micro_batches": [e.micro_batches for e in found], "zero": [e.zero for e in found],
        "recompute": [_again(model, e) for e in found],
        "core_again": [e.recompute == "selective" for e in found],
        "sequence_parallel": [e.tp > 1 for e in found],
        "float8": [e.dtype != "bf16" for e in found],
        "schedule": [SCHEDULES.index(e.schedule) for e in found],
        "head": [e.pp * e.virtual - 1 for e in found],
        "comm": [COMMS.index(e.comm) for e in found],
        "overlap": [e.overlap != "none" for e in found],
        "offload": [_offloaded(model, e) for e in found],
        "reduces": [e.micro_batches if e.each else 1 for e in found],
        "ep": [max(e.ep, 1) for e in found],
        "dispatcher": [DISPATCHERS.index(e.dispatcher) for e in found],
        "paired": [paired(e.schedule, e.pp, e.micro_batches, e.virtual) if e.overlap_ep else 0.0
                   for e in found],
    }  # fmt: skip
    arrays = {key: np.array(values, float) for key, values in columns.items()}
    arrays |= {key: np.full(len(found), float(value or 0)) for key, value in same.items()}
    arrays["cut"] = np.stack([padded[e.pp, e.virtual, e.v_shape] for e in found])
    return Runs(**arrays)


def _again(model: Model, e: Layout) -> float:
    """Return the share of the layers that are recomputed."""
    if e.recompute == "block":
        return min(1.0, e.again * e.pp * e.virtual / model.config.model.num_layers)
    return float(e.recompute == "full")


def _offloaded(model: Model, e: Layout) -> float:
    """Return the bytes of a layer's activations of a micro-batch that are offloaded to the host."""
    if not e.offload:
        return 0.0
    layer = of_layers(model.flags, e.tp, "none", e.dtype, e.ep, e.dispatcher).layer
    return layer * e.micro_batch / e.cp


def _ffn(model: Model) -> float:
    """Return the ffn size of a Llama layer with as many parameters as the model's, or a fork's.

    A layer with experts counts without them, with its router and shared expert.
    """
    m = model.config.model
    heads, size = m.num_attention_heads, m.kv_channels or m.hidden_size / m.num_attention_heads
    attention = 2 * heads * size + 2 * (m.num_query_groups or heads) * size
    own = sizes(model.flags, 1, min(model.experts, 1))
    return ((own.layer - own.experts) / m.hidden_size - attention) / 3


def choose(model: Model, cluster: Cluster, dtype: str) -> dict[tuple[int, int, int], Choice]:
    """Return the Choice with the fastest layer for each tp, cp and micro-batch size.

    Raises UsageError if a recipe of float8 allows no tp that the model's sizes allow.
    """
    found = [*grids(model, cluster)]
    allowed, why = possible(model, sorted({tp for tp, _ in found}), dtype)
    if why and not allowed:
        raise why
    tried = [
        Layout(tp=tp, pp=1, virtual=1, dp=1, micro_batch=b, micro_batches=1, zero=0,
               recompute="none", cp=cp, comm=way.comm, overlap=way.overlap, dtype=dtype)
        for tp, cp in found if tp in allowed for b in MICRO_BATCHES
        for way in choices(model, tp, cp)
    ]  # fmt: skip
    if not tried:
        return {}
    c, runs = _constants(cluster), runs_of(model, cluster, tried)
    times_of = np.maximum(layer(c, runs).seconds, host_layer(c, runs))
    fastest: dict[tuple[int, int, int], tuple[float, Choice]] = {}
    for e, seconds in zip(tried, times_of, strict=True):
        key, way = (e.tp, e.cp, e.micro_batch), Choice(e.comm, e.overlap)
        if key not in fastest or seconds < fastest[key][0] - 1e-12:
            fastest[key] = (float(seconds), way)
    return {key: way for key, (_, way) in fastest.items()}


def possible(model: Model, sizes: Sequence[int], dtype: str) -> tuple[set[int], UsageError | None]:
    """Return the tp sizes at which the flags of a dtype are allowed, and why one of them is not."""
    allowed, why = set[int](), None
    for tp in sizes:
        try:
            unit_config(model.flags, tp, float8_flags(dtype))
        except UsageError as error:
            why = error
        else:
            allowed.add(tp)
    return allowed, why


def plan(
    model: Model,
    cluster: Cluster,
    batch: int,
    dtype: str = "bf16",
    progress: Progress | None = None,
) -> Plans:
    """Return every layout of a model on a cluster, timed. Raises PlanError if there is none.

    dtype: of the layers' matmuls, bf16 or a float8 recipe. progress: shows what is being done.
    """
    progress = progress or Progress()
    progress.begin("listing layouts")
    check_dtype(cluster, dtype)
    if model.experts and dtype != "bf16":
        raise PlanError(f"{model.name}: experts multiply in bf16 only, not in {dtype}")
    found = list(layouts(model, cluster, batch, choose(model, cluster, dtype), dtype))
    if not found:
        raise PlanError(
            f"no layout of {cluster.gpus} GPUs divides a batch of {batch} sequences, "
            f"{model.config.model.num_layers} layers and {model.config.model.num_attention_heads} "
            "heads: try another --global-batch-size"
        )
    progress.begin(f"computing the times of {len(found):,} layouts")
    return replace(with_state_in_host(evaluate(model, cluster, found)), progress=progress)


def with_state_in_host(plans: Plans) -> Plans:
    """Add the layouts that (nearly) fit only with the optimizer's state in host memory.

    Layouts that fit without gain nothing and are skipped, as are those with offloaded activations.
    If none fits, layouts with the update on the host are tried instead.
    """
    some = _with(plans, carried, states=True)
    return some if some.fits.any() else _with(plans, on_host, on_host=True)


def _with(plans: Plans, seconds_of: Callable[..., Array], **change: bool) -> Plans:
    """Add the layouts that (nearly) fit only with a change of their fields.

    seconds_of: computes the additional seconds of their updates from constants, runs, bytes that
    leave the GPU, and seconds of a micro-batch.
    """
    at = np.array([n for n in np.flatnonzero(~plans.fits) if not plans.layouts[n].offload], int)
    away = [replace(plans.layouts[n], **change) for n in at]
    found = many(plans.model, away, plans.runs[at], plans.cluster.host)
    near = np.flatnonzero(found.fullest <= NEARLY * plans.limit)
    at = np.concatenate([np.arange(len(plans.layouts)), at[near]])
    moved = np.concatenate([np.zeros(len(plans.layouts)), found.moved[near]])
    runs, times = plans.runs[at], Times(*(getattr(plans.times, f.name)[at] for f in fields(Times)))
    more = seconds_of(_constants(plans.cluster), runs, moved, times.slot)
    return replace(
        plans,
        layouts=[*plans.layouts, *(away[n] for n in near)],
        runs=runs,
        times=with_state(times, more),
        bytes=np.concatenate([plans.bytes, found.fullest[near]]),
    )


def on_host(c: Constants, r: Runs, moved: Array, slot: Array) -> Array:
    """Return the seconds of an update on the host; same arguments as `carried`."""
    return updated_on_host(c, r, moved)


def with_state(times: Times, seconds: Array) -> Times:
    """Return the times with `seconds` added to each step."""
    return replace(times, step=times.step + seconds)


def check_dtype(cluster: Cluster, dtype: str) -> None:
    """Raise PlanError if a cluster's GPUs have no matmuls of a dtype or recipe."""
    device = read_device(cluster.device)
    if dtype != "bf16" and dtype not in CAPABLE:
        raise PlanError(f"--fp8-recipe {dtype}: the planner knows only {', '.join(CAPABLE)}")
    if dtype != "bf16" and (why := lacks(dtype, device.capability, device.name)):
        raise PlanError(why)


def evaluate(model: Model, cluster: Cluster, found: list[Layout]) -> Plans:
    """Return the predictions of given layouts."""
    runs, c = runs_of(model, cluster, found), _constants(cluster)
    times = _timed(c, runs)
    bytes_ = many(model, found, runs, cluster.host)
    host = np.array([e.on_host for e in found])
    more = np.where(host, updated_on_host(c, runs, bytes_.moved),
                    carried(c, runs, bytes_.moved * ~host, times.slot))  # fmt: skip
    times = with_state(times, more)
    return Plans(
        model=model,
        cluster=cluster,
        layouts=found,
        runs=runs,
        times=times,
        bytes=bytes_.fullest,
    )


def _constants(cluster: Cluster) -> dict[str, float]:
    return own(cluster.device)


def _timed(c: dict[str, float], runs: Runs) -> Times:
    """Time runs grouped by their number of stages, so that arrays are no wider than necessary."""
    count = (runs.pp * runs.virtual).astype(int)
    parts: list[tuple[npt.NDArray[np.intp], Times]] = []
    for stages in np.unique(count):
        at = np.flatnonzero(count == stages)
        some = runs[at]
        parts.append((at, times_of_runs(c, replace(some, cut=some.cut[:, :stages]))))
    values = {column.name: np.zeros(len(runs)) for column in fields(Times)}
    for at, some_times in parts:
        for name, joined in values.items():
            joined[at] = getattr(some_times, name)
    return Times(**values)
