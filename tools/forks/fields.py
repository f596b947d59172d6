# SPDX-License-Identifier: Apache-2.0
"""Vary every field of a model's config, and every field of its config.json: each must have effect.

If from_hf_config drops a field, or the model does not read it, a checkpoint is silently loaded as
another model.
"""

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from model.llama import Llama, LlamaConfig
from model.load import ModelFile, read_sizes
from mpu.context import LayerContext
from mpu.gradients import GradientSink
from tools.forks.case import noise_of

# fields that a config.json does not have: of padding, of initial weights
OF_THE_RUN = {"make_vocab_size_divisible_by", "width_mult"}
WITHOUT_EFFECT = {"max_position_embeddings"}  # on the model's output
OF_NO_MODEL = {"architectures", "torch_dtype", "dtype"}  # keys of a config.json
# {field: the method of Llama that applies it}
APPLIED = {"embedding_mult": "embed", "logits_divisor": "last_norm", "softmax_scale": "rope"}
SHORT = 12  # tokens from which RoPE scales, so that it changes the fastest pair, too
FEW = 5  # tokens of a window shorter than the rows of fork-check
MORE_LAYERS = (6, 12)  # than fork-check has, for a pattern of layers that is longer
Finding = tuple[str, str, str]


def others(name: str, value: Any) -> Iterator[Any]:
    """Yield other values of a field; of sizes, first those that are mostly divisible as needed. A
    number that bounds others, as a clip does, may have an effect only where it is far smaller or
    larger.
    """
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        some = (2 * value, value + 1, value // 2, 3) if value else (4, 1)
        yield from filter(None, some)
    elif isinstance(value, float):
        yield 4.0 if value == 0 else 1.5 * value + (0.05 if value < 0.01 else 0.0)
        yield from (value / 1e3, 1e3 * value + 10.0) if value else ()  # where a bound acts
    elif isinstance(value, str) and "act" in name:
        yield "gelu" if value != "gelu" else "relu"
    elif isinstance(value, str) and name == "model_type":
        yield "another-model"
    elif isinstance(value, list) and name == "layer_types" and value != value[::-1]:
        yield value[::-1]


def model_of(file: ModelFile, config: LlamaConfig) -> Any:
    """Return the whole model in fp64 on one rank, initialised."""
    kind = torch.float64
    ctx = LayerContext(dtype=kind, accumulate=kind, sink=GradientSink(kind))
    return file.Model(config, ctx).initialize(1)


@torch.inference_mode()
def output_of(file: ModelFile, config: LlamaConfig, tokens: Tensor) -> Tensor | None:
    """Return the logits, losses and auxiliary losses of a model with these sizes, in one vector, or
    None if it cannot be built or run.
    """
    try:
        model = model_of(file, config)
        for name, param in model.named_parameters():
            if param.dim() == 1:  # a bias of 0 would hide a field that adds it, as equal norms one
                param.add_(noise_of(name, param))
        auxiliary = model.ctx.auxiliary_losses
        auxiliary.in_forward = True
        parts = (model(tokens), model(tokens, tokens))
        return torch.cat([x.flatten() for x in (*parts, torch.as_tensor(auxiliary.take()))])
    except Exception:
        return None


def fields_of_config(file: ModelFile, config: LlamaConfig, tokens: Tensor) -> list[Finding]:
    """Return a finding for each field of ModelConfig that is lost in a config.json or not read, and
    for each key that hf_config writes and from_hf_config does not read.
    """
    own = file.ModelConfig.__name__
    try:
        read_sizes(file, json.loads(json.dumps(file.hf_config(config))))
    except ValueError as error:
        line = f"from_hf_config refuses what hf_config writes: {error}. {own}.__post_init__ must "
        return [("config", "", f"{line}refuse a size for which config.json has no field")]
    bases = [config]
    if not config.rope_scaling_factor and _valid(config, "rope_scaling_factor", 4.0):
        bases.append(replace(config, rope_scaling_factor=4.0, rope_original_length=SHORT))
    before = [output_of(file, base, tokens) for base in bases]
    found: list[Finding] = []
    known = {field.name for field in fields(LlamaConfig)}
    for name in (field.name for field in fields(config) if field.init):
        if name in OF_THE_RUN:
            continue
        lost, idle = [], []
        for base, logits in zip(bases, before, strict=True):
            values = [v for v in others(name, getattr(base, name)) if _valid(base, name, v)]
            unscaled = name == "rope_original_length" and not base.rope_scaling_factor
            if not values or unscaled:
                continue
            some = [replace(base, **{name: value}) for value in values]
            lost.append(_after_saving(file, base, some[0], name, tokens))
            if name not in WITHOUT_EFFECT:
                alike = all(_same(logits, output_of(file, one, tokens)) for one in some)
                idle.append(alike and _idle_in_more_layers(file, base, name, tokens))
        unread = bool(idle) and all(idle)
        if lost and all(lost):
            more = f"; the model does not depend on it either: let {own} refuse other values"
            if name not in known:
                more = "; the model does not depend on it either: a field that only layers have "
                more += f"belongs in a subclass of {own}, which layer_config returns"
            found.append(("config", name, lost[0] + more * unread))
        elif unread:
            line = f"the model does not depend on {name} of its config: another value gives "
            line += f"the same logits and loss{_replaced(file, name)}"
            found.append(("config", name, line))
    return found + _keys_of_json(file, config)


def windows_of(file: ModelFile, config: LlamaConfig, tokens: Tensor) -> list[str]:
    """Return the fields that count tokens, as a window does: a larger value does not change the
    logits, and FEW does. tokens [b, s].
    """
    found, base = [], output_of(file, config, tokens)
    known = {field.name for field in fields(LlamaConfig)}
    for name in (field.name for field in fields(config) if field.name not in known):
        value = getattr(config, name)
        if type(value) is not int or value < tokens.shape[1]:
            continue
        values: tuple[Any, ...] = (2 * value, FEW)
        if not all(_valid(config, name, n) for n in values):
            continue
        more, few = (output_of(file, replace(config, **{name: n}), tokens) for n in values)
        if _same(base, more) and few is not None and not _same(base, few):
            found.append(name)
    return found


def _idle_in_more_layers(file: ModelFile, config: LlamaConfig, name: str, tokens: Tensor) -> bool:
    """Return whether deeper models do not depend on a field either: a pattern may be long."""
    for layers in MORE_LAYERS:
        if layers <= config.num_layers or not _valid(config, "num_layers", layers):
            continue
        deep = replace(config, num_layers=layers)
        logits = output_of(file, deep, tokens)
        values = [v for v in others(name, getattr(deep, name)) if _valid(deep, name, v)]
        some = (output_of(file, replace(deep, **{name: value}), tokens) for value in values)
        if not all(_same(logits, each) for each in some):
            return False
    return True


def _replaced(file: ModelFile, name: str) -> str:
    """Return a clause on the remedy for a field that is not read: to call the method of Llama that
    applies it, if the fork replaces that method, or else to read or refuse the field.
    """
    method = APPLIED.get(name, "")
    if not method or getattr(file.Model, method) is getattr(Llama, method):
        return f": read it, or let {file.ModelConfig.__name__} refuse other values"
    own = f"{file.Model.__name__}.{method}"
    return f"; {own} replaces Llama's, which applies it: let it call super().{method}(...)"


def _same(one: Tensor | None, two: Tensor | None) -> bool:
    return one is not None and two is not None and torch.equal(one, two)


def _valid(config: LlamaConfig, name: str, value: Any) -> bool:
    try:
        replace(config, **{name: value})
    except (ValueError, TypeError, ArithmeticError):
        return False
    return True


def _after_saving(
    file: ModelFile, base: LlamaConfig, config: LlamaConfig, name: str, tokens: Tensor
) -> str:
    """Return the error of a field after hf_config and from_hf_config, or "".

    config: base with another value of it. The value may come back in another form that means the
    same model (every second layer; a list of the layers).
    """
    value = getattr(config, name)
    try:
        written = json.loads(json.dumps(file.hf_config(config)))
    except ValueError:
        return ""  # hf_config refuses the value
    try:
        back = read_sizes(file, written)
        got = getattr(back, name)
    except ValueError as error:
        return f"from_hf_config refuses what hf_config writes for {name} = {value!r}: {error}"
    if got == value:
        return ""
    if got != getattr(base, name):
        of_run = {n: getattr(config, n) for n in OF_THE_RUN if hasattr(config, n)}
        other = output_of(file, replace(back, **of_run), tokens)
        if _same(other, output_of(file, config, tokens)):
            return ""
    return (
        f"{name} = {value!r} is {got!r} after hf_config and from_hf_config: one of them drops it, "
        "so a checkpoint would be loaded as another model"
    )


def _keys_of_json(file: ModelFile, config: LlamaConfig) -> list[Finding]:
    """Return a finding for each key that hf_config writes and from_hf_config does not read."""
    written = json.loads(json.dumps(file.hf_config(config)))
    plain, found = read_sizes(file, written), []
    for key, value in written.items():
        values = list(others(key, value))
        if key == "rope_scaling":
            values = [{"rope_type": "yarn", "factor": 4.0}]
        if not values or key in OF_NO_MODEL:
            continue
        if not any(_reacts(file, {**written, key: other}, plain) for other in values):
            found.append(
                (
                    "config",
                    key,
                    f"from_hf_config reads {key} = {values[0]!r} of config.json in the same way as "
                    f"{value!r}: it must keep the value, or refuse it",
                )
            )
    return found


def _reacts(file: ModelFile, hf: dict[str, Any], plain: LlamaConfig) -> bool:
    try:
        return read_sizes(file, hf) != plain
    except ValueError:
        return True
