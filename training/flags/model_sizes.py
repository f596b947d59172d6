# SPDX-License-Identifier: Apache-2.0
"""Turn flags into the model's sizes, and the sizes stored in a checkpoint back into flags."""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from mpu.layers.rope import LINEAR, Yarn
from training.checkpoint.errors import CheckpointError
from training.checkpoint.find import newest, places, why_none
from training.checkpoint.huggingface import HuggingFaceDirectory
from training.checkpoint.load import Checkpoint, same_value
from training.data.tokenizer import tokenizer_of
from training.data.tokenizer_files import TOKENIZER_FILES, heads_of
from training.flags.flag_table import live_flags
from training.settings.arguments import EXPERT_SIZES, ModelConfig
from training.settings.config import UsageError
from training.settings.setting import flag_of

SAME = """vocab_size hidden_size ffn_hidden_size num_layers num_attention_heads num_query_groups
    kv_channels max_position_embeddings rotary_base norm_epsilon init_method_std""".split()
MUP = "mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim".split()
# more fields of a model's own config that flags set, and those that --use-mup sets
OTHERS = "rope_scaling_factor rope_original_length yarn tied make_vocab_size_divisible_by".split()
MULTIPLIERS = "embedding_mult logits_divisor softmax_scale width_mult".split()
ROPE = """--rotary-base --use-rope-scaling --rope-scaling-factor
    --rotary-seq-len-interpolation-factor --position-embedding-type --rotary-scaling-factor
    --yarn-original-max-position-embeddings --yarn-beta-fast --yarn-beta-slow
    --no-yarn-correction-range-round-to-int --mscale
    --mscale-all-dim""".split()  # by --allow-change rope
OfCheckpoint = Callable[
    [dict[str, Any], Mapping[str, Any] | None, str | None], tuple[str, Any]
]  # model/load.py
SIZES = {"--num-layers", "--hidden-size", "--num-attention-heads"}  # which have no default
# flags that may differ from the checkpoint: no weight depends on them
FREE = """--init-method-std --max-position-embeddings --seq-length --tokenizer-type
    --tokenizer-model""".split()


def of_model(m: ModelConfig) -> dict[str, Any]:
    """Return the fields of the model's own config (model/llama.py) by name."""
    own: dict[str, Any] = {}
    if m.position_embedding_type == "yarn":
        own["yarn"] = Yarn(
            m.rotary_scaling_factor, m.yarn_original_max_position_embeddings, m.yarn_beta_fast,
            m.yarn_beta_slow, Yarn.suggested(m.rotary_scaling_factor, m.mscale, m.mscale_all_dim),
            truncate=not m.no_yarn_correction_range_round_to_int,
        )  # fmt: skip
    scaling = m.rope_scaling_factor if m.use_rope_scaling else 0.0
    if m.rotary_seq_len_interpolation_factor > 1:
        scaling, own["rope_original_length"] = m.rotary_seq_len_interpolation_factor, LINEAR
    return {
        **{name: getattr(m, name) for name in SAME},
        **own,
        "make_vocab_size_divisible_by": m.make_vocab_size_divisible_by,
        "rope_scaling_factor": scaling,
        "tied": not m.untie_embeddings_and_output_weights,
    }


def from_checkpoint(
    given: Mapping[str, Any],
    of_checkpoint: OfCheckpoint,
    notes: list[str],
    own: Mapping[str, Any],
    typed: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `given`, {flag: value}, and a fork's `own`, {field: value}, completed with the values
    that --use-checkpoint-args takes from the checkpoint.

    The checkpoint is the one that the run will load: from --load, else --branch-from, else
    --pretrained-checkpoint. of_checkpoint(sizes, settings, --model-file or None) returns the path
    of the model's file and the model's config. typed: {field: flag} of the fields of `own` that
    were given; the others have defaults. Raises UsageError if a given flag on which weights depend
    contradicts the checkpoint, or if there is no checkpoint; a dry run then takes the sizes that
    are given, and adds a line to `notes`.
    """
    names = ("--load", "--branch-from", "--ckpt-step", "--pretrained-checkpoint")
    where = places(*map(given.get, names))
    refused: list[CheckpointError] = []
    for flag, root, step in where:
        found = newest(flag, root, step, refused)
        if found is None:
            continue
        directory = found.directory
        try:
            hf, saved = found.state["hf_config"], found.state.get("config")
            path, sizes = of_checkpoint(hf, saved, given.get("--model-file"))
            taken = {"--model-file": path, **_flags(sizes, found)}
            taken = {name: checked(name, value) for name, value in taken.items()}
        except KeyError as error:
            raise UsageError(f"{flag} {directory}: it lacks {error}") from None
        except (TypeError, AttributeError, ValueError) as error:
            raise UsageError(f"{flag} {directory}: {error}") from None
        free = [*FREE, *(ROPE if "rope" in given.get("--allow-change", ()) else ())]
        there = _own(sizes, own)
        both = [(name, given.get(name, value), value) for name, value in taken.items()]
        both += [(flag, own[name], there.get(name, own[name])) for name, flag in typed.items()]
        for name, here, value in both:
            pair = here, value
            if name == "--moe-layer-freq":
                pair = _layers(here, sizes.num_layers), _layers(value, sizes.num_layers)
            if not same_value(*pair) and name not in free:
                raise UsageError(
                    f"{name} {here} contradicts --use-checkpoint-args: {directory} has "
                    f"{value}; leave {name} out"
                )
        return {**taken, **given}, {**own, **there}
    looked_in = " nor ".join(f"{flag} {root}" for flag, root, _ in where) or "neither is given"
    if "--dry-run" in given and where and given.keys() >= SIZES:
        notes.append(
            f"--use-checkpoint-args: no checkpoint is on this machine ({looked_in}); a dry run "
            "takes the sizes from the flags"
        )
        return dict(given), dict(own)
    if refused:
        looked_in += f": {refused[0]}"
    elif where:
        looked_in += f": {why_none(where[-1][1])}"
    raise UsageError(
        f"--use-checkpoint-args: there is no checkpoint to take the arguments from: --load or "
        f"--pretrained-checkpoint must hold one ({looked_in})"
    )


def _layers(freq: Any, layers: int) -> list[bool]:
    """Return whether each layer has experts. freq: --moe-layer-freq, a number or a list."""
    if isinstance(freq, int):
        return [bool(freq) and i % freq == 0 for i in range(layers)]
    return [bool(each) for each in freq]


def _own(sizes: Any, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return {field: value} of a fork's config: the fields that its own flags set, and those that
    no flag of ours sets.
    """
    ours = {*SAME, *OTHERS, *MULTIPLIERS, *EXPERT_SIZES} - own.keys()
    return {f.name: getattr(sizes, f.name) for f in fields(sizes) if f.name not in ours}


def checked(name: str, value: Any) -> Any:
    """Return a flag's value from a file, checked by the flag's rule. Raises UsageError."""
    if value is True:
        return value
    return live_flags()[name].read(repr(value) if type(value) in (int, float) else str(value))


def flags_of(sizes: Any) -> dict[str, Any]:
    """Return {flag: value} for a model's config; a switch is True. Raises ValueError."""
    out = {flag_of(name): getattr(sizes, name) for name in SAME}
    out["--kv-channels"] = sizes.head_size
    out["--group-query-attention"] = True
    if sizes.rope_scaling_factor and sizes.rope_original_length == LINEAR:
        out["--rotary-seq-len-interpolation-factor"] = sizes.rope_scaling_factor
    elif sizes.rope_scaling_factor:
        if sizes.rope_original_length != 8192:
            raise ValueError(
                f"original_max_position_embeddings is {sizes.rope_original_length}, and the flags "
                "support only 8192"
            )
        out |= {"--use-rope-scaling": True, "--rope-scaling-factor": sizes.rope_scaling_factor}
    if (yarn := getattr(sizes, "yarn", None)) is not None:
        out |= _yarn(yarn)
    for name in EXPERT_SIZES:
        value = getattr(sizes, name, None)
        if value:  # else it is the default
            out[flag_of(name)] = list(value) if type(value) is tuple else value
    if not sizes.tied:
        out["--untie-embeddings-and-output-weights"] = True
    return out


def _flags(sizes: Any, found: Checkpoint) -> dict[str, Any]:
    """Return {flag: value} for a model's config and the checkpoint's tokenizer and length."""
    out = flags_of(sizes)
    settings = found.state.get("config", {})
    if settings.get("model.use_mup"):  # its multipliers are in the model's config, too
        out["--use-mup"] = True
        for name in MUP:
            if (value := settings.get(f"model.{name}")) is not None:
                out[flag_of(name)] = value
    if (length := found.state.get("config", {}).get("model.seq_length")) is not None:
        out["--seq-length"] = length
    kind, file = _tokenizer(found)
    if kind:
        out["--tokenizer-type"] = kind
    if file:
        out["--tokenizer-model"] = str(found.directory / file)
    return out


def _yarn(yarn: Yarn) -> dict[str, Any]:
    """Return {flag: value} of YaRN's scaling, its attention factor as an --mscale."""
    log = 0.1 * math.log(yarn.factor)
    mscale = 1.0
    if yarn.attention_factor != Yarn.suggested(yarn.factor):
        mscale = (yarn.attention_factor - 1.0) / log if log else -1.0
        if mscale < 0 or not same_value(Yarn.suggested(yarn.factor, mscale), yarn.attention_factor):
            raise ValueError(f"no --mscale gives yarn's attention_factor {yarn.attention_factor!r}")
    out = {
        "--position-embedding-type": "yarn",
        "--rotary-scaling-factor": yarn.factor,
        "--yarn-original-max-position-embeddings": yarn.original_length,
        "--yarn-beta-fast": yarn.beta_fast,
        "--yarn-beta-slow": yarn.beta_slow,
        "--mscale": mscale,
    }
    return out if yarn.truncate else out | {"--no-yarn-correction-range-round-to-int": True}


def _tokenizer(found: Checkpoint) -> tuple[str | None, str | None]:
    """Return the type of a checkpoint's tokenizer and the name of its file, once verified."""
    if isinstance(found, HuggingFaceDirectory):
        tokenizer = tokenizer_of(heads_of(str(found.directory)))
        return tokenizer.get("tokenizer_type"), tokenizer.get("tokenizer_model")
    kind, file = found.state.get("tokenizer_type"), found.state.get("tokenizer_model")
    if file is None or file not in found.manifest["files"]:
        return kind, None  # not in the checkpoint: --tokenizer-model must name it
    tokenizer_files = [name for name in TOKENIZER_FILES if name in found.manifest["files"]]
    found.verify([file, *tokenizer_files])
    return kind, file
