# SPDX-License-Identifier: Apache-2.0
"""Apply --attention-backend and --flash-attention-version on this rank's device."""

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch.nn import attention

from mpu.layers.attention.backends import Card, card_of, kernel_of
from training.flags.compute_rules import attention_line, attention_works
from training.settings.config import Config, UsageError

VERSION = "--flash-attention-version"
FA3 = "flash_attn_interface"  # the package that torch takes FlashAttention 3 from


def prepare_attention(config: Config, device: torch.device, note: Callable[[str], None]) -> None:
    """Activate the run's FlashAttention in torch, and note which attention runs.

    Needs no other rank. Raises UsageError if the device cannot do what the flags ask.
    """
    card = card_of(device)
    attention_line(config, card)
    if card.kind == "cuda":
        activate(config, card, note)
    note(attention_line(config, card_of(device)))


def activate(config: Config, card: Card, note: Callable[[str], None]) -> None:
    """Make torch call a newer FlashAttention, where the run uses flash and its package is there.

    The default is version 3 on Hopper, except with --deterministic-mode, in which its backward
    refuses wide heads; elsewhere it is torch's own version 2. The operators keep their names: torch
    registers other kernels for them (torch/nn/attention/_fa3.py).
    """
    p, dtype, size = config.parallel, config.run.dtype, config.model.kv_channels
    requested = p.flash_attention_version
    works = attention_works(config)
    if all(kernel_of(p.attention_backend, card, dtype, size, w) != "flash" for w in works):
        if requested is not None:
            note(f"{VERSION} {requested} has no effect: this run's attention is not FlashAttention")
        return
    found = card.major == 9 and not card.deterministic and find_spec(FA3) is not None
    version = requested or (3 if found else 2)
    if version == 2:
        return
    try:
        attention.activate_flash_attention_impl(f"FA{version}")
    except Exception as error:  # a package built for another torch may raise anything
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        if requested is not None:
            raise UsageError(
                f"{VERSION} {requested} cannot be used ({why}): install the package of "
                f"FlashAttention {requested}, or give {VERSION} 2"
            ) from None
        note(f"FlashAttention {version} is installed but cannot be used here ({why})")
