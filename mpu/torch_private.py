# SPDX-License-Identifier: Apache-2.0
"""All private names of torch that Weft uses, in one file, with the fallback if torch lacks one.

A name that begins with an underscore may be renamed, dropped, or take other arguments in any
version of torch. NAMES lists those that Weft uses, and `lacking` returns those that a torch does
not have: `python -m mpu.torch_private` prints them, and tests/mpu/test_torch_private.py tests the
fallback of each. A name is looked up when it is used, so a run that does not need it is not
affected. If there is no fallback, the requested feature raises TorchLacks.

A storage is identified by `id(x.untyped_storage())`, which needs no private name: torch keeps one
Python object per storage as long as the storage lives. Tables that recognise operators which have
run (mpu/kernels/by_address.py, forecast/rehearsal) do not call them, so a name that torch lacks
simply never occurs there.
"""

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

aten: Any = torch.ops.aten


class TorchLacks(ValueError):
    """A requested feature needs a private name that this torch does not have."""


class Name(NamedTuple):
    """A private name. without: the fallback if torch lacks it. takes: the arguments that Weft
    passes to an operator. nccl: only a build of torch with NCCL has it.
    """

    path: str
    without: str
    takes: tuple[str, ...] = ()
    nccl: bool = False


QKV = ("query", "key", "value")
BLOCK = ("is_causal",)
GRADS = ("grad_out", *QKV, "out", "logsumexp", "dropout_p", *BLOCK)
DEVICE_GRADS = (*GRADS, "cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset")
LOOP = "a loop over the tensors"
FLASH = (
    "auto computes blocks by matrix products; --attention-backend flash is refused, except for "
    "documents and windows"
)
CUDNN = "auto computes blocks by flash; --attention-backend fused is refused"
PRODUCTS = "blocks that csrc/attention.h does not support are computed by matrix products"
TRACKER = (
    "--rehearse, tools/explain.py, tools/fork_check.py and tools/bisect_runs.py are refused; if a "
    "loss is not finite, the error does not name the first module that is not"
)
REHEARSAL = "--rehearse is refused"
MISSED = "a rehearsal does not recognise this operation"
SLOWER = "a rehearsal or a plan takes twice as long"

NAMES = (
    Name(
        "torch.ops.aten._flash_attention_forward",
        "flash computes documents and windows block after block",
        (*QKV, "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal",
         "return_debug_mask", "window_size_left", "window_size_right"),
    ),
    Name("torch.ops.aten._scaled_dot_product_flash_attention", FLASH, (*QKV, *BLOCK)),
    Name("torch.ops.aten._scaled_dot_product_flash_attention_backward", FLASH, DEVICE_GRADS),
    Name(
        "torch.ops.aten._scaled_dot_product_cudnn_attention", CUDNN,
        (*QKV, *BLOCK, "attn_bias", "compute_log_sumexp"),
    ),
    Name(
        "torch.ops.aten._scaled_dot_product_cudnn_attention_backward", CUDNN,
        (*DEVICE_GRADS, "attn_bias"),
    ),
    Name("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", PRODUCTS, (*QKV, *BLOCK)),
    Name("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward", PRODUCTS, GRADS),
    Name(
        "torch.ops.mkldnn._linear_pointwise", "fp32 matmuls on a CPU use F.linear, which is slower",
        ("X", "W", "B", "attr", "scalars", "algorithm"),
    ),
    Name("torch.ops.aten.silu_backward.grad_input", "its formula is computed by several operations",
         ("grad_output", "self", "grad_input")),
    Name("torch._fused_adamw_", "AdamW updates one tensor at a time, with four temporary tensors"),
    Name("torch._foreach_add_", LOOP),
    Name("torch._foreach_sub_", LOOP),
    Name("torch._foreach_zero_", LOOP),
    Name("torch._foreach_copy_", LOOP),
    Name("torch.Tensor._version", "a forbidden change in place is not detected"),
    Name("torch.autograd.Function._backward_cls",
         "RoPE and the loss copy their input instead of overwriting it"),
    Name("torch.autograd.Function._backward_cls._forward_cls",
         "a rehearsal does not name the backward of a Function"),
    Name("torch._C._current_autograd_node", TRACKER),
    Name("torch.overrides._get_current_function_mode_stack",
         "tools miss the forward that --overlap-moe-expert-parallel-comm runs in a thread"),
    Name("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "the same"),
    Name("torch.utils._python_dispatch.TorchDispatchMode",
         "no run starts, as the memory plan records the operations of the model"),
    Name("torch.utils._python_dispatch._disable_current_modes", REHEARSAL),
    Name("torch.ops.aten.add.Tensor._schema", "the same"),
    Name("torch._subclasses.fake_tensor.FakeTensor", REHEARSAL),
    Name("torch._subclasses.fake_tensor.FakeTensorMode", REHEARSAL),
    Name("torch._subclasses.fake_tensor.in_kernel_invocation_manager", SLOWER),
    Name("torch._subclasses.fake_impls.op_implementations_dict", SLOWER),
    Name("torch._subclasses.fake_impls.op_implementations_checks", SLOWER),
    Name("torch._C._dispatch_has_computed_kernel_for_dispatch_key", SLOWER),
    Name("torch.ops.aten._local_scalar_dense", MISSED),
    Name("torch.ops.aten._pin_memory", MISSED),
    Name("torch.ops.aten._to_copy", MISSED),
    Name("torch.ops.aten._scaled_mm_v2", f"{MISSED}, and MFU does not count it"),
    Name("torch.ops.aten._grouped_mm", MISSED),
    Name("torch.distributed._symmetric_memory.empty",
         "--tp-comm-overlap symmetric is ring on GPUs, as the log says"),
    Name("torch.distributed._symmetric_memory.rendezvous", "the same"),
    Name("torch.distributed.ProcessGroupNCCL.Options._timeout",
         "torch warns of different timeouts of a group and its options", nccl=True),
    Name("torch._C._distributed_c10d._dump_nccl_trace_json",
         "a report of a hang lacks NCCL's flight recorder", nccl=True),
    Name("torch.cuda.memory._record_memory_history", "--record-memory-history is refused"),
    Name("torch.cuda.memory._dump_snapshot", "--record-memory-history is refused"),
    Name("torch._dynamo", "it is imported when the first optimizer is made"),
    Name("torch.distributed.checkpoint.filesystem._StorageInfo",
         "tools/checkpoint.py convert --to-mcore is refused"),
)  # fmt: skip
GIVEN: Mapping[str, tuple[str, ...]] = {name.path: name.takes for name in NAMES}
READS_A_NUMBER, PINS, CASTS = "aten::_local_scalar_dense", "aten::_pin_memory", "aten::_to_copy"
SCALED_MM = "_scaled_mm_v2"


# look-up


def find(path: str) -> Any:
    """Return the object at a dotted path that starts with torch, or None if it does not exist."""
    found, names = torch, path.split(".")[1:]
    for n, name in enumerate(names, 1):
        try:
            found = getattr(found, name)
        except (AttributeError, ImportError):  # torch imports some of its modules lazily
            try:
                found = importlib.import_module(".".join(("torch", *names[:n])))
            except ImportError:
                return None
    return found


def lacking() -> list[str]:
    """Return a line for each of NAMES that this torch lacks, or that takes other arguments."""
    lines = []
    for name in NAMES:
        if name.nccl and not dist.is_nccl_available():
            continue
        found = find(name.path)
        more = not_taken(found, name.takes) if name.takes else ()
        if found is None or more:
            what = f"{name.path} does not take {', '.join(more)}" if more else f"no {name.path}"
            lines.append(f"{what}: {name.without}")
    return lines


@lru_cache(maxsize=64)
def not_taken(operator: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `names` that are not arguments of an operator; () if it has no schema."""
    known = getattr(getattr(operator, "default", operator), "_schema", None)
    taken = {argument.name for argument in known.arguments} if known is not None else {*names}
    return tuple(name for name in names if name not in taken)


def require(feature: str, *paths: str) -> None:
    """Raise TorchLacks if this torch lacks a name that a feature needs."""
    missing = [path for path in paths if find(path) is None]
    if missing:
        raise TorchLacks(
            f"{feature} is not available: torch {torch.__version__} has no {', '.join(missing)} "
            "(mpu/torch_private.py)"
        )


# attention


def operator(name: str) -> Any:
    """Return an operator of aten, or None if this torch has none with Weft's arguments."""
    found = getattr(aten, name, None)
    given = GIVEN[f"torch.ops.aten.{name}"]
    return None if found is None or not_taken(found, given) else found


VARLEN = "_flash_attention_forward"
FORWARD = {  # each has a matching "_backward"
    "flash": "_scaled_dot_product_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "cpu": "_scaled_dot_product_flash_attention_for_cpu",
}
WAYS = {way: (name, f"{name}_backward") for way, name in FORWARD.items()}


def has_attention(way: str) -> bool:
    """Return whether this torch has a way's operators for attention; False if not in WAYS."""
    return way in WAYS and all(operator(name) is not None for name in WAYS[way])


def attention_lacks() -> tuple[str, ...]:
    """Return the operators of attention on a GPU that this torch lacks."""
    names = (VARLEN, *WAYS["flash"], *WAYS["cudnn"])
    return tuple(name for name in names if operator(name) is None)


def flash_attention_of_lengths(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends: Tensor | None,
    longest: tuple[int, int],
    window: int,
) -> Tensor:
    """Attend within documents [s, n, d] that end at `ends`, or in rows [b, s, n, d].

    longest: maximum length of queries and of keys. window: number of tokens to which a query
    attends; 0: all before it.
    """
    # torch.nn.attention.varlen calls this operator too; its own arguments differ in 2.11 to 2.13
    sides = (window - 1, 0) if window else (None, None)
    return aten._flash_attention_forward(
        q, k, v, cum_seq_q=ends, cum_seq_k=ends, max_q=longest[0], max_k=longest[1], dropout_p=0.0,
        is_causal=not window, return_debug_mask=False, window_size_left=sides[0],
        window_size_right=sides[1],
    )[0]  # fmt: skip


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, **more: Any
) -> tuple[Tensor, Tensor]:
    """Return out and the log-sum-exp for q [b, a, s, d], k and v [b, g, S, d]."""
    return aten._scaled_dot_product_flash_attention(q, k, v, is_causal=causal, **more)[:2]


def cudnn_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, learns: bool = True, **more: Any
) -> tuple[Tensor, Tensor]:
    """Like `flash_attention`; the log-sum-exp is [b, a, s, 1], and only computed if `learns`."""
    given = dict(attn_bias=None, compute_log_sumexp=learns, is_causal=causal) | more
    return aten._scaled_dot_product_cudnn_attention(q, k, v, **given)[:2]


def attention_backward(
    way: str, dy: Tensor, saved: Sequence[Tensor], causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv. way: one of WAYS. saved: q, k, v, out and the log-sum-exp [b, a, s]."""
    q, k, v, out, lse = saved
    if way == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, out, lse, dropout_p=0.0, is_causal=causal
        )
    # the kernels read the log-sum-exp by address, as contiguous [b, a, s], ignoring its strides;
    # the state is that of dropout, which is off
    lse, state = lse.contiguous(), torch.empty(2, dtype=torch.int64, device=q.device)
    given: dict[str, Any] = dict(cum_seq_q=None, cum_seq_k=None, dropout_p=0.0)
    given |= dict(max_q=q.shape[2], max_k=k.shape[2], is_causal=causal)
    if way == "cudnn":
        return aten._scaled_dot_product_cudnn_attention_backward(
            dy, q, k, v, out, lse[..., None], philox_seed=state[0], philox_offset=state[1],
            attn_bias=None, **given,
        )  # fmt: skip
    return aten._scaled_dot_product_flash_attention_backward(
        dy, q, k, v, out, lse, philox_seed=state, philox_offset=state, **given
    )


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Like `flash_attention`, on a CPU."""
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)


# other kernels


def linear_pointwise() -> Callable[..., Tensor] | None:
    """Return oneDNN's operator for a linear layer with a fused pointwise operation, or None."""
    found = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    given = GIVEN["torch.ops.mkldnn._linear_pointwise"]
    return None if found is None or not_taken(found, given) else found


def silu_backward_(dy: Tensor, x: Tensor) -> Tensor:
    """Multiply dy by silu'(x) = sig(x) (1 + x (1 - sig(x))), in place."""
    derive = getattr(getattr(aten, "silu_backward", None), "grad_input", None)
    if derive is not None:
        return derive(dy, x, grad_input=dy)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    sigmoid = wide.sigmoid()
    return dy.copy_(dy * (sigmoid * (1 + wide * (1 - sigmoid))))


def each(operation: str, tensors: Sequence[Tensor], *others: Sequence[Tensor] | float) -> None:
    """Apply an in-place operation, such as add_, to each tensor: in one call, if torch has it."""
    together = getattr(torch, f"_foreach_{operation}", None)
    if together is not None:
        together(tensors, *others)
        return
    for n, x in enumerate(tensors):
        getattr(x, operation)(*(o[n] if isinstance(o, Sequence) else o for o in others))


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    grad_scale: Tensor | None,
    found_inf: Tensor,
) -> None:
    """Update parameters and their moments by AdamW, as torch.optim.AdamW(fused=True) does.

    steps: of each parameter, including this one. grad_scale: the gradients are divided by it, in
    place. found_inf: if 1.0, nothing else changes; the host does not read it.
    """
    fused = getattr(torch, "_fused_adamw_", None)
    if fused is not None:
        fused(
            params, grads, first, second, [], steps, lr=lr, beta1=beta1, beta2=beta2,
            weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
            grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip
        return
    skips = found_inf > 0
    for param, grad, m, v, step in zip(params, grads, first, second, steps, strict=True):
        if grad_scale is not None:
            grad.div_(torch.where(skips, 1.0, grad_scale))
        kind = torch.promote_types(param.dtype, torch.float32)
        g, t = grad.to(kind), step.double()
        new_m, new_v = m.to(kind).lerp(g, 1 - beta1), v.to(kind).mul(beta2)
        new_v.addcmul_(g, g, value=1 - beta2)
        below = (new_v.sqrt() / (1 - beta2**t).sqrt().to(kind)).add_(eps)
        move = new_m / below
        new = param.to(kind) * (1 - lr * weight_decay) - (lr / (1 - beta1**t)).to(kind) * move
        for old, value in ((param, new), (m, new_m), (v, new_v)):
            old.copy_(torch.where(skips, old, value.to(old.dtype)))


# autograd, hooks and modes


def version_of(x: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 if torch does not provide it."""
    return getattr(x, "_version", 0)


def is_result_of(x: Tensor, function: type[torch.autograd.Function]) -> bool:
    """Return whether x is the result of a Function; False if torch does not provide it."""
    backward = getattr(function, "_backward_cls", None)
    return backward is not None and isinstance(x.grad_fn, backward)


def function_of(node: Any) -> Any:
    """Return the Function whose backward an autograd node is; None if torch does not provide it."""
    return getattr(type(node), "_forward_cls", None)


def running_node() -> Callable[[], Any]:
    """Return a function that returns the autograd node running in this thread, or None.

    Raises TorchLacks.
    """
    path = "torch._C._current_autograd_node"
    require("following a model through its backward", path)
    return find(path)


def active_modes() -> list[Any]:
    """Return the function and dispatch modes that are active in this thread, outermost first."""
    stacks = (
        "torch.overrides._get_current_function_mode_stack",
        "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    )
    return [mode for path in stacks if (stack := find(path)) is not None for mode in stack()]


class NoMode:
    """A placeholder for a missing dispatch mode, so that classes can derive from it.

    Entering it raises TorchLacks.
    """

    def __enter__(self) -> Any:
        require("seeing what torch computes", DISPATCH_MODE)

    def __exit__(self, *error: object) -> None:
        """Leave."""


DISPATCH_MODE = "torch.utils._python_dispatch.TorchDispatchMode"
if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as Mode
else:
    Mode = find(DISPATCH_MODE) or NoMode


class DispatchMode(Mode):
    """Intercepts every torch operation, like TorchDispatchMode, without torch's compiler."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch imports its compiler


NO_MODES = "torch.utils._python_dispatch._disable_current_modes"


def no_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context without dispatch modes."""
    return find(NO_MODES)()


def schema(operation: Any) -> Any:
    """Return the schema of an operation that a dispatch mode intercepts. Raises TorchLacks."""
    try:
        return operation._schema
    except AttributeError:
        raise TorchLacks(
            f"torch {torch.__version__} does not say what {operation} takes (its _schema), which "
            "--dry-run, --rehearse and tools/explain.py read"
        ) from None


FAKE = "torch._subclasses.fake_tensor"


def require_rehearsal() -> None:
    """Raise TorchLacks if this torch lacks a name without which a rehearsal cannot run."""
    own = ("torch._C._current_autograd_node", "torch.ops.aten.add.Tensor._schema")
    require(
        "--rehearse", f"{FAKE}.FakeTensor", f"{FAKE}.FakeTensorMode", DISPATCH_MODE, NO_MODES, *own
    )


def fake_tensors() -> Any:
    """Return the module of torch's fake tensors, with FakeTensor and FakeTensorMode."""
    return find(FAKE)


def in_meta_kernel(mode: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which fake tensors of a mode are meta tensors."""
    return find(f"{FAKE}.in_kernel_invocation_manager")(mode)


# operations that FakeTensorMode handles itself for symbolic sizes, or to choose a device: with
# integer sizes and on one device a meta kernel does the same
AS_META = (
    aten.view.default, aten.select.int, aten.slice.Tensor, aten.copy_.default,
    aten.new_empty.default, aten.new_zeros.default, aten.empty_like.default,
    aten.zeros_like.default,
)  # fmt: skip


@lru_cache(maxsize=1024)
def meta_kernel_says(func: Any) -> bool:
    """Return whether a meta kernel alone determines the result of an operation on fake tensors,
    which then depends on neither values, random numbers, nor special rules of fake tensors.
    """
    known = find("torch._subclasses.fake_impls.op_implementations_dict")
    checks = find("torch._subclasses.fake_impls.op_implementations_checks")
    has_kernel = find("torch._C._dispatch_has_computed_kernel_for_dispatch_key")
    if None in (known, checks, has_kernel, find(f"{FAKE}.in_kernel_invocation_manager")):
        return False
    tag = torch.Tag
    values = {tag.dynamic_output_shape, tag.data_dependent_output, tag.nondeterministic_seeded}
    if func.namespace != "aten" or {*values, tag.inplace_view} & {*func.tags}:
        return False
    if func.overloadpacket in (aten.lift_fresh, aten.lift_fresh_copy):
        return False
    if func not in AS_META and (func in known or any(check(func) for check, _ in checks)):
        return False
    return bool(has_kernel(func.name(), "Meta"))


COMPILER = "torch._dynamo"  # imported when a torch optimizer is created, which takes seconds

# groups, memory and files


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set a group's timeout in its options too; otherwise new_group warns that they differ."""
    with contextlib.suppress(AttributeError):
        options._timeout = timeout


def symmetric_memory() -> Any:
    """Return the module whose `empty` and `rendezvous` share GPU memory. Raises TorchLacks."""
    path = "torch.distributed._symmetric_memory"
    require("memory that GPUs share", f"{path}.empty", f"{path}.rendezvous")
    return find(path)


def nccl_record() -> Callable[..., Any] | None:
    """Return the function that dumps NCCL's record of collectives, or None."""
    return find("torch._C._distributed_c10d._dump_nccl_trace_json")


def memory_history() -> tuple[Callable[..., None], Callable[[str], None]]:
    """Return functions that record a GPU's allocations and that write them. Raises TorchLacks."""
    paths = ("torch.cuda.memory._record_memory_history", "torch.cuda.memory._dump_snapshot")
    require("--record-memory-history", *paths)
    return find(paths[0]), find(paths[1])


def storage_info() -> Callable[[str, int, int], Any]:
    """Return the class of a tensor's location in torch's distributed checkpoints: file, first byte
    and length. Raises TorchLacks.
    """
    path = "torch.distributed.checkpoint.filesystem._StorageInfo"
    require("--to-mcore", path)
    return find(path)


if __name__ == "__main__":
    print(*lacking() or [f"torch {torch.__version__} has all {len(NAMES)} names"], sep="\n")
