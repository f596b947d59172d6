# SPDX-License-Identifier: Apache-2.0
"""Take the learning rate's curve and the weight decay from a checkpoint instead of the flags.

--use-checkpoint-opt-param-scheduler restores what Megatron-LM restores (load_state_dict of
core/optimizer_param_scheduler.py): peak, floor, warm-up, length and style of the learning rate, and
the weight decay. The flags keep --lr-warmup-init, WSD's last part and the decoupled learning rate.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.checkpoint.find import newest, places
from training.flags import model_sizes
from training.settings.config import UsageError
from training.settings.setting import flag_of

FLAG = "--use-checkpoint-opt-param-scheduler"
TAKEN = ("lr", "min_lr", "lr_decay_style", "weight_decay")


def from_checkpoint(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given`, {flag: value}, with the schedule of the checkpoint that the run will resume.

    If there is none at --load and --branch-from, or only weights are loaded, the flags apply, as in
    Megatron-LM. Raises UsageError if the two runs count the schedule's lengths in different units.
    """
    if "--load" not in given or "--finetune" in given or "--no-load-optim" in given:
        return dict(given)
    where = places(*(given.get(flag) for flag in ("--load", "--branch-from", "--ckpt-step")))
    found = next(filter(None, (newest(*place) for place in where)), None)
    if found is None or "config" not in found.state:  # nothing, or Hugging Face's
        return dict(given)
    try:
        taken = _taken(given, found.state["config"], found.directory)
    except KeyError as error:
        raise UsageError(f"{FLAG}: {found.directory}: its config lacks {error}") from None
    rest = {name: value for name, value in given.items() if name not in taken}
    found_values = {n: model_sizes.checked(n, v) for n, v in taken.items() if v is not None}
    return rest | found_values


def _taken(given: Mapping[str, Any], saved: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return {flag: value or None} of a checkpoint's schedule. Raises KeyError and UsageError."""
    unit = "iters" if saved["batch.train_iters"] is not None else "samples"
    if f"--train-{unit}" not in given:
        raise UsageError(
            f"{FLAG}: {directory} was saved by a run with --train-{unit}, so its schedule counts "
            f"{unit}: give --train-{unit}"
        )
    size = saved["batch.global_batch_size"]
    if unit == "iters" and given.get("--global-batch-size", size) != size:
        raise UsageError(
            f"{FLAG}: {directory} counts its schedule in steps of {size} samples: "
            f"--global-batch-size is {given['--global-batch-size']} and must be {size}"
        )
    taken = {name: saved[f"optimizer.{name}"] for name in TAKEN}
    taken[f"lr_warmup_{unit}"] = saved[f"optimizer.lr_warmup_{unit}"]
    taken["lr_warmup_fraction"] = saved["optimizer.lr_warmup_fraction"]
    taken[f"lr_decay_{unit}"] = saved[f"optimizer.lr_decay_{unit}"] or saved[f"batch.train_{unit}"]
    return {flag_of(name): value for name, value in taken.items()}
