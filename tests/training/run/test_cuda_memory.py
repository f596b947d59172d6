# SPDX-License-Identifier: Apache-2.0
"""The numbers of CUDA's allocator in the log: by stand-ins, without a GPU."""

import pytest
import torch

from training.run.log import cuda_memory


def test_the_log_has_what_is_in_use_and_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5)
    found = cuda_memory(torch.device("cuda"))
    assert found == {"memory_allocated_bytes": 3, "memory_reserved_bytes": 5}
    assert cuda_memory(torch.device("cpu")) == {}
