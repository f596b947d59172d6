# SPDX-License-Identifier: Apache-2.0
"""Name a model: by its size, by the config.json of Hugging Face, or by flags, a fork's too."""

import shlex
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import pretrain_llama
from training.config import Config
from training.flags.parse import parse
from training.plan import activations
from training.plan.model_profile import model_profile
from training.run.dry_run import memory
from training.untrusted import read_json

LLAMA = {  # layers, hidden, ffn, heads, kv heads, vocabulary: Llama 3, 3.1 and 3.2
    "1B": (16, 2048, 8192, 32, 8, 128256), "3B": (28, 3072, 8192, 24, 8, 128256),
    "8B": (32, 4096, 14336, 32, 8, 128256), "70B": (80, 8192, 28672, 64, 8, 128256),
    "405B": (126, 16384, 53248, 128, 8, 128256),
}  # fmt: skip
TIED = ("1B", "3B")
HUGGING_FACE = {  # pretrain_llama.py's flag of each key
    "num_hidden_layers": "--num-layers", "hidden_size": "--hidden-size",
    "intermediate_size": "--ffn-hidden-size", "num_attention_heads": "--num-attention-heads",
    "vocab_size": "--vocab-size", "rope_theta": "--rotary-base",
}  # fmt: skip
REST = "--bf16 --lr 1e-4 --mock-data --train-iters 1"  # what a parse asks for beside a plan
FEW, MORE = 1, 2  # layers of the models from which one of any number is told


class ModelError(ValueError):
    """A model that cannot be planned: the text names what was given and the rule."""


@dataclass(frozen=True)
class Unit:
    """What one rank has of a micro-batch of one sequence, in bytes, at a tp and a recomputation.

    layer: kept of each layer. again: of one layer while it is recomputed, and what the embedding
    keeps. logits. working: of one operation; working_more: for each sequence more. layer_numbers,
    end_numbers: parameters of a layer, and of embedding and head together.
    """

    layer: float
    again: float
    logits: float
    working: float
    working_more: float
    layer_numbers: float
    end_numbers: float


@dataclass(frozen=True)
class Model:
    """A model by its flags; config: as pretrain_llama.py reads them on one rank."""

    name: str
    flags: tuple[str, ...]
    config: Config

    def unit(self, tp: int, recompute: str, sequence: int) -> Unit:
        """Return what --dry-run counts for a layer more, and what it counts beside the layers."""
        return _unit(self.flags, tp, recompute, sequence)

    def costs(self) -> tuple[float, float, float]:
        """Return forward FLOPs of a token: embedding, a layer, head."""
        few = replace(self.config, model=replace(self.config.model, num_layers=FEW))
        told = model_profile(few, pretrain_llama.model_provider)
        return told.embedding, told.layers[0], told.head


def read_model(name: str, sequence: int) -> Model:
    """Return the model of a size name, a config.json, or flags. Raises ModelError, UsageError."""
    if name.lstrip().startswith("-"):
        flags = shlex.split(name)
    elif name.upper() in LLAMA:
        layers, hidden, ffn, heads, kv, vocab = LLAMA[name.upper()]
        flags = [f"--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn}",
                 f"--num-attention-heads {heads} --group-query-attention --num-query-groups {kv}",
                 f"--vocab-size {vocab} --rotary-base 500000"]  # fmt: skip
        if name.upper() not in TIED:
            flags.append("--untie-embeddings-and-output-weights")
        flags = " ".join(flags).split()
    else:
        flags = _hugging_face(Path(name))
    if "--seq-length" not in flags:
        flags = [*flags, "--seq-length", str(sequence)]
    config = parse([*flags, *REST.split()], 1)
    if config.model.vocab_size is None:
        raise ModelError(f"{name}: --vocab-size is needed, as memory and FLOPs depend on it")
    return Model(name, tuple(flags), config)


def _hugging_face(path: Path) -> list[str]:
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        known = ", ".join(LLAMA)
        raise ModelError(f"{path}: neither a file, nor flags, nor a size of {known}")
    content = read_json(path)
    flags: list[str] = []
    for key, flag in HUGGING_FACE.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), int | float):
            raise ModelError(f"{path}: {key} is missing, or no number")
        flags += [flag, f"{content[key]:g}" if key == "rope_theta" else str(content[key])]
    groups = content.get("num_key_value_heads", content["num_attention_heads"])
    if groups != content["num_attention_heads"]:
        flags += ["--group-query-attention", "--num-query-groups", str(groups)]
    if not content.get("tie_word_embeddings", False):
        flags.append("--untie-embeddings-and-output-weights")
    if content.get("head_dim"):
        flags += ["--kv-channels", str(content["head_dim"])]
    return flags


def dry_run_bytes(flags: str, world: int) -> float:
    """Return the bytes of the fullest pipeline rank of a run, as --dry-run tells them."""
    config = parse([*shlex.split(flags.replace("--bf16", "")), *REST.split()], world)
    held = activations.held(config, pretrain_llama.model_provider)
    ranks = [memory(config, pretrain_llama.model_provider, n, each) for n, each in enumerate(held)]
    return max(float(sum(kinds.values())) for kinds in ranks)


RECOMPUTE = {  # flags of each kind of recomputation
    "none": "",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
}


@lru_cache(maxsize=256)
def _unit(flags: tuple[str, ...], tp: int, recompute: str, sequence: int) -> Unit:
    told: list[dict[str, float]] = []
    for layers, sequences in ((FEW, 1), (MORE, 1), (FEW, 2)):
        argv = [*flags, *REST.split(), *RECOMPUTE[recompute].split(), "--num-layers", str(layers),
                "--seq-length", str(sequence), "--tensor-model-parallel-size", str(tp),
                "--micro-batch-size", str(sequences),
                "--global-batch-size", str(sequences)]  # fmt: skip
        argv += ["--sequence-parallel"] * (tp > 1)
        config = parse(_last(argv), tp)
        held = activations.held(config, pretrain_llama.model_provider)[0]
        kinds = memory(config, pretrain_llama.model_provider, 0, held)
        told.append(dict(kinds))
    few, more, two = told
    numbers = [kinds["parameters"] / 2 for kinds in told]
    layer = more["activations"] - few["activations"]
    layer_numbers = numbers[1] - numbers[0]
    return Unit(
        layer=layer,
        again=few["activations"] - FEW * layer,
        logits=few["logits"],
        working=few["working memory"],
        working_more=two["working memory"] - few["working memory"],
        layer_numbers=layer_numbers,
        end_numbers=numbers[0] - FEW * layer_numbers,
    )


def _last(argv: list[str]) -> list[str]:
    """Return flags without what a later one of the same name replaces."""
    given = [n for n, word in enumerate(argv) if word.startswith("--")]
    latest = {argv[n]: n for n in given}
    kept: list[str] = []
    for n, following in zip(given, [*given[1:], len(argv)], strict=True):
        if latest[argv[n]] == n:
            kept += argv[n:following]
    return kept
