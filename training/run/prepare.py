# SPDX-License-Identifier: Apache-2.0
"""Do all of a rank's start-up that needs no other rank."""

import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

import mpu
from mpu import needs
from mpu.accelerators import missing
from mpu.grid import Grid
from mpu.layers.attention.backends import FLAG
from training.checkpoint.find import below, candidates, places, resumed, why_none
from training.data.build import Loaders, build_loaders
from training.data.dataset import Dataset
from training.data.stage_datasets import Staged
from training.data.tokenizer import tokenizer_for
from training.data.tokenizer_files import digests_of
from training.faults.activity import Activity
from training.run import same_run
from training.run.attention import prepare_attention
from training.run.device import choose_device
from training.run.output import check_wandb_login
from training.run.trial import try_calls
from training.settings.config import Config, UsageError
from training.settings.float8_layers import check_device
from training.settings.layer_options import accumulate_dtype

ROOT = Path(__file__).resolve().parents[2]


def prepare(
    config: Config,
    grid: Grid,
    share_cores: bool,
    note: Callable[[str], None],
    activity: Activity | None = None,
) -> tuple[Config, torch.device, Loaders, dict[str, str]]:
    """Do all that needs no other rank: choose the device, build the tokenizer and the loaders.

    What is quick to check comes first; reading a whole corpus, if it must be, comes last.

    share_cores: on a CPU, take only this rank's share of the node's cores. activity: prints what
    takes long. Returns the config with its vocabulary, the device, the loaders, and hashes that all
    ranks must share.
    """
    if Path(mpu.__path__[0]).resolve().parent != ROOT:
        raise UsageError(
            f"`import mpu` found {mpu.__path__[0]}, which is not Weft's: run from a checkout"
        )
    if line := needs.untested(torch.__version__):
        note(line)
    grid.launch.check_rendezvous()
    activity = activity or Activity(grid.launch)
    activity.what = "starting the device"
    device = choose_device(config, grid.launch, share_cores, note)
    p, dtype = config.parallel, config.run.dtype
    activity.what = "choosing kernels, and compiling the first one"
    te = "te" if p.attention_backend == "te" else ""
    if why := (
        missing("--optimizer-backend", p.optimizer_backend, device.type, accumulate_dtype(config))
        or missing("--norm-backend", p.norm_backend, device.type, dtype)
        or (te and missing(FLAG, te, device.type, dtype))
    ):
        raise UsageError(why)
    prepare_attention(config, device, note)
    check_device(config, device)
    if grid.rank == 0:
        activity.what = "looking for checkpoints"
        check_early(config)
    activity.what = "loading the tokenizer"
    tokenizer = tokenizer_for(config)
    config = config.with_vocab(tokenizer.vocab_size)
    if device.type == "cuda":
        activity.what = "compiling and calling each kind of kernel"
        try_calls(config, device, note)
    part = (grid.cp.rank, grid.cp.size)
    activity.what = "opening the data"
    loaders = build_loaders(
        config, tokenizer, grid.dp.rank, grid.dp.size, note, part,
        activity=activity, begun=partial(begun, config),
    )  # fmt: skip
    digests = {**digests_of(tokenizer), "data_digest": loaders.digest}
    return config, device, loaders, {**digests, **corpus_digests(loaders.train.dataset)}


def corpus_digests(data: Dataset) -> dict[str, str]:
    """Return the hashes of what is trained on that a checkpoint keeps."""
    digests = {"corpus_digest": data.corpus}
    digests["corpus_sketch"] = data.sketch  # compared with older checkpoints
    if isinstance(data, Staged):
        digests["stage_corpora"] = json.dumps(data.corpora)
    return digests


def begun(config: Config, split: str, train: Dataset) -> bool:
    """Return whether the run resumes one that read the same data in the same order.

    split: "train", or what is evaluated on.
    """
    c = config.checkpoint
    found = resumed(c.load, c.branch_from, c.ckpt_step, c.finetune)
    if found is None:
        return False
    return same_run.same_order(found, config, corpus_digests(train), held_out=split != "train")


def check_early(config: Config) -> None:
    """Raise ValueError for what would otherwise be found after the ranks met and built a model.

    It looks at names only: where checkpoints should be, which packages are installed, and whether
    W&B has a login.
    """
    c, log = config.checkpoint, config.log
    found: list[str] = []
    for flag, root, step in places(c.load, c.branch_from, c.ckpt_step, c.pretrained_checkpoint):
        found += candidates(root, step, flag)[0]
    if config.run.skip_train and c.load and not found:
        raise UsageError(f"--skip-train --load {c.load}: no checkpoint there ({why_none(c.load)})")
    if c.branch_from is not None and not found:
        why = f" ({why_none(c.branch_from)})" if below(c.branch_from) else ""
        raise UsageError(f"--branch-from {c.branch_from}: no checkpoint there{why}")
    if c.load and c.load != c.save and not found:
        if below(c.load):  # a run that its user meant to go on with
            raise UsageError(f"--load {c.load}: no checkpoint there ({why_none(c.load)})")
    if c.pretrained_checkpoint is not None and not found:
        place = c.pretrained_checkpoint
        why = why_none(place)
        raise UsageError(f"--pretrained-checkpoint {place}: no checkpoint there ({why})")
    for flag, wanted, package in (
        ("--tensorboard-dir", log.tensorboard_dir, "tensorboard"),
        ("--wandb-project", log.wandb_project, "wandb"),
    ):
        if wanted and find_spec(package) is None:
            raise UsageError(
                f"{flag} {wanted}: the package {package} is not installed; pip install {package}, "
                "or omit the flag"
            )
    if log.wandb_project:
        check_wandb_login(log.wandb_project)
