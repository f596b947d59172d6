# SPDX-License-Identifier: Apache-2.0
"""Do all of a rank's start-up that needs no other rank."""

from collections.abc import Callable
from pathlib import Path

import torch

import mpu
from mpu.grid import Grid
from mpu.zero import adam_backends
from training.config import Config, UsageError
from training.data.build import Loaders, build_loaders
from training.data.tokenizer import tokenizer_for
from training.plan.model_profile import accumulate_dtype
from training.run.device import choose_device

ROOT = Path(__file__).resolve().parents[2]


def prepare(
    config: Config, grid: Grid, share_cores: bool, note: Callable[[str], None]
) -> tuple[Config, torch.device, Loaders, dict[str, str]]:
    """Do all that needs no other rank: choose the device, build the tokenizer and the loaders.

    share_cores: on a CPU, take only this rank's share of the node's cores. Returns the config with
    its vocabulary, the device, the loaders, and hashes that all ranks must share.
    """
    if Path(mpu.__path__[0]).resolve().parent != ROOT:
        raise UsageError(
            f"`import mpu` found {mpu.__path__[0]}, which is not Weft's: run from a checkout"
        )
    grid.launch.check_meeting()
    device = choose_device(config, grid.launch, share_cores)
    backend = config.parallel.optimizer_backend
    if why := adam_backends.missing(backend, device.type, accumulate_dtype(config)):
        raise UsageError(why)
    tokenizer = tokenizer_for(config)
    config = config.with_vocab(tokenizer.vocab_size)
    loaders = build_loaders(config, tokenizer, grid.dp.rank, grid.dp.size, note)
    digests = {"tokenizer_digest": tokenizer.digest(), "data_digest": loaders.digest}
    digests["corpus_digest"] = loaders.train.dataset.corpus
    digests["corpus_sketch"] = loaders.train.dataset.sketch  # held against older checkpoints
    return config, device, loaders, digests
