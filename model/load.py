# SPDX-License-Identifier: Apache-2.0
"""Find the file of a model: the one that --model-file names, or that of a checkpoint.

A model's file defines the names that ModelFile lists, like model/llama.py. A modified copy of that
file, or a file that derives from it, is also a model.
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
FORKS = "examples/forks"  # worked forks; those of Hugging Face's models are named by model_type
NO_MODELS = ("__init__", "huggingface", "load", "sizes")  # other files of this folder
# {model_type: file}, if the names differ
FILES = {
    "granite": "llama",
    "mistral": "llama",
    "mixtral": "moe",
    "qwen3_moe": "moe",
    "dots1": "moe",
}
# {model_type of another mixture of experts: its features that no file of this folder has}
LATENT = "multi-head latent attention"
MISSING = {
    "qwen2_moe": "biases of q, k and v and a gate of the shared expert",
    "olmoe": "a norm over all heads of q, and of k, together",
    "flex_olmo": "norms after attention and MLP, and over all heads of q, and of k, together",
    "glm4_moe": "a rotary embedding of a part of each head",
    "hunyuan_v1_moe": "norms of q and k behind the rotary embedding",
    "deepseek_v2": f"{LATENT} (in examples/forks/deepseek.py)",
    "deepseek_v3": f"{LATENT} (in examples/forks/deepseek.py)",
    "kimi_k2": f"{LATENT} (in examples/forks/deepseek.py)",
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
KNOWN = ("CheckpointError", "MismatchError", "UsageError")  # our errors, whose text is complete
NEEDED = ("Model", "ModelConfig", "hf_names", "hf_config", "from_hf_config", "parameter_group")


class ModelFile(Protocol):
    """The interface of a model's file. Optionally it also has extra_args_provider(parser), for its
    own flags, which set the fields of ModelConfig with the same names; and with_mup(config, mup),
    without which --use-mup is rejected.
    """

    __file__: str
    Model: type[Llama]
    ModelConfig: type[LlamaConfig]

    def hf_names(self, model: Llama) -> dict[str, tuple[str, ...]]:
        """Return each parameter's names in a checkpoint, one for each of its fused sections."""

    def hf_config(self, config: LlamaConfig, dtype: str = "float32") -> dict[str, Any]:
        """Return the sizes as Hugging Face's config.json."""

    def from_hf_config(self, hf: dict[str, Any]) -> LlamaConfig:
        """Return the inverse of `hf_config`."""

    def parameter_group(self, name: str, param: nn.Parameter) -> str:
        """Return a parameter's group, one of mpu.param.GROUPS."""


class ModelFileError(ValueError):
    """A model's file raised an error, `__cause__`; the message names the file."""


@cache
def load_model_file(path: str) -> ModelFile:
    """Import a model's file. path: may also be relative to the parent of this folder.

    Raises ValueError if there is no such file, if it fails, or if it lacks a name of ModelFile.
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
    """Turn an error in the block into a ModelFileError that names --model-file `path`, its function
    and the line. at: the file itself.
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
    """Return `blaming` for an imported file."""
    at = Path(file.__file__).resolve()
    inside = at.is_relative_to(HERE.parent)
    return blaming(str(at.relative_to(HERE.parent) if inside else at), at)


def blame_forward(file: ModelFile, model: Llama) -> None:
    """Make errors in the model's forward name the line of its file, for example a line that needs
    values on meta tensors. ValueErrors, and errors in other files, are unchanged.
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
    """Return a function that adds a model file's own flags to a parser; None if it has none.

    Raises ValueError as load_model_file does.
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
    """Return the file of a checkpoint's model: `own`, else the matching file of this folder.

    hf: its sizes, a config.json. saved: the settings of the run that saved it. own: a given
    --model-file. A checkpoint may be untrusted, so it cannot cause any other file to be run. Raises
    ValueError if no file of this folder matches.
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
    meant = "the --model-file of a fork for it (docs/forking.md)"
    meant = f"--model-file {fork}" if fork else meant
    known = ", ".join(sorted({*stems, *FILES}))
    raise ValueError(
        f"config.json: model_type is {kind!r}, not one of Weft's ({known}): give {meant}"
    )


def worked_fork(kind: str) -> str:
    """Return the worked fork for a config.json's model_type, or "" if there is none."""
    fork = f"{FORKS}/{kind.removesuffix('_text')}.py" if kind.isidentifier() else ""
    return fork if (HERE.parent / fork).is_file() else ""


def missing_in(kind: str) -> str:
    """Return the error message for a mixture of experts with a model_type in MISSING."""
    return (
        f"config.json: model_type is {kind!r}, which has {MISSING[kind]}: that is not available in "
        "model/moe.py; give a --model-file that has it (docs/forking.md)"
    )


def of_checkpoint(
    hf: dict[str, Any], saved: Mapping[str, Any] | None = None, own: str | None = None
) -> tuple[str, LlamaConfig]:
    """Return the path of `model_file_of`, in the form of --model-file, and the model's config."""
    file = model_file_of(hf, saved, own)
    return own or f"model/{Path(file.__file__).name}", saved_config(file, hf, saved)


def digest(file: ModelFile) -> str:
    """Return the SHA-256 of a model's file in hex, which must be equal on all ranks."""
    return hashlib.sha256(Path(file.__file__).read_bytes()).hexdigest()


def config_of(
    file: ModelFile, sizes: Mapping[str, Any], own: Mapping[str, Any] | None = None
) -> LlamaConfig:
    """Return the model's config. sizes: from Weft's flags. own: fields that only some files have.

    Raises ValueError if they include experts, or YaRN, and the file does not support it.
    """
    fields, own = file.ModelConfig.__dataclass_fields__, own or {}
    if own.get("num_experts") and "num_experts" not in fields:
        raise ValueError(
            f"--num-experts {own['num_experts']}: {Path(file.__file__).name} has no experts; leave "
            "--model-file out to use model/moe.py, or give a changed copy of model/moe.py"
        )
    if sizes.get("yarn") and "yarn" not in fields:
        raise ValueError(
            f"--position-embedding-type yarn: {Path(file.__file__).name} does not support yarn; "
            "model/llama.py does"
        )
    return file.ModelConfig(**sizes, **{k: v for k, v in own.items() if k in fields})


def with_mup(file: ModelFile, sizes: LlamaConfig, mup: MuP) -> Widths:
    """Return the Widths of a model's file for muP. Raises ValueError if it does not define them."""
    name, say = Path(file.__file__).name, getattr(file, "with_mup", None)
    if say is None:
        raise ValueError(
            f"--use-mup: --model-file {name} does not define with_mup, which says which sizes are "
            "widths: define it, or import with_mup of model/llama.py if the parameters are the "
            "same (docs/mup.md)"
        )
    found: Widths = say(sizes, mup)
    if wrong := found.divisors.keys() - {*GROUPS}:
        raise ValueError(
            f"--use-mup: with_mup of --model-file {name} names {', '.join(sorted(wrong))}: the "
            f"groups of parameters are {', '.join(GROUPS)}"
        )
    return found


def read_sizes(file: ModelFile, hf: dict[str, Any]) -> LlamaConfig:
    """Return the sizes in a config.json. Raises ValueError for any invalid content."""
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
    """Return the config of a checkpoint's model. hf, saved: see `model_file_of`."""
    sizes = read_sizes(file, hf)
    found = {k.removeprefix("extra."): v for k, v in (saved or {}).items() if "extra." in k}
    own = {k: v for k, v in found.items() if k in file.ModelConfig.__dataclass_fields__}
    own = {k: tuple(v) if isinstance(v, list) else v for k, v in own.items()}
    return replace(sizes, **own)
