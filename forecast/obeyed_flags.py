# SPDX-License-Identifier: Apache-2.0
"""Find flags that a model does not obey, by running its forward on meta tensors. Dry runs and
fork-check do this check; training runs do not.

A flag that selects a kernel, a number format or which activations are saved acts inside functions
and modules of mpu. A --model-file that replaces these by modules of its own would silently ignore
the flag. This check refuses such a run with a message that names the flag and the module.

    flag                               the model must
    --fused-linear-cross-entropy       compute its loss by output_loss(head, ...)
    --norm-backend apex, te            have RMSNorm modules, whose own forward calls the kernel
    --attention-backend, except auto   attend by core_attention_of(ctx); fused: without a window
    --fp8-format                       have parallel linears in its layers, which multiply
    --recompute-granularity selective  wrap its core attention in recompute.selective
    --recompute-granularity full       run its layers by recompute.blocks
    --cpu-offload-activations          the same
    --offload-modules                  call the named modules
    --defer-embedding-wgrad-compute    have a ColumnParallelLinear(output_layer=True)
    --log-max-attention-logit          attend by core_attention_of(ctx)
    --qk-clip                          the same, with one qkv_linear per attention and no parameters
                                       between the two: a norm would undo the clip
    --output-z-loss-coeff              compute its loss by output_loss or
                                       vocab_parallel_cross_entropy
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpu.comm.transport import Axis
from mpu.context import LayerContext
from mpu.layers import cross_entropy, fused
from mpu.layers.attention.core import CoreAttention, core_attention
from mpu.layers.attention.transformer_engine import TransformerEngineAttention
from mpu.layers.context_attention import ContextAttention
from mpu.layers.float8.recipe import Float8
from mpu.layers.fused import RMSNorm
from mpu.layers.linear import ColumnParallelLinear, RowParallelLinear
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.meta_tensors import META, MetaOperations
from mpu.param import placement_of
from mpu.pipeline.stage_layout import Stage
from mpu.recompute import Blocks, Recompute
from training.run.context_parallel import rank_batch
from training.run.model_profile import ModelProvider, StagedModel, rank_model
from training.settings.config import Config
from training.settings.layer_options import recompute_of

ROOT = Path(__file__).resolve().parents[1]
LOSS, ATTENTION = "--fused-linear-cross-entropy", "--attention-backend"
WINDOW = "a window"
CLIP, LOGIT = "--qk-clip", "--log-max-attention-logit"
Z_LOSS = "--output-z-loss-coeff"
NO_CORE = "no layer uses mpu.layers.context_attention.core_attention_of(ctx)"
BY = {
    LOSS: "its loss is not computed by mpu.layers.cross_entropy.output_loss",
    ATTENTION: NO_CORE,
    CLIP: NO_CORE,
    LOGIT: NO_CORE,
    Z_LOSS: "its loss is not computed by output_loss or vocab_parallel_cross_entropy",
    "--recompute-granularity selective": "its core attention is not in recompute.selective(...)",
    "--recompute-granularity full": "its layers do not run by recompute.blocks(...)",
    "--cpu-offload-activations": "its layers do not run by recompute.blocks(...)",
}


def check_attention(config: Config, provider: ModelProvider) -> None:
    """Run each layer's forward on meta tensors and check that it communicates over the cp axis.

    Queries need keys that other ranks hold. A --model-file whose own attention does not exchange
    them would attend only within each rank's tokens. Raises ValueError naming the layer.
    """
    if config.parallel.context_parallel_size == 1:
        return
    size, positions, documents = rank_batch(config)
    stages = [Stage(i, i + 1, embedding=i == 0) for i in range(config.model.num_layers)]
    listener = _OverContext()
    model = rank_model(config, provider, stages, 0, trace=listener)
    tokens = torch.empty(size, dtype=torch.long, device=META)
    shape = model.hidden_shape(*size)
    with torch.no_grad(), MetaOperations():
        for chunk, stage in enumerate(stages):
            listener.over_cp = False
            given = torch.empty(shape, dtype=config.run.dtype, device=META)
            hidden = None if stage.embedding else given  # the first layer's may have another shape
            model(tokens, None, positions, documents, hidden=hidden, chunk=chunk)
            if not listener.over_cp:
                line = ContextAttention.compute.__code__.co_firstlineno
                raise ValueError(
                    f"--context-parallel-size {config.parallel.context_parallel_size}: layer "
                    f"{stage.first} of --model-file {config.model.model_file} sends nothing over "
                    "the context-parallel group, so tokens would not attend to those of other "
                    "ranks. Its attention must be core_attention_of(ctx) "
                    f"(mpu/layers/context_attention.py:{line}), or exchange keys over ctx.grid.cp"
                )


class _OverContext:
    """A trace that records whether a layer communicates over the cp axis."""

    over_cp = False

    def issued(self, verb: str, axis: Axis, tensor: Tensor, *rest: Any) -> None:
        self.over_cp = self.over_cp or axis.name == "cp"


def check_flags(config: Config, provider: ModelProvider) -> None:
    """Run a model's forward on meta tensors. Raises ValueError naming a flag that has no effect.

    A forward that reads values of tensors cannot run on meta tensors, and is not checked.
    """
    required = list(_functions(config))
    p, g = config.parallel, config.gpu
    modules = (p.norm_backend != "weft", config.float8.fp8_format, g.offload_modules)
    if not (required or any(modules) or p.defer_embedding_wgrad_compute):
        return
    listener = _Listener(config, provider)
    try:
        model = listener.run()
    except RuntimeError:  # it reads values, which meta tensors do not have
        return
    file = f"--model-file {config.model.model_file}"
    backend = p.attention_backend
    for flag in required:
        if flag not in listener.used:
            value = f" {backend}" if flag == ATTENTION else ""
            made = _maker_of_attention(model) if flag.endswith("selective") else ""
            raise ValueError(f"{flag}{value}: {file} does not support it: {BY[flag]}{made}")
        if flag == LOSS and listener.own_logits:
            raise ValueError(
                f"{flag}: the method logits of {file} does not return the output of its head, but "
                "the loss in chunks multiplies by the head's weight only: omit the flag"
            )
    if config.optimizer.qk_clip:
        _check_clip(model, file, len(listener.cores))
    if backend == "fused" and WINDOW in listener.used:
        raise ValueError(f"{ATTENTION} fused: {file} has attention windows; use flash or auto")
    for name in g.offload_modules:
        if name not in listener.used:
            raise ValueError(
                f"--offload-modules {name}: {file} does not call this module's forward, so none "
                "of its activations would be offloaded: name the module whose forward is called"
            )
    if p.norm_backend != "weft":
        flag = f"--norm-backend {p.norm_backend}"
        norms = {name: m for name, m in model.named_modules() if isinstance(m, RMSNorm)}
        for norm in norms.values():
            norm.check_backend(p.norm_backend)
        _used_flags(flag, file, listener, norms, "the norm's kernel")
    if config.float8.fp8_format is not None:
        flag = f"--fp8-format {config.float8.fp8_format}"
        layers = {name: m for name, m in model.named_modules() if in_float8(m)}
        _used_flags(flag, file, listener, layers, "the layer's recipe")
    if p.defer_embedding_wgrad_compute and not any(
        getattr(each, "output_layer", False) for each in model.modules()
    ):
        raise ValueError(
            f"--defer-embedding-wgrad-compute: {file} does not support it: its head must be a "
            "ColumnParallelLinear(output_layer=True)"
        )


def _functions(config: Config) -> Iterator[str]:
    """Yield the flags of a run that take effect in functions which the model calls."""
    p = config.parallel
    if p.fused_linear_cross_entropy:
        yield LOSS
    if p.attention_backend != "auto":
        yield ATTENTION
    if p.recompute_granularity is not None:
        yield f"--recompute-granularity {p.recompute_granularity}"
    if config.gpu.cpu_offload_activations:
        yield "--cpu-offload-activations"
    if config.optimizer.qk_clip:
        yield CLIP
    if config.log.log_max_attention_logit:
        yield LOGIT
    if config.optimizer.output_z_loss_coeff:
        yield Z_LOSS


def _check_clip(model: nn.Module, file: str, cores: int) -> None:
    """Raise ValueError if scaling rows of W_q and W_k would not scale the logits of their layer.

    cores: number of layers with attention.
    """
    linears = [name for name, m in model.named_modules() if _makes_qkv(m)]
    if len(linears) != cores:
        raise ValueError(
            f"{CLIP}: {file} has attention in {cores} layers, but makes queries and keys by "
            f"qkv_linear (mpu/layers/qkv.py) in {len(linears)}: each layer must use it"
        )
    for name in linears:
        attention = model.get_submodule(name.rpartition(".")[0])
        for own, _ in attention.named_parameters():
            module = attention.get_submodule(own.rpartition(".")[0])
            if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                at = f"{name.rpartition('.')[0]}.{own}"
                raise ValueError(
                    f"{CLIP}: {file} has {at} between queries or keys and their product, which "
                    "undoes the scaling of their weights if it is a norm: omit the flag; "
                    f"{LOGIT} shows the largest logit"
                )


def _makes_qkv(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and placement_of(weight).qkv


def in_float8(module: nn.Module) -> bool:
    """Return whether a run multiplies a module's weight in float8."""
    linear = isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    return linear and isinstance(module.recipe, Float8)


def _used_flags(
    flag: str,
    file: str,
    listener: "_Listener",
    found: Mapping[str, nn.Module],
    what: str,
) -> None:
    """Raise ValueError if `found` has no module, or one whose forward did not use `what`."""
    if not found:
        raise ValueError(f"{flag}: {file} does not support it: no module of a layer has {what}")
    for name, module in found.items():
        if name not in listener.used:
            raise ValueError(
                f"{flag}: {name} of {file} does not support it: the forward of "
                f"{type(module).__name__} does not use {what}"
            )


def _maker_of_attention(model: nn.Module) -> str:
    """Return the first module with a CoreAttention attribute and where it is defined, or ""."""
    for module in model.modules():
        if any(isinstance(value, CoreAttention) for value in vars(module).values()):
            code = type(module).__init__.__code__
            file = Path(code.co_filename)
            file = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
            return f" ({type(module).__name__}, made at {file}:{code.co_firstlineno})"
    return ""


class _Listener:
    """Builds a model on meta tensors, and records which flags and modules its forward uses."""

    def __init__(self, config: Config, provider: ModelProvider) -> None:
        self.config, self.provider = config, provider
        self.used: set[str] = set()
        self.cores: set[int] = set()  # the core attentions that were called
        self.own_logits = False  # the model's logits are not what its head returns

    def noting(self, what: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return a wrapper of `run` that records its calls as `what`."""

        def noted(*args: Any, **options: Any) -> Any:
            self.used.add(what)
            return run(*args, **options)

        return noted

    def run(self) -> nn.Module:
        """Run the whole model's forward, and return the model."""
        attention: Any = CoreAttention
        real, stats, fits = attention.attend, cross_entropy.softmax_stats, fused.fits
        attention.attend = self.noting_cores(real)  # before a layer stores the method of its core
        cross_entropy.softmax_stats = self.noting(Z_LOSS, stats)  # every loss of mpu calls it
        fused.fits = lambda *given, **more: False  # so that a norm calls its `passes`
        try:
            model = self.run_forward()
        finally:
            fused.fits = fits
            attention.attend = real
            cross_entropy.softmax_stats = stats
        if LOSS in self.used:
            self.used.add(Z_LOSS)
        return model

    def run_forward(self) -> nn.Module:
        """Build the model and run its forward."""
        config = self.config
        stages = [Stage(0, config.model.num_layers, embedding=True, loss=True)]
        recompute = recompute_of(config, META, partial(_Recompute, self))
        model = rank_model(config, self.build, stages, 0, recompute=recompute)
        assert isinstance(model, nn.Module)
        self.listen_to(model)
        size, positions, documents = rank_batch(config)
        tokens = torch.empty(size, dtype=torch.long, device=META)
        with torch.no_grad(), MetaOperations():
            model(tokens, tokens, positions, documents)
            if LOSS in self.used and hasattr(model, "logits"):
                shape = (*model.hidden_shape(*size)[:-1], config.model.hidden_size)
                self.own_logits = _own_logits(model, shape, config.run.dtype)
        return model

    def noting_cores(self, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a wrapper of `CoreAttention.attend` that records its calls."""

        def attend(
            core: CoreAttention,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            packed: PackedSeqParams | None = None,
            cache: list[Tensor] | None = None,
            window: int = 0,
            **options: Any,
        ) -> Tensor:
            self.cores.add(id(core))
            self.used |= {CLIP, LOGIT}
            if core.requested == self.config.parallel.attention_backend:
                self.used.add(ATTENTION)
            if window:
                self.used.add(WINDOW)
            stand_in = core_attention if isinstance(core, TransformerEngineAttention) else core
            return real(stand_in, q, k, v, packed, cache, window=window, **options)

        return attend

    def build(
        self,
        config: Config,
        ctx: LayerContext,
        recompute: Recompute | None = None,
        stages: Sequence[Stage] | None = None,
    ) -> StagedModel:
        """Replace the provider: build its model with a context that records calls."""
        chunks = ctx.loss_in_chunks and self.noting(LOSS, ctx.loss_in_chunks)
        backend = config.parallel.attention_backend
        ctx = replace(ctx, loss_in_chunks=chunks, attention_backend=backend)
        return self.provider(config, ctx, recompute, stages)

    def listen_to(self, model: nn.Module) -> None:
        """Record calls of norms, of layers in float8, and of the modules of --offload-modules."""
        for name, module in model.named_modules():
            if isinstance(module, RMSNorm):
                module.passes = _Passes(self, name, module.passes)
            if in_float8(module):
                layer: Any = module
                layer.operand_of_weight = self.noting(name, layer.operand_of_weight)
            parts = name.split(".")
            at = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts))
            inside = ".".join(parts[at + 1 :])
            if inside in self.config.gpu.offload_modules:
                module.register_forward_pre_hook(self.noting(inside, lambda *_: None))


def _own_logits(model: Any, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Return whether model.logits(h) is anything but head(h)."""
    calls: list[tuple[Any, Any]] = []
    hook = model.head.register_forward_hook(lambda _, given, y: calls.append((given[0], y)))
    h = torch.empty(shape, dtype=dtype, device=META)
    y = model.logits(h)
    hook.remove()
    return not any(given is h and made is y for given, made in calls)


class _Passes:
    """The norm kernel of one module, with its calls recorded."""

    def __init__(self, listener: _Listener, name: str, passes: Any) -> None:
        self.norm_forward = listener.noting(name, passes.norm_forward)


class _Recompute(Recompute):
    """A run's Recompute, with its calls recorded."""

    def __init__(self, listener: _Listener, *given: Any) -> None:
        super().__init__(*given)
        self.listener = listener

    def selective(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return self.listener.noting("--recompute-granularity selective", super().selective(run))

    def blocks(self, layers: Blocks, h: Tensor, *shared: Any) -> Tensor:
        self.listener.used |= {"--recompute-granularity full", "--cpu-offload-activations"}
        return super().blocks(layers, h, *shared)
