# SPDX-License-Identifier: Apache-2.0
"""Activations in host memory change where they wait, never a bit of the result."""

import weakref

import pytest
import torch
from torch import nn

from mpu.activation_offload import HostCopies, Offload, Stored
from mpu.recompute import Recompute
from tests.mpu.test_recompute import WAYS

CPU = torch.device("cpu")


class Layer(nn.Module):
    """h + tanh(h w) scaled by `shared`; notes the storages of what its product saves."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.product = nn.Linear(4, 4, bias=False)
        self.product.weight = nn.Parameter(torch.randn(4, 4, generator=g))
        self.made: list[weakref.ref] = []

    def forward(self, h, shared, none):
        assert none is None
        y = torch.tanh(self.product(h))
        self.made.append(weakref.ref(y.untyped_storage()))
        return h + y * shared


def run(way, offload=None, micro_batches=1, backward=lambda runs: runs):
    """Run forwards, then backwards in the order that `backward` gives; return every result."""
    granularity, method, count, _ = WAYS[way]
    layers = [Layer(i) for i in range(5)]
    again = Recompute(granularity, method, count, offload)
    g = torch.Generator().manual_seed(9)
    inputs = [torch.randn(3, 4, generator=g, requires_grad=True) for _ in range(micro_batches)]
    shared = torch.full((3, 4), 0.5)
    outs = [again.blocks(layers, h * 1, shared, None) for h in inputs]
    for i in backward(range(micro_batches)):
        outs[i].square().sum().backward()
    grads = [h.grad for h in inputs] + [layer.product.weight.grad for layer in layers]
    return [*outs, *grads], layers


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("modules", [(), ("product",), ("",)])
def test_results_have_the_same_bits(way, modules):
    carrier = HostCopies(CPU)
    found, _ = run(way, Offload(carrier, modules))
    assert same(found, run(way)[0])
    recomputed = WAYS[way][0] == "full" and way != "block 3"
    nothing = recomputed and modules == ("product",)  # it keeps nothing of a recomputed layer
    assert (carrier.host_bytes == 0) == nothing


def test_the_device_forgets_what_host_memory_holds():
    layers = [Layer(i) for i in range(5)]
    again = Recompute(offload=Offload(HostCopies(CPU)))
    h = torch.randn(3, 4, requires_grad=True) * 1
    y = again.blocks(layers, h, torch.full((3, 4), 0.5), None)
    alive = [layer.made[0]() is not None for layer in layers]
    assert alive == [False, False, False, False, True]  # the last unit's stays
    y.sum().backward()


@pytest.mark.parametrize("order", [lambda r: r, reversed], ids=["1F1B", "last first"])
def test_several_micro_batches_wait_at_once(order):
    carrier = HostCopies(CPU)
    found, _ = run("none", Offload(carrier), 3, order)
    assert same(found, run("none", None, 3, order)[0])
    assert carrier.host_bytes == 3 * 4 * 2 * 3 * 4 * 4  # of each of 4 units h and tanh's result


def test_host_memory_is_used_again():
    carrier = HostCopies(CPU)
    offload = Offload(carrier)
    run("none", offload)
    first = carrier.host_bytes
    run("none", offload)
    assert carrier.host_bytes == first > 0


def test_what_stays():
    """Parameters, what the layers share, a leaf that comes as input, small and whole numbers."""
    table = torch.randn(64)

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64))

        def forward(self, h, shared):
            mask = (h > 0).long() * 3
            x = h * self.weight * shared  # saves h, the weight and the table
            return x * mask.to(x.dtype).sin() + x[:2].exp().sum()  # a sine, and two exponentials

    kept = []

    class Spy(Offload):
        def pack(self, tensor):
            kept.append(tensor)
            return tensor

    h = torch.randn(64, requires_grad=True)
    carrier = HostCopies(CPU)
    layers = [Sum(), Sum()]
    y = Recompute(offload=Spy(carrier, min_size=8)).blocks(layers, h, table)
    stays = {x.untyped_storage().data_ptr() for x in (h, table, layers[0].weight)}
    assert stays <= {x.untyped_storage().data_ptr() for x in kept}
    assert all(x.numel() < 8 or x.untyped_storage().data_ptr() in stays for x in kept)
    assert carrier.host_bytes == 64 * 4  # the sine
    y.sum().backward()


def test_a_weight_stays_where_it_lies_when_it_is_saved():
    """ZeRO stage 3 gives a parameter other memory within its layer's forward."""

    class Gathered(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1).expand(64))

        def forward(self, h):
            self.weight.data = torch.randn(64)
            return h * self.weight  # saves both

    carrier = HostCopies(CPU)
    layers = [Gathered(), Gathered()]
    h = Recompute(offload=Offload(carrier)).blocks(layers, torch.randn(64, requires_grad=True) * 1)
    h.sum().backward()
    assert carrier.host_bytes == 64 * 4  # of h alone


def test_a_storage_that_another_module_keeps_is_not_copied():
    class Alone(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, h):
            return self.act(h).sum() + h

    class Shared(Alone):
        def forward(self, h):
            return self.act(h) * h  # the product saves the tanh, too

    for layer, count in ((Alone, 1), (Shared, 0)):
        carrier = HostCopies(CPU)
        offload = Offload(carrier, modules=("act",))
        h = torch.randn(8, requires_grad=True)
        Recompute(offload=offload).blocks([layer(), layer()], h * 1).sum().backward()
        assert carrier.host_bytes == count * 8 * 4


def test_without_gradients_nothing_is_kept():
    carrier = HostCopies(CPU)
    with torch.no_grad():
        run_layers = [Layer(i) for i in range(3)]
        Recompute(offload=Offload(carrier)).blocks(run_layers, torch.randn(3, 4), 0.5, None)
    assert carrier.host_bytes == 0


def test_what_changes_in_place_after_it_was_saved_is_refused():
    """As autograd refuses it; hooks of saved tensors bypass its own check."""

    def careless(h: torch.Tensor) -> torch.Tensor:
        y = (h * 2).exp()  # saves its result
        z = y * 1.0
        y.mul_(3)
        return z

    offload = Offload(HostCopies(torch.device("cpu")))
    h = torch.randn(64, requires_grad=True)
    out = offload.run([((careless,), careless), ((torch.tanh,), torch.tanh)], h)
    with pytest.raises(RuntimeError, match="--cpu-offload-activations: .* changed in place"):
        out.sum().backward()


def test_sizes_that_change_share_host_memory():
    """As the rows of experts do; before, each new size took memory that no other size used."""
    carrier, used = HostCopies(CPU), []
    for step in range(300):
        size = 1000 + step * 37 % 400
        kept = Stored(torch.full((size,), float(step), dtype=torch.float64))
        carrier.down([kept])
        kept.flat = None
        carrier.up([kept])
        assert kept.flat is not None and kept.flat.shape == (size,)
        assert (kept.flat == step).all()
        used.append(carrier.host_bytes)
    assert used[-1] == used[40] < 16 * 8 * 1400
