# SPDX-License-Identifier: Apache-2.0
"""--empty-unused-memory-level, and the numbers of CUDA's allocator: by stand-ins, without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from training.run.log import cuda_memory
from training.run.memory_report import empty_cache
from training.settings.arguments import FaultConfig


@pytest.mark.parametrize("given, emptied", [(0, []), (1, [1]), (2, [1, 2])])
def test_the_cache_is_emptied_from_its_level_on(
    monkeypatch: pytest.MonkeyPatch, given: int, emptied: list[int]
) -> None:
    called: list[int] = []
    config: Any = SimpleNamespace(fault=FaultConfig(empty_unused_memory_level=given))
    for level in (1, 2):
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda level=level: called.append(level))
        empty_cache(config, torch.device("cpu"), level)
        empty_cache(config, torch.device("cuda"), level)
    assert called == emptied


def test_the_log_has_what_is_in_use_and_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    found = cuda_memory(torch.device("cuda"))
    assert found == {"memory_allocated_bytes": 3, "memory_reserved_bytes": 5}
    assert cuda_memory(torch.device("cpu")) == {}
