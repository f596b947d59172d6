# SPDX-License-Identifier: Apache-2.0
"""Run the trainer's own start and loop as one rank of any world, on fake tensors, and record it."""

import contextlib
import gc
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter

from mpu.grid import Grid
from mpu.launch import Launch
from mpu.param import draw_normal, placement_of
from tools.explain_ops import Layers
from tools.rehearsal.device import Reads
from tools.rehearsal.events import Action
from tools.rehearsal.group import Distributed
from tools.rehearsal.patches import Patches
from tools.rehearsal.peers import Peers
from tools.rehearsal.record import Actions, Recorder, Watch
from training.config import Config
from training.data.batch import DocumentRules
from training.data.build import Loaders
from training.data.loader import Loader
from training.data.mock import MockDataset
from training.data.tokenizer import tokenizer_for
from training.plan.model_profile import model_profile


@dataclass
class Rehearsed:
    """What a rehearsal of one rank saw. first: the index of the last step's first event."""

    config: Config
    grid: Grid
    recorder: Recorder
    first: int
    notes: list[str]
    run: Any

    def kinds(self) -> dict[int, str]:
        """Return what is kept from step to step: the storage's number and its kind."""
        found: dict[int, str] = {}
        for kind, tensors in self.run.optimizer.held().items():
            for tensor in tensors:
                if tensor is not None:
                    number = self.recorder.live.get(tensor.untyped_storage()._cdata)
                    if number is not None:
                        found.setdefault(number[0], kind)
        return found


def rehearsable(config: Config, steps: int) -> Config:
    """Return the config of the rehearsal: made-up data, nothing read or written, a few steps."""
    data = replace(
        config.data, mock_data=True, data_path=(), train_data_path=(), valid_data_path=(),
        test_data_path=(), num_workers=0,
    )  # fmt: skip
    checkpoint = replace(
        config.checkpoint, save=None, load=None, pretrained_checkpoint=None, save_interval=None
    )
    run = replace(config.run, exit_interval=steps, eval_interval=None)
    log = replace(config.log, log_interval=1, tensorboard_dir=None, log_json=None)
    fault = replace(config.fault, peer_checkpoint=None)
    return replace(config, data=data, checkpoint=checkpoint, run=run, log=log, fault=fault)


@torch.no_grad()
def _draw_one_block(param: Parameter, names: Sequence[str], std: float, seed: int) -> None:
    # in place of draw_normal: one block of each part, as the numbers are not there in any case
    param.zero_()
    for piece in placement_of(param).pieces(names):
        rows = max(1, (1 << 20) // max(1, torch.Size(piece.shape[1:]).numel()))
        shape = (min(rows, piece.shape[0]), *piece.shape[1:])
        torch.empty(shape, dtype=torch.float32, device=param.device).normal_(0.0, std)


def loader(config: Config, grid: Grid) -> Loader:
    """Return a loader of made-up samples, whose last token of the vocabulary ends documents."""
    data, vocabulary = config.data, config.model.vocab_size
    assert vocabulary is not None
    end = vocabulary - 1
    dataset = MockDataset("train", config.model.seq_length, config.run.seed, vocabulary, end)
    rules = DocumentRules(
        end, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss
    )
    size = config.batch.micro_batch_size
    return Loader(
        dataset, size, grid.dp.rank, grid.dp.size, vocab_size=vocabulary, rules=rules, workers=0
    )


def rehearse(
    script: ModuleType,
    config: Config,
    launch: Launch,
    recorder: Recorder,
    network: Distributed,
    steps: int,
    patches: Patches,
    real: bool = False,
) -> Rehearsed:
    """Run `steps` steps of the script's `work` on the rank of `launch`.

    real: in earnest, on tensors that have memory, beside the other ranks of a world that has met.
    """
    config = rehearsable(config, steps)
    device = torch.device(recorder.device)
    if config.model.vocab_size is None:
        config = config.with_vocab(tokenizer_for(config).vocab_size)
    model_profile(config, script.model_provider)
    grid: Grid = script.make_grid(config, launch)
    loaders = Loaders(loader(config, grid), None, None)
    grid.traced(network)
    network.peers = Peers(config, script.model_provider)
    monitor = Actions(recorder)
    patches.replace(script, "GradientCheck", lambda grid, note: None)  # of values
    notes: list[str] = []
    gc.collect()
    gc.disable()  # what lives until it runs lives to the end; when it runs is not the product's
    with contextlib.ExitStack() as modes:
        modes.callback(gc.enable)
        if real:
            modes.enter_context(Watch(recorder, fake=False))
        else:
            patches.everywhere(draw_normal, _draw_one_block)
            fake = modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            modes.enter_context(Watch(recorder, fake=True))
            modes.enter_context(Reads(recorder, fake))
        script.connect(config, grid, device, None, timedelta(minutes=1), notes.append)
        run = script.build(config, grid, device, monitor)
        recorder.layers = Layers(run.model, run.engine.queue)
        with script.StopSignal() as stop, contextlib.redirect_stdout(io.StringIO()) as out:
            script.work(run, loaders, {}, stop)
        recorder.paused = True
    last = Action(f"iteration {steps}")
    first = len(recorder.events) - 1 - recorder.events[::-1].index(last)
    notes += out.getvalue().splitlines()
    return Rehearsed(config, grid, recorder, first, notes, run)
