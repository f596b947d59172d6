# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the tools: small checkpoints, and tools that are called or started."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model.llama import LlamaConfig, hf_config
from mpu.grid import Grid
from tools.checkpoint import main
from training.checkpoint import save
from training.checkpoint.pieces import whole

NAMES = {
    "norm": "model.norm.weight",
    "wide": "model.embed_tokens.weight",
    "moment": "model.norm.weight.exp_avg",
}


@pytest.fixture
def write() -> Callable[..., Path]:
    """write(root, step, **changes) -> the directory of a checkpoint with the tensors of NAMES.

    changes: other values for a tensor (None: without it), further tensors, or more "state".
    """

    def write(root: Path, step: int, **changes: Any) -> Path:
        numbers = torch.Generator().manual_seed(1)
        values: dict[str, Any] = {
            "norm": torch.randn(7, generator=numbers),
            "wide": torch.randn(9, 5, generator=numbers),
            "moment": torch.full((7,), 0.25),
        }
        state = {
            "iteration": step,
            "consumed_samples": 1000 * step,
            "consumed_tokens": 64000 * step,
            "config": {"model": {"num_layers": 2}, "run": {"seed": 1234}},
            "hf_config": hf_config(LlamaConfig(250, 64, 96, 2, 8, 4)),
            **changes.pop("state", {}),
        }
        values |= changes
        pieces = [whole(NAMES.get(n, n), t) for n, t in values.items() if t is not None]
        attach = {"tokenizer.json": b"{}"}
        return save(root, step=step, pieces=pieces, state=state, grid=Grid(), attach=attach)

    return write


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, list[str], list[str]]]:
    """tool("list", ...) -> the exit code, the lines on stdout, the lines on stderr."""

    def tool(*argv: object) -> tuple[int, list[str], list[str]]:
        capsys.readouterr()
        code = main([str(a) for a in argv])
        said = capsys.readouterr()
        return code, said.out.splitlines(), said.err.splitlines()

    return tool
