# SPDX-License-Identifier: Apache-2.0
"""Fake tensors that meta kernels answer are those of FakeTensorMode, and of a CPU."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from forecast.rehearsal.fakes import fake_tensor_mode
from mpu import torch_private
from tests.mpu.test_torch_private import hide

F = torch.nn.functional
CASES = {
    "product": lambda a, b, i: a @ b.t(),
    "batched product, transposed": lambda a, b, i: torch.bmm(a.view(4, 3, 8).transpose(1, 2),
                                                            b.view(4, 3, 8)),
    "sum in place": lambda a, b, i: a.add_(b, alpha=2),
    "broadcast": lambda a, b, i: a.unsqueeze(1) * b[:2].unsqueeze(0),
    "of a transposed": lambda a, b, i: a.t() + b.t().contiguous(),
    "with a number": lambda a, b, i: a / 3 - 1,
    "in another dtype": lambda a, b, i: a.to(torch.bfloat16) * b,
    "result in another dtype": lambda a, b, i: a.bfloat16().sum(0, dtype=torch.float32),
    "comparison": lambda a, b, i: torch.where(a > b, a, b.double()),
    "mean and norm": lambda a, b, i: (a.mean(-1, keepdim=True), torch.linalg.vector_norm(a)),
    "softmax": lambda a, b, i: F.softmax(a, dim=-1, dtype=torch.float32),
    "views": lambda a, b, i: (a[1], a[:, 2:6:2], a.permute(1, 0), *a.split([1, 11]), *a.unbind(1)),
    "of a view in place": lambda a, b, i: a[3:].copy_(b[:9]).flatten(),
    "joined": lambda a, b, i: (torch.cat([a, b.t().reshape(12, 8)], 1), torch.stack([a, b])),
    "rows": lambda a, b, i: (F.embedding(i, a), a.index_select(0, i), a[i]),
    "places": lambda a, b, i: (a.gather(1, i[:, None]), b.scatter(1, i[:, None], a)),
    "new": lambda a, b, i: (a.new_zeros(3), torch.empty_like(a.t()), a.new_empty(2, 2).zero_()),
    "largest": lambda a, b, i: (*a.topk(2), a.argmax(-1), *a.sort(0)),
    "list": lambda a, b, i: (torch._foreach_add_([a, b], 1.0), a)[1],
    "triangle": lambda a, b, i: (a.tril(), a.cumsum(1), a.flip(0)),
    "index arithmetic": lambda a, b, i: (i // 3, i % 3, i.bitwise_and(1), (i == 2).sum()),
    "clone": lambda a, b, i: (a.t().clone(), a.expand(2, 12, 8).contiguous()),
}  # fmt: skip


def told(found: object) -> list[tuple]:
    """Return what is known of each tensor without its values."""
    tensors = found if isinstance(found, tuple) else (found,)
    return [(x.shape, x.stride(), x.dtype, x.storage_offset(), x.device, x.untyped_storage().size())
            for x in tensors]  # fmt: skip


def given(device: str) -> tuple[torch.Tensor, ...]:
    a, b = torch.zeros(12, 8, device=device), torch.zeros(12, 8, device=device)
    return a, b, torch.zeros(5, dtype=torch.long, device=device)


@pytest.mark.parametrize("name", CASES)
def test_usual_operations_are_those_of_torchs_mode_and_of_a_cpu(name: str) -> None:
    found = []
    for mode in (fake_tensor_mode(), FakeTensorMode()):
        with mode:
            found.append(told(CASES[name](*given("cpu"))))
    assert found[0] == found[1]
    assert found[0] == told(CASES[name](*given("cpu")))


def test_meta_kernels_are_asked_and_torch_computes_the_rest(monkeypatch) -> None:
    asked, dispatch = [], FakeTensorMode.dispatch

    def seen(self, func, *args):
        if func.namespace == "aten":
            asked.append(str(func))
        return dispatch(self, func, *args)

    monkeypatch.setattr(FakeTensorMode, "dispatch", seen)

    def run(mode) -> torch.Tensor:
        asked.clear()
        with mode:
            a, b, i = given("cpu")
            asked.clear()
            x = (a @ b.t()).relu()[2:] * 2
            assert type(x) is FakeTensor
            return F.embedding(i, x)

    run(fake_tensor_mode())
    assert asked == ["aten.embedding.default"]
    hide(monkeypatch, "torch._subclasses.fake_impls.op_implementations_dict")
    torch_private.meta_kernel_says.cache_clear()
    run(fake_tensor_mode())
    assert len(asked) > 4
    torch_private.meta_kernel_says.cache_clear()


def test_tensors_of_two_devices_are_refused_as_by_torch() -> None:
    with fake_tensor_mode() as mode:
        a = torch.zeros(2, 2)
        b = FakeTensor(mode, torch.zeros(2, 2, device="meta"), torch.device("meta:1"))
        with pytest.raises(RuntimeError, match="two different devices|device"):
            a @ b
