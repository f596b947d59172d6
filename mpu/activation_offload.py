# SPDX-License-Identifier: Apache-2.0
"""Keep a layer's activations in host memory until its backward (`--cpu-offload-activations`).

A unit is a layer, or the layers that `--recompute-method uniform` recomputes together. The tensors
that autograd saves in a unit's forward are copied down to the host during the next unit's forward,
and back up during the backward of the next unit:

    compute    F 0 | F 1     | F 2 ...   B 2      | B 1      | B 0
    down             unit 0    unit 1
    up                                   unit 1     unit 0

So the device stores the tensors of at most two units, for any number of layers. The last unit of a
stage is not offloaded, as its backward runs first. Bytes are copied, so no bit of a result changes.

`saved_tensors_hooks` (torch.autograd.graph) intercepts the saved tensors, since attention's
operators save tensors internally; everything else happens at a unit's end, in `_Boundary` and
`Offload.run`. On a CPU the same code makes plain copies. On an H200 small models had equal bits
(docs/gpu-results.md).
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from mpu.host_memory import HostMemory, power_of_two
from mpu.torch_private import version_of

Event = torch.cuda.Event | None  # None on a CPU


class Stored:
    """A storage of a unit's saved tensors: on the device, in host memory, or temporarily in both.

    flat: all of it as a tensor [n]; None while it is only in host memory. host: its buffer there,
    which may be larger.
    """

    def __init__(self, flat: Tensor) -> None:
        self.flat: Tensor | None = flat
        self.host: Tensor | None = None
        self.size, self.dtype, self.nbytes = flat.numel(), flat.dtype, flat.nbytes
        self.version = version_of(flat)  # at the copy to the host

    @property
    def on_host(self) -> Tensor:
        """Return the tensor in host memory [n]."""
        assert self.host is not None
        return self.host[: self.nbytes].view(self.dtype)


class _View(NamedTuple):
    """A saved tensor, as a view of its storage."""

    stored: Stored
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    version: int

    def tensor(self) -> Tensor:
        flat = self.stored.flat
        if self.version != self.stored.version:
            raise RuntimeError(
                f"--cpu-offload-activations: a tensor {tuple(self.shape)} of {self.dtype} was "
                "changed in place after it was saved for backward"
            )
        assert flat is not None, "backward already ran past its unit's boundary"
        return flat.view(self.dtype).as_strided(self.shape, self.stride, self.offset)


class HostCopies:
    """Copies storages between the device and page-locked host memory, on two separate streams.

    Host memory is pooled and reused: buffers of one size, the oldest first. Sizes that change from
    step to step, such as those of the rows of experts, are rounded to share buffers
    (`buffer_bytes`).
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: dict[int, deque[tuple[Tensor, Event]]] = {}  # by bytes
        self._down: torch.cuda.Stream | None = None
        self._up: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._down, self._up = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._host = HostMemory(device.type == "cuda")
        self.host_bytes = 0  # of all buffers, in the pool and in use

    def down(self, stored: Sequence[Stored]) -> Event:
        """Start to copy storages to the host; return an event that marks the end."""
        if self._down:
            self._down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._down):
            for each in stored:
                each.host, last_use = self._buffer(each)
                if last_use:
                    last_use.wait(self._down)
                assert each.flat is not None
                each.on_host.copy_(each.flat, non_blocking=True)
        return self._down.record_event() if self._down else None

    def up(self, stored: Sequence[Stored]) -> Event:
        """Start to copy storages to the device; return an event that marks the end."""
        for each in stored:
            each.flat = torch.empty(each.size, dtype=each.dtype, device=self.device)
        if self._up:  # earlier users of this memory are on the current stream
            self._up.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._up):
            for each in stored:
                assert each.flat is not None
                each.flat.copy_(each.on_host, non_blocking=True)
        event = self._up.record_event() if self._up else None
        for each in stored:
            assert each.host is not None
            self._pool[len(each.host)].append((each.host, event))
            each.host = None
        return event

    def wait(self, event: Event) -> None:
        """Make the current stream wait for an event."""
        if event:
            event.wait(torch.cuda.current_stream(self.device))

    def _buffer(self, stored: Stored) -> tuple[Tensor, Event]:
        size = buffer_bytes(stored.nbytes)
        free = self._pool.setdefault(size, deque())
        if free:
            return free.popleft()
        self.host_bytes += size
        return self._host.empty((size,), torch.uint8), None


def buffer_bytes(nbytes: int) -> int:
    """Return the size of a buffer: there are 16 sizes from one power of two to the next."""
    step = max(power_of_two(nbytes) // 32, 1)
    return -(-nbytes // step) * step


class Offload:
    """Selects the saved tensors to store in host memory, and copies them.

    A stage's last unit is never offloaded. modules: names of modules in a layer ("attention.qkv",
    "mlp"; "" is the layer itself), whose tensors are offloaded; empty: all. Tensors of a module are
    those saved in its own forward, not in its submodules'. min_size: tensors with fewer elements
    stay on the device.
    """

    def __init__(
        self,
        copies: HostCopies,
        modules: Sequence[str] = (),
        min_size: int = 1,
    ) -> None:
        self.copies, self.min_size = copies, min_size
        self.modules = frozenset(modules)
        self.running = RunningModule()

    def chooses(self, tensor: Tensor) -> bool:
        """Return whether a tensor that the running module saves may be offloaded."""
        here = not self.modules or self.running.name in self.modules
        numbers = tensor.is_floating_point() or tensor.dtype == torch.uint8  # rows of float8
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return here and numbers and size >= self.min_size

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd saves for a tensor that stays on the device."""
        return tensor

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that `pack` was given."""
        tensor: Tensor = packed
        return tensor

    def run(
        self, units: Sequence[tuple[Sequence[Any], Callable[..., Tensor]]], h: Tensor, *shared: Any
    ) -> Tensor:
        """Run units one after another, h = run(h, *shared); units: (layers, run) of each.

        `shared` (the RoPE tables) and parameters stay on the device.
        """
        if not torch.is_grad_enabled():
            for _, run in units:
                h = run(h, *shared)
            return h
        before: _Unit | None = None
        for i, (layers, run) in enumerate(units):
            own = _Unit(self, layers, h, shared) if i < len(units) - 1 else None
            if own is None:
                h = run(h, *shared)
            else:
                if self.modules:
                    self.running.follow(layers)
                with saved_tensors_hooks(own.pack, own.unpack):
                    h = run(h, *shared)
                own.send()
            if before:
                before.leave()
            if own or before:
                h = _Boundary.apply(h, own, before)
            before = own
        return h


class _Unit:
    """The tensors that one unit has saved for one micro-batch."""

    def __init__(
        self, offload: Offload, layers: Sequence[Any], h: Tensor, shared: Sequence[Any]
    ) -> None:
        self.offload, self.copies = offload, offload.copies
        self.parameters = [p for layer in layers for p in getattr(layer, "parameters", tuple)()]
        given = [x for x in shared if isinstance(x, Tensor)]
        if h.is_leaf and h.requires_grad:  # a received input, which the engine keeps anyway
            given.append(h)
        # keep references, as another storage could reuse the id of a freed one
        self.on_device = {id(x.untyped_storage()): x.untyped_storage() for x in given}
        self.stored: dict[int, Stored] = {}
        self.offloaded: list[Stored] = []
        self.sent: Event = None
        self.came: Event = None

    def pack(self, tensor: Tensor) -> Any:
        """Return the object that autograd saves for a tensor; record its storage."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if any(id(p.untyped_storage()) == key for p in self.parameters):  # in its current storage
            return self.offload.pack(tensor)
        if key in self.on_device or not self.offload.chooses(tensor):
            self.on_device[key] = storage  # offloading it for another module would free nothing
            return self.offload.pack(tensor)
        stored = self.stored.get(key)
        if stored is None:
            size = tensor.untyped_storage().nbytes() // tensor.element_size()
            stored = self.stored[key] = Stored(tensor.detach().as_strided((size,), (1,), 0))
        shape, stride = tensor.shape, tensor.stride()
        at = int(tensor.storage_offset())
        return _View(stored, tensor.dtype, shape, stride, at, version_of(tensor))

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor to autograd."""
        return packed.tensor() if isinstance(packed, _View) else self.offload.unpack(packed)

    def send(self) -> None:
        """Start the copy to the host, at the end of this unit's forward."""
        self.offloaded = [
            stored for key, stored in self.stored.items() if key not in self.on_device
        ]
        for stored in self.offloaded:
            assert stored.flat is not None
            stored.version = version_of(stored.flat)
        self.stored, self.on_device, self.parameters = {}, {}, []
        self.sent = self.copies.down(self.offloaded)

    def leave(self) -> None:
        """Free the device memory, at the end of the next unit's forward."""
        self.copies.wait(self.sent)
        for stored in self.offloaded:
            stored.flat = None

    def fetch(self) -> None:
        """Start the copy to the device, before the next unit's backward."""
        self.came = self.copies.up(self.offloaded)

    def arrive(self) -> None:
        """Make this unit's backward wait for its tensors; drop all other references to them."""
        self.copies.wait(self.came)
        self.offloaded = []


class _Boundary(torch.autograd.Function):
    """The end of a unit: identity in forward; its backward runs before that of the unit."""

    @staticmethod
    def forward(saved_ctx: Any, h: Tensor, own: _Unit | None, before: _Unit | None) -> Tensor:
        saved_ctx.own, saved_ctx.before = own, before
        return h

    @staticmethod
    def backward(saved_ctx: Any, dh: Tensor) -> tuple[Tensor, None, None]:
        if saved_ctx.before is not None:
            saved_ctx.before.fetch()
        if saved_ctx.own is not None:
            saved_ctx.own.arrive()
        return dh, None, None


class RunningModule:
    """Tracks which module of a layer runs its forward, by name in the layer; "" is the layer."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._followed: set[int] = set()

    @property
    def name(self) -> str:
        return self._names[-1] if self._names else ""

    def follow(self, layers: Sequence[Any]) -> None:
        """Track the modules of these layers, from now on."""
        for layer in layers:
            if isinstance(layer, nn.Module) and id(layer) not in self._followed:
                self._followed.add(id(layer))
                for name, module in layer.named_modules():
                    module.register_forward_pre_hook(lambda _, args, n=name: self._names.append(n))
                    module.register_forward_hook(lambda *_: self._leave(), always_call=True)

    def _leave(self) -> None:
        self._names.pop()
