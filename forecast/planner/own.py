# SPDX-License-Identifier: Apache-2.0
"""Read a layout from the user's own flags."""

import shlex
from dataclasses import fields, replace

from forecast.planner.cluster import Cluster
from forecast.planner.model import Model, last_of_each, read_flags, with_rest
from forecast.planner.search import PlanError
from mpu.layers.float8.rows import RECIPES
from training.flags.foreign import uses_of
from training.settings.config import Config

SIZES = {"--global-batch-size", "--step-batch-size-schedule"}  # of a step's batch
OF_MODEL = {"seq_length", "max_position_embeddings", "init_method_std"}  # may differ from MODEL's


def config_of(model: Model, cluster: Cluster, flags: str, batch: int = 0) -> Config:
    """Return the Config of a layout's flags on a cluster. Raises PlanError, UsageError.

    batch: sequences of a step if the flags do not set them; 0: the trainer's default.
    """
    words = shlex.split(flags)
    if batch and not SIZES & {use.dashed for use in uses_of(words)}:
        words += ["--global-batch-size", str(batch)]
    config = read_flags(with_rest([*model.flags, *words]), cluster.gpus)
    other = [
        f"--{field.name.replace('_', '-')}" for field in fields(config.model)
        if field.name not in OF_MODEL
        and getattr(config.model, field.name) != getattr(model.config.model, field.name)
    ]  # fmt: skip
    if other:
        raise PlanError(
            f"{', '.join(other)} in a layout's flags changes the model, {model.name}, so the "
            "layouts cannot be compared: give the changed model as MODEL"
        )
    return config


def without_sizes(flags: str) -> list[str]:
    """Return a layout's flags without those that set the batch of a step."""
    uses = uses_of(shlex.split(flags))
    return [word for use in uses if use.dashed not in SIZES for word in use.words]


def dtype_of(config: Config) -> str:
    """Return the dtype of the layers' matmuls: bf16, or a float8 recipe."""
    f = config.float8
    return RECIPES[f.fp8_recipe or ""] if f.fp8_format else "bf16"


def with_optimizer(model: Model, flags: str) -> Model:
    """Return the model with the optimizer of a layout's flags, if these set one."""
    uses = uses_of(shlex.split(flags))
    taken = [use for use in uses if use.dashed == "--optimizer" or use.dashed.startswith("--muon-")]
    added = [word for use in taken for word in use.words]
    if not added:
        return model
    words = last_of_each([*model.flags, *added])
    return replace(model, flags=tuple(words), config=read_flags(with_rest(words), 1))
