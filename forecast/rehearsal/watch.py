# SPDX-License-Identifier: Apache-2.0
"""Intercept every operation of torch, and record what it launches, reads and writes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from forecast.rehearsal.events import HostWait, Launch, Where
from forecast.rehearsal.order import Finding
from forecast.rehearsal.places import end_of
from forecast.rehearsal.record import Recorder
from mpu.kernels import by_address
from mpu.module_tracker import tensors_of
from mpu.torch_private import (
    PINS,
    READS_A_NUMBER,
    DispatchMode,
    function_of,
    no_modes,
    running_node,
    schema,
)

NO_KERNEL = {  # operations that launch no kernel
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_",
    "detach", "detach_", "alias", "lift_fresh", "requires_grad_", "record_stream", "is_pinned",
    "_reshape_alias", "_unsafe_view", "is_same_size",
    "_has_compatible_shallow_copy_type",
}  # fmt: skip
RUN_BACKWARD = ("", "mpu/pipeline/engine.py", "mpu/recompute.py")  # files that run autograd
OVERWRITE = ("copy_", "zero_", "fill_")  # in-place operations that do not read their target
OF_ROWS = ("embedding", "index_select", "index_add_", "index_put_", "gather")
COPIES = ("_to_copy", "copy_", "clone")
FLASH = ("_flash_attention_forward", "_flash_attention_backward")
ASKS_DEVICE = torch.ops.prim.device.default
UNKNOWN_SIZE = (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)


class Watch(DispatchMode):
    """Records every operation of torch. fake: tensors have no values; host reads return 0."""

    def __init__(self, recorder: Recorder, fake: bool) -> None:
        super().__init__()
        self.recorder, self.fake = recorder, fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation and record it."""
        if func is ASKS_DEVICE:  # three of five calls; a fake tensor has it without a dispatch
            return args[0].device
        kwargs, recorder = kwargs or {}, self.recorder
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if self.fake and func is torch.ops.aten._unsafe_view.default:
            func = torch.ops.aten.view.default  # equal below autograd, and cached
        name = name_of(func)
        if name == READS_A_NUMBER:
            return self._read(args[0]) if self.fake else func(*args, **kwargs)
        if self.fake and func in UNKNOWN_SIZE and args[0].device.type == recorder.device:
            recorder.host_wait(stream=recorder.stream, reads=name, of=args[0])
            columns = (args[0].dim(),) if func is UNKNOWN_SIZE[0] else ()
            kind = torch.long if columns else args[0].dtype
            return args[0].new_empty((0, *columns), dtype=kind)
        if self.fake and func is torch.ops.aten.is_pinned.default:
            return bool(getattr(args[0].untyped_storage(), "_weft_pinned", False))
        if self.fake and name == PINS:
            recorder.pin(copy := torch.empty_like(args[0]))
            return copy
        if self.fake and kwargs.get("pin_memory"):
            recorder.pin(out := func(*args, **{**kwargs, "pin_memory": False}))
            return out
        if recorder.paused:
            return func(*args, **kwargs)
        inputs = tensors_of(args) + tensors_of(kwargs.values())
        before = [id(t.untyped_storage()) for t in inputs]
        if self.fake and name == "aten::_fused_adamw_":
            scalars_are_single(kwargs)
        try:  # torch before 2.13 has no shape rule for this addmm with another dtype
            adds = self.fake and func is torch.ops.aten.addmm.dtype_out
            out = kwargs["out"] if adds else func(*args, **kwargs)
        except Exception as error:
            made = [f"{recorder.birthplace(x)} ({x.dtype}, {x.device.type})" for x in inputs]
            error.add_note(f"its inputs were made at {', '.join(made)}")
            raise
        if self.fake and func is torch.ops.aten.index.Tensor:
            out = as_indexed(out, *args)
        if not inputs and not isinstance(out, Tensor):
            return out
        outputs = tensors_of((out,))
        if func is torch.ops.aten.lift_fresh.default and recorder.device == "cpu":
            # made from Python numbers; with fake tensors it has a new storage
            recorder.numbers(outputs, recorder.where())
            return out
        if func.is_view and all(id(t.untyped_storage()) in before for t in outputs):
            return out
        device = recorder.device
        if all(t.device.type != device for t in (*outputs, *inputs)):
            if name.rpartition("::")[2] not in NO_KERNEL:
                recorder.host_use(inputs, outputs + self._changed(func, args, kwargs))
            for x in outputs:
                storage = x.untyped_storage()
                if x.device.type == "cpu" and not hasattr(storage, "_weft_born"):
                    storage._weft_born = recorder.place()  # type: ignore[attr-defined]
            return out
        where = recorder.where()
        if where.part == "glue" and "attention" in name:  # called by autograd's engine, not a line
            where = where._replace(part="attention")
        short = name.rpartition("::")[2]
        if short == "_to_copy":
            recorder.found += cast_by_autograd(where.place)
        recorder.numbers((*inputs, *outputs), where)
        if short in ("resize_", "set_") or name == "inductor::resize_storage_bytes_":
            recorder.resized(inputs[0].untyped_storage(), where)
        if short in NO_KERNEL or name.startswith("c10d"):
            return out
        overload = ".dtype" if "dtype" in schema(func).overload_name else ""
        if name + overload in by_address.CALLS and device != "cpu":
            names = (argument.name for argument in schema(func).arguments)
            given = dict(zip(names, args, strict=False)) | kwargs
            recorder.check_layout(name + overload, given, where)
        changed = outputs + self._changed(func, args, kwargs)
        only = {id(x) for x in results_of(func, kwargs)} - {id(x) for x in tensors_of(args)}
        taken = [x for x in inputs if id(x) not in only]
        read, written, spans = recorder.uses(taken, changed, where, recorder.stream)
        if short in COPIES and len({t.device.type for t in (*inputs, *outputs)}) > 1:
            third = short == "copy_" and len(args) > 2 and args[2]
            nowait = kwargs.get("non_blocking", third)
            source = inputs[-1] if short == "copy_" else inputs[0]
            target, uses = (outputs or inputs)[0], (read, written, spans)
            self._between(source, target, nowait, where, uses)
            return out
        flops = flops_of(func, args, kwargs, out)
        recorder.chain()
        here = [[x for x in side if x.device.type == device] for side in (taken, changed)]
        recorder.events.append(
            Launch(
                name,
                recorder.stream,
                shapes=tuple(tuple(t.shape) for t in (*inputs, *outputs)),
                dtype=str((outputs or inputs)[0].dtype).removeprefix("torch."),
                read=read,
                written=written,
                bytes=moved(short, *here),
                flops=flops,
                where=where,
                spans=spans,
                dtypes=tuple(str(t.dtype).removeprefix("torch.") for t in (*inputs, *outputs)),
                host=tuple(recorder.birthplace(t) for t in inputs if t.device.type != device),
            )
        )
        return out

    def _changed(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the argument tensors that an operation writes."""
        changed: list[Tensor] = []
        for i, argument in enumerate(schema(func).arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                changed += tensors_of((value,))
        return changed

    def _between(
        self, source: Tensor, target: Tensor, nowait: bool, where: Where, uses: Any
    ) -> None:
        """Record a copy between host and device, and whether the host waits for it."""
        recorder, (read, written, spans) = self.recorder, uses
        down = target.device.type == "cpu"
        host = target if down else source
        name = "memcpy DtoH" if down else "memcpy HtoD"
        nbytes = target.numel() * target.element_size()
        dtype = str(target.dtype).removeprefix("torch.")
        shapes = (tuple(source.shape), tuple(target.shape))
        recorder.chain()
        recorder.events.append(
            Launch(
                name,
                recorder.stream,
                shapes=shapes,
                dtype=dtype,
                read=read,
                written=written,
                bytes=nbytes,
                flops=0.0,
                where=where,
                spans=spans,
                dtypes=tuple(str(x.dtype).removeprefix("torch.") for x in (source, target)),
            )
        )
        if not (nowait and getattr(host.untyped_storage(), "_weft_pinned", False)):
            how = "a copy to the host" if down else "a copy from pageable host memory"
            recorder.chain()
            made = recorder.birthplace(host)
            recorder.events.append(HostWait(-1, recorder.stream, how, where, made))

    def _read(self, tensor: Tensor) -> Any:
        """Record that the host reads a number; return zero of its type."""
        self.recorder.host_use([tensor], [])
        if tensor.device.type == self.recorder.device and tensor.device.type != "cpu":
            self.recorder.host_wait(stream=self.recorder.stream, reads="aten::item", of=tensor)
        kind = tensor.dtype
        return False if kind == torch.bool else 0.0 if kind.is_floating_point else 0


def results_of(func: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the `out` arguments of an operation, which it does not read."""
    names = [a.name for a in schema(func).arguments if a.is_out]
    return tensors_of([kwargs.get(name) for name in names])


def scalars_are_single(given: dict[str, Any]) -> None:
    """Raise RuntimeError for scalars that torch's fused AdamW refuses; its fake kernel does not."""
    for name in ("grad_scale", "found_inf"):
        x = given.get(name)
        if x is not None and x.dtype != torch.float32:
            raise RuntimeError(f"expected scalar type Float but found {x.dtype} ({name})")


def cast_by_autograd(place: str) -> list[Finding]:
    """Return a finding if the current cast is by autograd, on the result of a Function's backward.

    Autograd casts a gradient if the backward returns another dtype than the input's.
    """
    node = running_node()()
    called = place.partition(":")[0] in RUN_BACKWARD
    if not called or not isinstance(node, torch.autograd.function.BackwardCFunction):
        return []
    made = function_of(node)
    if made is None:
        return []
    place = end_of(made.backward)
    what = "autograd casts a gradient of this backward, whose dtype is not that of the input"
    return [Finding("dtype", place, what)]


def as_indexed(out: Tensor, x: Tensor, places: Any) -> Tensor:
    """Return the result of an indexing with the strides that it has on a real device.

    The strides of torch's fake tensors differ: they ignore the strides of transposed indices.
    """
    if out.dim() < 2 or any(i is not None and i.dtype != torch.long for i in places):
        return out
    with no_modes():
        table = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
        at = [
            None if i is None else torch.empty_strided(i.shape, i.stride(), dtype=i.dtype).zero_()
            for i in places
        ]
        strides = torch.ops.aten.index.Tensor(table, at).stride()
    return out if strides == out.stride() else out.new_empty_strided(out.shape, strides)


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Return the FLOPs of an operation's matmuls by torch's counter, half for causal attention."""
    short = name_of(func).rpartition("::")[2]
    if short == "_scaled_mm_v2":  # torch's table has only _scaled_mm
        return 2.0 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
    if short == "_grouped_mm":  # [n, k] x [e, k, m], each row by one of the e matrices
        return 2.0 * args[0].shape[0] * args[1].shape[-2] * args[1].shape[-1]
    packet, same = func.overloadpacket, short.rstrip("_")  # in-place operations have no formula
    if short in FLASH and args[0].dim() == 4:
        # [b, s, n, d], which torch's formula takes only since 2.14: use the one of [b, n, s, d]
        args = [rows_last(a) for a in args]
        kwargs = {name: rows_last(a) for name, a in kwargs.items()}
        packet, same = None, "_scaled_dot_product" + short.removesuffix("_forward")
    count = flop_registry.get(packet) or flop_registry.get(getattr(torch.ops.aten, same, None))
    if count is None:
        return 0.0
    if "attention" in short:
        args = as_many_heads(args)
    operands = [a for a in args if not isinstance(a, torch.dtype)]  # it takes a dtype for a shape
    flops = float(count(*operands, **kwargs, out_val=out))
    if "attention" in short and _causal(func, args, kwargs):
        flops /= 2
    return flops


def rows_last(x: Any) -> Any:
    """Return a tensor [b, s, n, d] as [b, n, s, d]; anything else as it is."""
    return x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x


def as_many_heads(args: Any) -> list[Any]:
    """Return attention's arguments, [b, n, s, d] or rows [s, n, d], with n of the queries in each.

    Before torch 2.13 its formulas do not support grouped-query attention.
    """
    most = max((a.shape[1] for a in args if isinstance(a, Tensor) and a.dim() > 2), default=0)

    def repeated(a: Any) -> Any:
        if not isinstance(a, Tensor) or a.dim() < 3 or a.shape[1] == most:
            return a
        with no_modes():
            return torch.empty(a.shape[0], most, *a.shape[2:], dtype=a.dtype, device="meta")

    return [repeated(a) for a in args]


def _causal(func: Any, args: Any, kwargs: Any) -> bool:
    for i, argument in enumerate(schema(func).arguments):
        if argument.name == "is_causal":
            return bool(args[i]) if i < len(args) else bool(kwargs.get("is_causal"))
    return False


def name_of(func: Any) -> str:
    """Return an operation's name."""
    return str(schema(func).name)


def moved(op: str, read: Sequence[Tensor], written: Sequence[Tensor]) -> int:
    """Return the bytes that a kernel reads and writes; each tensor counts once in each direction.

    OVERWRITE operations do not read their target. OF_ROWS operations move only some rows of the
    table, their first tensor: at most as many bytes as their largest other tensor has.
    """

    def sizes(tensors: Sequence[Tensor]) -> dict[tuple[int, int], int]:
        places = ((id(x.untyped_storage()), int(x.storage_offset())) for x in tensors)
        return {place: x.numel() * x.element_size()
                for place, x in zip(places, tensors, strict=True)}  # fmt: skip

    reads, writes = sizes(read), sizes(written)
    if op in OVERWRITE:
        reads = {place: size for place, size in reads.items() if place not in writes}
    if op in OF_ROWS and reads:
        table = next(iter(reads))
        rows = max((size for side in (reads, writes) for place, size in side.items()
                    if place != table), default=0)  # fmt: skip
        reads, writes = ({place: min(size, rows) if place == table else size
                          for place, size in side.items()} for side in (reads, writes))  # fmt: skip
    return sum(reads.values()) + sum(writes.values())
