# SPDX-License-Identifier: Apache-2.0
"""Read a layout of the user's own flags, and list the settings that the planner does not count."""

import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from mpu.layers.float8.rows import RECIPES
from tools.planner.cluster import Cluster
from tools.planner.layout import Layout
from tools.planner.model import REST, Model, last_of_each
from tools.planner.pipeline import SCHEDULES
from tools.planner.runs import COMMS
from tools.planner.search import PlanError
from training.config import Config
from training.flags.parse import parse

SECTIONS = ("parallel", "float8", "gpu")  # of a Config: what changes the time or memory of a step
ALIASES = {  # settings that Layout has under another name, or that change neither
    "zero_stage", "use_distributed_optimizer", "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank", "pipeline_schedule", "cp_comm_type", "fp8_format",
    "distributed_timeout_minutes", "expert_tensor_parallel_size",
}  # fmt: skip
OF_MODEL = {"seq_length", "max_position_embeddings", "init_method_std"}  # may differ: same layers


def config_of(model: Model, cluster: Cluster, flags: str, batch: int = 0) -> Config:
    """Return the Config of a layout's flags on a cluster. Raises PlanError, UsageError.

    batch: sequences of a step where the flags say none; 0: as the trainer takes it.
    """
    words = shlex.split(flags)
    if batch and not any(word.startswith("--global-batch-size") for word in words):
        words += ["--global-batch-size", str(batch)]
    config = parse([*model.flags, *REST.split(), *words], cluster.gpus)
    other = [
        f"--{field.name.replace('_', '-')}" for field in fields(config.model)
        if field.name not in OF_MODEL
        and getattr(config.model, field.name) != getattr(model.config.model, field.name)
    ]  # fmt: skip
    if other:
        raise PlanError(
            f"--why: {', '.join(other)} makes another model than {model.name}, with which nothing "
            "can be compared: name that model as MODEL"
        )
    return config


def dtype_of(config: Config) -> str:
    """Return the dtype of the layers' matmuls: bf16, or a float8 recipe."""
    f = config.float8
    return RECIPES[f.fp8_recipe or ""] if f.fp8_format else "bf16"


def layout_of(config: Config) -> Layout:
    """Return the layout of a Config. Raises PlanError where the planner cannot count it."""
    p, b = config.parallel, config.batch
    if len(set(p.cp_comm_type)) > 1 or p.cp_comm_type[0] not in COMMS:
        raise PlanError(f"--why knows one --cp-comm-type, {', '.join(COMMS)}")
    if p.schedule not in SCHEDULES:
        raise PlanError(f"--why does not count --pipeline-schedule {p.schedule}")
    kind = p.recompute_granularity or "none"
    if kind == "full" and p.recompute_method == "block":
        kind = "block"
    return Layout(
        tp=p.tensor_model_parallel_size,
        pp=p.pipeline_model_parallel_size,
        virtual=p.virtual_stages,
        dp=p.data_parallel_size,
        micro_batch=b.micro_batch_size,
        micro_batches=b.global_batch_size // (b.micro_batch_size * p.data_parallel_size),
        zero=p.zero,
        recompute=kind,
        again=(p.recompute_num_layers or 1) if kind == "block" else 0,
        cp=p.context_parallel_size,
        comm=p.cp_comm_type[0],
        schedule=p.schedule,
        offload=config.gpu.cpu_offload_activations,
        overlap="none" if p.tp_comm_overlap == "none" else "ring",
        dtype=dtype_of(config),
        each=p.zero_reduce_each_microbatch,
        states=p.optimizer_state_offload and not p.optimizer_cpu_offload,
        on_host=p.optimizer_cpu_offload,
        ep=config.expert_model_parallel_size,
        dispatcher=p.moe_token_dispatcher_type if config.expert_model_parallel_size > 1 else "auto",
        overlap_ep=p.overlap_moe_expert_parallel_comm,
    )


def uncounted(model: Model, cluster: Cluster, config: Config, each: Layout) -> list[str]:
    """Return the settings of a Config that its layout's own flags set otherwise.

    The planner times what `each.flags()` say, so that it counts these settings as those have them.
    """
    words = shlex.split(each.flags())
    counted = parse([*model.flags, *REST.split(), *words], cluster.gpus)
    return list(_differences(config, counted))


def _differences(config: Config, counted: Config) -> Iterator[str]:
    for section in SECTIONS:
        yours, ours = getattr(config, section), getattr(counted, section)
        for field in fields(yours):
            a, b = getattr(yours, field.name), getattr(ours, field.name)
            if field.name not in ALIASES and a != b:
                flag = f"--{field.name.replace('_', '-')}"
                yield f"{flag} (yours: {_word(a)}, counted as: {_word(b)})"


def _word(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "on" if value else "off"
    return str(value)


def with_optimizer(model: Model, flags: str) -> Model:
    """Return the model with the optimizer that a layout's flags name, if they name one."""
    added, taken = list[str](), False
    for word in shlex.split(flags):
        if word.startswith("--"):
            name = word.partition("=")[0].replace("_", "-")
            taken = name == "--optimizer" or name.startswith("--muon-")
        added += [word] * taken
    if not added:
        return model
    words = last_of_each([*model.flags, *added])
    return replace(model, flags=tuple(words), config=parse([*words, *REST.split()], 1))


def with_sequence(model: Model, config: Config) -> Model:
    """Return the model with the sequence length of a Config."""
    if config.model.seq_length == model.config.model.seq_length:
        return model
    words = list(model.flags)
    words[words.index("--seq-length") + 1] = str(config.model.seq_length)
    sized = replace(model.config.model, seq_length=config.model.seq_length)
    return replace(model, flags=tuple(words), config=replace(model.config, model=sized))
