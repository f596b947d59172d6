# SPDX-License-Identifier: Apache-2.0
"""Name each operation for tools/explain.py, and the memory that it reads and writes."""

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
COPIES = ("clone", "_to_copy")  # a copy is attributed to the operation that made its source
ADDS = ("add", "copy")
WGRAD_MATMUL = "wgrad matmul"
# allocations; compiled code, such as a norm's, writes the tensor
UNWRITTEN = ("empty", "new_empty", "new_full")


# file -> the name of its part of a step, outside of all layers
STEP = {
    path_of(train_step.__code__.co_filename): "train_step",
    path_of(Agreement.ask.__code__.co_filename): "agreement",
    path_of(norm.__file__): "gradient norm",
}


def name_of(here: Site) -> str:
    """Return the printed name of a site outside of layers: a part of the step, or the file."""
    file = here.call.partition(":")[0]
    return STEP.get(file, Path(file).stem)


def matmul_in(phase: str) -> str:
    """Return the name of a matmul in a phase: of a weight's or an input's gradient, or forward."""
    return {WGRAD: WGRAD_MATMUL, BACKWARD: "dgrad matmul"}.get(phase, "matmul")


class Operation(NamedTuple):
    """An operation. name: without "aten::". read, written: addresses of its tensors' storages."""

    name: str
    read: list[int]
    written: list[int]


class Operations(DispatchMode):
    """Calls `ran` with every operation that is not a view."""

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
