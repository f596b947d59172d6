# SPDX-License-Identifier: Apache-2.0
"""Read a model from the name of a size, a config.json of Hugging Face, or flags (of forks, too)."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pretrain_llama
from model.llama import SIZES
from model.load import load_model_file, of_checkpoint, own_flags
from training.checkpoint.load import same_value
from training.files.untrusted import read_json
from training.flags.flag_table import live_flags
from training.flags.foreign import uses_of
from training.flags.model_sizes import flags_of
from training.flags.parse import model_file, parse
from training.run.model_profile import model_profile
from training.settings.config import Config
from training.settings.setting import flag_of

LLAMA = {  # names of model.llama.SIZES
    "1B": "llama3.2-1b", "3B": "llama3.2-3b", "7B": "llama2-7b", "8B": "llama3-8b",
    "13B": "llama2-13b", "70B": "llama3-70b", "405B": "llama3.1-405b",
}  # fmt: skip
# flags that parsing requires in addition; given ones replace them
REST = "--bf16 --lr 1e-4 --mock-data --train-iters 8"
# layers, hidden, ffn, heads, groups, vocabulary; experts, top k, expert ffn; kv channels; RoPE base
MIXTURES = {
    "MIXTRAL-8X7B": ((32, 4096, 14336, 32, 8, 32000), (8, 2, 14336), 128, 1000000),
    "MIXTRAL-8X22B": ((56, 6144, 16384, 48, 8, 32768), (8, 2, 16384), 128, 1000000),
    "QWEN3-30B-A3B": ((48, 2048, 6144, 32, 4, 151936), (128, 8, 768), 128, 1000000),
    "QWEN3-235B-A22B": ((94, 4096, 12288, 64, 4, 151936), (128, 8, 1536), 128, 1000000),
}
ALIASES = {"MIXTRAL": "MIXTRAL-8X7B", "QWEN3-30B": "QWEN3-30B-A3B", "QWEN3-235B": "QWEN3-235B-A22B"}
IMPLIED = ("model/llama.py", "model/moe.py")  # files that need no --model-file
SEQUENCE = 8192  # tokens of a sample if none are given
LENGTH = "max_position_embeddings"
FEW = 1  # layers of the model of which `costs` takes the parts


class ModelError(ValueError):
    """A model cannot be planned. The message names the given value and the rule."""


@dataclass(frozen=True)
class Model:
    """A model by its flags. config: these flags as pretrain_llama.py reads them on one rank."""

    name: str
    flags: tuple[str, ...]
    config: Config

    def costs(self) -> tuple[float, float, float]:
        """Return the forward FLOPs per token of the embedding, of a layer and of the head."""
        few = replace(self.config, model=replace(self.config.model, num_layers=FEW))
        profile = model_profile(few, pretrain_llama.model_provider)
        return profile.embedding, profile.layers[0], profile.head


    @property
    def experts(self) -> int:
        """Return the number of experts of a layer; 0: the model is dense."""
        return self.config.moe.experts

    def own(self) -> dict[str, float]:
        """Return the sizes of experts and of attention heads, by the names of fields of Runs."""
        moe, m = self.config.moe, self.config.model
        found: dict[str, float] = {"channels": m.kv_channels or 0}
        if self.experts:
            ffn = moe.moe_ffn_hidden_size or m.ffn_hidden_size or 0
            found |= {"experts": self.experts, "topk": moe.moe_router_topk, "expert_ffn": ffn}
        return found


MIXED = (
    "it has both dense layers and layers with experts, but the search needs equal layers; "
    "--dry-run shows the memory and the traffic of a layout that you choose"
)


def read_flags(argv: Sequence[str], world: int) -> Config:
    """Return the Config of flags, including a fork's own. Raises UsageError."""
    return parse(argv, world, own_flags(model_file(argv)))


def on_cpu(model: Model) -> Model:
    """Return the model with --device cpu."""
    words = (*model.flags, "--device", "cpu")
    return replace(model, flags=words, config=read_flags(with_rest(words), 1))


def read_model(name: str, sequence: int = 0, optimizer: str = "") -> Model:
    """Return the model of a size name, a config.json, or flags. Raises ModelError, UsageError.

    sequence: tokens of a sample; 0: as the flags say, or SEQUENCE. optimizer: value of
    --optimizer; "": the one of the flags.
    """
    if name.lstrip().startswith("-"):
        flags = shlex.split(name)
    elif (size := LLAMA.get(name.upper(), name.lower())) in SIZES:
        flags = _llama(size)
    elif ALIASES.get(name.upper(), name.upper()) in MIXTURES:
        flags = _mixture(ALIASES.get(name.upper(), name.upper()))
    else:
        flags = _hugging_face(Path(name))
    if optimizer:
        flags = last_of_each([*flags, "--optimizer", optimizer])
    given = any(use.dashed == "--seq-length" for use in uses_of(flags))
    if sequence or not given:
        flags = last_of_each([*flags, "--seq-length", str(sequence or SEQUENCE)])
    config = read_flags(with_rest(flags), 1)
    every = (1, (1,) * config.model.num_layers)
    if config.moe.experts and config.moe.moe_layer_freq not in every:
        raise ModelError(f"{name}: {MIXED}")
    if config.model.vocab_size is None:
        raise ModelError(f"{name}: --vocab-size is needed, as memory and FLOPs depend on it")
    return Model(name, tuple(flags), config)


def _llama(name: str) -> list[str]:
    """Return the flags of a size of model.llama.SIZES, without RoPE scaling, which is free."""
    m = SIZES[name]
    flags = f"""--num-layers {m.num_layers} --hidden-size {m.hidden_size}
        --ffn-hidden-size {m.ffn_hidden_size} --num-attention-heads {m.num_attention_heads}
        --vocab-size {m.vocab_size} --rotary-base {m.rotary_base:g}""".split()
    if m.num_query_groups != m.num_attention_heads:
        flags += ["--group-query-attention", "--num-query-groups", str(m.num_query_groups)]
    return flags + ["--untie-embeddings-and-output-weights"] * (not m.tied)


def _hugging_face(path: Path) -> list[str]:
    """Return the flags of a config.json's model. Raises ModelError."""
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join([*LLAMA, *MIXTURES])
        raise ModelError(f"{path}: not a file, flags in quotes, or a known model ({known})")
    content = read_json(path, limit=1 << 20, foreign=True)
    if not isinstance(content, dict):
        raise ModelError(f"{path}: it must be a JSON object")
    try:
        file, sizes = of_checkpoint(content)
        found = flags_of(sizes)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{path}: {error}") from None
    del found[flag_of(LENGTH)]  # a plan may have longer sequences
    if not isinstance(found.get("--moe-layer-freq", 1), int):
        raise ModelError(f"{path}: {MIXED}")
    words = [] if file in IMPLIED else ["--model-file", file]
    for flag, value in found.items():
        words += [flag] if value is True else [flag, _text(value)]
    again = pretrain_llama.widths(read_flags(with_rest([*words, "--seq-length", "1"]), 1)).sizes
    ours, theirs = (load_model_file(file).hf_config(each) for each in (again, sizes))
    named = content.keys() & theirs.keys() - {"architectures", "model_type", LENGTH}
    if lost := sorted(n for n in named if not same_value(ours.get(n), theirs[n])):
        raise ModelError(
            f"{path}: no flags of {file} give {', '.join(lost)}: give the model as flags in "
            "quotes, with --use-mup or a --model-file that has them"
        )
    return words


def _text(value: Any) -> str:
    """Return a flag's value as text; a float in its short form, if that is exact."""
    short = f"{value:g}" if type(value) is float else str(value)
    return short if type(value) is not float or float(short) == value else repr(value)


def _mixture(name: str) -> list[str]:
    (layers, hidden, ffn, heads, kv, vocab), (experts, topk, width), channels, base = MIXTURES[name]
    flags = f"""--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn}
        --num-attention-heads {heads} --group-query-attention --num-query-groups {kv}
        --kv-channels {channels} --vocab-size {vocab} --rotary-base {base}
        --untie-embeddings-and-output-weights --num-experts {experts} --moe-router-topk {topk}
        --moe-ffn-hidden-size {width}"""
    return [*flags.split(), *["--qk-layernorm"] * name.startswith("QWEN3")]


def with_rest(words: Sequence[str]) -> list[str]:
    """Return flags with those that parsing requires in addition, unless they are given."""
    return last_of_each([*REST.split(), *words])


def last_of_each(argv: list[str]) -> list[str]:
    """Return flags without those that a later one of the same name replaces.

    All occurrences of repeatable flags are kept, as later ones add to earlier ones.
    """
    added = {flag.name for flag in live_flags().values() if flag.rule.repeated}
    uses = uses_of(argv)
    latest = {use.dashed: use for use in uses}
    kept = [use for use in uses if latest[use.dashed] is use or use.dashed in added]
    return [word for use in kept for word in use.words]
