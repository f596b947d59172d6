# SPDX-License-Identifier: Apache-2.0
"""Settle what is measured before the first step: which layers are in float8, then what overlaps.

In this order, as a matmul of float8 sends other bytes, so another method may be its fastest.
"""

from torch import nn

from mpu.context import LayerContext
from training.config import Config
from training.run import float8_auto, overlap
from training.run.overlap import Note, Overlap
from training.run.saver import Saver


def settle(
    model: nn.Module, ctx: LayerContext, config: Config, note: Note, saver: Saver
) -> Overlap:
    """Replay what the checkpoint recorded, or measure; let the next checkpoints record it.

    All ranks call it. Raises UsageError as overlap.settle does.
    """
    saver.float8_choices = float8_auto.settle(model, ctx, config, note, saver.float8_choices)
    found = overlap.settle(model, ctx, config, note, saver.overlap_choices)
    saver.overlap_choices = found.chosen.choices
    return found
