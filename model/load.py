# SPDX-License-Identifier: Apache-2.0
"""Find the file of a model: the one that --model-file names, or a checkpoint's.

A model's file defines what ModelFile lists, as model/llama.py does. A changed copy of it, or a file
that derives from it, is a model too.
"""

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from traceback import walk_tb
from types import ModuleType
from typing import Any, Protocol

from torch import nn

from model.llama import Llama, LlamaConfig
from mpu.meta_tensors import meta_hint
from mpu.mup import MuP, Widths
from mpu.param import GROUPS

HERE = Path(__file__).resolve().parent
FORKS = "examples/forks"  # worked forks, those of Hugging Face's models by model_type
NO_MODELS = ("__init__", "huggingface", "load", "sizes")  # other files of this folder
# by model_type, where the names differ
FILES = {
    "granite": "llama",
    "mistral": "llama",
    "mixtral": "moe",
    "qwen3_moe": "moe",
    "dots1": "moe",
}
# by model_type of other mixtures of experts, what they compute that no file of this folder does
LATENT = "multi-head latent attention"
MISSING = {
    "qwen2_moe": "biases of q, k and v and a gate of the shared expert",
    "olmoe": "a norm over all heads of q, and of k, together",
    "flex_olmo": "norms after attention and MLP, and over all heads of q, and of k, together",
    "glm4_moe": "a rotary embedding of a part of each head",
    "hunyuan_v1_moe": "norms of q and k behind the rotary embedding",
    "deepseek_v2": f"{LATENT}, as examples/forks/deepseek.py has it",
    "deepseek_v3": f"{LATENT}, as examples/forks/deepseek.py has it",
    "kimi_k2": f"{LATENT}, as examples/forks/deepseek.py has it",
    "glm4_moe_lite": LATENT,
    "gpt_oss": "attention sinks, sliding windows, and biases of experts and projections",
    "granitemoe": "multipliers of embeddings, residuals, attention and logits",
    "phimoe": "LayerNorm, and a router of another kind (sparsemixer)",
    "ernie4_5_moe": "softmax scores with a bias, and a rotary embedding of neighbouring pairs",
    "dbrx": "LayerNorm, and clipped q, k and v",
    "llama4": "layers without a rotary embedding, and experts whose inputs are weighted",
    "jamba": "state-space layers",
    "lfm2_moe": "convolutions in place of attention",
    "minimax": "linear attention",
    "qwen3_next": "linear attention",
    "qwen3_5_moe": "linear attention",
}
KNOWN = ("CheckpointError", "MismatchError", "UsageError")  # whose text is a sentence of ours
NEEDED = ("Model", "ModelConfig", "hf_names", "hf_config", "from_hf_config", "parameter_group")


class ModelFile(Protocol):
    """What a model's file defines. It may also have extra_args_provider(parser), for its own flags:
    one whose name is a field of ModelConfig sets that field; and with_mup(config, mup), without
    which --use-mup is refused.
    """

    __file__: str
    Model: type[Llama]
    ModelConfig: type[LlamaConfig]

    def hf_names(self, model: Llama) -> dict[str, tuple[str, ...]]:
        """Return each parameter's names in a checkpoint, one for each fused section of it."""

    def hf_config(self, config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
        """Return the sizes as Hugging Face's config.json."""

    def from_hf_config(self, hf: dict[str, Any]) -> LlamaConfig:
        """Return the inverse of `hf_config`."""

    def parameter_group(self, name: str, param: nn.Parameter) -> str:
        """Return a parameter's group, one of mpu.param.GROUPS."""


class ModelFileError(ValueError):
    """A model's file failed; the message names it, and `__cause__` is the error."""


@cache
def load_model_file(path: str) -> ModelFile:
    """Import a model's file: a path, which may also be relative to the folder above this one.

    Raises ValueError where there is none, where it fails, or where it lacks a name of ModelFile.
    """
    at = next((p for p in (Path(path), HERE.parent / path) if p.is_file()), None)
    if at is None or at.suffix != ".py":
        raise ValueError(f"--model-file {path}: there is no such Python file")
    with blaming(path, at.resolve()):
        module = _import(at.resolve())
    missing = [name for name in NEEDED if not hasattr(module, name)]
    if missing:
        raise ValueError(
            f"--model-file {path} does not define {', '.join(missing)}, as model/llama.py does "
            "(docs/forking.md)"
        )
    return module  # type: ignore[return-value]


@contextmanager
def blaming(path: str, at: Path) -> Iterator[None]:
    """Raise ModelFileError that names --model-file `path`, the function of it and the line, where
    the block fails. at: the file itself.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        trace, function, line = error.__traceback__, "", 0
        while trace is not None:
            code = trace.tb_frame.f_code
            if code.co_filename == str(at):
                function, line = function or code.co_name.strip("<>"), trace.tb_lineno
            trace = trace.tb_next
        where = "" if function in ("", "module") else f"{function}, "
        where += f"line {line}: " if line else ""
        known = "" if type(error).__name__ in KNOWN else f"{type(error).__name__}: "
        text = f"--model-file {path}: {where}{known}{error}{meta_hint(error)}"
        raise ModelFileError(text) from error


def blaming_file(file: ModelFile) -> AbstractContextManager[None]:
    """Return `blaming` for a file that is imported."""
    at = Path(file.__file__).resolve()
    inside = at.is_relative_to(HERE.parent)
    return blaming(str(at.relative_to(HERE.parent) if inside else at), at)


def blame_forward(file: ModelFile, model: Llama) -> None:
    """Let the model's forward name the line of its file that fails, as lines do that need values on
    meta tensors. An error that is a sentence already, or of another file, stays.
    """
    forward, at = model.forward, Path(file.__file__).resolve()

    def blamed(*args: Any, **options: Any) -> Any:
        try:
            return forward(*args, **options)
        except ValueError:
            raise
        except Exception as error:
            frames = walk_tb(error.__traceback__)
            if at.parent == HERE or not any(f.f_code.co_filename == str(at) for f, _ in frames):
                raise
            with blaming_file(file):
                raise

    model.forward = blamed  # type: ignore[method-assign]


def _import(at: Path) -> ModuleType:
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(at):
            return module
    if at.parent == HERE:
        return importlib.import_module(f"model.{at.stem}")
    name = f"model_file_{at.stem}"
    spec = importlib.util.spec_from_file_location(name, at)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def own_flags(path: str) -> Callable[[Any], None] | None:
    """Return what adds a model file's own flags to a parser, None where it has none.

    Raises what load_model_file does.
    """
    file = load_model_file(path)
    provider: Callable[[Any], None] | None = getattr(file, "extra_args_provider", None)
    if provider is None:
        return None

    def add(parser: Any) -> None:
        with blaming_file(file):
            provider(parser)

    return add


def model_file_of(
    hf: Mapping[str, Any], saved: Mapping[str, Any] | None = None, own: str | None = None
) -> ModelFile:
    """Return the file of a checkpoint's model: `own`, else the one of this folder that is its.

    hf: its sizes, a config.json. saved: the settings of the run that saved it. own: a --model-file
    that was given. A checkpoint may come from anybody, so what it says runs no other file. Raises
    ValueError where no file of this folder is its model's.
    """
    if own:
        return load_model_file(own)
    kind, named = hf.get("model_type", "llama"), (saved or {}).get("model.model_file")
    if not isinstance(kind, str):
        raise ValueError(f"config.json: model_type is {kind!r}: it must be a string")
    at = (HERE.parent / str(named or f"model/{FILES.get(kind, kind)}.py")).resolve()
    stems = [p.stem for p in HERE.glob("*.py") if p.stem not in NO_MODELS]
    if at in [HERE / f"{stem}.py" for stem in stems]:
        return load_model_file(str(at))
    if named:
        raise ValueError(f"it was trained with --model-file {named}: give this flag too")
    if kind in MISSING:
        raise ValueError(missing_in(kind))
    fork = worked_fork(kind)
    meant = "a --model-file that supports it (docs/forking.md)"
    meant = f"--model-file {fork}" if fork else meant
    known = ", ".join(sorted({*stems, *FILES}))
    raise ValueError(
        f"config.json: model_type is {kind!r}, which is none of Weft's ({known}): give {meant}"
    )


def worked_fork(kind: str) -> str:
    """Return the worked fork of a config.json's model_type, "" where there is none."""
    fork = f"{FORKS}/{kind.removesuffix('_text')}.py" if kind.isidentifier() else ""
    return fork if (HERE.parent / fork).is_file() else ""


def missing_in(kind: str) -> str:
    """Return the sentence that refuses a mixture of experts of a model_type in MISSING."""
    return (
        f"config.json: model_type is {kind!r}, which has {MISSING[kind]}: that is not available in "
        "model/moe.py; give a --model-file that has it (docs/forking.md)"
    )


def of_checkpoint(
    hf: dict[str, Any], saved: Mapping[str, Any] | None = None, own: str | None = None
) -> tuple[str, LlamaConfig]:
    """Return the path of `model_file_of`'s, as --model-file takes it, and the model's config."""
    file = model_file_of(hf, saved, own)
    return own or f"model/{Path(file.__file__).name}", saved_config(file, hf, saved)


def digest(file: ModelFile) -> str:
    """Return the SHA-256 of a model's file, which all ranks must share, in hex."""
    return hashlib.sha256(Path(file.__file__).read_bytes()).hexdigest()


def config_of(
    file: ModelFile, sizes: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> LlamaConfig:
    """Return the model's config: `sizes` from Weft's flags, and what only some files have, `own`.

    Raises ValueError where these have experts and the file does not.
    """
    fields, own = file.ModelConfig.__dataclass_fields__, own or {}
    if own.get("num_experts") and "num_experts" not in fields:
        raise ValueError(
            f"--num-experts {own['num_experts']}: {Path(file.__file__).name} has no experts; omit "
            "--model-file to use model/moe.py, or give a modified copy of model/moe.py"
        )
    if sizes.get("yarn") and "yarn" not in fields:
        raise ValueError(
            f"--position-embedding-type yarn: ModelConfig of {Path(file.__file__).name} has no "
            "field yarn; see that of model/llama.py"
        )
    return file.ModelConfig(**sizes, **{k: v for k, v in own.items() if k in fields})


def with_mup(file: ModelFile, sizes: LlamaConfig, mup: MuP) -> Widths:
    """Return what a model's file says of muP. Raises ValueError where it does not say it."""
    name, say = Path(file.__file__).name, getattr(file, "with_mup", None)
    if say is None:
        raise ValueError(
            f"--use-mup: --model-file {name} has no with_mup, which says which sizes are widths: "
            "define it, or import it from model/llama.py if the parameters are the same "
            "(docs/mup.md)"
        )
    found: Widths = say(sizes, mup)
    if wrong := found.divisors.keys() - {*GROUPS}:
        raise ValueError(
            f"--use-mup: with_mup of --model-file {name} names {', '.join(sorted(wrong))}: a group "
            f"of parameters must be one of {', '.join(GROUPS)}"
        )
    return found


def read_sizes(file: ModelFile, hf: dict[str, Any]) -> LlamaConfig:
    """Return the sizes in a config.json. Raises ValueError, whatever it holds."""
    try:
        return file.from_hf_config(hf)
    except ValueError as error:
        if not (fork := worked_fork(str(hf.get("model_type")))):
            raise
        try:
            load_model_file(fork).from_hf_config(hf)
        except Exception:
            raise error from None
        raise ValueError(f"{error}; --model-file {fork} supports it") from None
    except Exception as error:
        raise ValueError(f"config.json: missing or bad field: {error}") from None


def saved_config(
    file: ModelFile, hf: dict[str, Any], saved: Mapping[str, Any] | None = None
) -> LlamaConfig:
    """Return the config of a checkpoint's model from what `model_file_of` takes."""
    sizes = read_sizes(file, hf)
    found = {k.removeprefix("extra."): v for k, v in (saved or {}).items() if "extra." in k}
    own = {k: v for k, v in found.items() if k in file.ModelConfig.__dataclass_fields__}
    own = {k: tuple(v) if isinstance(v, list) else v for k, v in own.items()}
    return replace(sizes, **own)
