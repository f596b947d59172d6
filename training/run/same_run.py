# SPDX-License-Identifier: Apache-2.0
"""Record the progress of a run, and find changes that are not allowed between a save and a resume.

Such a change would repeat samples or leave some out. Layout, micro-batch size and workers may
change; so may the learning rate, the optimizer's settings and the length of the run, and a line
reports each of these (training/run/settings_changed.py).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.checkpoint import Checkpoint, plain_name
from training.checkpoint.load import same_value
from training.data.dataset import FULL_DIGEST
from training.data.tokenizer_files import files_of, same_tokenizer, with_class
from training.run import settings_changed
from training.settings.arguments import DataConfig
from training.settings.batch_size import schedule, steps_of
from training.settings.config import Config
from training.settings.expert_options import expert_options
from training.settings.learning_rate import learning_rate
from training.settings.stages import ROPE as ROPE_SETTINGS
from training.settings.stages import record, saved_settings, tokens_at

# What a resumed run must share with its checkpoint, by the value of --allow-change: settings of the
# config, and hashes stored in the state.
SHARED = {
    "seed": ("run.seed",),
    "tokenizer": ("tokenizer_digest",),
    "data": (
        *("model.seq_length", "data.reset_position_ids", "data.reset_attention_mask"),
        *("data.eod_mask_loss", "corpus_digest"),
    ),  # with stages, those begun so far are compared in place of length and corpus
    "mup": ("model.mup_base_hidden_size",),  # a model's hf_config has the multipliers
    "batch": ("batch.global_batch_size", "batch.step_batch_size_schedule"),
}
HELD_OUT = ("data.valid_data_path", "data.test_data_path")
# The version of how losses are computed. A checkpoint's state has it, or else counts as version 0;
# `losses` lists what each version changed.
NUMERICS = 1
SCHEDULE = "batch.step_batch_size_schedule"
# fields of a model's hf_config, which has some of them; they may change by --allow-change rope
ROPE = ("rope_theta", "rope_scaling", "rope_parameters")
SCALED_BY = {  # {rope_type: the flag of its factor}
    "yarn": "--rotary-scaling-factor",
    "linear": "--rotary-seq-len-interpolation-factor",
}


def expected(config: Config, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of hf_config that a checkpoint must have in common with this run."""
    staged = len({stage.settings for stage in config.stages}) > 1  # `_stages` compares them
    free = ROPE if "rope" in config.checkpoint.allow_change or staged else ()
    return {field: value for field, value in hf_config.items() if field not in free}


def of_model(found: Checkpoint, config: Config, hf_config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if the loaded weights were trained with another --model-file, and one if they
    were trained with other rotary positions, which `expected` allowed: the old and the new ones.
    """
    saved, file = found.state.get("config", {}), config.model.model_file
    if (was := saved.get("model.model_file", file)) != file:
        yield f"{found.directory} was trained with --model-file {was}; this run has {file}"
    there = found.state.get("hf_config", {})
    if there and not all(same_value(there.get(field), hf_config.get(field)) for field in ROPE):
        length = saved.get("model.seq_length")
        yield (
            f"{found.directory} was trained with {_rope(there, length)}; continuing with "
            f"{_rope(hf_config, config.model.seq_length)}, as {_requested(config)} allows"
        )


def other_frozen(found: Checkpoint, frozen: Sequence[str]) -> str:
    """Return a sentence where a checkpoint's run froze other parameters than this one, else ""."""
    there, here = {*found.state.get("frozen_parameters", ())}, {*frozen}
    if there == here:
        return ""
    own, theirs = sorted(here - there), sorted(there - here)
    name = [*own, *theirs][0]
    where = "this run, not in the checkpoint" if own else "the checkpoint, not in this run"
    more = len(own) + len(theirs) - 1
    others = f" ({more} more differ)" if more else ""
    return f"{found.directory}: {name} is frozen in {where}{others}"


def _requested(config: Config) -> str:
    """Return the flag by which rotary positions may change."""
    rope = "rope" in config.checkpoint.allow_change
    return "--allow-change rope" if rope else f"--data-stages {config.data.data_stages}"


def _rope(fields: Mapping[str, Any], length: int | None) -> str:
    """Return rotary positions as flags, with the sequence length if it is known.

    Fields that a fork writes in another form are returned as they are.
    """
    scaling, theta = fields.get("rope_scaling") or {}, fields.get("rope_theta")
    try:
        flag = SCALED_BY.get(str(scaling.get("rope_type")), "--rope-scaling-factor")
        text = f"--rotary-base {theta:g}, "
        factor = f"{flag} {scaling['factor']:g}" if scaling else ""
        text += factor or "no --use-rope-scaling"
    except (AttributeError, KeyError, TypeError, ValueError):
        own = {field: fields[field] for field in ROPE if fields.get(field) is not None}
        text = ", ".join(f"{field} {value!r}" for field, value in own.items()) or "no rope_theta"
    return text + (f", --seq-length {length}" if length else "")


def changes(
    found: Checkpoint, config: Config, digests: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield (the value of --allow-change for it, a sentence about it) of each change."""
    there = {**found.state.get("config", {}), **found.state}
    here = {**config.flat(), **digests}
    if _sketched(there) and "corpus_sketch" in here:
        here["corpus_digest"] = here["corpus_sketch"]
    known = there.get("tokenizer_digest")
    if "tokenizer_digest" in digests and same_tokenizer(known, digests, found.manifest["files"]):
        here["tokenizer_digest"] = known
    staged = bool(config.stages or found.state.get("stages"))
    if staged:
        yield from (
            (what, f"{found.directory} {line}") for what, line in _past(found, config, here)
        )
    for what, keys in SHARED.items():
        for key in keys:
            if staged and key in ("model.seq_length", "corpus_digest", SCHEDULE):
                continue
            if key in there and key in here and there[key] != here[key]:
                yield what, f"{found.directory} {_difference(key, there[key], here[key])}"


def _past(found: Checkpoint, config: Config, here: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (what, sentence) for each difference of the stages that the checkpoint has begun.

    A run without --data-stages counts as one stage. Stages that have not begun may change.
    """
    consumed = found.state["consumed_samples"]
    saved = found.state.get("config", {})
    before = found.state.get("stages") or [_only(saved, found.state.get("corpus_digest"))]
    now = _stages(config, here) or [_only(config.flat(), here["corpus_digest"])]
    old, new = ([s for s in stages if s["first_sample"] < consumed] for stages in (before, now))
    for was, stage in zip(old, new, strict=False):
        for key in stage.keys() & was.keys() - {"name", "start_tokens"}:
            if was[key] != stage[key] and None not in (was[key], stage[key]):
                what = "rope" if key in ROPE_SETTINGS else "data"
                if key == "corpus":
                    yield what, f"was made with other data in stage {was['name']}"
                else:
                    yield what, f"has {key} {was[key]!r} in stage {was['name']}, not {stage[key]!r}"
    if len(old) != len(new):
        names = [", ".join(stage["name"] for stage in stages) for stages in (old, new)]
        yield "data", f"has begun stages {names[0]}, and this run would have begun {names[1]}"
    yield from _sizes(saved, config, consumed)


def _sizes(saved: Mapping[str, Any], config: Config, consumed: int) -> Iterator[tuple[str, str]]:
    """Yield a sentence if the samples so far were consumed in batches of other sizes."""
    was = saved.get(SCHEDULE) or [[0, saved.get("batch.global_batch_size")]]
    old, new = (steps_of(sizes, consumed) for sizes in (was, schedule(config)))
    if old != new:
        yield "batch", f"was made with batch sizes [first sample, size] {old}; this run has {new}"


def _stages(config: Config, digests: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the stages of this run as a checkpoint stores them."""
    return record(config.stages, json.loads(digests["stage_corpora"])) if config.stages else []


def _only(flat: Mapping[str, Any], corpus: Any) -> dict[str, Any]:
    """Return the single stage of a run without --data-stages."""
    return {"name": "none", "first_sample": 0, "corpus": corpus, **saved_settings(flat)}


def edited(found: Checkpoint, config: Config, digests: Mapping[str, str]) -> Iterator[str]:
    """Yield a line if the stages that have not begun differ from those the checkpoint planned."""
    consumed, was = found.state.get("consumed_samples", 0), found.state.get("stages") or []
    old, new = (
        [s for s in stages if s["first_sample"] >= consumed]
        for stages in (was, _stages(config, digests))
    )
    if was and old != new:
        names = (", ".join(s["name"] for s in stages) or "none" for stages in (old, new))
        yield (
            "--data-stages {}: the stages still to come have changed (names, data or numbers): "
            "the checkpoint has {}, this run {}"
        ).format(config.data.data_stages, *names)


def same_order(
    found: Checkpoint, config: Config, digests: Mapping[str, str], held_out: bool
) -> bool:
    """Return whether a checkpoint's run trains on the same data in the same order, also in the
    stages to come. held_out: it must also evaluate on the same paths.
    """
    saved, here = found.state.get("config", {}), config.flat()
    return (
        all(what != "data" for what, _ in changes(found, config, digests))
        and not any(edited(found, config, digests))
        and not (held_out and any(saved.get(key) != here[key] for key in HELD_OUT))
    )


def losses(found: Checkpoint, config: Config) -> Iterator[str]:
    """Yield a line if the checkpoint is of a version that computed losses in another way."""
    if found.state.get("numerics", 0) >= NUMERICS:
        return
    changed, moe, options = list[str](), config.moe, expert_options(config)
    limits = {
        "--moe-router-num-groups": options.balance and moe.moe_router_num_groups > 1,
        "--moe-router-enable-expert-bias": moe.moe_router_enable_expert_bias
        and "lagged_global_aux_loss" in dict(options.balance),
    }
    if named := " and ".join(flag for flag, limits_them in limits.items() if limits_them):
        changed.append(
            f"balance losses count each token's best scores, no longer limited by {named}"
        )
    router = options.balance or options.z_coefficient
    fork = not config.model.model_file.startswith("model/")  # it may have auxiliary losses
    if config.data.eod_mask_loss and (router or fork):
        which = "the router's losses" if router else "auxiliary losses, if the model has any"
        changed.append(f"--eod-mask-loss no longer multiplies {which}")
    if changed:
        yield f"{found.directory} was saved by an older version: now {', and '.join(changed)}"


def lines(found: Checkpoint, config: Config, digests: Mapping[str, str]) -> Iterator[str]:
    """Yield a line on each change that --allow-change allowed, on each other change that affects
    training, and on what the checkpoint does not record.
    """
    compared = {key for keys in SHARED.values() for key in keys}
    if config.stages or found.state.get("stages"):
        compared.remove(SCHEDULE)  # only its past is compared
    yield from settings_changed.lines(found, config, compared)
    yield from losses(found, config)
    file, key = config.model.model_file, "model_digest"
    known = {found.state.get(key), digests.get(key), None}
    if len(known) > 2 and not file.startswith("model/"):  # Weft's own files change by version
        yield f"{found.directory}: --model-file {file} has changed since this checkpoint was saved"
    yield from edited(found, config, digests)
    for _, line in changes(found, config, digests):
        yield f"{line}; continuing, as --allow-change allows"
    if _sketched(found.state) and digests.get("corpus_digest", "").startswith(FULL_DIGEST):
        yield (
            f"{found.directory} was saved by an older version, which identified the corpus by 64 "
            "blocks of each file: they match, and the next save identifies it by all tokens"
        )


def _sketched(state: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint's corpus digest is not of all tokens: of blocks, or no files."""
    return not str(state.get("corpus_digest", FULL_DIGEST)).startswith(FULL_DIGEST)


def _difference(key: str, there: Any, here: Any) -> str:
    """Return a difference from this run as the predicate of a sentence about the checkpoint."""
    if key == "tokenizer_digest":
        return "was made with another tokenizer (--tokenizer-type, --tokenizer-model)"
    if key == "corpus_digest":
        flags = "--data-path, --split, --data-order"
        return f"was made with other data or another blend of it ({flags})"
    return settings_changed.difference(key, there, here)


def progress(
    config: Config,
    iteration: int,
    consumed: int,
    before: tuple[int, int],
    digests: Mapping[str, str],
) -> dict[str, Any]:
    """Return the part of a checkpoint's state that identifies its run and records its progress.

    before: samples and tokens that earlier runs consumed. digests: hashes of its data.
    """
    samples, tokens = before
    tokens += (consumed - samples) * config.model.seq_length
    stages = {"stages": _stages(config, digests)} if config.stages else {}
    return {
        **stages,
        "numerics": NUMERICS,
        "iteration": iteration,
        "consumed_samples": consumed,
        "consumed_tokens": tokens_at(config, consumed) if config.stages else tokens,
        "lr": learning_rate(config, consumed),
        "seed": config.run.seed,
        "tokenizer_type": config.data.tokenizer_type,
        "command_line": list(config.command_line),
        "config": config.flat(),
        "config_digest": config.digest(),
    }


def branch(found: Checkpoint) -> dict[str, Any]:
    """Return the record, in a branch's checkpoints, of the one that it branched off from."""
    manifest = (found.directory / "manifest.json").read_bytes()
    return {
        "directory": str(found.directory.resolve()),
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
        **{key: found.state[key] for key in ("iteration", "consumed_samples", "consumed_tokens")},
        "branched_from": found.state.get("branched_from"),
    }


def tokenizer_files(data: DataConfig) -> dict[str, bytes]:
    """Return {name: bytes} of the tokenizer's files, saved so that a checkpoint can be moved."""
    paths = files_of(data.tokenizer_type, data.tokenizer_model, data.merge_file)
    files = {plain_name(Path(n), "tokenizer"): Path(at).read_bytes() for n, at in paths.items()}
    if data.tokenizer_type != "HuggingFaceTokenizer" or not paths:
        return files
    own, at = next(iter(paths.items()))
    return with_class(files, str(Path(at).parent), own=own)
