# SPDX-License-Identifier: Apache-2.0
"""Replace torch.cuda by a fake device, whose streams and events a Recorder records.

`install` replaces torch.cuda's functions for the whole process, which ends with the rehearsal.
`Reads` handles calls on fake tensors that never reach torch's dispatcher: reads on the host,
prints, addresses, the choice of an attention kernel.
"""

from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forecast.rehearsal.events import Alloc
from forecast.rehearsal.memory import step
from forecast.rehearsal.patches import Patches
from forecast.rehearsal.record import Recorder
from mpu.layers.attention.backends import card_of, kernel_of
from mpu.torch_private import cudnn_attention, fake_tensors, flash_attention

DEVICE = torch.device("cuda", 0)
TENSOR, ATTENTION = torch.tensor, F.scaled_dot_product_attention  # torch's own
CUDNN = 91900  # assumed, 9.19: the one that wheels of torch 2.11 and later need is beyond 9.15


class Stream:
    """Replaces torch.cuda.Stream."""

    recorder: Recorder  # set by install

    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None) -> None:
        self.number = self.recorder.new_stream() if number is None else number
        self.device = DEVICE
        self.cuda_stream = self.number

    def wait_stream(self, other: "Stream") -> None:
        """Wait for all work enqueued so far on another stream."""
        self.wait_event(other.record_event())

    def wait_event(self, event: "CudaEvent") -> None:
        """Wait for an event."""
        if event.number >= 0:
            self.recorder.wait(self.number, event.number)

    def record_event(self, event: "CudaEvent | None" = None) -> "CudaEvent":
        """Record an event on the stream."""
        event = event or CudaEvent()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for the stream."""
        self.recorder.host_wait(stream=self.number)

    def query(self) -> bool:
        """Return True: the stream is idle."""
        return True

    def __enter__(self) -> "Stream":
        self._before, self.recorder.stream = self.recorder.stream, self.number
        return self

    def __exit__(self, *error: object) -> None:
        self.recorder.stream = self._before


class CudaEvent:
    """Replaces torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, **kwargs: Any) -> None:
        self.number = -1

    def record(self, stream: Stream | None = None) -> None:
        """Record the event on a stream."""
        recorder = Stream.recorder
        self.number = recorder.new_event()
        recorder.record(self.number, recorder.stream if stream is None else stream.number)

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for the event."""
        (stream or _current()).wait_event(self)

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        if self.number >= 0:
            Stream.recorder.host_wait(event=self.number)

    def query(self) -> bool:
        """Return True: the event is complete."""
        return True

    def elapsed_time(self, other: "CudaEvent") -> float:
        """Return 0.0 milliseconds: a rehearsal does not measure time."""
        return 0.0


def _current(device: Any = None) -> Stream:
    return Stream(number=Stream.recorder.stream)


@contextmanager
def _streaming(stream: Stream | None) -> Any:
    if stream is None:
        yield
        return
    with stream:
        yield


class Generator(torch.Generator):
    """torch.Generator, on the CPU whatever the device."""

    def __new__(cls, device: Any = None) -> "Generator":
        return super().__new__(cls)


class Memory:
    """The bytes in use on the device, for torch.cuda.memory_allocated and similar functions."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.at, self.now, self.most = recorder, 0, 0, 0
        self.live: dict[int, Alloc] = {}

    def allocated(self, device: Any = None) -> int:
        """Return the bytes of live storages."""
        for event in self.recorder.events[self.at :]:
            self.now += step(self.live, event, self.recorder.device)
            self.most = max(self.most, self.now)
        self.at = len(self.recorder.events)
        return self.now

    def peak(self, device: Any = None) -> int:
        """Return the peak of `allocated`."""
        self.allocated()
        return self.most


def install(recorder: Recorder, properties: dict[str, Any], deterministic: bool = False) -> None:
    """Replace torch.cuda's functions. properties: name, major, minor, multi_processor_count, ..."""
    Stream.recorder, memory, cuda = recorder, Memory(recorder), torch.cuda
    found = SimpleNamespace(**properties)
    fakes: dict[str, Callable[..., Any] | type] = dict(
        is_available=lambda: True,
        is_initialized=lambda: True,
        init=lambda: None,
        _lazy_init=lambda: None,
        device_count=lambda: 1,
        current_device=lambda: 0,
        set_device=lambda device: None,
        synchronize=lambda device=None: recorder.host_wait(),
        Stream=Stream,
        Event=CudaEvent,
        stream=_streaming,
        current_stream=_current,
        default_stream=lambda device=None: Stream(number=0),
        get_device_properties=lambda device=None: found,
        get_device_name=lambda device=None: found.name,
        get_device_capability=lambda device=None: (found.major, found.minor),
        is_bf16_supported=lambda *args: True,
        memory_allocated=memory.allocated,
        max_memory_allocated=memory.peak,
        memory_reserved=memory.allocated,
        max_memory_reserved=memory.peak,
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
        is_current_stream_capturing=lambda: False,
    )
    for name, fake in fakes.items():
        setattr(cuda, name, fake)
    # up to torch 2.12 fake tensors initialize their device by a real allocation
    fake_tensors().init_gpu_context = lambda device: None
    torch.Generator = Generator  # type: ignore[misc]
    torch.backends.cudnn.version = lambda: CUDNN
    torch.are_deterministic_algorithms_enabled = lambda: deterministic


class Reads:
    """Handles and records what fake tensors cannot do: reads on the host, prints, addresses."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def install(self, patches: Patches) -> None:
        """Replace methods of fake tensors, torch.tensor and scaled_dot_product_attention."""
        methods: dict[str, Callable[..., Any]] = {
            "tolist": self.tolist,
            "numpy": self._numpy,
            "data_ptr": self._address,
            "__repr__": self._printed,
            "__format__": self._printed,
            "record_stream": lambda x, s: self.recorder.record_stream(x, s.number),
        }
        for name, answer in methods.items():
            patches.replace(fake_tensors().FakeTensor, name, method(answer))
        patches.everywhere(torch.tensor, self._tensor)
        patches.everywhere(ATTENTION, self._attention)

    def _reads(self, x: Tensor, name: str) -> None:
        if x.device.type != "cpu":
            self.recorder.host_wait(stream=self.recorder.stream, reads=name, of=x)

    def tolist(self, x: Tensor) -> Any:
        """Record one wait and return zeros."""
        self._reads(x, "tolist")
        zero: Any = 0.0 if x.dtype.is_floating_point else 0

        def zeros(shape: tuple[int, ...]) -> Any:
            return [zeros(shape[1:]) for _ in range(shape[0])] if shape else zero

        return zeros(tuple(x.shape))

    def _numpy(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._reads(x, "numpy")
        return torch.zeros(x.shape, dtype=x.dtype, device="meta").numpy()

    def _address(self, x: Tensor) -> int:
        if (address := getattr(x, "weft_address", None)) is not None:  # another rank's memory
            return int(address)
        number = self.recorder.number(x)
        start = number << 36 if number >= 0 else id(x.untyped_storage())
        return int(start + x.storage_offset() * x.element_size())

    def _printed(self, x: Tensor, *args: Any, **kwargs: Any) -> str:
        self._reads(x, "a print")
        return f"tensor of {tuple(x.shape)}"

    def _tensor(self, data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        pinned = kwargs.pop("pin_memory", False)
        x = TENSOR(data, **kwargs)
        x.constant = None  # type: ignore[attr-defined]  # a constant would really be copied
        if pinned:
            return x.pin_memory()
        if device is None or torch.device(device).type == "cpu":
            return x
        return x.to(device)

    def _attention(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """Call the kernel that torch chooses on CUDA (mpu/layers/attention/backends.py)."""
        kernel = "math"
        if q.device.type == "cuda" and attn_mask is None:
            kernel = kernel_of("auto", card_of(q.device), q.dtype, q.shape[-1])
        if kernel == "flash":
            return flash_attention(q, k, v, is_causal, dropout_p=dropout_p, scale=scale)[0]
        if kernel == "cudnn":
            learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
            more = dict(dropout_p=dropout_p, scale=scale)
            return cudnn_attention(q, k, v, is_causal, learns, **more)[0]
        return ATTENTION(
            q, k, v, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def method(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a bound method as a function, so that it becomes a method where a class has it."""
    return lambda x, *args, **kwargs: answer(x, *args, **kwargs)
