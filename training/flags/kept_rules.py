# SPDX-License-Identifier: Apache-2.0
"""Check the flags that say where activations wait for backward: recomputed, or in host memory."""

from training.config import Config, GpuConfig, UsageError

OFFLOAD = "--cpu-offload-activations"


def check(config: Config) -> None:
    """Raise UsageError for flags that contradict each other or the layout."""
    _recompute(config)
    _offload(config)


def _recompute(config: Config) -> None:
    p = config.parallel
    if p.recompute_granularity != "full":
        for flag, value in (
            ("--recompute-method", p.recompute_method),
            ("--recompute-num-layers", p.recompute_num_layers),
        ):
            if value is not None:
                raise UsageError(f"{flag} {value} needs --recompute-granularity full")
    elif p.recompute_num_layers == 0:
        raise UsageError("--recompute-num-layers 0 needs --recompute-method block")
    elif (p.recompute_num_layers or 1) > config.model.num_layers:
        raise UsageError(
            f"--recompute-num-layers {p.recompute_num_layers} is more than --num-layers "
            f"{config.model.num_layers}"
        )


def _offload(config: Config) -> None:
    g, p, layers = config.gpu, config.parallel, config.model.num_layers
    if not g.cpu_offload_activations:
        for flag, given in (
            ("--offload-modules", " ".join(g.offload_modules)),
            (
                "--min-offloaded-tensor-size",
                g.min_offloaded_tensor_size
                if g.min_offloaded_tensor_size != GpuConfig.min_offloaded_tensor_size
                else "",
            ),
        ):
            if given:
                raise UsageError(f"{flag} {given} needs {OFFLOAD}")
        return
    number = g.cpu_offloading_num_layers
    if number is not None and number >= layers:
        raise UsageError(
            f"--cpu-offloading-num-layers {number} must be less than --num-layers {layers}: the "
            "last layer of a stage stays, as its backward comes first"
        )
    stages = p.pipeline_model_parallel_size * p.virtual_stages
    if layers <= stages:
        raise UsageError(
            f"{OFFLOAD} with --num-layers {layers} in {stages} pipeline stages: a stage's last "
            "layer stays, and no stage has another"
        )
    group = p.recompute_num_layers or 1 if p.recompute_method == "uniform" else 1
    if group * stages >= layers:
        raise UsageError(
            f"{OFFLOAD} with --recompute-num-layers {group}: a stage's last group of recomputed "
            "layers stays, and no stage has another"
        )
    if number is not None and number < group:
        raise UsageError(
            f"--cpu-offloading-num-layers {number} is less than --recompute-num-layers {group}: "
            "layers that are recomputed together go together"
        )
    if g.offload_modules and p.recompute_granularity == "full":
        raise UsageError(
            f"--offload-modules {' '.join(g.offload_modules)} with --recompute-granularity full: "
            "a recomputed layer keeps its input alone, which belongs to no module of it"
        )
