# SPDX-License-Identifier: Apache-2.0
"""Measure a model: its parameters, and the FLOPs of each of its parts.

The model is built and run on meta tensors, which have shapes and no memory. Nothing here depends on
the model's code, so a changed copy of model/llama.py is measured as it is. forecast/recording.py
records a rank's activations and messages.

    Stage(0, 0, embedding)   Stage(0, 1)   ...   Stage(L - 1, L)   Stage(L, L, loss)
    the embedding            layer 0             layer L - 1       the head

"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from mpu.comm.meta import MetaTransport
from mpu.context import ExpertOptions, LayerContext
from mpu.gradients import GradientSink
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.meta_tensors import META, PRODUCTS, MetaOperations, is_block
from mpu.param import Placement, group_of, placement_of
from mpu.pipeline.stage_layout import Stage
from mpu.recompute import Recompute
from mpu.torch_private import SCALED_MM
from mpu.zero.bucket_layout import ParamEntry, block_of, entries_of
from mpu.zero.gradient_check import check_registered
from training.settings.arguments import BatchConfig, ParallelConfig
from training.settings.config import Config
from training.settings.layer_options import context_of, recompute_of
from training.settings.nccl import nccl_groups
from training.settings.update_rules import needs_full_matrices

ROOT = Path(__file__).resolve().parents[2]
MPU, MODEL, TORCH = f"{ROOT}/mpu/", f"{ROOT}/model/", f"{Path(torch.__file__).parent}/"
SETTINGS = (bool, int, float, str, torch.dtype, type(None))  # types of a module's settings


class StagedModel(Protocol):
    """The interface of a model to the trainer: run one of its stages, name its parameters."""

    @property
    def stages(self) -> Sequence[Stage]:
        """Return the stages that the model holds, one for each chunk."""

    @property
    def ctx(self) -> LayerContext:
        """Return the context that the layers were built with."""

    def __call__(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        hidden: Tensor | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """Run a chunk: tokens [b, s], or hidden after the first stage -> hidden.

        The last stage returns the loss of each token [b, s], without labels the logits.
        """

    def hidden_shape(self, batch: int, length: int) -> tuple[int, ...]:
        """Return the shape of the activations sent between stages."""

    def chunk_of(self, name: str) -> int:
        """Return the chunk that holds a parameter."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules by name."""

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters, which carry a Placement (mpu/param.py)."""


class ModelProvider(Protocol):
    """Build a rank's stages of the model, or all of it. Hashable, as profiles are cached by it."""

    def __hash__(self) -> int: ...

    def __call__(
        self,
        config: Config,
        ctx: LayerContext,
        recompute: Recompute | None = None,
        stages: Sequence[Stage] | None = None,
    ) -> StagedModel:
        """Return the model, its weights unset, with the context's device and dtype."""


@dataclass(frozen=True)
class ModelProfile:
    """The number of parameters, without padding, and the FLOPs of one token's forward, by part."""

    parameters: int
    embedding: float
    layers: tuple[float, ...]
    # of each of `layers`: the FLOPs of core attention, which selective recomputation repeats
    core: tuple[float, ...]
    head: float
    alike: bool  # all layers have the same modules, parameters, settings and FLOPs
    # of each part, from the embedding to the head: {parameter: the lines of its uses in one
    # forward}; a parameter of several names is under each
    uses: tuple[dict[str, tuple[str, ...]], ...] = field(default=(), compare=False)

    @property
    def flops(self) -> float:
        """Return the FLOPs of a token's forward and backward; backward is twice the forward."""
        return 3.0 * (self.embedding + sum(self.layers) + self.head)


class ParameterProfile(NamedTuple):
    """A parameter of a rank: its local shape and its entry in the layout of buckets."""

    shape: tuple[int, ...]
    entry: ParamEntry  # of a frozen parameter as if it were trained
    holders: int  # modules that hold it; several for a tied weight
    # this rank is the first of those that hold a copy of the same part (Placement.copies)
    first: bool = True
    place: Placement = Placement(())  # its part of the whole tensor
    frozen: bool = False


def model_profile(config: Config, provider: ModelProvider) -> ModelProfile:
    """Return the parameters and FLOPs of the whole model, the vocabulary unpadded.

    The FLOPs are those of matrix products (Chowdhery et al. 2022, appendix B). The two products of
    attention (F.scaled_dot_product_attention) count half where it is causal or masked, and those of
    a window block by block (mpu/layers/attention/blocks.py). Documents, whose lengths are not known
    before the run, count as one. Look-ups and elementwise work do not count. Raises ValueError
    if the vocabulary size is not known yet, PlacementError if a tensor that requires a
    gradient is not a parameter.
    """
    if config.model.vocab_size is None:
        raise ValueError("the vocabulary size is not known before the tokenizer is read")
    model = replace(config.model, make_vocab_size_divisible_by=1)
    alone = ParallelConfig()  # one rank, as the grid below; part of the cache key
    optimizer = replace(config.optimizer, param_group=())  # names layers that a planner may cut off
    one = replace(config, model=model, parallel=alone, batch=BatchConfig(), optimizer=optimizer)
    return _model_profile(one, provider)


def whole_model(config: Config, provider: ModelProvider) -> StagedModel:
    """Return the whole model on one rank, of meta tensors."""
    ctx = LayerContext(Grid(), dtype=config.run.dtype, device=META)
    return provider(replace(config, parallel=ParallelConfig(), batch=BatchConfig()), ctx)


@lru_cache(maxsize=16)
def _model_profile(config: Config, provider: ModelProvider) -> ModelProfile:
    count, length = config.model.num_layers, config.model.seq_length
    stages = [Stage(0, 0, embedding=True), *(Stage(i, i + 1) for i in range(count))]
    stages.append(Stage(count, count, loss=True))
    flops = _Flops()
    # rows that an expert pads or drops do not change the FLOPs of a model
    sink = _Uses()
    ctx = meta_context(config, Grid(), sink, experts=ExpertOptions())
    with torch.no_grad(), flops:
        built: Any = provider(config, ctx, _CountedRecompute(flops), stages)
        check_registered(built)
        tokens = torch.empty((1, length), dtype=torch.long, device=META)
        hidden, parts, cores, uses = None, [], [], []
        for chunk in range(count + 2):
            hidden = built(tokens, tokens, hidden=hidden, chunk=chunk)
            part, core = flops.take()
            parts.append(part / length)
            cores.append(core / length)
            uses.append(sink.take())
    parameters = sum(param.numel() for _, param in built.named_parameters())
    layers, inside = tuple(parts[1:-1]), tuple(cores[1:-1])
    alike = len({*zip(layers, inside, strict=True)}) <= 1 and _same_blocks(built)
    every = list(built.named_parameters(remove_duplicate=False))
    named = tuple({name: lines[p] for name, p in every if p in lines} for lines in uses)
    return ModelProfile(parameters, parts[0], layers, inside, parts[-1], alike=alike, uses=named)


def _is_setting(value: Any) -> bool:
    return all(map(_is_setting, value)) if isinstance(value, tuple) else isinstance(value, SETTINGS)


def _same_blocks(model: StagedModel) -> bool:
    """Return whether all numbered blocks of a model are equal: the types of their modules, the
    names and shapes of their parameters, and each attribute that is a number, a string or a dtype.
    """
    blocks: dict[str, list[Any]] = {}
    for name, module in model.named_modules():
        if not (block := block_of(name)):
            continue
        own = [
            (key, value if _is_setting(value) else type(value))
            for key, value in sorted(vars(module).items())
        ]
        params = [
            (key, tuple(param.shape), param.dtype, param.requires_grad, group_of(param),
             placement_of(param))
            for key, param in module.named_parameters(recurse=False)
        ]
        blocks.setdefault(block, []).append((name[len(block) :], type(module), own, params))
    first, *others = blocks.values() or [[]]
    return all(other == first for other in others)


def make_grid(config: Config, launch: Launch) -> Grid:
    """Return the layout of the ranks, without process groups yet."""
    p = config.parallel
    sizes = (p.tensor_model_parallel_size, p.context_parallel_size, p.pipeline_model_parallel_size)
    return Grid(
        launch.world, *sizes, launch, p.distributed_backend, p.num_distributed_optimizer_instances,
        query_groups=config.model.num_query_groups,
        order=tuple(p.rank_order.split("-")), ep_size=config.expert_model_parallel_size,
        nccl=nccl_groups(p.nccl_communicator_config_path),
        needs_full_matrices=needs_full_matrices(config),
    )  # fmt: skip


def grid_of(config: Config, pp_rank: int) -> Grid:
    """Return the grid of the first of the ranks at `pp_rank`, without process groups."""
    world = config.parallel.world_size
    first = make_grid(config, Launch(0, world))
    return make_grid(config, Launch(first.pp.ranks[pp_rank], world))


def rank_model(
    config: Config,
    provider: ModelProvider,
    stages: Sequence[Stage],
    pp_rank: int,
    trace: Any = None,
    recompute: Recompute | None = None,
) -> StagedModel:
    """Build the model of a pipeline rank on meta tensors.

    trace: called for each collective; nothing is sent (mpu/comm/meta.py).
    """
    grid = grid_of(config, pp_rank).carried_by(MetaTransport()).traced(trace)
    ctx = meta_context(config, grid)
    return provider(config, ctx, recompute or recompute_of(config, META), stages)


def meta_context(
    config: Config, grid: Grid, sink: GradientSink | None = None, **other: Any
) -> LayerContext:
    """Return the run's context on meta tensors, without kernels of other libraries, which accept no
    meta tensors and need not be installed where a run is planned.
    """
    own: dict[str, Any] = {"norm_backend": "weft", "attention_backend": "auto"}
    return context_of(config, grid, META, sink or GradientSink(), **own | other)


def rank_parameters(
    config: Config, provider: ModelProvider, stages: Sequence[Stage], pp_rank: int
) -> dict[str, ParameterProfile]:
    """Return {name: parameter} of a pipeline rank in definition order, each parameter once."""
    return _rank_parameters(config, provider, tuple(stages), pp_rank)


@lru_cache(maxsize=256)
def _rank_parameters(
    config: Config, provider: ModelProvider, stages: tuple[Stage, ...], pp_rank: int
) -> dict[str, ParameterProfile]:
    model = rank_model(config, provider, stages, pp_rank)
    holders: dict[nn.Parameter, int] = {}
    for _, param in model.named_parameters(remove_duplicate=False):
        holders[param] = holders.get(param, 0) + 1
    named = list(model.named_parameters())
    frozen = {name for name, param in named if not param.requires_grad}
    for _, param in named:
        param.requires_grad_(True)
    return {
        name: ParameterProfile(
            tuple(param.shape),
            entry,
            holders[param],
            not any(axis.rank for axis in placement_of(param).copies),
            placement_of(param),
            name in frozen,
        )
        for (name, param), entry in zip(named, entries_of(named, model.chunk_of), strict=True)
    }


class _Uses(GradientSink):
    """Record where a forward uses each weight: file and line in a fork, else in Weft's model."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: dict[nn.Parameter, tuple[str, ...]] = {}

    def acquire(self, param: nn.Parameter) -> Tensor:
        frame: FrameType | None = sys._getframe(1)
        at = ""
        while frame is not None and frame.f_code.co_filename != __file__:
            file = frame.f_code.co_filename
            if not file.startswith((MPU, TORCH)):
                at = at or f"{file}:{frame.f_lineno}"
                if not file.startswith(MODEL):
                    at = f"{file}:{frame.f_lineno}"
                    break
            frame = frame.f_back
        self._lines[param] = (*self._lines.get(param, ()), at.removeprefix(f"{ROOT}/"))
        return param

    def take(self) -> dict[nn.Parameter, tuple[str, ...]]:
        """Return the uses recorded since the last call."""
        lines, self._lines = self._lines, {}
        return lines


class _Flops(MetaOperations):
    """Count the FLOPs of matrix products since `take`: all, and those in core attention."""

    def __init__(self) -> None:
        super().__init__()
        self.all = self.core = 0
        self.inside = False  # core attention is running

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS or func.overloadpacket.__name__ == SCALED_MM:
            at = PRODUCTS.get(func, 0)
            self.add(2 * prod(args[at].shape) * args[at + 1].shape[-1])
        if is_block(func):  # of q [b, a, s, d], k [b, g, S, d], v [b, g, S, e]
            q, k, v, *options = args  # dropout, causal
            square = prod(q.shape[:-1]) * k.shape[-2]
            self.add((1 if options[1:] == [True] else 2) * square * (q.shape[-1] + v.shape[-1]))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def add(self, count: int) -> None:
        self.all += count
        self.core += count * self.inside

    def take(self) -> tuple[int, int]:
        counted, self.all, self.core = (self.all, self.core), 0, 0
        return counted


class _CountedRecompute(Recompute):
    """Recompute nothing; mark for the counter when core attention runs."""

    def __init__(self, flops: _Flops) -> None:
        super().__init__()
        self.flops = flops

    def selective(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `run` with its FLOPs counted as core attention's."""

        def inside(*inputs: Any, **options: Any) -> Tensor:
            self.flops.inside = True
            out = run(*inputs, **options)
            self.flops.inside = False
            return out

        return inside
