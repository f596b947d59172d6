# SPDX-License-Identifier: Apache-2.0
"""Name what runs, for tools/explain.py: each operation, and what it reads and writes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from mpu.module_tracker import BACKWARD, WGRAD, Site, path_of, tensors_of
from mpu.torch_private import DispatchMode, schema
from mpu.zero import norm
from pretrain_llama import train_step
from training.run.stop import Agreement

MATMULS = ("mm", "addmm", "linear", "mkldnn::_linear_pointwise")
COPIES = ("clone", "_to_copy")  # what they copy is still the result of another operation
ADDS = ("add", "copy")
WGRAD_MATMUL = "wgrad matmul"
# they compute nothing; the tensor is written by compiled code, such as a norm's
UNWRITTEN = ("empty", "new_empty", "new_full")


# file: the name of what it does outside of all layers
STEP = {
    path_of(train_step.__code__.co_filename): "train_step",
    path_of(Agreement.ask.__code__.co_filename): "agreement",
    path_of(norm.__file__): "gradient norm",
}


def name_of(here: Site) -> str:
    """Return what to print if no layer runs: a part of the step, or the file's name."""
    file = here.call.partition(":")[0]
    return STEP.get(file, Path(file).stem)


def matmul_in(phase: str) -> str:
    """Return what a matmul computes in a phase: a weight's gradient, an input's, or forward."""
    return {WGRAD: WGRAD_MATMUL, BACKWARD: "dgrad matmul"}.get(phase, "matmul")


class Operation(NamedTuple):
    """An operation that ran. name: without "aten::". read, written: addresses of its tensors."""

    name: str
    read: list[int]
    written: list[int]


class Operations(DispatchMode):
    """Call `ran` with every operation that is not a view."""

    def __init__(self, ran: Callable[[Operation], None]) -> None:
        super().__init__()
        self.ran = ran

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and report it unless it is a view."""
        kwargs, takes = kwargs or {}, schema(func)
        out = func(*args, **kwargs)
        if not func.is_view:
            names = (argument.name for argument in takes.arguments)
            given = dict(zip(names, args, strict=False)) | kwargs
            changed = [a.name for a in takes.arguments if a.alias_info and a.alias_info.is_write]
            written = _memory([out, *(given.get(name) for name in changed)])
            name = takes.name.removeprefix("aten::")
            self.ran(Operation(name, _memory([args, kwargs]), written))
        return out


def _memory(values: Any) -> list[int]:
    return [memory(x) for x in tensors_of((values,))]


def memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, the same for all its views."""
    return tensor.untyped_storage().data_ptr()
