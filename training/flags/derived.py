# SPDX-License-Identifier: Apache-2.0
"""Fill in the settings that are derived from others.

Each function of DERIVED handles one subject. It changes the values, by section and field, in place,
and adds a line to `notes` for a change that no flag asks for.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from training.data.split import DEFAULT_SPLIT
from training.flags.expert_rules import choose_file
from training.flags.flag_table import live_flags
from training.flags.parallel_rules import check_world
from training.flags.run_rules import has_validation, shard_list
from training.settings.arguments import ParallelConfig
from training.settings.batch_size import parse_schedule
from training.settings.config import SECTIONS, Config
from training.settings.pipeline_schedule import virtual_stages

GPT2 = "GPT2BPETokenizer"


@dataclass
class Values:
    """The values of a command line, from which a Config is made."""

    given: dict[str, Any]  # {flag: value}
    parts: dict[str, dict[str, Any]]  # {section: {field: value}}
    notes: list[str]


def assemble(
    given: dict[str, Any], world_size: int, notes: list[str], own: tuple[tuple[str, Any], ...]
) -> Config:
    """Return the Config of the flags given. own: a fork's own settings. Raises UsageError."""
    values = Values(given, {section: {} for section in SECTIONS}, notes)
    values.parts["parallel"]["world_size"] = world_size
    for name, value in given.items():
        if flag := live_flags().get(name):
            values.parts[flag.section][flag.dest] = value
    for derive in DERIVED:
        derive(values)
    built = {section: cls(**values.parts[section]) for section, cls in SECTIONS.items()}
    return Config(**built, extra=own, notes=tuple(notes))


def _model(v: Values) -> None:
    model = v.parts["model"]
    if "--group-query-attention" in v.given and "--num-query-groups" not in v.given:
        model["num_query_groups"] = 1
    v.parts["moe"] = choose_file(v.parts["moe"], model)


def _tensor_parallel(v: Values) -> None:
    """Turn off what has no effect at tensor-parallel size 1, and note an overlap that may vary."""
    p, alone = v.parts["parallel"], "at --tensor-model-parallel-size 1"
    method = p.get("tp_comm_overlap", "none")
    if p.get("tensor_model_parallel_size", 1) == 1:
        if p.pop("sequence_parallel", False):
            v.notes.append(f"--sequence-parallel is off: {alone} there is nothing to split")
        if p.pop("tp_comm_overlap", "none") != "none":
            v.notes.append(f"--tp-comm-overlap {method} is off: {alone} nothing is sent")
    elif method == "auto" and "--deterministic-mode" in v.given:
        v.notes.append(
            "--deterministic-mode: --tp-comm-overlap auto may choose differently in another run, "
            "which changes bits; name a method"
        )


def _recompute(v: Values) -> None:
    p = v.parts["parallel"]
    if p.get("recompute_method") == "block" and p.get("recompute_num_layers") == 0:
        p.pop("recompute_granularity", None)  # the first 0 layers: none
    if "recompute_granularity" not in p:  # nothing is recomputed, as in Megatron-LM
        p.pop("recompute_method", None)
        p.pop("recompute_num_layers", None)
    if p.get("recompute_granularity") == "full":
        p.setdefault("recompute_method", "uniform")
        p.setdefault("recompute_num_layers", 1)


def _pipeline(v: Values) -> None:
    p, virtual = v.parts["parallel"], virtual_stages(v.given, v.parts["model"]["num_layers"])
    p.pop("num_layers_per_virtual_pipeline_stage", None)
    if virtual is not None:
        p["num_virtual_stages_per_pipeline_rank"] = virtual


def _batch(v: Values) -> None:
    batch, layout = v.parts["batch"], ParallelConfig(**v.parts["parallel"])
    check_world(layout)
    if text := batch.get("step_batch_size_schedule"):
        steps = parse_schedule(text, v.parts["model"]["seq_length"])
        batch |= {"step_batch_size_schedule": steps, "global_batch_size": steps[0][1]}
    one = batch.setdefault("micro_batch_size", 1) * layout.data_parallel_size
    batch.setdefault("global_batch_size", one)


def _precision(v: Values) -> None:
    run, low = v.parts["run"], v.parts["float8"]
    bf16, fp64 = run.pop("bf16", False), run.pop("fp64", False)
    run["dtype"] = torch.float64 if fp64 else torch.bfloat16 if bf16 else torch.float32
    if low.get("fp8_format") and "fp8_recipe" not in low:
        low["fp8_recipe"] = "delayed"
        v.notes.append(
            "no --fp8-recipe: delayed, as in Megatron-LM; tensorwise needs no history and "
            "clamps nothing (docs/float8.md)"
        )


def _tokenizer(v: Values) -> None:
    data, load = v.parts["data"], v.parts["checkpoint"].get("load")
    vocab_file = data.pop("vocab_file", None)
    if data.get("mock_data"):
        data.setdefault("tokenizer_type", "NullTokenizer")
    if vocab_file and "tokenizer_type" not in data:  # the default of Megatron-LM's pretrain_gpt.py
        data["tokenizer_type"] = GPT2
        v.notes.append(f"--vocab-file without --tokenizer-type: {GPT2}, as in Megatron-LM")
    kind = data.get("tokenizer_type")
    if kind == GPT2:
        data["tokenizer_model"] = vocab_file  # as in Megatron-LM, --tokenizer-model is not read
    if kind == "HuggingFaceTokenizer" and load and "--use-checkpoint-args" not in v.given:
        data.setdefault("tokenizer_model", load)  # else it takes the checkpoint's tokenizer


def _data(v: Values) -> None:
    data = v.parts["data"]
    if listed := data.pop("data_args_path", None):
        data["data_path"] = shard_list(listed, v.parts["run"].get("dry_run", False))
    if data.get("split"):
        data["split"] = data["split"].strip(" '\"")
    if data.get("data_path"):
        data.setdefault("split", DEFAULT_SPLIT)


def _evaluation(v: Values) -> None:
    """Turn off --eval-interval if there is no validation data."""
    run, data = v.parts["run"], v.parts["data"]
    train = data.get("train_data_path") or data.get("data_stages")
    paths = (bool(train), bool(data.get("valid_data_path")))
    batches = run.get("eval_iters", 1) > 0 or data.get("full_validation")
    if run.get("eval_interval") and batches and not has_validation(data.get("split"), *paths):
        v.notes.append(
            f"--eval-interval {run.pop('eval_interval')} has nothing to evaluate on, so there is "
            "no evaluation: give the second number of --split a share, or --valid-data-path"
        )
    alone = run.get("skip_train") and not run.get("eval_interval")
    if alone and data.get("data_order") == "megatron":
        v.notes.append(
            "--skip-train without --eval-interval: --data-order megatron draws the samples of a "
            "single evaluation, which differ from those of a run with several; give the "
            "--eval-interval of the run"
        )


# in this order: _batch counts the ranks, and _evaluation reads the split that _data makes
DERIVED: tuple[Callable[[Values], None], ...] = (
    _model, _tensor_parallel, _recompute, _pipeline, _batch, _precision, _tokenizer,
    _data, _evaluation,
)  # fmt: skip
