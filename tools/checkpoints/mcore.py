# SPDX-License-Identifier: Apache-2.0
"""Import a run from Megatron: weights, AdamW's state and progress, without unpickling.

torch_dist.py reads the directory, mcore_names.py maps its names, mcore_state.py reads the
optimizer's state. The model's sizes come from a Hugging Face config.json; the iteration, the
samples consumed, the optimizer's step and the arguments that a resume compares come from common.pt.
_extra_state and random states are not read.
"""

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.llama import LlamaConfig
from model.load import ModelFile, model_file_of, read_sizes
from tools.checkpoints.copy import save_new
from tools.checkpoints.inert_pickle import shown
from tools.checkpoints.mcore_names import Names
from tools.checkpoints.mcore_state import (
    MOMENTS,
    WEIGHTS_ALONE,
    State,
    Weights,
    state_of,
    steps_of,
)
from tools.checkpoints.torch_dist import COMMON, McoreCheckpoint, is_count
from training.checkpoint import CheckpointError, NamedPiece
from training.checkpoint.huggingface import CONFIG, read_json, spelt
from training.checkpoint.pieces import state_name, whole
from training.data.tokenizer import tokenizer_of
from training.files.untrusted import sentence
from training.run.export import TOKEN_IDS, tokenizer_files
from training.run.same_run import NUMERICS
from training.run.waiting import Progress
from training.settings.arguments import SETTINGS
from training.settings.setting import SWITCH, Number, Rule

# Megatron's arguments that are copied to state.json, by the part of the config that has them.
ARGUMENTS = {
    "run": "seed",
    "model": "seq_length",
    "batch": "global_batch_size train_iters train_samples",
    "data": "reset_position_ids reset_attention_mask eod_mask_loss",
    "optimizer": """lr min_lr lr_decay_style weight_decay adam_beta1 adam_beta2 adam_eps clip_grad
        lr_warmup_iters lr_warmup_samples lr_warmup_fraction lr_decay_iters lr_decay_samples
        lr_warmup_init""",
}
# matches the name of a tensor of experts, of their router or of a shared expert
EXPERT = re.compile(r"\.mlp\.(router|experts|shared_experts)\.")


def import_mcore(
    source: Path,
    hf: Path,
    root: Path,
    note: Callable[[str], None],
    with_optimizer: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Write a Megatron checkpoint as one of ours; return its directory.

    It has Megatron's iteration and consumed samples. If common.pt lacks these, the checkpoint is of
    step 0, without the optimizer's state, and `note` prints a line about that. A missing or damaged
    common.pt raises CheckpointError, unless only the weights are wanted (not `with_optimizer`).

    hf: a directory with the model's config.json and, if there are any, its tokenizer's files.
    Raises CheckpointError and ValueError.
    """
    found = McoreCheckpoint(source, with_optimizer)
    if name := next((name for name in found.index if EXPERT.search(name)), ""):
        raise CheckpointError(
            f"{found.directory}: it is a mixture of experts ({name}), and only dense Llamas are "
            "read from Megatron's format: export it to Hugging Face's format with Megatron-Bridge "
            "or Megatron's own tools, and convert that with --from-hf"
        )
    try:
        foreign = read_json(hf / CONFIG)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(f"--hf-config {hf}: {sentence(error)}") from None
    file, config = spelt(foreign, str(hf / CONFIG), _model)
    names = Names(file, config)
    weights = Weights(found, names)
    ids = {k: foreign[k] for k in TOKEN_IDS if foreign.get(k) is not None}
    files = tokenizer_files(hf)
    state: State | None = None
    try:
        iteration, consumed, length = found.progress()
    except CheckpointError as error:
        if with_optimizer and not found.has_common():
            raise CheckpointError(f"{error}; {WEIGHTS_ALONE}") from None
        iteration = consumed = length = 0
        note(f"{error}: only the weights are taken, and the checkpoint begins at sample 0")
    else:
        state = state_of(weights) if with_optimizer else None
    if padding := weights.padding():
        note(
            f"{padding} rows of the vocabulary beyond the {config.vocab_size} of {hf / CONFIG} are "
            "padding and are left out: Megatron's loss counts them, and this one does not"
        )
    dtype = str(weights.dtype).removeprefix("torch.")
    about = {
        "numerics": NUMERICS,
        "iteration": iteration,
        "consumed_samples": consumed,
        "consumed_tokens": consumed * length,
        "optimizer_steps": iteration if state is None else steps_of(found),
        "hf_config": {**file.hf_config(config, dtype), **ids},
        **tokenizer_of(files),
    }
    if iteration:
        try:
            about["config"] = _settings(found.arguments(), file.__file__)
        except ValueError as error:
            raise CheckpointError(f"{found.directory / COMMON}: {error}") from None
    pieces = _pieces(weights, state)
    progress = progress or Progress()
    return save_new(root, pieces, progress, step=iteration, state=about, attach=files)


def _model(foreign: dict[str, Any]) -> tuple[ModelFile, LlamaConfig]:
    file = model_file_of(foreign)
    return file, read_sizes(file, foreign)


def _settings(args: dict[str, Any], model_file: str) -> dict[str, Any]:
    """Return the settings of Megatron's run that a resume compares or may use.

    Raises ValueError for an argument whose value is not valid for its flag.
    """
    found: dict[str, Any] = {"model.model_file": f"model/{Path(model_file).name}"}
    for part, keys in ARGUMENTS.items():
        for key in keys.split():
            value = args.get(key)
            # a flag that was not given is None
            known = key in args or part == "optimizer" or key.startswith("train_")
            if known and isinstance(value, (int, float, str, type(None))):
                if value is not None and not fits(value, SETTINGS[f"{part}.{key}"].rule):
                    raise ValueError(f"its argument {key} is {shown(value)}, not a valid value")
                found[f"{part}.{key}"] = value
    return found


def fits(value: Any, rule: Rule) -> bool:
    """Return whether a value is of a flag's type, and, if it is a number, one of 64 bits."""
    if rule is SWITCH:
        return isinstance(value, bool)
    if isinstance(rule, Number):
        counts = is_count(abs(value)) if type(value) is int else not rule.integer
        return counts and type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, str) and len(value) <= 80 and value.isprintable()


def _pieces(weights: Weights, state: State | None) -> list[NamedPiece]:
    """List the whole tensors, each read when it is written."""
    found = []
    kinds = dict.fromkeys(MOMENTS, torch.float32) if state is not None else {}
    if state is not None and weights.dtype != torch.float32:
        kinds = {"master": torch.float32, **kinds}
    for name, shape in weights.names.shapes.items():
        for kind, dtype in {"": weights.dtype, **kinds}.items():
            empty = torch.empty(shape, dtype=dtype, device="meta")
            fetch = partial(_read, weights, state, name, kind)
            found.append(whole(state_name(name, kind), empty, fetch))
    return found


def _read(weights: Weights, state: State | None, name: str, kind: str) -> Tensor:
    theirs = weights.names.theirs(name)
    if not kind:
        return weights.names.part(name, weights.read(theirs))
    assert state is not None
    return weights.names.part(name, state.read(theirs, kind).float())
