# SPDX-License-Identifier: Apache-2.0
"""Say how far a run is, and find what must not change between a checkpoint and its resume.

A change of these would repeat samples or leave some out. Layout, micro-batch, workers,
learning-rate flags and the length of the run may change.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from training.arguments import DataConfig
from training.checkpoint import Checkpoint, plain_name
from training.config import Config
from training.data.dataset import WHOLE
from training.data.tokenizer_files import files_of, same_tokenizer
from training.learning_rate import learning_rate

# What a resumed run must share with its checkpoint, by the word that --allow-change takes: settings
# of the config, and hashes kept in the state.
SHARED = {
    "seed": ("run.seed",),
    "tokenizer": ("tokenizer_digest",),
    "data": (
        *("model.seq_length", "data.reset_position_ids", "data.reset_attention_mask"),
        *("data.eod_mask_loss", "corpus_digest"),
    ),
    "batch": ("batch.global_batch_size", "batch.step_batch_size_schedule"),
}
ROPE = ("rope_theta", "rope_scaling")  # of a model's hf_config; the word is "rope"


def expected(config: Config, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of this run's model that its checkpoint's must equal."""
    free = ROPE if "rope" in config.checkpoint.allow_change else ()
    return {field: value for field, value in hf_config.items() if field not in free}


def of_model(found: Checkpoint, config: Config, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line where the loaded weights were trained by another --model-file, and one where
    with other rotary positions, as `expected` let through: what they were, what they are.
    """
    saved, file = found.state.get("config", {}), config.model.model_file
    if (was := saved.get("model.model_file", file)) != file:
        yield f"{found.directory} was trained with --model-file {was}; this run has {file}"
    there = found.state.get("hf_config", {})
    before = {field: there.get(field) for field in ROPE}
    if there and before != {field: hf_config[field] for field in ROPE}:
        length = saved.get("model.seq_length")
        yield (
            f"{found.directory} was trained with {_rope(before, length)}; going on with "
            f"{_rope(hf_config, config.model.seq_length)}, as --allow-change rope says"
        )


def _rope(fields: Mapping[str, Any], length: int | None) -> str:
    """Return rotary positions as flags, at a sequence length if it is known."""
    scaling = fields["rope_scaling"] or {}
    flag = "--rotary-" if scaling.get("rope_type") == "yarn" else "--rope-"
    text = f"--rotary-base {fields['rope_theta']:g}, "
    text += f"{flag}scaling-factor {scaling['factor']:g}" if scaling else "no --use-rope-scaling"
    return text + (f", --seq-length {length}" if length else "")


def changes(
    found: Checkpoint, config: Config, digests: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield (what changed, as --allow-change names it, and a sentence about it)."""
    there = {**found.state.get("config", {}), **found.state}
    here = {**config.flat(), **digests}
    if _sketched(there) and "corpus_sketch" in here:
        here["corpus_digest"] = here["corpus_sketch"]
    known = there.get("tokenizer_digest")
    if "tokenizer_digest" in digests and same_tokenizer(known, digests, found.manifest["files"]):
        here["tokenizer_digest"] = known
    for what, keys in SHARED.items():
        for key in keys:
            if key in there and key in here and there[key] != here[key]:
                yield what, f"{found.directory} {_told(key, there[key], here[key])}"


def lines(found: Checkpoint, config: Config, digests: Mapping[str, str]) -> Iterator[str]:
    """Yield a line on each change that --allow-change let through, and on what is not known.

    Float8 may change, as a checkpoint's weights are of high precision.
    """
    for key, here in config.flat().items():
        there = found.state.get("config", {}).get(key, here)
        if key.startswith("float8.") and there != here:
            yield f"{found.directory} {_told(key, there, here)}; it goes on from the same weights"
    for _, line in changes(found, config, digests):
        yield f"{line}; going on as --allow-change says"
    if _sketched(found.state) and digests.get("corpus_digest", "").startswith(WHOLE):
        yield (
            f"{found.directory} is of an older version, which knew its corpus by 64 blocks of each "
            "file; these were compared, and the next save knows every token"
        )


def _sketched(state: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint knows its corpus by blocks, or holds none made of files."""
    return not str(state.get("corpus_digest", WHOLE)).startswith(WHOLE)


def _told(key: str, there: Any, here: Any) -> str:
    """Return how a checkpoint differs from this run, as the rest of a sentence about it."""
    if key == "tokenizer_digest":
        return "was made with another tokenizer (--tokenizer-type, --tokenizer-model)"
    if key == "corpus_digest":
        return "was made with other data or another blend of them (--data-path, --split)"
    flag = "--" + key.rpartition(".")[2].replace("_", "-")
    return f"was made with {flag} {there!r} and this run has {here!r}"


def progress(
    config: Config, iteration: int, consumed: int, before: tuple[int, int]
) -> dict[str, Any]:
    """Return the part of a checkpoint's state that says which run it is of, and how far.

    before: samples and tokens that earlier runs consumed.
    """
    samples, tokens = before
    return {
        "iteration": iteration,
        "consumed_samples": consumed,
        "consumed_tokens": tokens + (consumed - samples) * config.model.seq_length,
        "lr": learning_rate(config, consumed),
        "seed": config.run.seed,
        "tokenizer_type": config.data.tokenizer_type,
        "command_line": list(config.command_line),
        "config": config.flat(),
        "config_digest": config.digest(),
    }


def tokenizer_files(data: DataConfig) -> dict[str, bytes]:
    """Return {name: bytes} of the tokenizer's files, kept so that a checkpoint can be moved."""
    paths = files_of(data.tokenizer_type, data.tokenizer_model, data.merge_file)
    return {plain_name(Path(n), "tokenizer"): Path(at).read_bytes() for n, at in paths.items()}
