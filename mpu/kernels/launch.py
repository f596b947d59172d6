# SPDX-License-Identifier: Apache-2.0
"""Launch Triton's kernels: all launches of the product go through `Kernel.launch`.

At each launch Triton binds the arguments, determines how to specialise each of them, formats the
options, and looks up the compiled kernel: 6 to 30 us of Python, dozens of times per layer. The
result is the same for equal integers and constants, dtypes and alignments of addresses. So the
compiled kernel of a launch is cached under these, and a cache hit passes addresses and numbers
directly to it. On a miss Triton launches, and alone decides what is compiled
(`python benchmarks/bench_launch.py`).

    cache key          grid, device, numbers, constants, options; of each tensor its dtype, and
                       whether its address is a multiple of 16
    not in the key     floats that are not constants, and numbers in `do_not_specialize`, except for
                       whether they fit 32 bits
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.runtime.driver import driver

from mpu.kernels.by_address import ALIGN

INTERPRETED = bool(triton.knobs.runtime.interpret)  # TRITON_INTERPRET was set at import
KEPT = 4096  # cached launches per kernel; a full cache is cleared, as sizes may change every call
FITS = range(-(1 << 31), 1 << 31)  # numbers that Triton passes in 32 bits

Pick = Callable[[tuple[Any, ...]], tuple[Any, ...]]


def cdiv(n: int, size: int) -> int:
    """Return n / size, rounded up; triton.cdiv takes 2 us."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two >= n, for n >= 1; Triton's takes 2 us."""
    return 1 << (n - 1).bit_length()


class Compiled(NamedTuple):
    """A compiled kernel and its launch parameters, from Triton."""

    run: Callable[..., object]
    grid: tuple[int, ...]
    function: int
    metadata: Any


class Call:
    """How a kernel's arguments are passed: the first ones by position, the others by `named`.

    tensors, values, free: select the tensors, the other arguments on which Triton specialises, and
    the integers of which only the size matters. arrange: selects the kernel's arguments, in its own
    order and without options, from the tensors' addresses followed by all arguments.
    """

    def __init__(
        self, kernel: Any, given: tuple[Any, ...], named: Sequence[str], seen: frozenset[int]
    ) -> None:
        """seen: positions of tensors in `given`, or in an earlier call that had None elsewhere."""
        self.seen, self.compiled = seen, dict[tuple[Any, ...], Compiled]()
        names = [*kernel.arg_names[: len(given) - len(named)], *named]
        of = {param.name: param for param in kernel.params}
        tensors, values, free = sorted(seen), list[int](), list[int]()
        for i in set(range(len(given))) - seen:
            param = of.get(names[i])
            if param is None or param.is_constexpr:
                values.append(i)
            elif not isinstance(given[i], float):
                (free if param.do_not_specialize else values).append(i)
        places = dict(zip(tensors, range(len(tensors)), strict=True))
        order = [names.index(name) for name in kernel.arg_names]
        self.tensors, self.values = pick(tensors), pick(values)
        self.free = pick(free) if free else None
        self.arrange = pick([places.get(i, len(places) + i) for i in order])


def places_of_tensors(given: Sequence[Any]) -> frozenset[int]:
    """Return the positions of tensors."""
    return frozenset(i for i, value in enumerate(given) if isinstance(value, Tensor))


def pick(places: Sequence[int]) -> Pick:
    """Return a function that selects items of a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    only = slice(places[0], places[0] + 1) if places else slice(0)
    return itemgetter(only)


class Kernel:
    """A Triton kernel, with its declaration (mpu/kernels/declared.py).

    jitted: the result of `triton.jit`, for compiling it without a launch.
    """

    def __init__(self, jitted: Any, declared: Any) -> None:
        self.jitted, self.declared = jitted, declared
        self.fn, self.arg_names = jitted.fn, tuple(jitted.arg_names)
        self._calls: dict[tuple[str, ...], Call] = {}

    def launch(self, grid: tuple[int, ...], *args: Any, **named: Any) -> None:
        """Launch `grid` programs on the current stream of the current device.

        Pass all arguments, by position or by name, and options of Triton by name (num_warps). Hooks
        of Triton's profiler are only called for launches that are not in the cache.
        """
        if INTERPRETED:
            self.jitted[grid](*args, **named)
            return
        active, given, names = driver.active, (*args, *named.values()), tuple(named)
        call = self._calls.get(names)
        if call is None:
            seen = places_of_tensors(given)
            call = self._calls[names] = Call(self.jitted, given, names, seen)
        addresses: list[int] = []
        kinds: list[Any] = []
        bits = 0
        for x in call.tensors(given):
            if x is None:
                addresses.append(0)
                kinds.append(x)
                continue
            address = x.data_ptr()
            bits |= address
            addresses.append(address)
            kinds.append(x.dtype)
        device = active.get_current_device()
        key = (grid, device, call.values(given), *kinds)
        if bits % ALIGN:
            key += tuple(address % ALIGN for address in addresses)
        if call.free:
            key += tuple(number in FITS for number in call.free(given))
        found = call.compiled.get(key)
        if found is not None:
            run, size, function, metadata = found
            stream, given = active.get_current_stream(device), (*addresses, *given)
            run(*size, stream, function, metadata, None, None, None, *call.arrange(given))
            return
        compiled = self.jitted[grid](*args, **named)
        if not (seen := places_of_tensors(given)) <= call.seen:  # some were None before
            self._calls[names] = Call(self.jitted, given, names, call.seen | seen)
            return
        if len(call.compiled) == KEPT:
            call.compiled.clear()
        call.compiled[key] = Compiled(
            compiled.run, (*grid, 1, 1)[:3], compiled.function, compiled.packed_metadata
        )
