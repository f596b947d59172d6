# SPDX-License-Identifier: Apache-2.0
"""Hugging Face weights next to each save (--save-hf), written in the background.

A folder is made from the checkpoint that was just saved, so it is the same for every layout. Each
rank reads and writes a part of the files. tools/checkpoint.py convert --to-hf writes the same ones.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from mpu.comm.transport import Axis
from mpu.grid import Grid
from training.checkpoint import Checkpoint, SaveError, first_error, together
from training.checkpoint.files import open_plain
from training.checkpoint.huggingface import HuggingFaceDirectory
from training.checkpoint.stream import attached
from training.checkpoint.write_huggingface import Extra, clear, keep_newest, write_huggingface
from training.data.auto_tokenizer import auto_tokenizer
from training.data.foreign_code import LARGEST
from training.data.tokenizer_files import MODEL, STANDARD, TOKENIZER_FILES, tokenizer_in, with_class
from training.files.untrusted import sentence
from training.files.written import Written
from training.settings.arguments import CheckpointConfig

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # of config.json, kept as they are
NO_PADDING = {"pad_token_id": None}
STEP = re.compile(r"step_\d{8,}")
RECORD = "save_hf.json"  # in --save
SHARD_BYTES = 5_000_000_000  # of one file of weights, as transformers has it


class HuggingFaceSaves:
    """The folders under --save-hf of one run. note: prints a line, on rank 0."""

    def __init__(self, c: CheckpointConfig, grid: Grid, note: Callable[[str], None]) -> None:
        assert c.save_hf is not None
        self.root, self.config, self.grid, self.note = Path(c.save_hf), c, grid, note
        if not self.root.exists():  # made/../hf is another folder once `made` is made
            self.root = Path(os.path.realpath(self.root))
        self._extra: Extra | None = None
        self._record: Written | None = None  # on rank 0
        self._told = set[str]()
        self._checked = False

    def begin(self) -> None:
        """Remove unfinished folders of a killed run. Call it under the lock of --save.

        The record of the folders that this run wrote is in --save, so no other run shares it.
        """
        if self.grid.rank == 0:
            assert self.config.save is not None
            self._record = Written(Path(self.config.save) / RECORD)
            clear(self.root, self._record)

    def refuse_others(self, iteration: int) -> None:
        """Raise SaveError if a later save would replace a folder that this run did not write."""
        if self._record is None or not self.root.is_dir():
            return
        names, known = sorted(filter(STEP.fullmatch, os.listdir(self.root))), self._record.names()
        others = len(set(names) - set(known))
        if others and self.config.save_hf_keep_last_k:
            self.note(f"--save-hf {self.root}: {others} folder(s) of other runs are kept")
        for name in names:
            if int(name[5:]) > iteration and not self._record.ours(self.root / name):
                raise SaveError(
                    f"{name} was not written by this run, or was changed since, and a save of that "
                    "step would replace it: use another --save-hf, or move the folder away"
                )

    def has(self, step: str) -> bool:
        """Return whether the folder of a step exists; if it does, it is complete."""
        return (self.root / step).is_dir()

    def write(self, saved: Path, world: Axis, best: Collection[str] = ()) -> None:
        """Write the folder of a checkpoint, collectively; remove folders that are no longer kept.

        world: the axis over which a background thread may communicate. best: names of folders that
        are kept at any age. Raises SaveError.
        """
        opened: list[Checkpoint] = []
        failed = first_error(together(lambda: opened.append(Checkpoint(saved)), world))
        if failed is not None:
            raise SaveError(
                f"--save-hf {self.root}: {saved.name}: rank {failed.rank}: {failed.error}"
            )
        (found,) = opened

        def extra() -> Extra:
            if self._extra is None:  # the tokenizer of a run is always the same
                self._extra = exported_tokenizer(found, None)
            return self._extra

        write_huggingface(
            self.root / saved.name, found, found.weights(), extra,
            dtype=getattr(torch, self.config.save_hf_dtype),
            shard_bytes=SHARD_BYTES,
            grid=self.grid, world=world, record=self._record,
        )  # fmt: skip
        if self._record is None:
            return
        self.note(f"wrote {self.root / saved.name} for transformers")
        if not self._checked:
            self._checked = True
            shapes = {name: tuple(found.index[name]["shape"]) for name in found.weights()}
            if why := not_for_transformers(found.state["hf_config"], shapes):
                self.note(f"--save-hf {self.root}: {why}")
        try:
            count = self.config.save_hf_keep_last_k
            _, changed = keep_newest(self.root, count, STEP, self._record, best)
            for name in set(changed) - self._told:
                self.note(f"{self.root / name} is kept: it was changed after this run wrote it")
            self._told.update(changed)
        except OSError as error:
            self.note(f"no folder of --save-hf was removed: {error.strerror}: {error.filename}")


def tokenizer_files(root: Path) -> dict[str, bytes]:
    """Return {name: bytes} of the tokenizer's files in a directory. Raises ValueError."""
    found = {}
    for name in TOKENIZER_FILES:
        if os.path.lexists(root / name):
            with open_plain(root / name, links=True) as file:
                found[name] = file.read(LARGEST + 1)
            if len(found[name]) > LARGEST:
                raise ValueError(f"{root / name} is larger than {LARGEST:,} bytes")
    return with_class(found, str(root))


def exported_tokenizer(found: Checkpoint, given: Path | None) -> Extra:
    """Return the tokenizer's files for an export, and the ids for its config.json.

    given: --tokenizer. The files have the names that Hugging Face looks for, and missing files that
    transformers.AutoTokenizer reads are added. The ids of an imported model are kept; otherwise
    they are the tokenizer's own. There is no padding id unless it was imported: the default of a
    model_type may be outside of this vocabulary. Raises ValueError.
    """
    state = found.state if given is None else {}
    directory = found.directory if given is None else given
    if given is not None or isinstance(found, HuggingFaceDirectory):
        extra = tokenizer_files(directory)
    else:
        kind, own = (str(state.get(f"tokenizer_{what}")) for what in ("type", "model"))
        extra = attached(found, {*TOKENIZER_FILES, own})
        if own in extra:
            extra[STANDARD.get(kind, MODEL)] = extra.pop(own)
    sizes = found.state["hf_config"]
    ids = {k: sizes[k] for k in TOKEN_IDS if sizes.get(k) is not None}
    if given is not None or not ids:
        tokenizer = tokenizer_in(state, str(directory), sizes.get("vocab_size"))
        if tokenizer is not None:
            ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod}
            extra |= auto_tokenizer(extra, tokenizer)
    extra = with_class(extra, None, sizes.get("model_type"))
    if ids and "generation_config.json" not in extra:
        known = {"_from_model_config": True, **{k: v for k, v in ids.items() if v is not None}}
        extra["generation_config.json"] = json.dumps(known, indent=2).encode()
    return extra, {**NO_PADDING, **ids}


def not_for_transformers(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return why transformers cannot load a folder as it is, "" if it can.

    transformers' model of this config is built on meta tensors, and names and shapes are compared,
    except for the MLPs of a mixture of experts: transformers renames them while it loads.
    """
    try:
        import transformers
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    except Exception as error:  # it may be there and not suit what it imports
        why = f"transformers cannot be imported ({sentence(error)})"
        return f"{why}, so whether it can load the folders was not checked"

    kind = str(config.get("model_type", ""))
    own = "the folders hold the weights under the fork's own names, which tools/checkpoint.py reads"
    if config.get("logits_scaling") and kind != "granite":
        return f"transformers' {kind} does not read muP's multipliers, so its logits would differ"
    if kind not in CONFIG_MAPPING:
        return f"transformers {transformers.__version__} has no model_type {kind!r}: {own}"
    # a copy: transformers writes into the dictionaries that it reads
    fields = {key: deepcopy(value) for key, value in config.items() if key != "torch_dtype"}
    fields = {**NO_PADDING, **fields}
    quiet = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**fields))
    except Exception as error:
        return f"transformers' {kind} fails with this config ({type(error).__name__}): {own}"
    finally:
        transformers.logging.set_verbosity(quiet)
    theirs = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    wrong = [n for n, shape in shapes.items() if theirs.get(n) != shape]
    if any(".experts." in name for name in shapes):
        wrong = [n for n in wrong if ".mlp." not in n and ".block_sparse_moe." not in n]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"transformers' {kind} has no weight {wrong[0]} of this shape{more}: {own}"
    return ""
