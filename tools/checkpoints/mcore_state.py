# SPDX-License-Identifier: Apache-2.0
"""Find AdamW's state in a torch_dist checkpoint of megatron-core, in the forms of its flags.

    model space   optimizer.state.KIND.PARAMETER, shaped as the parameter: optimizers that are not
                  distributed, and the distributed one's fully_reshardable (megatron-core 0.14 on)
    flattened     the same names; a parameter that is cut into a grid of blocks is a tensor
                  [blocks..., elements of a block]: fully_sharded_model_space (0.5 to 0.13)
    buckets       optimizer.distributed.dp_group_idx_G.gbuf_idx_B.dtype_D.bucket_idx_I.KIND: the
                  distributed optimizer's flat memory, dp_reshardable (0.14 on)

Buckets do not name their parameters. Their order is the reverse order of the modules, with each
parameter at a multiple of 64 elements; the layers of a pipeline stage follow from the sizes. The
result is checked against the weights: each master must round to its weight, else the import is
refused.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from tools.checkpoints.inert_pickle import Table
from tools.checkpoints.mcore_names import (
    FC1,
    FC2,
    LAYER,
    PROJ,
    QKV,
    TOP,
    VOCABULARY,
    Names,
    Theirs,
)
from tools.checkpoints.torch_dist import COMMON, OPTIMIZER, Archive, McoreCheckpoint, within
from training.checkpoint import CheckpointError
from training.checkpoint.huggingface import EMBEDDING, HEAD
from training.checkpoint.load import instead_of
from training.checkpoint.manifest import intersection

STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
BUCKET = re.compile(
    r"optimizer\.distributed\.dp_group_idx_([0-9]{1,9})\.gbuf_idx_([0-9]{1,9})"
    r"\.dtype_\(.*\)\.bucket_idx_([0-9]{1,9})\.(\w+)"
)
GROUP = re.compile(r"optimizer\.distributed\.dp_group_idx_[0-9]{1,9}\.optimizer/shard_0_1")
MASTERS = ("fp32_param", "param")
MOMENTS = ("exp_avg", "exp_avg_sq")
ALIGNED = 64  # elements: a parameter begins at a multiple of this in the flat memory
BLOCKS = 1 << 16  # most blocks that a parameter's state is cut into
WEIGHTS_ALONE = "take the weights alone with --no-load-optim"


class Weights:
    """The weights of a checkpoint. Raises CheckpointError if they belong to another model."""

    def __init__(self, found: McoreCheckpoint, names: Names) -> None:
        self.found, self.names = found, names
        expected: dict[str, tuple[int, ...]] = {}
        for theirs in names.every():
            if theirs.layer is None:
                expected[theirs.inside] = theirs.shape
                continue
            count = names.config.num_layers
            for key, shape in self._halves(theirs):
                stacked = LAYER + key
                if stacked in found.index:
                    expected[stacked] = (count, *shape)
                else:
                    expected[f"{LAYER}{theirs.layer}.{key}"] = shape
        for key, shape in expected.items():
            if key not in found.index:
                more = instead_of(key, [k for k in found.index if not OPTIMIZER.match(k)])
                raise CheckpointError(f"{found.directory}: the tensor {key} is missing{more}")
            there = found.index[key].shape
            rows = key in VOCABULARY  # padded
            if there[rows:] != shape[rows:] or there[0] < shape[0]:
                raise CheckpointError(
                    f"{found.directory}: {key} has shape {list(there)}; config.json asks for "
                    f"{'at least ' if rows else ''}{list(shape)}"
                )
        for key in found.index:
            if key not in expected and not OPTIMIZER.match(key):
                raise CheckpointError(
                    f"{found.directory}: {key} is not a tensor of the dense Llama in config.json"
                )
        self.dtype = found.index[TOP[EMBEDDING]].dtype

    def _halves(self, theirs: Theirs) -> list[tuple[str, tuple[int, ...]]]:
        """Return the keys of a layer's parameter and their shapes: gate and up may be separate."""
        key, shape = theirs.inside, theirs.shape
        separate = (f"{LAYER}{theirs.layer}.{key}_w", f"{LAYER}{key}_w")
        if any(name in self.found.index for name in separate):
            return [(f"{key}{half}", (shape[0] // 2, *shape[1:])) for half in ("_w", "_v")]
        return [(key, shape)]

    def places(
        self, theirs: Theirs
    ) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        """Yield (key, starts, sizes, shape) of the rectangles that hold a parameter."""
        if theirs.layer is None:
            yield theirs.inside, (0,) * len(theirs.shape), theirs.shape, theirs.shape
            return
        for key, shape in self._halves(theirs):
            zeros = (0,) * len(shape)
            if LAYER + key in self.found.index:
                yield LAYER + key, (theirs.layer, *zeros), (1, *shape), shape
            else:
                yield f"{LAYER}{theirs.layer}.{key}", zeros, shape, shape

    def read(self, theirs: Theirs, prefix: str = "") -> Tensor:
        """Return a parameter's values, or those of its state under a prefix. Raises
        CheckpointError.
        """
        found = [
            self._rectangle(prefix, key, starts, sizes).view(shape)
            for key, starts, sizes, shape in self.places(theirs)
        ]
        return torch.cat(found) if len(found) > 1 else found[0]

    def _rectangle(
        self, prefix: str, key: str, starts: tuple[int, ...], sizes: tuple[int, ...]
    ) -> Tensor:
        """Return a rectangle of a tensor that is shaped as the weight, or flattened by blocks."""
        stored, weight = self.found.index[prefix + key], self.found.index[key]
        if stored.shape == weight.shape:
            return self.found.read(prefix + key, starts, sizes)
        *grid, length = stored.shape or (0,)
        shape = weight.shape
        block = tuple(n // max(g, 1) for n, g in zip(shape, grid, strict=False))
        exact = len(grid) == len(shape) and prod(grid) * length == prod(shape)
        if not exact or prod(block) != length or prod(grid) > BLOCKS:
            raise CheckpointError(
                f"{self.found.directory}: {prefix}{key} has shape {list(stored.shape)}, which fits "
                f"neither a tensor of shape {list(shape)} nor its blocks; {WEIGHTS_ALONE}"
            )
        target = torch.empty(sizes, dtype=stored.dtype)
        for at in product(*map(range, grid)):
            corner = tuple(i * n for i, n in zip(at, block, strict=True))
            shared = intersection(corner, block, starts, sizes)
            if shared is not None:
                values = self.found.read(prefix + key, (*at, 0), (1,) * len(grid) + (length,)).view(
                    block
                )
                target[within(starts, shared)] = values[within(corner, shared)]
        return target

    def padding(self) -> int:
        """Return the number of rows of the embedding that are padding."""
        return self.found.index[TOP[EMBEDDING]].shape[0] - self.names.shapes[EMBEDDING][0]


class State(ABC):
    """AdamW's state of a checkpoint."""

    weights: Weights

    @abstractmethod
    def read(self, theirs: Theirs, kind: str) -> Tensor:
        """Return "exp_avg", "exp_avg_sq" or "master" of a parameter. Raises CheckpointError."""

    def agrees(self, some: Iterable[Theirs]) -> bool:
        """Return whether the masters of some parameters round to their weights."""
        return all(
            torch.equal(
                self.read(theirs, "master").to(self.weights.dtype), self.weights.read(theirs)
            )
            for theirs in some
        )


class ModelSpace(State):
    """State under the parameters' own names."""

    def __init__(self, weights: Weights) -> None:
        self.weights, found = weights, weights.found
        kinds = set[str]()
        for key in found.index:
            if match := STATE.fullmatch(key):
                kinds.add(match[1])
            elif OPTIMIZER.match(key):
                raise CheckpointError(
                    f"{found.directory}: {key} is not understood; {WEIGHTS_ALONE}"
                )
        if odd := sorted(kinds - {*MOMENTS, *MASTERS}):
            raise CheckpointError(
                f"{found.directory}: its optimizer's state has {', '.join(odd)}: only AdamW's is "
                f"read here; {WEIGHTS_ALONE}"
            )
        master = next((kind for kind in MASTERS if kind in kinds), None)
        self.kinds = {kind: kind for kind in MOMENTS}
        if master or weights.dtype != torch.float32:
            self.kinds["master"] = master or "fp32_param"
        for kind, theirs in product(self.kinds.values(), weights.names.every()):
            for key, *_ in weights.places(theirs):
                if f"optimizer.state.{kind}.{key}" not in found.index:
                    raise CheckpointError(
                        f"{found.directory}: the tensor optimizer.state.{kind}.{key} is missing; "
                        f"{WEIGHTS_ALONE}"
                    )

        if "master" in self.kinds and not self.agrees(weights.names.every()):
            raise CheckpointError(
                f"{found.directory}: not every {self.kinds['master']} rounds to its weight. "
                "megatron-core 0.16 writes the state of fully_reshardable at wrong places where "
                "buckets end in padding; save once more without "
                f"--dist-ckpt-optim-fully-reshardable, or {WEIGHTS_ALONE}"
            )

    def read(self, theirs: Theirs, kind: str) -> Tensor:
        return self.weights.read(theirs, f"optimizer.state.{self.kinds[kind]}.")


Flat = Callable[[str, int, int, int], Tensor]  # (kind, bucket, first, count) -> elements


class Memory(State):
    """State in the layout of the distributed optimizer's flat memory.

    There is one row of buckets for each rank of tp x pp and chunk of its model: `sizes` has their
    sizes in elements, and `flat` reads a range of them.
    """

    def __init__(
        self,
        weights: Weights,
        sizes: Mapping[tuple[int, int], Sequence[int]],
        flat: Mapping[tuple[int, int], Flat],
    ) -> None:
        self.weights, self.flat = weights, flat
        found, args = weights.found, weights.found.arguments()
        self.directory = found.directory
        grid = [args.get(f"{name}_model_parallel_size") for name in ("tensor", "pipeline")]
        counts = [n for n in grid if type(n) is int and n > 0]
        if len(counts) != 2:
            raise self._unclear(f"{COMMON} lacks the tensor- and pipeline-parallel sizes")
        self.tp, self.pp = counts
        chunks = 1 + max(buffer for _, buffer in sizes)
        count = self.tp * self.pp * chunks
        grid_of = range(self.tp * self.pp), range(chunks)
        if count != len(sizes) or set(sizes) != set(product(*grid_of)):
            raise self._unclear(
                f"tp {self.tp} x pp {self.pp} x {chunks} chunks need {count} buffers, and "
                f"{len(sizes)} are there"
            )
        self.sizes, self.stages = sizes, self.pp * chunks
        for fused in (True, False):  # Transformer Engine's layers, then megatron-core's own
            self.at = self._places(fused)
            if self.at is not None and self.agrees(self._probe()):
                break
        else:
            raise self._unclear("parameters of these sizes do not fill its buffers")
        if not self.agrees(weights.names.every()):
            raise self._unclear("not every master weight there rounds to its weight")

    def _unclear(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.directory}: the distributed optimizer's buffers cannot be assigned to "
            f"parameters: {why}; save once more with megatron-core 0.14 or later and "
            f"--dist-ckpt-optim-fully-reshardable, or {WEIGHTS_ALONE}"
        )

    def _order(self, fused: bool) -> list[str]:
        """Return a layer's parameters in the order of its modules."""
        norms = f"{QKV}.layer_norm_weight", f"{FC1}.layer_norm_weight"
        qk = [f"self_attention.{x}_layernorm.weight" for x in "qk"]
        attention = [f"{QKV}.weight", f"{QKV}.bias"]
        if fused:
            order = [PROJ, norms[0], *attention, *qk, norms[1], f"{FC1}.weight", FC2]
        else:
            order = [norms[0], PROJ, *attention, *qk, norms[1], f"{FC1}.weight", FC2]
        return [name for name in order if name in self.weights.names.inside]

    def _local(self, theirs: Theirs) -> tuple[int, ...]:
        """Return the shape of a parameter on one rank of tp."""
        shape = theirs.shape
        if theirs.inside in VOCABULARY:
            shape = self.weights.found.index[theirs.inside].shape
        if theirs.inside in (PROJ, FC2):
            return shape[0], shape[1] // self.tp
        if theirs.inside.endswith(("layernorm.weight", "layer_norm_weight")):
            return shape
        return shape[0] // self.tp, *shape[1:]

    def _stage(self, stage: int, layers: range, order: list[str]) -> list[Theirs | None]:
        """Return the parameters of a stage, reversed; None is its copy of a tied embedding."""
        names = self.weights.names
        found: list[Theirs | None] = []
        if stage == 0:
            found.append(names.theirs(EMBEDDING))
        found += [Theirs(inside, i, names.inside[inside]) for i in layers for inside in order]
        if stage == self.stages - 1:
            found.append(names.theirs("model.norm.weight"))
            if HEAD in names.shapes:
                found.append(names.theirs(HEAD))
            elif self.stages > 1:
                found.append(None)
        return found[::-1]

    def _places(self, fused: bool) -> dict[tuple[str, int], tuple[int, int, int, int]] | None:
        """Return {(parameter, tp rank): (group, buffer, bucket, first)}, or None if none fits.

        A stage has as many layers as its buckets have room for.
        """
        names, order = self.weights.names, self._order(fused)
        places: dict[tuple[str, int], tuple[int, int, int, int]] = {}
        layer, embedding = 0, names.theirs(EMBEDDING)
        one = sum(prod(self._local(Theirs(n, 0, names.inside[n]))) for n in order)
        for stage in range(self.stages):
            buffer, p = divmod(stage, self.pp)
            buckets = self.sizes[p * self.tp, buffer]
            top = self._stage(stage, range(0), order)
            room = sum(buckets) - sum(prod(self._local(t or embedding)) for t in top)
            for count in (n for n in range(room // one, -1, -1) if n >= room // one - 1):
                stop = layer + count
                each = self._stage(stage, range(layer, stop), order)
                fit = pack([prod(self._local(t or embedding)) for t in each], buckets)
                if fit is not None and stop <= names.config.num_layers:
                    break
            else:
                return None
            for rank in range(self.tp):
                group = p * self.tp + rank
                if list(self.sizes[group, buffer]) != list(buckets):
                    return None
                for theirs, (bucket, first) in zip(each, fit, strict=True):
                    if theirs is not None:
                        places[theirs.name, rank] = group, buffer, bucket, first
            layer = stop
        return places if layer == names.config.num_layers else None

    def _probe(self) -> list[Theirs]:
        """Return parameters whose places differ in the two orders of a layer."""
        inside = self.weights.names.inside
        return [Theirs(n, 0, inside[n]) for n in (PROJ, f"{QKV}.layer_norm_weight")]

    def read(self, theirs: Theirs, kind: str) -> Tensor:
        assert self.at is not None
        local = self._local(theirs)
        parts = []
        for rank in range(self.tp):
            group, buffer, bucket, first = self.at[theirs.name, rank]
            flat = self.flat[group, buffer]
            values = flat("param" if kind == "master" else kind, bucket, first, prod(local))
            parts.append(values.view(local))
        if local == theirs.shape:
            return parts[0]
        if theirs.inside == f"{FC1}.weight":  # each rank has its gate, then its up
            pairs = [part.view(2, -1, *local[1:]) for part in parts]
            return torch.cat(pairs, dim=1).reshape(theirs.shape)
        fused = torch.cat(parts, dim=int(theirs.inside in (PROJ, FC2)))
        return fused[: theirs.shape[0]]


def pack(counts: Sequence[int], buckets: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return the (bucket, first) of parameters of these counts, or None if they do not fill them.

    As in core/distributed/param_and_grad_buffer.py, each begins at a multiple of 64.
    """
    places, bucket, end = list[tuple[int, int]](), 0, 0
    for count in counts:
        first = -(-end // ALIGNED) * ALIGNED
        if first + count > buckets[bucket]:
            if buckets[bucket] not in (end, first) or bucket + 1 == len(buckets):
                return None
            bucket, first = bucket + 1, 0
            if count > buckets[bucket]:
                return None
        places.append((bucket, first))
        end = first + count
    return places if bucket + 1 == len(buckets) and end == buckets[bucket] else None


def _buckets(weights: Weights) -> Memory:
    """Return the state of dp_reshardable."""
    found = weights.found
    sizes: dict[tuple[int, int], dict[int, int]] = {}
    keys: dict[tuple[int, int, int, str], str] = {}
    for key, stored in found.index.items():
        if match := BUCKET.fullmatch(key):
            group, buffer, bucket = map(int, match.groups()[:3])
            keys[group, buffer, bucket, match[4]] = key
            sizes.setdefault((group, buffer), {})[bucket] = prod(stored.shape)
        elif OPTIMIZER.match(key):
            raise CheckpointError(f"{found.directory}: {key} is not understood; {WEIGHTS_ALONE}")

    def flat(group: int, buffer: int) -> Flat:
        def read(kind: str, bucket: int, first: int, count: int) -> Tensor:
            key = keys.get((group, buffer, bucket, kind))
            if key is None:
                raise CheckpointError(
                    f"{found.directory}: bucket {bucket} of rank {group} lacks {kind}; "
                    f"{WEIGHTS_ALONE}"
                )
            return found.read(key, (first,), (count,))

        return read

    for (group, _), row in sizes.items():
        if len(row) != 1 + max(row):
            raise CheckpointError(
                f"{found.directory}: only {len(row)} of {1 + max(row):,} buckets of rank {group} "
                f"are there; {WEIGHTS_ALONE}"
            )
    rows = {at: [row[i] for i in range(len(row))] for at, row in sizes.items()}
    return Memory(weights, rows, {at: flat(*at) for at in rows})


def state_of(weights: Weights) -> State | None:
    """Return the optimizer's state, or None if the checkpoint has none.

    Raises CheckpointError if it is not AdamW's, or its form is not known.
    """
    found = weights.found
    own = [key for key in (*found.index, *found.objects) if OPTIMIZER.match(key)]
    if not own:
        return None
    if chained := sorted(key for key in own if not key.startswith("optimizer.")):
        raise CheckpointError(
            f"{found.directory}: {chained[0]}: several optimizers share the parameters; "
            f"{WEIGHTS_ALONE}"
        )
    if any(STATE.fullmatch(key) for key in found.index):
        return ModelSpace(weights)
    if any(BUCKET.fullmatch(key) for key in found.index):
        return _buckets(weights)
    if gathered := [key for key in own if ".param_state/" in key]:
        raise CheckpointError(
            f"{found.directory}: {gathered[0]} is of the form dp_zero_gather_scatter, which is not "
            f"read: save once more with --ckpt-fully-parallel-save, or {WEIGHTS_ALONE}"
        )
    raise CheckpointError(f"{found.directory}: {own[0]} is not understood; {WEIGHTS_ALONE}")


def steps_of(found: McoreCheckpoint) -> int:
    """Return the number of updates that the optimizer has made. Raises CheckpointError."""
    counts = set[float]()
    try:
        _collect(found.common, found.common.top.named().get("optimizer"), counts)
        for key in found.objects:
            if GROUP.fullmatch(key):
                archive = found.object(key)
                _collect(archive, archive.top, counts)
                archive.close()
    except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{found.directory}: the optimizer's step: {error}") from None
    whole = all(count.is_integer() and 0 <= count < 1 << 53 for count in counts)
    if len(counts) != 1 or not whole:
        problem = (
            f"is {sorted(counts)[:8]}, where one count is expected" if counts else "is missing"
        )
        raise CheckpointError(f"{found.directory}: the optimizer's step {problem}; {WEIGHTS_ALONE}")
    return int(counts.pop())


def _collect(archive: Archive, value: Any, counts: set[float]) -> None:
    """Add the numbers under "step" or "common_step" in nested tables."""
    if isinstance(value, Table):
        for key, inner in value:
            if key in ("step", "common_step") and inner is not None:
                counts.add(archive.number(inner))
            elif isinstance(inner, (Table, list)):
                _collect(archive, inner, counts)
    elif isinstance(value, list):
        for inner in value:
            _collect(archive, inner, counts)
