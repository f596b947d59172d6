# SPDX-License-Identifier: Apache-2.0
"""Export a run to Megatron: a torch_dist checkpoint from which its load_checkpoint resumes.

It has weights, AdamW's state, iteration, consumed samples and learning-rate schedule, under
megatron-core's names (mcore_names.py) and independent of the layout: Megatron reads it at any tp,
pp and dp. The optimizer's state is in the form fully_reshardable, and the same bytes are also
listed under the names of optimizers that are not distributed. One tensor is in memory at a time.

common.pt and .metadata are pickles, as Megatron requires; torch writes them from plain numbers,
strings and torch's own metadata classes. Nothing is unpickled here.
"""

import json
import os
import re
import secrets
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from model.llama import LlamaConfig
from model.load import ModelFile, model_file_of, saved_config
from mpu.layers.rope import LINEAR
from mpu.torch_private import storage_info
from tools.checkpoints.convert_huggingface import check_shapes
from tools.checkpoints.copy import open_newest
from tools.checkpoints.mcore import ARGUMENTS, fits
from tools.checkpoints.mcore_names import FC1, FC2, LAYER, PROJ, QKV, Names, Theirs
from tools.checkpoints.mcore_state import MASTERS, MOMENTS
from tools.checkpoints.torch_dist import COMMON, FORMAT, LATEST
from training.checkpoint import Checkpoint, SaveError
from training.checkpoint.files import write_bytes
from training.checkpoint.header import BY_NAME
from training.checkpoint.huggingface import spelt
from training.checkpoint.lock import DirectoryLock
from training.checkpoint.pieces import state_name, whole
from training.files.owned import check, fsync_directory, plain_files, refuse
from training.files.untrusted import printable, read_plain
from training.run.waiting import Progress
from training.settings.arguments import SETTINGS

FILE_BYTES = 4 << 30
MARK = "weft_export"  # a key of common.pt; Megatron ignores unknown keys
UNFINISHED = re.compile(r"\.iter_\d{7,}\.tmp-[0-9a-f]+")
WRITES = re.compile(r"__0_\d+\.distcp|\.metadata(\.tmp)?|common\.pt|metadata\.json")
# modules of a layer whose _extra_state Megatron requires; without float8 its value is None
EXTRA = ("self_attention.core_attention", QKV, FC1, *(n[: -len(".weight")] for n in (PROJ, FC2)))


class Parts:
    """The .distcp files of a directory: archives of torch.save, one after another."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.files = directory, 0
        self.results: list[WriteResult] = []
        self._place = storage_info()
        self._open()

    def _open(self) -> None:
        self.name = f"__0_{self.files}.distcp"
        self._file = open(self.directory / self.name, "xb")  # noqa: SIM115
        self.files += 1

    def add(self, value: Any, *names: MetadataIndex) -> None:
        """Write an archive, and list it under each of the names."""
        if self._file.tell() >= FILE_BYTES:
            self.close()
            self._open()
        start = self._file.tell()
        torch.save(value, self._file)
        length = self._file.tell() - start
        place = self._place(self.name, start, length)
        self.results += [WriteResult(name, length, place) for name in names]

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def export_mcore(
    place: Path, root: Path, note: Callable[[str], None], progress: Progress | None = None
) -> tuple[Path, Path]:
    """Write the newest whole checkpoint for Megatron; return the directories read and made.

    The output is complete or absent. Raises CheckpointError, SaveError, and ValueError for contents
    that Megatron's dense Llama or its Adam does not have.
    """
    storage_info()  # before anything is read or written
    progress = progress or Progress()
    found = open_newest(place, hashed=True, progress=progress)
    if "hf_config" not in found.state:
        raise ValueError(f"{found.directory}: state.json has no hf_config, the model's sizes")
    saved = found.state.get("config")

    def model(sizes: dict[str, Any]) -> tuple[ModelFile, LlamaConfig]:
        file = model_file_of(sizes, saved)
        return file, saved_config(file, sizes, saved)

    file, config = spelt(found.state["hf_config"], f"{found.directory}: state.json", model)
    names = Names(file, config)
    check_shapes(found, names.shapes)
    with_state = _check_state(found, names)
    common = _common(found, config, with_state)
    iteration = common["iteration"]
    made = root / f"iter_{iteration:07d}"
    if os.path.lexists(made):
        raise ValueError(f"--to-mcore: {made} exists")
    refuse("--to-mcore", root / LATEST, _is_ours, "of an export by this command")
    root.mkdir(parents=True, exist_ok=True)
    lock = DirectoryLock(root, note, patience=0)
    try:
        _write(root, made, found, names, common, with_state=with_state, progress=progress)
    finally:
        lock.close(undo=True)
    if not with_state:
        frozen = " of frozen parameters" if found.state.get("frozen_parameters") else ""
        note(f"{found.directory} has no optimizer state{frozen}: give Megatron --finetune")
    if with_state and saved and saved.get("optimizer.param_group"):
        note("Megatron has no --param-group: there its factors of learning rate and decay are 1")
    if config.vocab_size % 128:
        note(
            f"Megatron pads the vocabulary of {config.vocab_size} to a multiple of "
            "--make-vocab-size-divisible-by x tp, and its loss counts the padding"
        )
    return found.directory, made


def _write(
    root: Path,
    made: Path,
    found: Checkpoint,
    names: Names,
    common: dict[str, Any],
    with_state: bool,
    progress: Progress,
) -> None:
    """Write the directory under a temporary name, rename it, and name it in LATEST.

    common: the contents of common.pt. Raises SaveError.
    """
    for left in root.iterdir():  # by a killed export
        files = plain_files(left) if UNFINISHED.fullmatch(left.name) else None
        if files is not None and all(WRITES.fullmatch(name) for name in files):
            shutil.rmtree(left, ignore_errors=True)
    aside = root / f".{made.name}.tmp-{secrets.token_hex(8)}"
    aside.mkdir()
    try:
        _write_tensors(aside, found, names, with_state, progress)
        with open(aside / COMMON, "xb") as file:
            torch.save(common, file)
            file.flush()
            os.fsync(file.fileno())
        about = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        about |= {"common_backend": "torch", "common_backend_version": 1}
        write_bytes(aside / FORMAT, json.dumps(about).encode())  # Megatron writes it last too
        fsync_directory(aside)
        os.rename(aside, made)
    except BaseException as error:
        free = shutil.disk_usage(root).free
        shutil.rmtree(aside, ignore_errors=True)  # this call made it
        if isinstance(error, OSError):
            raise SaveError(f"{made}: it was not written: {error}") from None
        if isinstance(error, RuntimeError):  # of torch.save, whose message is a line of C++
            why = f"torch.save wrote only a part of it, and {free:,} bytes were free there"
            raise SaveError(f"{made}: it was not written: {why}") from None
        raise
    latest = root / f".latest-{secrets.token_hex(8)}"
    write_bytes(latest, str(common["iteration"]).encode())
    check(root / LATEST, _is_ours)
    os.replace(latest, root / LATEST)
    fsync_directory(root)


def _is_ours(latest: Path) -> bool:
    """Return whether LATEST names an iteration that this command wrote, by MARK in common.pt."""
    try:
        common = latest.parent / f"iter_{int(read_plain(latest, 20)):07d}" / COMMON
        return MARK.encode() in read_plain(common, 1 << 26)
    except (OSError, ValueError):
        return False


def _check_state(found: Checkpoint, names: Names) -> bool:
    """Return whether there is AdamW's state of all parameters.

    Raises ValueError for the state of another optimizer, and for other weights than a dense
    Llama's.
    """
    weights = {*found.weights()}
    kinds = {name.rpartition(".")[2] for name in found.index.keys() - weights} - {"amax_history"}
    if odd := sorted(weights - names.shapes.keys()):
        raise ValueError(f"{found.directory}: {odd[0]} is not a tensor of a dense Llama")
    dtypes = {found.index[name]["dtype"] for name in names.shapes}
    if not dtypes <= {"F32", "BF16", "F16"}:
        kinds_there = ", ".join(sorted(dtypes))
        raise ValueError(f"{found.directory}: weights in {kinds_there}, not in F32, BF16 or F16")
    if odd := sorted(kinds - {"master", *MOMENTS}):
        raise ValueError(
            f"{found.directory}: its optimizer's state has {', '.join(odd)}: only AdamW's is "
            "written; export the weights with --to-hf"
        )
    return bool(kinds) and not found.state.get("frozen_parameters")


def _write_tensors(
    directory: Path, found: Checkpoint, names: Names, with_state: bool, progress: Progress
) -> None:
    """Write weights, state and empty _extra_states, and the index."""
    parts, about = Parts(directory), dict[str, Any]()

    def add(theirs: Theirs, kind: str, *prefixes: str) -> None:
        values = names.fused(theirs, lambda name: _read(found, name, kind)).contiguous()
        key = theirs.inside if theirs.layer is None else f"{LAYER}{theirs.inside}"
        values = values[None] if theirs.layer is not None else values
        count = names.config.num_layers if theirs.layer is not None else len(values)
        shape = torch.Size([count, *values.shape[1:]])
        at = torch.Size([theirs.layer or 0, *(0 for _ in values.shape[1:])])
        for prefix in prefixes:
            entry = about.setdefault(
                prefix + key, TensorStorageMetadata(TensorProperties(values.dtype), shape, [])
            )
            entry.chunks.append(ChunkStorageMetadata(at, values.shape))
        parts.add(values.clone(), *(MetadataIndex(prefix + key, at) for prefix in prefixes))

    masters = [f"optimizer.state.{kind}." for kind in MASTERS]
    progress.begin("writing", len(names.every()), "tensors")
    for theirs in names.every():
        own = any(
            state_name(name, "master") in found.index
            for name in names.shapes
            if names.theirs(name) == theirs
        )
        if with_state and own:
            add(theirs, "master", *masters)
        add(theirs, "", "", *(masters if with_state and not own else ()))
        for kind in MOMENTS if with_state else ():
            add(theirs, kind, f"optimizer.state.{kind}.")
        progress.add()
    for name in _extra_states(names):
        about[name] = BytesStorageMetadata()
        parts.add([None], MetadataIndex(name))
    parts.close()
    FileSystemWriter(directory).finish(Metadata(about), [parts.results])


def _extra_states(names: Names) -> Iterator[str]:
    """Yield the keys of the _extra_states that Megatron requires."""
    count = names.config.num_layers
    norms = [n.removesuffix(".weight") for n in names.inside if n.endswith("_layernorm.weight")]
    for module in (*EXTRA, *norms):
        for i in range(count):
            yield f"{LAYER}{module}._extra_state/shard_{i}_{count}"
    yield "decoder.final_layernorm._extra_state/shard_0_1"


def _read(found: Checkpoint, name: str, kind: str) -> Tensor:
    entry = found.index[state_name(name, kind)]
    empty = torch.empty(entry["shape"], dtype=BY_NAME[entry["dtype"]])
    piece = whole(state_name(name, kind), empty)
    found.read([piece])
    return piece.tensor


def _common(found: Checkpoint, config: LlamaConfig, with_state: bool) -> dict[str, Any]:
    """Return the contents of common.pt."""
    state, settings = found.state, {**found.state.get("config", {}), **_taken(found)}
    iteration, consumed = (
        _state_of(found, n, default=0) for n in ("iteration", "consumed_samples")
    )
    qk = any(name.endswith("q_norm.weight") for name in found.index)
    linear = config.rope_scaling_factor and config.rope_original_length == LINEAR
    args = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.ffn_hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "group_query_attention": True,
        "num_query_groups": config.num_query_groups,
        "kv_channels": config.head_size,
        "seq_length": settings.get("model.seq_length", config.max_position_embeddings),
        "max_position_embeddings": config.max_position_embeddings,
        "position_embedding_type": "rope",
        "add_position_embedding": True,  # Megatron-LM's, whatever the positions are
        "rotary_base": config.rotary_base,
        "rotary_percent": 1.0,
        "use_rope_scaling": bool(config.rope_scaling_factor) and not linear,
        "rotary_seq_len_interpolation_factor": config.rope_scaling_factor if linear else None,
        "normalization": "RMSNorm",
        "norm_epsilon": config.norm_epsilon,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": any(name.endswith("q_proj.bias") for name in found.index),
        "qk_layernorm": qk,
        "untie_embeddings_and_output_weights": not config.tied,
        "padded_vocab_size": config.vocab_size,
        "make_vocab_size_divisible_by": 128,
        "tokenizer_type": state.get("tokenizer_type"),
        "iteration": iteration,
        "consumed_train_samples": consumed,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "data_parallel_size": 1,
        "world_size": 1,
        "no_save_rng": True,
        "no_save_optim": not with_state,
        "use_distributed_optimizer": True,
        "ckpt_fully_parallel_save": True,
        "bf16": found.state["hf_config"].get("torch_dtype") == "bfloat16",
    }
    for name, value in settings.items():
        part, _, key = name.partition(".")
        if part in ("batch", "optimizer") or name == "run.seed":
            args.setdefault(key, value)
    common: dict[str, Any] = {
        "args": Namespace(**args),
        "checkpoint_version": 3.0,
        MARK: 1,
        "iteration": iteration,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {
            "distrib_optim_sharding_type": "fully_reshardable",
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }
    if with_state:
        schedule = _schedule(found)
        groups = _groups(found, schedule)
        step = torch.tensor(float(_state_of(found, "optimizer_steps")))
        inner = {"param_groups": groups, "state": {"common_step": step}}
        common["optimizer"] = {
            **inner, "optimizer": inner, "param_state_sharding_type": "fully_reshardable",
        }  # fmt: skip
        common["opt_param_scheduler"] = schedule
    return common


def _taken(found: Checkpoint) -> dict[str, Any]:
    """Return the run's settings that are also arguments of Megatron. Raises ValueError."""
    settings = found.state.get("config", {})
    names = [f"{part}.{key}" for part, keys in ARGUMENTS.items() for key in keys.split()]
    taken = {name: settings[name] for name in names if settings.get(name) is not None}
    for name, value in taken.items():
        if not fits(value, SETTINGS[name].rule):
            text = printable(str(value))[:80]
            raise ValueError(f"{found.directory}: state.json: {name} is {text}, not a valid value")
    return taken


def _state_of(found: Checkpoint, name: str, *, default: Any = None) -> Any:
    """Return a number of a run's state. Raises ValueError if it is missing or not a number."""
    value = found.state.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{found.directory}: state.json: {name} is not a number")
    return value


def _schedule(found: Checkpoint) -> dict[str, Any]:
    """Return the state of Megatron's OptimizerParamScheduler, which counts in samples."""
    c = _taken(found)
    try:
        counted = "batch.train_iters" in c
        size = c["batch.global_batch_size"] if counted else 1
        unit = "iters" if counted else "samples"
        length = c.get(f"batch.train_{unit}", 0)
        end = c.get(f"optimizer.lr_decay_{unit}") or length
        warmup = c.get(f"optimizer.lr_warmup_{unit}", 0) * size
        if (fraction := c.get("optimizer.lr_warmup_fraction")) is not None:
            warmup = int(fraction * end * size)
        decay = c["optimizer.weight_decay"]
        return {
            "max_lr": c["optimizer.lr"],
            "lr_warmup_steps": warmup,
            "num_steps": _state_of(found, "consumed_samples"),
            "lr_decay_style": c["optimizer.lr_decay_style"],
            "lr_decay_steps": end * size,
            "min_lr": c["optimizer.min_lr"],
            "start_wd": decay,
            "end_wd": decay,
            "wd_incr_style": "constant",
            "wd_incr_steps": length * size,
        }
    except KeyError as error:
        raise ValueError(f"{found.directory}: state.json: config lacks {error}") from None


def _groups(found: Checkpoint, schedule: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return Adam's groups as Megatron makes them: with weight decay, and without for vectors."""
    c = _taken(found)
    try:
        betas = (c["optimizer.adam_beta1"], c["optimizer.adam_beta2"])
        eps = c["optimizer.adam_eps"]
    except KeyError as error:
        raise ValueError(f"{found.directory}: state.json: config lacks {error}") from None
    lr = _state_of(found, "lr", default=schedule["max_lr"])
    steps = _state_of(found, "optimizer_steps")
    return [
        {
            "wd_mult": factor,
            "lr_mult": 1.0,
            "is_expert_parallel": False,
            "is_decoupled_lr": False,
            "default_config": True,
            "max_lr": schedule["max_lr"],
            "min_lr": schedule["min_lr"],
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": schedule["start_wd"] * factor,
            "bias_correction": True,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": None,
            "decoupled_weight_decay": True,
            "step": steps,
        }
        for factor in (1.0, 0.0)
    ]
