# SPDX-License-Identifier: Apache-2.0
"""Output layer and loss in chunks: against the two apart, and what lives at once."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mpu.context import LayerContext
from mpu.gradients import GradientSink, run_deferred
from mpu.layers import linear_cross_entropy as chunked
from mpu.layers.cross_entropy import vocab_parallel_cross_entropy
from mpu.layers.linear import ColumnParallelLinear, Recipe

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def run(fused, dtype, s=7, h=12, v=1001, deferred=False, mode=None):
    """Return losses, input gradient, weight gradient; the same numbers in every dtype."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    ctx = LayerContext(dtype=dtype, accumulate=wide, sink=GradientSink(wide))
    head = ColumnParallelLinear(h, v, ctx=ctx, pad_to=64, output_layer=True)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=g).bfloat16())
    x = torch.randn(s, 3, h, generator=g).bfloat16().to(dtype).requires_grad_()
    labels = torch.randint(0, v, (s, 3), generator=g)
    dloss = (torch.randint(0, 5, (s, 3), generator=g) / 8).to(wide)  # some are masked
    ctx.sink.main_grad(head.weight)
    if deferred:
        ctx.queue.defer(output_layer_only=True)
    with mode or torch.enable_grad():
        if fused:
            loss = chunked.linear_cross_entropy(head, x, labels, v)
        else:
            loss = vocab_parallel_cross_entropy(head(x), labels, v, ctx)
        loss.backward(dloss)
    if deferred:
        run_deferred(ctx.queue.take())
    return loss.detach(), x.grad, ctx.sink.main[head.weight]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [64, 192, 4096])
def test_equals_the_two_apart(monkeypatch, dtype, columns):
    """No further from fp64 than these, but for bf16's dx on a CPU, of which each chunk is rounded
    once; a deferred weight gradient has the same bits.
    """
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 0)
    monkeypatch.setattr(chunked, "ALIGNED", columns)
    exact, apart = run(False, torch.float64), run(False, dtype)
    got, waited = run(True, dtype), run(True, dtype, deferred=True)
    for mine, theirs, want, again in zip(got, apart, exact, waited, strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, again)
        allowed = (theirs.double() - want).norm() + 1e-6 * want.norm()
        if dtype == torch.float64:
            allowed = 1e-14 * want.norm()
        assert (mine.double() - want).norm() <= 1.5 * allowed


class Peak(TorchDispatchMode):
    """The most bytes that storages made inside have at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.known = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        given = {x.untyped_storage()._cdata for x in tensors}
        out = func(*args, **kwargs)
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in given and key not in self.known:
                    self.known[key] = weakref.ref(storage, lambda _, k=key, n=size: self.end(k, n))
                    self.now += size
                    self.most = max(self.most, self.now)
        return out

    def end(self, key, size):
        del self.known[key]
        self.now -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_does_not_grow_with_the_vocabulary(monkeypatch, dtype):
    """Without the weight and its gradient, from 32k to 256k tokens; apart it does."""
    monkeypatch.setattr(chunked, "CHUNK_BYTES", 3 * 16 * 8192 * dtype.itemsize)
    peaks = {}
    for fused in (True, False):
        for v in (1 << 15, 1 << 18):
            mode = Peak()
            run(fused, dtype, s=16, h=8, v=v, mode=mode)
            peaks[fused, v] = mode.most
    assert peaks[True, 1 << 18] <= 1.02 * peaks[True, 1 << 15]
    assert peaks[False, 1 << 18] > 7 * peaks[False, 1 << 15]
    assert peaks[True, 1 << 15] < 0.6 * peaks[False, 1 << 15]


def test_an_output_layer_with_its_own_arithmetic_is_refused():
    class Coarse(Recipe):
        pass

    head = ColumnParallelLinear(4, 8, ctx=LayerContext(), recipe=Coarse())
    with pytest.raises(ValueError, match="--fused-linear-cross-entropy: .* recipe is Coarse"):
        chunked.linear_cross_entropy(head, torch.zeros(2, 1, 4), torch.zeros(2, 1).long(), 8)


@pytest.mark.parametrize("how", ["forward", "hook"])
def test_an_output_layer_that_computes_more_is_refused(how):
    """A soft-cap in the head's forward, or a hook, would be left out without a word."""

    class Capped(ColumnParallelLinear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 30.0 * torch.tanh(super().forward(x) / 30.0)

    class Named(ColumnParallelLinear):
        pass

    ctx = LayerContext()
    head = (Capped if how == "forward" else ColumnParallelLinear)(4, 8, ctx=ctx)
    if how == "hook":
        head.register_forward_hook(lambda module, inputs, y: 30.0 * torch.tanh(y / 30.0))
    x, labels = torch.zeros(2, 1, 4), torch.zeros(2, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="--fused-linear-cross-entropy: .*, but the loss in"):
        chunked.linear_cross_entropy(head, x, labels, 8)
    assert chunked.linear_cross_entropy(Named(4, 8, ctx=ctx), x, labels, 8).shape == (2, 1)
