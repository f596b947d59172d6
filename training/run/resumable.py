# SPDX-License-Identifier: Apache-2.0
"""Test before the first step that a resume can read a save of this model.

A model's file may be user code, and errors in its functions would otherwise appear at the first
save or at the first resume, after hours of training. So the functions that save and resume call are
called on what the run would save, in memory.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from reprlib import repr as short
from typing import Any, Protocol

from torch import Tensor, nn

from mpu.grid import Grid
from mpu.param import placement_of, saved_buffers, unique_parameters
from training.checkpoint import Checkpoint, CheckpointError, weight_pieces
from training.checkpoint.files import json_bytes
from training.checkpoint.load import FREE_FIELDS, check_state
from training.checkpoint.manifest import INDEX, LIMIT, STATE, check_index, merge_index, parse
from training.checkpoint.pieces import DTYPES, dtype_name, is_state
from training.flags.model_sizes import SAME
from training.run import same_run
from training.run.model_profile import StagedModel
from training.settings.config import Config, UsageError

# sizes of a model that a config.json may omit: no tensor depends on them
FREE = ("kv_channels", "init_method_std", "max_position_embeddings")  # the first is head_size
FILE = "rank_00000-000.safetensors"


class Unwritten(Checkpoint):
    """The checkpoint of a run's start as a resume would read it; nothing is written to disk."""

    def __init__(
        self, directory: Path, state: dict[str, Any], model: nn.Module, names: Mapping[str, Any]
    ) -> None:
        self.directory, self.step, self._boxes = directory, 0, {}
        self.manifest = {"step": 0, "files": {FILE: {}}}
        self.state = as_read(state, STATE)
        check_state(self.state)
        pieces = weight_pieces(model, names, Grid())
        rows = [
            [p.name, dtype_name(p.tensor.dtype), list(p.shape), FILE, p.key]
            + [list(p.starts), list(p.sizes)]
            for p in pieces
        ]
        index = json.dumps(merge_index([rows]), separators=(",", ":"))
        self.index = parse(index.encode(), INDEX)
        check_index(self.index, self.manifest)
        self.check_tensors(pieces, cast=False)


def as_read(value: Any, name: str) -> dict[str, Any]:
    """Return `value` as a resume reads it back from JSON: with lists in place of tuples.

    Raises CheckpointError for values that cannot be read back: NaN, a long integer, a type that
    JSON does not have.
    """
    try:
        data = json_bytes(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{name}: {error}") from None
    if len(data) > LIMIT:
        raise CheckpointError(f"{name} is larger than {LIMIT} bytes")
    return parse(data, name)


def spelled(hf_config: Callable[[Any, str], Any], sizes: Any, dtype: str) -> dict[str, Any]:
    """Return a model's hf_config as a checkpoint stores it. Raises UsageError naming the field."""
    found = hf_config(sizes, dtype)
    if not isinstance(found, dict):
        raise UsageError(f"hf_config returns a {type(found).__name__}: it must return a dict")
    return dict(each_read(found, "hf_config"))


def each_read(values: Mapping[str, Any], by: str) -> Iterator[tuple[str, Any]]:
    """Yield (field, value) as a resume reads them, in the order in which it compares them.

    by: the function that returned the values. Raises UsageError naming it and the field.
    """
    for field, value in values.items():
        try:
            if not isinstance(field, str):
                raise CheckpointError(f"a field's name is a {type(field).__name__}, not a str")
            yield field, as_read({field: value}, field)[field]
        except CheckpointError as error:
            why = str(error).removeprefix(f"{field}: ").removeprefix(f"{field} is not JSON: ")
            raise UsageError(
                f"{by}: {field} is {short(value)}, which a checkpoint's JSON cannot hold ({why}): "
                "use finite numbers, strings, lists and dicts"
            ) from None


def check_names(model: nn.Module, names: Any) -> None:
    """Raise UsageError if hf_names does not name each tensor of the whole model once."""
    if not isinstance(names, Mapping):
        raise UsageError(f"hf_names returns a {type(names).__name__}: it must return a dict")
    tensors: list[tuple[str, Tensor, int]] = []
    for name, param in unique_parameters(model):
        tensors.append((name, param, len(placement_of(param).sections) or 1))
    tensors += [(name, buffer, 1) for name, buffer in saved_buffers(model)]
    taken: dict[str, str] = {}
    for name, tensor, sections in tensors:
        theirs = names.get(name)
        if theirs is None:
            raise UsageError(f"hf_names has no {name}: it must name each parameter of the model")
        plain = isinstance(theirs, (tuple, list)) and all(type(each) is str for each in theirs)
        if not plain or len(theirs) != sections or not all(theirs):
            many = "a name" if sections == 1 else f"{sections} names, one for each part,"
            here = f"hf_names has {short(theirs)} for {name}"
            raise UsageError(f"{here}: it must be a tuple of {many}")
        if tensor.dtype not in DTYPES:
            raise UsageError(
                f"{name} is {tensor.dtype}: a checkpoint can hold {', '.join(DTYPES.values())}"
            )
        for each in theirs:
            if taken.get(each, name) != name:
                raise UsageError(
                    f"hf_names has {each!r} for {taken[each]} and for {name}: each tensor needs a "
                    "name of its own"
                )
            taken[each] = name
    for each in taken:
        if is_state(each, taken):
            raise UsageError(
                f"hf_names has {each!r} and {each.rpartition('.')[0]!r}: the first is the name of "
                "an optimizer state of the second; choose another name"
            )


def check_sizes(config: Config, sizes: Any, back: Any, again: dict[str, Any], hf: Any) -> None:
    """Raise UsageError if from_hf_config does not return the sizes that hf_config was given.

    hf: hf_config of `sizes`. back: the sizes as a tool reads them from a checkpoint. again:
    hf_config of the sizes that from_hf_config makes of `hf` alone.
    """
    for field, value in hf.items():
        if field not in FREE_FIELDS and again.get(field) != value:
            raise UsageError(
                f"from_hf_config loses {field}: hf_config writes {short(value)}, and "
                f"{short(again.get(field))} after from_hf_config has read that"
            )
    own = [f for f in dict(config.extra) if hasattr(sizes, f)]
    flags = ["rope_scaling_factor", "yarn", "tied", "head_size", *SAME, *own]
    for name in flags:
        here, there = getattr(sizes, name, None), getattr(back, name, None)
        if isinstance(here, list):
            here = tuple(here)
        if name not in FREE and here != there:
            raise UsageError(
                f"from_hf_config returns {name} {short(there)} where the run has {short(here)}: "
                "hf_config must write it, and from_hf_config read it"
            )


class ModelFile(Protocol):
    """The functions of a model's file that a save and a resume call (model/load.py)."""

    def hf_names(self, model: Any) -> dict[str, tuple[str, ...]]:
        """Return each parameter's names in a checkpoint."""

    def hf_config(self, config: Any, dtype: str) -> dict[str, Any]:
        """Return the sizes as Hugging Face's config.json."""

    def from_hf_config(self, hf: dict[str, Any]) -> Any:
        """Return the inverse of hf_config."""


def check(
    config: Config,
    digests: Mapping[str, str],
    model: StagedModel,
    file: ModelFile,
    saved_config: Callable[[Any, dict[str, Any], Mapping[str, Any]], Any],
) -> None:
    """Raise ValueError, a sentence about the model's file, where a resume of this run would fail.

    model: the whole model on one rank, of meta tensors. saved_config(file, hf, settings): returns
    the sizes that a tool reads from a checkpoint. Without --save only hf_names is tested.
    """
    assert isinstance(model, nn.Module)
    names = file.hf_names(model)
    check_names(model, names)
    c = config.checkpoint
    if not c.save:
        return
    own = {k: v for k, v in config.flat().items() if k.startswith("extra.")}
    dict(each_read(own, "extra_args_provider"))
    dtype = str(config.run.dtype).removeprefix("torch.")
    sizes: Any = model.config
    hf = spelled(file.hf_config, sizes, dtype)
    state = {**same_run.progress(config, 0, 0, (0, 0), digests), "optimizer_steps": 0, **digests}
    found = Unwritten(Path(c.save), {**state, "hf_config": hf}, model, names)
    again = spelled(file.hf_config, file.from_hf_config(dict(hf)), dtype)
    check_sizes(config, sizes, saved_config(file, dict(hf), found.state["config"]), again, hf)
    found.check_model(same_run.expected(config, hf))
    changes = (line for _, line in same_run.changes(found, config, digests))
    for line in (*same_run.of_model(found, config, hf), *changes):
        raise UsageError(f"a checkpoint of this run could not be resumed: {line}")
