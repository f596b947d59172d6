# SPDX-License-Identifier: Apache-2.0
"""Compare a model with transformers', if that has its MODEL_TYPE: names, config, logits.

transformers' model gets the fork's weights by the names of `hf_names`, and its sizes by
`hf_config`. Then every field of transformers' config that changes its logits is varied:
`from_hf_config` must refuse the value, or the fork must compute the same.
"""

import importlib
import math
import re
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from model.llama import LlamaConfig
from model.load import ModelFile, read_sizes
from mpu.module_tracker import site
from mpu.param import placement_of, saved_buffers, unique_parameters
from tools.forks.case import NUMBER, cut, held, noise_of, whole
from tools.forks.fields import Finding, model_of, others
from training.run.watch.recorder import FRAME

SAME = 1e-5  # largest error of logits, by norm: transformers computes parts in fp32
IGNORED = re.compile(r"token_id|use_cache|output_|return_dict|chunk_size|dtype|version|range$")
# {a field that is missing or null in transformers' config: a value that changes the logits}
ABSENT = {"is_causal": False, "sliding_window": 2}


def compare(
    file: ModelFile, config: LlamaConfig, tokens: Tensor
) -> tuple[list[Finding], list[str]]:
    """Return findings, and notes: what was compared, or why nothing was. tokens [b, s].

    Some of transformers' models only support heads of size hidden_size / heads: these are compared
    with heads of size 8.
    """
    hf = file.hf_config(config)
    kind = str(hf.get("model_type", ""))
    try:
        library = importlib.import_module("transformers")
    except ImportError as error:
        return [], [f"logits were not compared with transformers, which is not installed: {error}"]
    if kind not in library.CONFIG_MAPPING:
        problem = f"transformers {library.__version__} has no model_type {kind!r}"
        return [], [f"logits were not compared with transformers: {problem}"]
    quiet = library.logging.get_verbosity()
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    try:
        try:
            found = _Theirs(library, file, config, tokens).compare()
            if all(field for _, field, _ in found[0]):  # the logits agree
                return found
        except Exception:
            return _Theirs(library, file, square(config), tokens).compare()
        with suppress(Exception):
            again = _Theirs(library, file, square(config), tokens).compare()
            return found if again[0] else again
        return found
    except Exception as error:
        problem = f"transformers' {kind} fails with what hf_config writes, {type(error).__name__}: "
        return [("transformers", "", problem + " ".join(str(error).split())[:300])], []
    finally:
        library.logging.set_verbosity(quiet)


def square(config: LlamaConfig) -> LlamaConfig:
    """Return sizes with which all heads together are as wide as hidden states."""
    width = 8 * config.num_attention_heads
    try:
        return replace(config, kv_channels=8, hidden_size=width)
    except ValueError:  # the model's heads have one size
        return replace(config, hidden_size=width)


def some_weights(file: ModelFile, config: LlamaConfig) -> dict[str, Tensor]:
    """Return whole weights by canonical name: the initial ones plus some noise."""
    model = model_of(file, config)
    names = file.hf_names(model)
    found = whole(
        (piece, held(param.detach(), piece))
        for name, param in unique_parameters(model)
        for piece in placement_of(param).pieces(names[name])
    )
    for name, value in found.items():
        value += noise_of(name, value)
    for name, buffer in saved_buffers(model):
        found[names[name][0]] = buffer + noise_of(name, buffer)
    return found


def _other_ropes(key: str, value: Any) -> list[Any]:
    """Return other values of a field of rope_parameters, which has one for each kind of layers."""
    if isinstance(value, dict):
        return [{**value, k: other} for k, v in value.items() for other in _other_ropes(k, v)]
    return [value / 2] if "factor" in key else list(others(key, value))[:1]


def _unfit(unknown: list[str], missing: list[str]) -> str:
    """Return the names that do not match, in words."""
    return "; ".join(
        f"{what} {names[0]}" + f" (and {len(names) - 1} more)" * (len(names) > 1)
        for what, names in (("it has no", unknown), ("it also needs", missing))
        if names
    )


@contextmanager
def _seen(
    modules: Mapping[str, Any], names: Container[str], read: Callable[[str, str, Tensor], None]
) -> Iterator[None]:
    """Call read(name, "input" or "output", tensor) for modules that run inside and take one tensor,
    and for the first tensor that they return.
    """

    def called(name: str, given: tuple[Any, ...], result: Any) -> None:
        tensors = [x for x in given if isinstance(x, Tensor)]
        if len(tensors) == 1 and tensors[0].is_floating_point():
            read(name, "input", tensors[0])
        result = result[0] if isinstance(result, tuple) else result
        if isinstance(result, Tensor):
            read(name, "output", result)

    hooks = [
        module.register_forward_hook(lambda _, x, y, name=name: called(name, x, y))
        for name, module in modules.items()
        if name in names
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _makers(
    some: Sequence[Tensor], known: Sequence[Tensor], file: str
) -> tuple[set[Any], set[int], list[int]]:
    """Return the autograd nodes that computed tensors from known ones, the lines of a file in which
    they ran, which anomaly detection records, and which of the known ones they are.
    """
    before = {y.grad_fn: i for i, y in enumerate(known)}
    at, found, lines, used = [x.grad_fn for x in some], set[Any](), set[int](), list[int]()
    while at:
        node = at.pop()
        if node in before:
            used.append(before[node])
        if node is None or node in found or node in before:
            continue
        found.add(node)
        kept = "".join(cast(Any, node.metadata).get("traceback_", ()))
        lines |= {int(line) for name, line in FRAME.findall(kept) if name == file}
        at += [each for each, _ in node.next_functions]
    return found, lines, used


def _by_token(x: Tensor, *sizes: int) -> Tensor:
    """Return [*sizes, h] in place of [n, h], in which a router has all tokens."""
    return x.unflatten(0, sizes) if x.dim() == 2 and len(x) == math.prod(sizes) else x


class _Choices(TorchFunctionMode):
    """Records the lines of a file that computed a tensor without a gradient, such as a choice of
    experts, which autograd does not lead back to.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file, self.lines = file, list[int]()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        y = func(*args, **(kwargs or {}))
        if isinstance(y, Tensor) and torch.is_grad_enabled() and not y.requires_grad:
            at, _, line = site(self.file).call.rpartition(":")
            self.lines += [int(line)] if at == self.file else []
        return y


class _Theirs:
    def __init__(
        self,
        library: Any,
        file: ModelFile,
        config: LlamaConfig,
        tokens: Tensor,
    ) -> None:
        self.library, self.file, self.config = library, file, config
        self.weights, self.tokens = some_weights(file, config), tokens

    def compare(self) -> tuple[list[Finding], list[str]]:
        """Return findings and notes."""
        config = self.library.AutoConfig.for_model(**self.file.hf_config(self.config))
        theirs = self.made(config)
        name = type(theirs).__name__
        odd = self.load(theirs) or self.renamed(theirs)
        if odd:
            line = f"hf_names does not name the weights of transformers' {name}: {odd}"
            return [("transformers", "", line)], []
        want, ours = self.logits(theirs), self.ours(self.config)
        error = float((want - ours).norm() / want.norm())
        if not error <= SAME:
            line = f"with the same weights its logits differ from those of transformers' {name} by "
            line += f"{error:.2g} of their norm"
            line += self.swapped(theirs, ours) or f": {self.first_apart(theirs)}"
            return [("transformers", "", line)], []
        found, count = self.fields(config, want)
        note = f"its logits agree with those of transformers' {name} to {error:.1g}, and with each "
        return found, [f"{note}of {count} config fields changed (unless the change is refused)"]

    def made(self, config: Any) -> Any:
        """Return transformers' model, in fp64 and in training mode, with its noise."""
        config._attn_implementation = config._experts_implementation = "eager"
        if (getattr(config, "pad_token_id", None) or 0) >= config.vocab_size:  # the type's own
            config.pad_token_id = None
        model = self.library.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        return model.double().train()

    def load(self, theirs: Any) -> str:
        """Write the weights into transformers' model; return a mismatch in words, or ""."""
        params = dict(theirs.named_parameters(remove_duplicate=False))
        params |= {n: b for n, b in theirs.state_dict().items() if n not in params}
        tied = {
            n for n, p in params.items() if any(p is params[w] for w in self.weights if w in params)
        }
        unknown = sorted(self.weights.keys() - params.keys())
        missing = sorted(params.keys() - self.weights.keys() - tied)
        if unknown and missing:
            return self.read(theirs)
        if unknown or missing:
            buffers = {name for name, _ in theirs.named_buffers()} & set(missing)
            how = " (buffers: register_buffer makes them part of a checkpoint)"
            return _unfit(unknown, missing) + how * bool(buffers)
        for name, value in self.weights.items():
            if params[name].shape != value.shape:
                there = list(params[name].shape)
                return f"{name} has shape {list(value.shape)}, and {there} in transformers"
        with torch.no_grad():
            for name, value in self.weights.items():
                params[name].copy_(value)
        return ""

    def renamed(self, theirs: Any) -> str:
        """Return a name that exists in memory only, and what transformers saves, or ""."""
        here = theirs.state_dict()
        if not self.weights.keys() <= here.keys():  # they are a checkpoint's, which `read` reads
            return ""
        try:
            saved = importlib.import_module("transformers.core_model_loading")
        except ImportError:  # transformers 4 saves the names that it has in memory
            return ""
        kept = saved.revert_weight_conversion(theirs, here).keys()
        wrong, right = sorted(self.weights.keys() - kept), sorted(kept - here.keys())
        some = f"{wrong[0]} is only its name in memory, and checkpoints have " if wrong else ""
        return some and some + ", ".join(right[:2])

    def read(self, theirs: Any) -> str:
        """Load the weights by transformers as a checkpoint's: it changes names and fuses experts.

        Returns a mismatch in words, or "".
        """
        made, odd = type(theirs).from_pretrained(
            None, config=theirs.config, state_dict=dict(self.weights), dtype=torch.float64,
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
        if odd["unexpected_keys"] or odd["missing_keys"]:
            return _unfit(sorted(odd["unexpected_keys"]), sorted(odd["missing_keys"]))
        for name, here, there in sorted(odd["mismatched_keys"]):
            return f"{name} has shape {list(here)}, and {list(there)} in transformers"
        with torch.no_grad():
            theirs.load_state_dict(made.state_dict())
        return ""

    @torch.no_grad()
    def logits(self, theirs: Any) -> Tensor:
        """Return transformers' logits [b, s, V]."""
        with torch.random.fork_rng():
            torch.manual_seed(1)
            found: Tensor = theirs(self.tokens, use_cache=False).logits
        return found

    @torch.no_grad()
    def ours(self, config: LlamaConfig) -> Tensor:
        """Return the fork's logits [b, s, V] with the same weights."""
        logits: Tensor = self.model(config)(self.tokens)
        return logits[..., : config.vocab_size].transpose(0, 1)

    @torch.no_grad()
    def model(self, config: LlamaConfig) -> Any:
        """Return the fork's model with the same weights."""
        model = model_of(self.file, config)
        names = self.file.hf_names(model)
        for name, param in unique_parameters(model):
            param.zero_()
            for piece in placement_of(param).pieces(names[name]):
                held(param, piece).copy_(cut(self.weights[piece.name], piece))
        for name, buffer in saved_buffers(model):
            buffer.copy_(self.weights[names[name][0]])
        return model

    def first_apart(self, theirs: Any) -> str:
        """Return the first module whose input or output differs, and the lines of the fork that
        computed this tensor from those that agree. A differing tensor from which an agreeing one is
        computed is skipped: transformers' module does more, as an embedding that scales.
        """
        self.load(theirs)  # `swapped` has loaded others
        model, file = self.model(self.config), self.file.__file__
        names, alike = self.file.hf_names(model), dict[str, list[str]]()
        rows, length = self.tokens.shape
        there: dict[tuple[str, str], Tensor] = {}
        modules = dict(theirs.named_modules())
        for name, _ in unique_parameters(model):
            found = [each.rpartition(".")[0] for each in dict.fromkeys(names[name])]
            if name.endswith(".weight") and modules.keys() >= set(found):
                alike[name.removesuffix(".weight")] = found

        def keep(name: str, kind: str, x: Tensor) -> None:
            x = _by_token(x, rows, length).clone()  # a later line may overwrite it
            there.setdefault((name, kind), x)

        with _seen(modules, {n for found in alike.values() for n in found}, keep):
            self.logits(theirs)
        choices = _Choices(file)
        agree: list[tuple[str, Tensor, int]] = []  # words, tensor, how many choices before it
        apart: list[tuple[str, Tensor, str, int]] = []  # and the line of the call

        def compare(name: str, kind: str, x: Tensor) -> None:
            parts = [there.get((each, kind)) for each in alike[name]]
            parts = parts[:1] if kind == "input" else parts
            if any(part is None or part.dim() < 3 for part in parts):
                return
            want = torch.cat([p for p in parts if p is not None], -1)
            got = _by_token(x, length, rows).detach().transpose(0, 1)[..., : want.shape[-1]]
            if got.dim() == 4 and got.shape != want.shape:  # [b, heads, s, d] there
                want = want.transpose(1, 2)
            if got.shape != want.shape:
                return
            what, error = f"the {kind} of {name}", float((got - want).norm() / want.norm())
            if error <= SAME:
                agree.append((what, x, len(choices.lines)))
            if error <= SAME or x.dim() == 2:  # some routers return scores in place of logits
                return
            after = f" after {agree[-1][0]}" if agree else ""
            what += f" is the first{after} that differs, by {error:.2g} of its norm, from that of "
            apart.append((what + alike[name][0], x, site(file).use, len(choices.lines)))

        with torch.autograd.set_detect_anomaly(True, check_nan=False), warnings.catch_warnings():
            with choices, _seen(dict(model.named_modules()), set(alike), compare):
                model(self.tokens)
        known = [x for _, x, _ in agree]
        makes, *_ = _makers(known, [], file)
        for what, x, line, chosen in apart:
            if x.grad_fn not in makes:
                _, lines, used = _makers([x], known, file)
                lines.update(choices.lines[min((agree[i][2] for i in used), default=0) : chosen])
                if line.startswith(file) and not lines:
                    lines = {int(line.rpartition(":")[2])}
                own = f"; made in {Path(file).name}, line {', '.join(map(str, sorted(lines)))}"
                return what + own * bool(lines)
        after = f" after {agree[-1][0]}" if agree else ""
        return f"the two models compute different things{after}"

    def swapped(self, theirs: Any, ours: Tensor) -> str:
        """Return two names that make the logits agree if they are exchanged, in words, or ""."""
        kinds: dict[str, list[str]] = {}
        for name in self.weights:
            kinds.setdefault(NUMBER.sub("N", name), []).append(name)
        right = self.weights
        for one, two in combinations(kinds, 2):
            pairs = list(zip(kinds[one], kinds[two], strict=False))
            if any(right[a].shape != right[b].shape for a, b in pairs):
                continue
            self.weights = right | {a: right[b] for a, b in pairs}
            self.weights |= {b: right[a] for a, b in pairs}
            self.load(theirs)
            off = (self.logits(theirs) - ours).norm() / ours.norm()
            self.weights = right
            if off <= SAME:
                return (
                    f", and agree where {one} and {two} are exchanged: hf_names has them swapped, "
                    "or forward takes one for the other"
                )
        return ""

    def fields(self, config: Any, want: Tensor) -> tuple[list[Finding], int]:
        """Vary the fields; return findings and the number that change transformers' logits."""
        base = {k: v for k, v in config.to_dict().items() if not IGNORED.search(k)}
        rope = base.get("rope_parameters") or {}
        varied = [
            (key, [{**base, key: x} for x in ([0.5] if "drop" in key else others(key, value))])
            for key, value in base.items()
            if key != "model_type"
        ]
        varied += [(k, [{**base, k: v}]) for k, v in ABSENT.items() if base.get(k) is None]
        varied += [
            (f"rope_parameters.{key}", [{**base, "rope_parameters": {**rope, key: other}}])
            for key, value in rope.items()
            for other in _other_ropes(key, value)
        ]
        found: list[Finding] = []
        count = 0
        try:
            plain = read_sizes(self.file, config.to_dict())
        except ValueError as error:
            line = "from_hf_config refuses the config.json that transformers saves for this model: "
            return [("transformers", "", f"{line}{error}")], 0
        for key, values in varied:
            changed = self.changed(type(config), values, want)
            if changed is None:
                continue
            count += 1
            fields, theirs, got = changed
            try:
                ours = read_sizes(self.file, theirs.config.to_dict())
            except ValueError:
                continue
            value = fields.get(key, (fields.get("rope_parameters") or {}).get(key.split(".")[-1]))
            if ours == plain:
                line = f"from_hf_config drops {key}: with {key} = {value!r} the logits of "
                found.append(("transformers", key, line + "transformers change, and Weft's do not"))
                continue
            if got is None or key == "tie_word_embeddings":
                continue
            try:
                mine = self.ours(ours)
            except ValueError:  # refused, as by from_hf_config
                continue
            off = float((mine - got).norm() / got.norm())
            if not off <= SAME:
                line = f"with {key} = {value!r} in config.json its logits differ from those of "
                found.append(("transformers", key, line + f"transformers by {off:.2g} of the norm"))
        return found, count

    def changed(
        self, kind: Any, values: list[dict[str, Any]], want: Tensor
    ) -> tuple[dict[str, Any], Any, Tensor | None] | None:
        """Return the first of some configs of which transformers makes another model, the model,
        and its logits, or None where it does not have the same weights; None if there is none.
        """
        for fields in values:
            with suppress(Exception):  # transformers refuses the value
                theirs = self.made(kind(**fields))
                got = None if self.load(theirs) else self.logits(theirs)
                if got is None or not float((got - want).norm() / want.norm()) <= SAME:
                    return fields, theirs, got
        return None
