# SPDX-License-Identifier: Apache-2.0
"""Common parts of tools/fork_check.py: a case, the record of one rank, a rank's report."""

import re
import traceback
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from model.load import ModelFileError, load_model_file, of_checkpoint
from mpu.layers.packed_seq_params import PackedSeqParams
from mpu.meta_tensors import meta_hint
from mpu.param import Piece, placement_of, unique_parameters
from mpu.pipeline.schedules import forward_only
from pretrain_llama import LlamaRun, run_schedule, train_step
from tools.compare.join import Side
from training.data.batch import Batch
from training.data.context_part import context_part
from training.flags.parse import parse
from training.run.watch.recorder import FileRecorder, recorded
from training.settings.config import Config, UsageError

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or an expert, in a name
ONE_RANK = "one rank"  # the case that all others are compared with


class Case(NamedTuple):
    """One row of the table. load, save: folders under the desk's.

    record: the step, counted from 0, of which all tensors are recorded instead; -1: none.
    """

    name: str
    ranks: int
    flags: tuple[str, ...] = ()
    tied: bool = False
    load: str = ""
    save: str = ""
    oracle: bool = False
    record: int = -1


@dataclass
class Desk:
    """The common settings of all cases. model: the file. own: the user's flags. sizes: as flags."""

    model: str
    folder: str
    sizes: tuple[str, ...]
    own: tuple[str, ...]
    own_loss: bool = False  # the loss is intentionally not its logits' cross entropy

    def record(self, name: str, what: int | str, inside: bool = False) -> Path:
        """Return the folder to which the ranks of a case record the initial weights, or a step.

        inside: the record has the tensors inside the model, too.
        """
        return Path(self.folder, "records", name, f"{what}{', inside' * inside}")

    def one_rank(self, tied: bool, what: int | str) -> Side:
        """Return the record of one rank."""
        return Side(self.record(f"{ONE_RANK}{', tied' * tied}", what))

    def config(self, case: Case) -> Config:
        """Return the config of a case. Raises UsageError."""
        file = load_model_file(self.model)
        flags = [*self.sizes, "--model-file", self.model, *case.flags]
        flags += [] if case.tied else ["--untie-embeddings-and-output-weights"]
        for flag, folder in (("--load", case.load), ("--save", case.save)):
            flags += [flag, str(Path(self.folder, folder))] if folder else []
        own = getattr(file, "extra_args_provider", None)
        return parse([*flags, *self.own], case.ranks, own, of_checkpoint)

    def refusal(self, case: Case) -> str:
        """Return why the flags of a layout are refused though those of one rank are not, or ""."""
        try:
            self.config(case)
        except UsageError as error:
            return "" if case.oracle else str(error)
        return ""


@dataclass
class Report:
    """A rank's results. findings: (kind, parameter, sentence); errors: the largest of each kind.

    notes: lines that are not about mistakes.
    """

    findings: list[tuple[str, str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    errors: dict[str, float] = field(default_factory=dict)

    def error(self, kind: str, value: float) -> None:
        """Record the largest error of a kind; NaN is larger than any."""
        value = float("inf") if value != value else value
        self.errors[kind] = max(value, self.errors.get(kind, 0.0))


def at_line(frame: traceback.FrameSummary) -> str:
    """Return a frame's file and line in words."""
    return f"{Path(frame.filename).name} line {frame.lineno}"


def describe_error(error: BaseException, model: str) -> str:
    """Return an error as a sentence, with the line of the model's file in its traceback."""
    if isinstance(error, ModelFileError):
        assert error.__cause__ is not None
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).resolve() == Path(model).resolve()]
    where = f", {at_line(own[-1])}" if own else ""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    if not own and kind and frames:
        notes = getattr(error, "__notes__", None)
        where = f", {notes[0] if notes else at_line(frames[-1])}"
    text = " ".join(str(error).split()).partition(" Hint: ")[0]  # torch's, of autograd
    freed = (
        ": at ZeRO stage 3 a weight is freed outside of its use, and initialize(seed, names) "
        "writes the parameters in `names` alone"
    )
    hint = freed * ("refers to a single memory location" in text) or meta_hint(error)
    return f"{kind}{text[:300]}{where}{hint}"


def raised_in(error: BaseException, model: str) -> bool:
    """Return whether a line of the model's file raised a ValueError itself."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    at = [Path(frame.filename).resolve() for frame in last]
    return isinstance(error, ValueError) and at == [Path(model).resolve()]


def rectangles(run: LlamaRun) -> Iterator[tuple[str, nn.Parameter, Piece]]:
    """Yield (name, parameter, piece) of all pieces on this rank."""
    table = load_model_file(run.config.model.model_file).hf_names(run.model)
    for name, param in unique_parameters(run.model):
        for piece in placement_of(param).pieces(table[name]):
            yield name, param, piece


def noise_of(name: str, values: Tensor) -> Tensor:
    """Return noise for a tensor, other for each name, with a standard deviation of 0.1."""
    g = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return 0.1 * torch.randn(values.shape, generator=g, dtype=values.dtype)


def whole(parts: Iterable[tuple[Piece, Tensor]]) -> dict[str, Tensor]:
    """Return {canonical name: whole tensor} from the pieces of one rank."""
    found: dict[str, Tensor] = {}
    for piece, values in parts:
        full = found.setdefault(piece.name, values.new_zeros(piece.shape))
        cut(full, piece).copy_(values)
    return found


def cut(full: Tensor, piece: Piece) -> Tensor:
    """Return the part of a whole tensor that a rank holds."""
    return full.narrow(piece.dim, piece.start, piece.size)


def held(local: Tensor, piece: Piece) -> Tensor:
    """Return a piece of a local parameter."""
    return local.narrow(piece.dim, piece.local, piece.size)


@torch.no_grad()
def put(run: LlamaRun, full: Mapping[str, Tensor]) -> None:
    """Write whole tensors, by canonical name, into this rank's weights."""
    for names in run.sink.fill():
        for name, param, piece in rectangles(run):
            if name in names:
                if piece.local == 0:
                    param.zero_()  # padding is in no piece
                held(param, piece).copy_(cut(full[piece.name], piece))
    run.optimizer.masters_from_weights()


def batches_of(run: LlamaRun, step: int) -> list[Batch]:
    """Return this rank's micro-batches of a step: k of data rank r is rows (k D + r) b on."""
    m, b = run.config.model, run.config.batch
    assert m.vocab_size is not None
    rows, s, size = b.global_batch_size, m.seq_length, b.micro_batch_size
    g = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, m.vocab_size, (rows, s + 1), generator=g)
    masks: dict[str, Tensor | None] = dict.fromkeys(("loss_mask", "position_ids"))
    if step == 1:
        at, first = torch.arange(s).expand(rows, s), torch.randint(1, s, (rows, 1), generator=g)
        masks["loss_mask"] = (torch.rand(rows, s, generator=g) > 0.3).float()
        masks["position_ids"] = torch.where(at >= first, at - first, at)
    made = []
    for low in range(run.grid.dp.rank * size, rows, run.grid.dp.size * size):
        own = {k: None if t is None else t[low : low + size] for k, t in masks.items()}
        count = size * s if own["loss_mask"] is None else int(own["loss_mask"].sum())
        part = ids[low : low + size]
        packed = None
        if step == 1:  # two documents a row
            cuts = first[low : low + size, 0].tolist()
            packed = PackedSeqParams.of([length for cut in cuts for length in (cut, s - cut)])
        global_batch = Batch(
            part[:, :-1], part[:, 1:], own["loss_mask"], own["position_ids"], packed,
            first_sample=low, token_count=count,
        )  # fmt: skip
        made.append(context_part(global_batch, run.grid.cp.rank, run.grid.cp.size))
    return made


def forward(run: LlamaRun, record: Path | None = None) -> float:
    """Run a forward pass of step 0's batch; return its loss. record: a folder for its tensors."""
    batches = batches_of(run, 0)
    schedule = forward_only(run.schedule(len(batches)))
    file = run.config.model.model_file
    names = load_model_file(file).hf_names(run.model)
    auxiliary = run.model.ctx.auxiliary_losses
    auxiliary.share, auxiliary.in_forward = None, True
    with nullcontext() if record is None else FileRecorder(run, batches, names, record, fork=file):
        total = run_schedule(run, schedule, batches, 1, "of a forward pass")
    auxiliary.in_forward = False
    return ((total[0] + total[2]) / total[1]).item() if total[1] else 0.0


def record_weights(run: LlamaRun, folder: Path) -> None:
    """Record the current weights."""
    names = load_model_file(run.config.model.model_file).hf_names(run.model)
    with FileRecorder(run, batches_of(run, 0), names, folder, inside=False):
        pass


def step(
    run: LlamaRun, number: int, record: Path | None = None, inside: bool = False
) -> tuple[float, float]:
    """Train a step; return the loss and the gradient's norm.

    record: a folder for its parameters and gradients. inside: for all other tensors, too.
    """
    batches, lr = batches_of(run, number), run.config.optimizer.lr
    run.model.ctx.auxiliary_losses.share = None  # of a step before, which had a mask
    take = train_step
    if record is not None:
        file = run.config.model.model_file
        take = recorded(train_step, load_model_file(file).hf_names(run.model), record, file, inside)
    loss, norm, _ = take(run, batches, lr)
    run.iteration += 1
    run.consumed += run.config.batch.global_batch_size
    return loss.item(), norm.item()
