# SPDX-License-Identifier: Apache-2.0
"""Checks of tools/fork_check.py on one rank, for mistakes that a comparison of layouts misses.

A gradient that autograd drops is dropped in every layout, so it is compared with finite differences
of the loss. `decode` is compared with `forward`. Random numbers and the names in a checkpoint are
checked.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.llama import Llama
from model.load import load_model_file
from mpu.grid import Grid
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.param import Piece, placement_of, unique_parameters
from mpu.torch_private import DispatchMode
from pretrain_llama import LlamaRun, model_provider
from tools.compare.first_difference import Allowed
from tools.compare.join import Side
from tools.compare.verdict import verdict_of
from tools.forks.case import NUMBER, cut, held
from training.run.model_profile import meta_context
from training.settings.config import Config

STEP = 1e-6  # of each weight, in the differences
WRONG = 1e-4  # a gradient's largest error against differences, relative to its norm
NOISE = 1e-8  # rounding of a difference of losses, divided by STEP
SAME = 1e-10  # largest error of decode's logits, relative to their norm
CERTAIN = 5.0  # standard errors by which a drawn value's spread may be off


def names_of(config: Config) -> list[tuple[str, str]]:
    """Return (kind, sentence) for parameters that a checkpoint could not hold."""
    model = model_provider(config, meta_context(config, Grid()))
    table, found = load_model_file(config.model.model_file).hf_names(model), []
    counts: Counter[str] = Counter()
    for name, param in unique_parameters(model):
        names, sections = table.get(name, ()), len(placement_of(param).sections) or 1
        counts.update(set(names))  # parts of one tensor share a name
        if len(names) != sections:
            found.append(
                f"{name} has {sections} section{'s' * (sections > 1)}, but hf_names gives it the "
                f"names {list(names)}: each section needs one, or the weight is not saved"
            )
    found += [
        f"hf_names gives the name {name} to {count} parameters: a checkpoint keeps only one"
        for name, count in counts.items()
        if count > 1
    ]
    return [("names", line) for line in found]


class Casts(DispatchMode):
    """Records the lines of a file that round an fp64 tensor, those that mix one with another dtype,
    and those that write in place. lines, mixed, writes: {line: dtype}.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.lines, self.mixed, self.writes = (dict[int, torch.dtype]() for _ in range(3))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        given = [x for each in args for x in (each if isinstance(each, list) else [each])]
        kinds = {x.dtype for x in given if isinstance(x, Tensor) and x.is_floating_point()
                 and x.dim()}  # fmt: skip
        if func is torch.ops.aten._to_copy.default:
            if args[0].dtype == torch.float64 != y.dtype and y.is_floating_point():
                self.note(self.lines, y.dtype)
        elif func.overloadpacket.__name__.endswith("_"):
            self.note(self.writes, y.dtype)
        elif len(kinds) > 1 and isinstance(y, Tensor) and y.dtype == torch.float64:
            self.note(self.mixed, min(kinds, key=lambda kind: kind.itemsize))
        return y

    def note(self, lines: dict[int, torch.dtype], kind: torch.dtype) -> None:
        """Record the innermost running line of the file."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_code.co_filename != self.file:
            frame = frame.f_back
        if frame is not None:
            lines.setdefault(frame.f_lineno, kind)

    def said(self) -> list[str]:
        """Return a sentence for each line."""
        return [
            f"fp64 becomes {str(kind).removeprefix('torch.')} ({Path(self.file).name}:{line}), so "
            "no two layouts would agree: use ctx.accumulate, which is fp64 with --fp64 and fp32 "
            "in a run in bf16"
            for line, kind in sorted(self.lines.items())
        ]

    def written(self) -> str:
        """Return the lines that write in place in words, or ""."""
        return " or ".join(f"line {line}" for line in sorted(self.writes))

    def warned(self) -> list[str]:
        """Return a warning for each line in which types are mixed."""
        return [
            f"a {str(kind).removeprefix('torch.')} tensor is combined with a float64 one "
            f"({Path(self.file).name}:{line}), so in a run in bf16 the result is not bf16: create "
            "it with dtype=ctx.dtype"
            for line, kind in sorted(self.mixed.items())
        ]


def draws(run: LlamaRun, forward: Callable[[Path | None], float], folder: Path) -> str:
    """Return a sentence if a forward pass draws random numbers or depends on the one before, or "".

    forward: makes a pass of the same batch, returns its loss, and records it in a folder.
    """
    state, loss = torch.get_rng_state(), forward(None)
    again = forward(None)
    drawn = not torch.equal(state, torch.get_rng_state())
    if not drawn and loss == again:
        return ""
    sides = []
    for name in ("once", "again"):
        forward(folder / name)
        sides.append(Side(folder / name))
    verdict = verdict_of(sides[0], sides[1], Allowed(True))
    first = "" if verdict.same else f"; {verdict.sentence}"
    if drawn:
        return (
            "the forward pass draws random numbers from torch's default generator, which differ "
            f"over tp, in a pipeline, under recomputation and after a resume{first}"
        )
    return (
        "two forward passes of the same batch with the same weights differ, so the model keeps "
        f"something from one call to the next, or draws random numbers{first}"
    )


@torch.no_grad()
def derivatives(
    order: Sequence[tuple[str, nn.Parameter, Piece]],
    gradients: Mapping[str, Tensor],
    loss: Callable[[], float],
) -> tuple[float, list[tuple[str, str]], list[str]]:
    """Compare each gradient with (loss(w + d) - loss(w - d)) / 2 for a random d of signs.

    Frozen parameters have no gradient. Returns the largest error; (name, sentence) of the wrong
    gradients, the nearest to the loss first; and a line for each parameter on which the loss does
    not depend.
    """
    worst, wrong, idle = 0.0, [], []
    for number, (_, param, piece) in enumerate(order):
        if not param.requires_grad:
            continue
        grad, here = cut(gradients[piece.name], piece), held(param, piece)
        g = torch.Generator().manual_seed(number)
        signs = torch.randint(0, 2, grad.shape, generator=g).double() * 2 - 1
        original, ends = here.clone(), []
        for sign in (1, -1):
            here.copy_(original + sign * STEP * signs)
            ends.append(loss())
        here.copy_(original)
        true, found = (ends[0] - ends[1]) / (2 * STEP), float((grad * signs).sum())
        size = max(float(grad.norm()), abs(true))
        error = abs(true - found) / size if size > NOISE else 0.0
        if abs(true - found) <= NOISE:
            error = 0.0
        worst = max(worst, error)
        if not error <= WRONG:
            how = f"says {found:.6g}" if grad.any() else "is zero"
            wrong.append(
                (
                    piece.name,
                    f"the loss changes by {true:.6g} along a random direction of {piece.name}, and "
                    f"its gradient {how}: an operation after this weight drops or falsifies it (a "
                    ".detach(), a torch.no_grad, a wrong backward)",
                )
            )
        elif not grad.any():
            idle.append(f"the loss does not depend on {piece.name}")
    return worst, wrong[::-1], idle


@torch.inference_mode()
def loss_of_logits(model: Llama, tokens: Tensor, labels: Tensor) -> tuple[float, str]:
    """Return the distance of the loss and the logits' cross entropy, and a sentence if it is large.

    tokens, labels [b, s].
    """
    logits = model(tokens)[..., : model.config.vocab_size]  # [s, b, V]
    want = F.cross_entropy(logits.permute(1, 2, 0), labels, reduction="none")
    got = model(tokens, labels)
    error = float((got - want).norm() / want.norm())
    if error <= SAME:
        return error, ""
    return error, (
        f"the loss of the first token is {float(got[0, 0]):.6g}, but the cross entropy of its "
        f"logits, which decode returns, is {float(want[0, 0]):.6g}: change logits in Llama.logits, "
        "which both use; add a further loss by ctx.auxiliary_loss; if the loss is meant to differ, "
        "give --own-loss"
    )


def initial_values(values: Mapping[str, Tensor], std: float, layers: int) -> tuple[str, list[str]]:
    """Return a line that lists the initial values by name, and a warning for each unusual one.

    std: --init-method-std. Usual are N(0, std), N(0, std / sqrt(2 layers)) for a matrix, and 0 or 1
    everywhere for a vector, 0 for a bias.
    """
    every: dict[str, list[Tensor]] = {}
    for name, value in values.items():
        every.setdefault(NUMBER.sub("N", name), []).append(value)
    stated: dict[str, list[str]] = {}
    odd = []
    expected = {"std": std, "std / sqrt(2 L)": std / math.sqrt(2 * layers)}
    for name, parts in every.items():
        flat = torch.cat([part.flatten() for part in parts])
        spread, mean = float(flat.std(correction=0)), float(flat.mean())
        vector = parts[0].dim() == 1 or name.endswith("bias")  # of experts it is a matrix
        noise = CERTAIN / math.sqrt(2 * len(flat))
        word = next((w for w, s in expected.items() if abs(spread / s - 1) <= noise), "")
        if spread == 0:
            ones = mean == 1.0 and not name.endswith("bias")
            how, usual = f"{mean:g}", vector and (mean == 0.0 or ones)
        else:
            how = f"N({mean:.2g}, {spread:.3g}^2)"
            usual = bool(word) and abs(mean) <= CERTAIN * spread / math.sqrt(len(flat))
            how = f"N(0, {word})" if usual else how
        stated.setdefault(how, []).append(name)
        if not usual:
            due = (
                "a vector is usually 1, a bias 0 (Llama.initial_vector)"
                if vector
                else f"--init-method-std {std:g} asks for N(0, {std:g}^2), or N(0, "
                f"{expected['std / sqrt(2 L)']:.3g}^2) where it ends a branch"
            )
            odd.append(f"{name} is {how} after initialize(), and {due}")
    line = "; ".join(f"{how}: {', '.join(names)}" for how, names in stated.items())
    return f"initial values (std {std:g}, L {layers}): {line}", odd


@torch.inference_mode()
def decodes(model: Llama, tokens: Tensor) -> tuple[float, str]:
    """Return the largest error of decode's logits over their norm, and a sentence if it is large.

    tokens [b, s]: token by token, and in two chunks.
    """
    length, worst = tokens.shape[1], 0.0
    want = model(tokens)  # [s, b, V/t]
    for how, cuts in (("token by token", [1] * length), ("in two chunks", [length // 2 + 1])):
        model.rope(None, length)
        caches: list[list[Tensor]] = [[] for _ in range(model.config.num_layers)]
        at = 0
        for count in [*cuts, length - sum(cuts)]:
            if not count:
                continue
            got = model.decode(tokens[:, at : at + count], at, caches)
            part = want[at : at + count]
            error = float((got - part).norm() / part.norm())
            worst = max(worst, error)
            if not error <= SAME:
                return worst, (
                    f"decode differs from forward: given {how}, the logits at position {at} are "
                    f"off by {error:.2g} of their norm: a layer does not read earlier tokens from "
                    "its cache, or counts positions from 0 instead of taking position_ids"
                )
            at += count
    return worst, ""


@torch.inference_mode()
def documents(model: Llama, tokens: Tensor) -> tuple[float, str]:
    """Return the relative distance of the logits of rows of two documents from those of each
    document alone, and a sentence if it is large. tokens [b, s].
    """
    rows, length = tokens.shape
    sizes = [length // 2 + 1, length - length // 2 - 1]
    places = torch.cat([torch.arange(size) for size in sizes]).expand(rows, -1)
    got = model(tokens, None, places, PackedSeqParams.of(sizes * rows))  # [s, b, V/t]
    want = torch.cat([model(part) for part in tokens.split(sizes, 1)])
    error = float((got - want).norm() / want.norm())
    if error <= SAME:
        return error, ""
    near = [float((a - b).norm() / b.norm()) <= SAME for a, b in zip(got, want, strict=True)]
    return error, (
        f"the logits of two documents in a row differ by {error:.2g} of their norm from those of "
        f"each alone, from position {near.index(False)} on, and the second begins at {sizes[0]}: "
        "packed_seq_params does not reach core_attention, a layer reads the tokens before, or "
        "positions are those in the row instead of position_ids"
    )
