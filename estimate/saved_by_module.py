# SPDX-License-Identifier: Apache-2.0
"""Measure what each module of a layer keeps for backward: the rows that a flag decides on."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from estimate.context_parallel import rank_batch
from estimate.meta import (
    META,
    MetaAttention,
    MetaHostCopies,
    MetaOperations,
    MetaRecompute,
    flash_attention,
)
from estimate.model_profile import ModelProvider, rank_model
from mpu.activation_offload import HostCopies, Offload
from mpu.pipeline.stage_layout import Stage
from training.config import Config


class _Ledger(Offload):
    """Offload every tensor of the first unit, and note which module saved its storage first."""

    def __init__(self, copies: HostCopies) -> None:
        super().__init__(copies, modules=("every",))  # so that modules are followed
        self.storages: dict[int, tuple[str, int]] = {}  # and each one's bytes
        self.cores: set[str] = set()  # modules in which core attention runs

    def chooses(self, tensor: Tensor) -> bool:
        storage = tensor.untyped_storage()
        self.storages.setdefault(id(storage), (self.running.name, storage.nbytes()))
        return True


class _Recompute(MetaRecompute):
    """Recompute nothing; tell the ledger where core attention runs."""

    offload: _Ledger

    def selective(self, run: Callable[..., Tensor]) -> Callable[..., Tensor]:
        inside = super().selective(run)

        def core(*inputs: Any, **options: Any) -> Tensor:
            ledger = self.offload
            ledger.cores = ledger.cores or {ledger.running.name}  # of the first layer
            return inside(*inputs, **options)

        return core


def saved_by_module(config: Config, provider: ModelProvider) -> tuple[dict[str, int], set[str]]:
    """Return {module: bytes} that the model's first layer keeps of a micro-batch on a rank.

    Modules are named as in the layer, "" the layer itself, in the order of forward. A storage
    counts for the module that saves it first. Nothing is recomputed. The set holds the modules in
    which core attention runs, which --recompute-granularity selective runs again.
    """
    p = replace(
        config.parallel,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
    )
    config = replace(config, parallel=p)
    ledger = _Ledger(MetaHostCopies(META))
    recompute = _Recompute(offload=ledger)
    stages: Sequence[Any] = [Stage(0, 2)]
    model = rank_model(config, provider, stages, 0, recompute=recompute)
    size, positions, packed = rank_batch(config)
    tokens = torch.empty(size, dtype=torch.long, device=META)
    shape = model.hidden_shape(*size)
    hidden = torch.empty(shape, dtype=config.run.dtype, device=META).requires_grad_() * 1
    with MetaAttention(flash_attention), MetaOperations():
        model(tokens, None, positions, packed, hidden=hidden, chunk=0)
    found: Counter[str] = Counter()
    for name, nbytes in ledger.storages.values():
        found[name] += nbytes
    return dict(found), ledger.cores
