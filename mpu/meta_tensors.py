# SPDX-License-Identifier: Apache-2.0
"""Run a model on meta tensors, which have shapes but no memory, quickly and as its kernels would.

Torch computes many elementwise operations on meta tensors in Python and first imports SymPy, which
takes seconds at the start of every run. `MetaOperations` computes the results of common operations
directly from their shapes. For meta tensors torch implements attention by products of s x s
matrices, which flash kernels neither compute nor store; importing this module registers
`flash_attention` for them instead.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from mpu.layers.attention.block_attention import products_forward
from mpu.torch_private import FORWARD, DispatchMode, cpu_attention, has_attention, schema

META = torch.device("meta")
_COMPARE = {"eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "isfinite", "signbit"}
_COMPARE |= {"logical_and", "logical_or", "logical_xor", "logical_not"}

PRODUCTS = {  # [..., n, k] x [..., k, m]: the position of the first of the two arguments
    torch.ops.aten.mm.default: 0,
    torch.ops.aten.bmm.default: 0,
    torch.ops.aten.addmm.default: 1,
    torch.ops.aten.baddbmm.default: 1,
}
UNKNOWN = object()  # the result of `answer` if torch must compute it
_REDUCE = {"sum", "mean", "amax", "amin", "linalg_vector_norm"}


VALUES = re.compile(
    r"item\(\)|copy out of meta|nonzero|masked_select|unique|data.dependent|local_scalar",
    re.IGNORECASE,
)


def meta_hint(error: BaseException) -> str:
    """Return advice for a model file that fails on meta tensors, or "" for other errors."""
    text = str(error)
    if "meta" not in text.lower():
        return ""
    if VALUES.search(text):
        return (
            ": the model asks for values (a boolean index, nonzero, unique, .item(), an `if` of a "
            "tensor), but meta tensors, on which memory is planned, have shapes only: multiply by "
            "a mask or use torch.where, so that no shape depends on a value"
        )
    return (
        ": the model makes a tensor without device=ctx.device, or keeps one of an earlier pass: a "
        "forward takes everything from its arguments"
    )


class MetaOperations(DispatchMode):
    """Computes common operations on meta tensors from their shapes, the others by torch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = answer(func, args, kwargs)
        return func(*args, **kwargs) if found is UNKNOWN else found


def is_block(func: Any) -> bool:
    """Return whether an operation is torch's attention of a block on a CPU."""
    return func.overloadpacket.__name__ == FORWARD["cpu"]


@lru_cache(maxsize=1024)
def _kind(func: Any) -> str:
    """Return the case of `answer` for an operation, or "" if there is none."""
    aten, name = torch.ops.aten, func.overloadpacket.__name__
    if name in ("arange", "stack") or func is aten.cat.default:
        return name
    if name.startswith(("_fused_", "_foreach_")) and name.endswith("_"):
        return "lists in place"
    if func._overloadname.endswith("out"):
        return "out"
    if name in ("select_backward", "slice_backward"):
        return "backward of a view"
    if name in ("_softmax", "_softmax_backward_data", "cumsum"):
        return name
    if name.endswith("_") and torch.Tag.inplace_view not in func.tags:  # masked_fill_, zero_
        return "in place"
    if torch.Tag.pointwise in func.tags or name == "floor_divide":
        return "elementwise"
    if name in _REDUCE:
        return "reduction"
    if is_block(func):
        return "block"
    if name in ("empty_like", "zeros_like", "ones_like", "full_like", "flip"):
        return "like"
    if func in PRODUCTS or name in ("mm", "addmm"):
        return "product"
    known = (
        aten.mv.default, aten.index.Tensor, aten.gather.default, aten.embedding.default,
        aten.new_empty.default, aten.new_full.default, aten.new_zeros.default,
        aten._unsafe_view.default, aten.permute.default,
    )  # fmt: skip
    return name if func in known else ""


def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of an operation, or UNKNOWN if torch must compute it."""
    kind = _kind(func)
    if not kind:
        return UNKNOWN
    if kind == "lists in place":
        return None if all(x.is_meta for x in args[0]) else UNKNOWN
    first: Any = args[0] if args else None
    if kind == "arange":
        if kwargs.get("device") == META and {*map(type, args)} <= {int}:
            dtype = kwargs.get("dtype") or torch.long
            return torch.empty(len(range(*args)), dtype=dtype, device=META)
        return UNKNOWN
    if kind in ("cat", "stack"):
        shape, dim = list(first[0].shape), args[1] if len(args) > 1 else 0
        dim %= max(len(shape), 1) if kind == "cat" else len(shape) + 1
        alike = {part.shape[:dim] + part.shape[dim + (kind == "cat") :] for part in first}
        if not first[0].is_meta or len(alike) > 1:
            return UNKNOWN
        if kind == "stack":
            shape.insert(dim, len(first))
        else:
            shape[dim] = sum(part.shape[dim] for part in first)
        return torch.empty(shape, dtype=_common(first), device=META)
    if not (isinstance(first, Tensor) and first.is_meta):
        return UNKNOWN
    if kind == "in place":
        return first
    if kind == "out":
        return kwargs.get("out", UNKNOWN)
    if kind == "backward of a view":
        return _new(first, args[1])
    if kind == "_softmax":
        kept = torch.float32 if args[2] else first.dtype
        return torch.empty(first.shape, dtype=kept, device=META)
    if kind == "_softmax_backward_data":
        return torch.empty(first.shape, dtype=args[3], device=META)
    if kind == "cumsum":
        kept = kwargs.get("dtype") or (first.dtype if first.is_floating_point() else torch.long)
        return torch.empty(first.shape, dtype=kept, device=META)
    if kind == "elementwise":
        return _elementwise(func, args, kwargs)
    if kind == "reduction":
        return _reduction(func, args, kwargs)
    if kind == "block":
        (b, a, s, _), e = first.shape, args[2].shape[3]
        sums = torch.float64 if first.dtype == torch.float64 else torch.float32
        lse = torch.empty((b, s, a), dtype=sums, device=META).transpose(1, 2)
        return _new(first, (b, s, a, e)).transpose(1, 2), lse
    if kind == "like":
        dtype = kwargs.get("dtype") or first.dtype
        strides = first.stride() if _dense(first) else _without_gaps(first)
        return torch.empty_strided(first.shape, strides, dtype=dtype, device=META)
    if kind == "product":
        if "out" in kwargs:
            return kwargs["out"]
        if func not in PRODUCTS:
            return UNKNOWN
        x, y = args[PRODUCTS[func] :][:2]
        if (*x.shape[:-2], x.shape[-1]) != y.shape[:-1] or not y.is_meta:
            return UNKNOWN
        return _new(x, (*x.shape[:-1], y.shape[-1]))
    if kind in ("new_empty", "new_full", "new_zeros"):
        device = kwargs.get("device")
        if device is not None and device.type != "meta":
            return UNKNOWN
        return torch.empty(args[1], dtype=kwargs.get("dtype") or first.dtype, device=META)
    if kind == "_unsafe_view":
        return first.view(args[1])
    if kind == "permute":
        own, strides, dims = first.shape, first.stride(), args[1]
        sizes, steps = [own[d] for d in dims], [strides[d] for d in dims]
        return first.as_strided(sizes, steps, first.storage_offset())
    if kind == "mv":
        return _new(first, first.shape[:1])
    if kind == "index":
        if not all(i is not None and i.dtype == torch.long for i in args[1]):
            return UNKNOWN
        return _new(first, (*_broadcast(args[1]), *first.shape[len(args[1]) :]))
    if kind == "gather":
        return _new(first, args[2].shape)
    return _new(first, (*args[1].shape, first.shape[1]))  # embedding


def _new(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor with the dtype of `like`; `new_empty` is slow (Python) for meta tensors."""
    return torch.empty(shape, dtype=like.dtype, device=META)


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the result of an elementwise operation: one of its arguments, or an empty tensor."""
    name = func.overloadpacket.__name__
    for written in ("out", "grad_input"):
        if written in kwargs:
            return kwargs[written]
    tensors = [a for a in args if isinstance(a, Tensor)]
    if any(t.dim() and not t.is_meta for t in tensors):
        raise RuntimeError(f"{name}: expected all tensors on device meta, but one is on another")
    shape = _broadcast(tensors)
    if name in _COMPARE:
        dtype = torch.bool
    else:
        values = tensors[1:] if name == "where" else [a for a in args if _is_value(a)]
        dtype = values[0].dtype if name in ("masked_fill", "clone") else _common(values)
    like = next((t for t in tensors if t.shape == shape and _dense(t)), None)
    if like is None or kwargs.get("memory_format") == torch.contiguous_format:
        return torch.empty(shape, dtype=dtype, device=META)
    return torch.empty_strided(shape, like.stride(), dtype=dtype, device=META)


def _reduction(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the result of a sum, mean, norm or extreme over some dimensions."""
    names = [argument.name for argument in schema(func).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    x, dims = given["self"], given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(x.dim())
    over = {dim % max(x.dim(), 1) for dim in dims}
    length = 1 if given.get("keepdim") else None
    shape = [length if i in over else n for i, n in enumerate(x.shape)]
    counts = func.overloadpacket.__name__ == "sum" and not x.is_floating_point()
    dtype = given.get("dtype") or (torch.long if counts else x.dtype)
    return torch.empty([n for n in shape if n is not None], dtype=dtype, device=META)


def _broadcast(tensors: list[Tensor]) -> torch.Size:
    """Return the broadcast shape of the tensors. Raises RuntimeError if they do not broadcast."""
    sizes = list(zip_longest(*(reversed(t.shape) for t in tensors), fillvalue=1))
    if any(len({*some} - {1}) > 1 for some in sizes):
        shapes = " and ".join(str(list(t.shape)) for t in tensors)
        raise RuntimeError(f"the shapes {shapes} cannot be broadcast")
    return torch.Size([next((n for n in some if n != 1), 1) for some in sizes][::-1])


def _is_value(argument: Any) -> bool:
    return isinstance(argument, (Tensor, int, float)) and not isinstance(argument, bool)


def _common(values: list[Any]) -> torch.dtype:
    """Return the dtype to which torch promotes these values; the first is a tensor."""
    out = values[0]
    for value in values[1:]:
        out = torch.empty((), dtype=torch.result_type(out, value), device=META)
    return out.dtype


def _without_gaps(tensor: Tensor) -> list[int]:
    """Return gapless strides with the same order of dimensions as the tensor's."""
    strides, step = [0] * tensor.dim(), 1
    for dim in sorted(reversed(range(tensor.dim())), key=tensor.stride):
        strides[dim], step = step, step * max(tensor.shape[dim], 1)
    return strides


def _dense(tensor: Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps, in some order."""
    need = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != need:
                return False
            need *= size
    return True


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Replacement for a flash kernel: F.scaled_dot_product_attention on meta tensors.

    q [b, a, s, d], k [b, g, S, d], v [b, g, S, e] -> [b, a, s, e].
    """
    out: Tensor = _FlashAttention.apply(q, k, v, is_causal or attn_mask is not None)
    return out


class _FlashAttention(torch.autograd.Function):
    """Saves the same tensors as flash kernels: q, k, v, the output, and a log-sum-exp per query."""

    @staticmethod
    def forward(f: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        attend = cpu_attention if has_attention("cpu") else products_forward
        out, sums = attend(q, k, v, causal)
        f.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(f: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, _, _ = f.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), None


ATTENTION = torch.library.Library("aten", "IMPL", "AutogradMeta")
ATTENTION.impl("scaled_dot_product_attention", flash_attention)
