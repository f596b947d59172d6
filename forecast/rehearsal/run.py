# SPDX-License-Identifier: Apache-2.0
"""Run the trainer's own start-up and loop as one rank of any world on fake tensors; record it."""

import contextlib
import gc
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function
from torch.nn import Parameter

from forecast.recording import Actions, few_micro_batches, record
from forecast.rehearsal.device import Reads
from forecast.rehearsal.events import Action, Alloc, Event, Free
from forecast.rehearsal.fakes import fake_tensor_mode
from forecast.rehearsal.group import Distributed
from forecast.rehearsal.order import Finding
from forecast.rehearsal.patches import Patches
from forecast.rehearsal.places import lines_of, traced
from forecast.rehearsal.record import Recorder
from forecast.rehearsal.watch import Watch
from forecast.rehearsal.whole_step import whole_step
from mpu.comm.transport import Axis
from mpu.grid import Grid
from mpu.launch import Launch
from mpu.layers.dispatch import Capacity, Dispatcher
from mpu.module_tracker import CARRIERS, ModuleTracker
from mpu.param import PlacementError, draw_normal, placement_of
from mpu.torch_private import function_of
from training.data.batch import DocumentRules
from training.data.build import Loaders
from training.data.loader import Loader
from training.data.mock import MockDataset
from training.data.tokenizer import tokenizer_for
from training.run import start
from training.run.model_profile import model_profile
from training.run.trial import try_calls
from training.run.waiting import Progress
from training.settings.config import Config, UsageError
from training.settings.pipeline_schedule import micro_batch_counts, schedule_of

READS, OVER = "reading the data", "the end of the run"  # first action of each iteration; last one
STEPS = tuple(Action(f"iteration {step}") for step in (1, 2, 3))


@dataclass
class Rehearsed:
    """What a rehearsal of one rank recorded."""

    config: Config
    grid: Grid
    recorder: Recorder
    begin: int  # index of the first event of the first step
    first: int  # index of the first event of the last step
    notes: list[str]
    run: Any  # None if building it failed
    script: ModuleType
    micro_batches: int  # of a whole step
    few: int  # number of micro-batches that ran
    failure: Finding | None = None  # the exception that ended it, if one did

    @property
    def loop(self) -> int:
        """Return the index at which the last iteration begins, with reading its data."""
        events = self.recorder.events
        turns = (
            index for index in range(self.first - 1, -1, -1)
            if type(event := events[index]) is Action and event.words.startswith(READS)
        )  # fmt: skip
        return next(turns, self.first)

    @property
    def end(self) -> int:
        """Return the index at which the loop ends."""
        events = self.recorder.events
        over = (i for i in range(self.first, len(events)) if events[i] == Action(OVER))
        return next(over, len(events))

    def step(self, micro_batches: int = 0) -> list[Event]:
        """Return the events of the last step with `micro_batches` micro-batches; 0: all."""
        return self._whole(self.recorder.events[self.first :], micro_batches)

    def earlier(self, micro_batches: int = 0) -> list[Event]:
        """Return the events of the steps before the last one; micro_batches: as for `step`."""
        events, found = self.recorder.events[: self.first], list[Event]()
        begins = [i for i, event in enumerate(events) if event in STEPS]
        for low, high in zip(begins, [*begins[1:], len(events)], strict=True):
            found += self._whole(events[low:high], micro_batches)
        return found

    def batches_left_out(self) -> int:
        """Return the bytes of the batches of micro-batches that did not run. A step holds all its
        batches from its start, together with those of the previous step.
        """
        kept, reads = dict[int, int](), False
        for event in self.recorder.events[: self.first]:
            if type(event) is Action:
                reads = event.words.startswith(READS)
            elif type(event) is Alloc and reads:
                kept[event.storage] = event.bytes
            elif type(event) is Free:
                kept.pop(event.storage, None)
        return sum(kept.values()) // self.few * (self.micro_batches - self.few)

    def _whole(self, events: list[Event], micro_batches: int) -> list[Event]:
        count = micro_batches or self.micro_batches
        if self.few == count or self.failure is not None:
            return events
        schedule = schedule_of(self.config, count)
        return whole_step(events, schedule, self.grid.pp.rank, self.few)

    def kinds(self) -> dict[int, str]:
        """Return the kind of each storage that persists from step to step, by its number."""
        found: dict[int, str] = {}
        if self.run is None or self.failure is not None:
            return found
        for kind, tensors in self.run.optimizer.tensors_by_kind().items():
            for tensor in tensors:
                if tensor is not None:
                    number = self.recorder.live.get(id(tensor.untyped_storage()))
                    if number is not None:
                        found.setdefault(number[0], kind)
        return found


def few_of(config: Config) -> int:
    """Return the number of micro-batches to run: all of them if the batch size ramps up, or if two
    micro-batches overlap; else a few.
    """
    p, counts = config.parallel, micro_batch_counts(config)
    unlike = p.overlap_moe_expert_parallel_comm or len(counts) > 1
    return counts[0] if unlike else few_micro_batches(config)


def rehearsable(config: Config, steps: int, few: int) -> Config:
    """Return the rehearsal's config: mock data, no files read or written, `steps` steps.

    few: micro-batches of a step.
    """
    samples = few * config.batch.micro_batch_size * config.parallel.data_parallel_size
    if len(micro_batch_counts(config)) == 1:
        config = replace(config, batch=replace(config.batch, global_batch_size=samples))
    data = replace(
        config.data, mock_data=True, data_path=(), train_data_path=(), valid_data_path=(),
        test_data_path=(), num_workers=0, multiple_validation_sets=False, full_validation=False,
    )  # fmt: skip
    checkpoint = replace(
        config.checkpoint, save=None, load=None, pretrained_checkpoint=None, save_interval=None
    )
    run = replace(
        config.run, exit_interval=steps, eval_interval=None, eval_at_start=False, skip_train=False
    )  # fmt: skip
    log = replace(
        config.log, log_interval=1, tensorboard_dir=None, log_json=None, sample_interval=None,
        record_memory_history=False,
    )  # fmt: skip
    return replace(config, data=data, checkpoint=checkpoint, run=run, log=log)


@torch.no_grad()
def _draw_one_block(param: Parameter, names: Sequence[str], std: float, seed: int) -> None:
    # replaces draw_normal: draws only one block of each part, as fake tensors have no values
    param.zero_()
    for piece in placement_of(param).pieces(names):
        rows = max(1, (1 << 20) // max(1, torch.Size(piece.shape[1:]).numel()))
        shape = (min(rows, piece.shape[0]), *piece.shape[1:])
        torch.empty(shape, dtype=torch.float32, device=param.device).normal_(0.0, std)


ON_HOST = Dispatcher.on_host


def _assumed(
    self: Dispatcher, load: Tensor, total: int, capacity: Capacity | None
) -> list[list[int]]:
    # replaces ON_HOST: calls it for its wait, then on meta tensors, as fake ones have no values
    ON_HOST(self, load, total, capacity)
    return ON_HOST(self, torch.empty_like(load, device="meta"), total, capacity)


def heard_in(
    config: Config, script: ModuleType, rank: int
) -> Callable[[bytes, Axis], list[bytes] | None]:
    """Return a function that maps the bytes of a rank to those of all ranks of its pipeline, or to
    None where all ranks are taken to send the same.

    To find them, all ranks of the pipeline are built on tensors without memory
    (forecast/recording.py). Call this before any function of torch is replaced.
    """
    if config.parallel.pipeline_model_parallel_size == 1:
        return lambda data, axis: None
    if config.model.vocab_size is None:
        config = config.with_vocab(tokenizer_for(config).vocab_size)
    built = record(config, script, (), member=rank)[0]
    place = script.make_grid(config, Launch(rank, config.parallel.world_size)).pp.rank
    by_own = {said[place]: said for said in built.heard}
    return lambda data, axis: by_own.get(data) if axis.name == "pp" else None


def is_trained(x: Any) -> bool:
    """Return whether x is a tensor for which autograd computes a gradient here."""
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


def watch_functions(recorder: Recorder, patches: Patches) -> None:
    """Notify the recorder of each forward and backward of a torch.autograd.Function."""
    for owner, name in ((Function, "{}"), (BackwardCFunction, "{}.backward")):
        own = vars(owner)["apply"]  # a method in Python or, since torch 2.15, in C

        def entered(self: Any, /, *args: Any, own: Any = own, name: str = name, **named: Any
        ) -> Any:  # fmt: skip
            of_class = isinstance(self, type)
            made = self if of_class else function_of(self)
            of = [isinstance(x, Parameter) for x in args if is_trained(x)]
            recorder.enters(name.format(made.__name__), made, (any(of), not all(of)))
            try:
                return own.__get__(*((None, self) if of_class else (self,)))(*args, **named)
            finally:
                recorder.leaves()

        patches.replace(owner, "apply", classmethod(entered) if owner is Function else entered)


def watch_storages(recorder: Recorder, patches: Patches) -> None:
    """Notify the recorder of storages that are resized: to 0 bytes, or back to their size."""
    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        out = resize(storage, size)
        if not recorder.paused:
            recorder.resized(storage, recorder.where())
        return out

    patches.replace(torch.UntypedStorage, "resize_", resized)


def loader(config: Config, grid: Grid) -> Loader:
    """Return a loader of mock samples; the last token of the vocabulary ends documents."""
    data, vocabulary = config.data, config.model.vocab_size
    assert vocabulary is not None
    end = vocabulary - 1
    dataset = MockDataset("train", config.model.seq_length, config.run.seed, vocabulary, end)
    rules = DocumentRules(
        end, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss
    )
    size = config.batch.micro_batch_size
    return Loader(
        dataset, size, grid.dp.rank, grid.dp.size, vocab_size=vocabulary, rules=rules, workers=0,
        context=(grid.cp.rank, grid.cp.size),
    )  # fmt: skip


def rehearse(
    script: ModuleType,
    config: Config,
    launch: Launch,
    recorder: Recorder,
    network: Distributed,
    steps: int,
    patches: Patches,
    real: bool = False,
    progress: Progress | None = None,
    tries: bool = True,
) -> Rehearsed:
    """Run `steps` steps of the script's `work` on the rank of `launch`.

    real: use tensors with memory, among the other ranks of a real world. progress: counts the
    steps. tries: whether to make a run's trial calls and warm-up first.
    """
    progress = progress or Progress()
    progress.begin("building the model")
    count, few = micro_batch_counts(config)[0], few_of(config)
    config = rehearsable(config, steps, few)
    device = torch.device(recorder.device)
    if config.model.vocab_size is None:
        config = config.with_vocab(tokenizer_for(config).vocab_size)
    model_profile(config, script.model_provider)
    grid: Grid = script.make_grid(config, launch)
    loaders = Loaders(loader(config, grid), {}, None)
    grid.traced(network)

    def begins(action: str) -> None:
        if action.startswith("iteration "):
            gc.collect()  # the only garbage collections of the rehearsal
            if action == STEPS[0].words:
                progress.begin("steps:", steps)
            else:
                progress.add()
        if action == OVER:
            progress.begin("looking for mistakes")
        if action.startswith(READS) or action == OVER:
            recorder.count_pinned()
        recorder.acts(action)

    monitor = Actions(begins)
    watch_functions(recorder, patches)
    watch_storages(recorder, patches)
    patches.replace(start, "GradientCheck", lambda grid, note: None)  # it compares values
    if not tries:
        patches.replace(start, "warm_up", lambda *given: None)
    notes: list[str] = []
    run, failure = None, None
    gc.collect()
    gc.disable()  # automatic collections come at random moments; here one precedes each step
    with contextlib.ExitStack() as modes:
        modes.callback(gc.enable)
        if real:
            modes.enter_context(Watch(recorder, fake=False))
        else:
            patches.everywhere(draw_normal, _draw_one_block)
            patches.replace(Dispatcher, "on_host", _assumed)
            modes.enter_context(fake_tensor_mode())
            modes.enter_context(Watch(recorder, fake=True))
            Reads(recorder).install(patches)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                if tries and device.type == "cuda":
                    try_calls(config, device, notes.append)
                script.connect(config, grid, device, None, timedelta(minutes=1), notes.append)
                run = script.build(config, grid, device, monitor)
                if not tries:
                    run.optimizer.loaded(1)  # its state exists, as after a first step
                recorder.layers = ModuleTracker(run.model, run.engine.queue, run.sink)
                with script.StopSignal() as stop:
                    script.work(run, loaders, {}, stop)
            except (UsageError, PlacementError, OSError):
                raise
            except Exception as error:  # of any kind: it would also end the run on a GPU
                failure = failed(error, recorder.fork)
        recorder.paused = True
    events = recorder.events
    steps_begin = [i for i, event in enumerate(events) if event in STEPS]
    begin, first = (steps_begin[0], steps_begin[-1]) if steps_begin else (len(events),) * 2
    notes += out.getvalue().splitlines()
    return Rehearsed(
        config, grid, recorder, begin, first, notes, run=run, script=script, micro_batches=count,
        few=few, failure=failure,
    )  # fmt: skip


def failed(error: BaseException, fork: str) -> Finding:
    """Return an exception as a finding, placed at the innermost line of the product.

    Lines of the modules that only carry calls (CARRIERS) are skipped if there are others.
    """
    lines, named = lines_of(error, fork), traced(error, fork)[1]
    place = next((line for line in lines if not line.startswith(CARRIERS)), (*lines, "")[0])
    text = " ".join(str(error).split())
    also = next((line for line in named if line != place), "")
    return Finding("exception", place, f"{type(error).__name__}: {text}"[:600], also, lines)
