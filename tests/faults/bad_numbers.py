# SPDX-License-Identifier: Apache-2.0
"""Write a wrong number into a run: a flipped bit, a NaN, a number that is far too large.

A fault of tests/faults/fault_injection.py with "how": "spoil" has two more keys, and "seed" draws
the element:

    "what"   "weight", "moment" or "own weight" (a ZeRO 3 rank's part), at the point "step";
             "gradient" at "gradient sums"; "output" of the function at "forward" or "layer"
    "value"  "flip" one of its 32 bits, "small flip" one that is not of its exponent, "nan", "inf",
             or a number that multiplies the whole tensor
    "named"  only parameters in whose name this stands
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def places(what: str, run: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of what this rank holds; values: a view."""
    if what == "weight":
        yield from ((f"{name} (weight)", p.data) for name, p in run.model.named_parameters())
    elif what == "own weight":
        weights = run.optimizer.named_weights()
        yield from ((f"{name} (weight)", values) for name, _, _, values in weights)
    elif what == "moment":
        state = run.optimizer.named_state()
        yield from ((f"{name} ({kind})", values) for name, kind, _, values in state)
    else:
        assert what == "gradient", what
        for i, bucket in enumerate(run.buckets):  # of a sink
            yield f"bucket {i}", bucket.grad if bucket.grad is not None else bucket.grad_shard


def write(values: Tensor, value: str | float, rng: random.Random) -> str:
    """Write the wrong number at an element of values; return where, and which bit."""
    flat = values.data.view(-1)  # unseen by autograd
    at = rng.randrange(flat.numel())
    if isinstance(value, float):
        flat.mul_(value)
        return f"times {value}"
    if value not in ("flip", "small flip"):
        flat[at] = float(value)
        return f"element {at}: {value}"
    bit = rng.randrange(32) if value == "flip" else rng.choice([*range(23), 31])
    word = flat[at : at + 1].view(torch.int32)
    word ^= -(2**31) if bit == 31 else 1 << bit
    return f"element {at}, bit {bit}"


def spoil(
    fault: dict[str, Any], told: Callable[[str], None], inner: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call `inner` with something spoilt before it or in its result; tell what."""
    rng, what, value = random.Random(fault["seed"]), fault["what"], fault["value"]
    if what == "output":
        out = inner(*args, **kwargs)
        with torch.no_grad():
            told(f"output, {write(out, value, rng)}")
        return out
    found = [(n, v) for n, v in places(what, args[0]) if fault.get("named", "") in n and v.numel()]
    name, values = rng.choice(found)
    with torch.no_grad():
        told(f"{name}, {write(values, value, rng)}")
    return inner(*args, **kwargs)
