# SPDX-License-Identifier: Apache-2.0
"""No tensor of s x s elements is made in a step with --reset-attention-mask."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpu.grid import Grid
from pretrain_llama import build, train_step
from training.data.batch import DocumentRules, make_batch
from training.faults.monitor import FailureMonitor
from training.flags.parse import parse

S = 61  # a prime: the numbers of elements of no other tensor are multiples of its square
FLAGS = f"""
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 80 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length {S} --max-position-embeddings {S}
    --vocab-size 96 --micro-batch-size 2 --global-batch-size 2 --mock-data
    --reset-attention-mask --reset-position-ids --train-iters 1 --lr 1e-3 --device cpu
"""


class Squares(TorchDispatchMode):
    """Record operations that return s x s elements, or several times as many."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.calls += 1
        for x in tree_leaves(results):
            if isinstance(x, Tensor) and x.numel() and x.numel() % S**2 == 0:
                self.found.append(f"{func}: {list(x.shape)}")
        return results


@pytest.mark.parametrize("more", ["", "--recompute-granularity selective", "--bf16"])
def test_a_step_makes_no_square(more):
    run = build(parse(f"{FLAGS} {more}".split(), 1), Grid(), torch.device("cpu"), FailureMonitor())
    rows = np.random.default_rng(0).integers(0, 6, (2, S + 1))
    batch = make_batch(rows, DocumentRules(0, True, True), 0)
    with Squares() as squares:
        loss, norm, _ = train_step(run, [batch], 1e-3)
    assert loss > 0 and norm > 0 and squares.calls > 100
    assert not squares.found
