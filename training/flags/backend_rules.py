# SPDX-License-Identifier: Apache-2.0
"""Check --norm-backend and --core-attention-backend: kernels of other packages."""

import torch

from training.config import Config, UsageError


def check(config: Config) -> None:
    """Raise UsageError where the run cannot take the packages' kernels, installed or not."""
    p = config.parallel
    chosen = (
        ("--norm-backend", p.norm_backend, "weft"),
        ("--core-attention-backend", p.core_attention_backend, "torch"),
    )
    for flag, name, own in chosen:
        if name == own:
            continue
        if p.device == "cpu":
            raise UsageError(f"{flag} {name} needs --device cuda; on a CPU use {own}")
        if config.run.dtype == torch.float64:
            raise UsageError(f"{flag} {name} has no fp64: with --fp64 use {own}")
        if config.rehearse.rehearse:
            raise UsageError(
                f"{flag} {name} runs kernels of another package, and --rehearse has no device for "
                f"them: rehearse with {own}"
            )
    if p.core_attention_backend == "te" and p.context_parallel_size > 1:
        raise UsageError(
            f"--core-attention-backend te at --context-parallel-size {p.context_parallel_size}: "
            "attention over ranks is Weft's own, so use torch"
        )
