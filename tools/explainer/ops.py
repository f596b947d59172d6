# SPDX-License-Identifier: Apache-2.0
"""Find out what runs, for tools/explain.py: which layer, forward or backward, and at which line.

forward             hooks before and after each module's forward keep a stack of names
backward            the hook after a forward writes the module's name on the autograd nodes of
                    its graph, where the name of the innermost module is kept
weight gradients    a work in the queue is wrapped with the name of the layer that put it there
file and line       the Python stack, of which only files and line numbers are read
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mpu.gradients import WeightGradientQueue
from pretrain_llama import train_step
from training.run.stop import Agreement

ROOT = Path(__file__).resolve().parents[2]
MARK = "tools/explain.py: layer"  # in the metadata of an autograd node
MATMULS = ("mm", "addmm", "linear", "mkldnn::_linear_pointwise")
COPIES = ("clone", "_to_copy")  # what they copy is still the result of another operation
ADDS = ("add", "copy")
WGRAD = "wgrad matmul"
UNWRITTEN = ("empty", "new_empty", "new_full")  # they compute nothing


def _marks(node: Node) -> dict[str, str]:
    """Return a node's metadata, which torch's own types call a method."""
    return cast(dict[str, str], node.metadata)


class Layers:
    """Follow the layers of a model that trains; `running` returns the one that runs now."""

    def __init__(self, model: nn.Module, queue: WeightGradientQueue) -> None:
        current = getattr(torch._C, "_current_autograd_node", None)
        if current is None:
            raise RuntimeError(
                f"torch {torch.__version__} does not tell which autograd node runs "
                "(torch._C._current_autograd_node): tools/explain.py needs 2.11 to 2.13"
            )
        self._node: Callable[[], Any] = current
        self.names = {id(module): name for name, module in model.named_modules()}
        self._modules: list[str] = []  # whose forward runs, outermost first
        self._works: list[str] = []  # whose weight gradient runs
        self._marked = ""  # the layer of the last node that had a mark
        for name, module in model.named_modules():
            if getattr(module, "output_layer", False) and module.ctx.loss_in_chunks is not None:
                continue  # it is not called: the loss in chunks takes its weight
            module.register_forward_pre_hook(partial(self._enter, name))
            module.register_forward_hook(partial(self._leave, name), with_kwargs=True)
        put = queue.put

        def noted(work: Callable[[], None], *rest: Any) -> None:
            put(partial(self._work, self.running(), work), *rest)

        queue.put = noted  # type: ignore[method-assign,assignment]  # only for the one step

    def running(self) -> str:
        """Return the name of the layer that runs, or ""."""
        for names in (self._works, self._modules):
            if names:
                return names[-1]
        node = self._node()
        if node is None:
            return ""
        # a node without a mark, made by recomputation, belongs to the last layer that had one
        self._marked = _marks(node).get(MARK, self._marked)
        return self._marked

    def new_action(self) -> None:
        """Forget the previous action's layer: the nodes behind a stage's output have no mark."""
        self._marked = ""

    @property
    def in_backward(self) -> bool:
        """True during backward, recomputation in it included."""
        return self._node() is not None

    @property
    def kind(self) -> str:
        """Return what a matmul computes now: a weight's gradient, an input's, or forward."""
        if self._works:
            return WGRAD
        return "dgrad matmul" if self.in_backward and not self._modules else "matmul"

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self._modules.append(name)

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        self._modules.pop()
        done = {_node_of(x) for x in tree_leaves((args, kwargs))} | {None}
        nodes: list[Any] = [_node_of(x) for x in tree_leaves(out)]
        while nodes:
            if (node := nodes.pop()) not in done:
                done.add(node)
                assert node is not None
                _marks(node).setdefault(MARK, name)
                nodes += [node for node, _ in node.next_functions]

    def _work(self, name: str, work: Callable[[], None]) -> None:
        self._works.append(name)
        work()
        self._works.pop()


def _node_of(x: Any) -> Node | None:
    return x.grad_fn if isinstance(x, Tensor) else None


@cache
def _path(file: str) -> str:
    """Return the file's path in this repository, or "" for a file that is not the trainer's."""
    try:
        path = Path(file).resolve().relative_to(ROOT)
    except ValueError:
        return ""
    own = path.parts[0] in ("mpu", "model", "training", "pretrain_llama.py")
    return path.as_posix() if own else ""


CARRIERS = ("mpu/comm/", "mpu/overlap/")  # what carries a collective is not where it is called
# what they do, they do for a layer
SERVANTS = (*CARRIERS, "mpu/zero/", "mpu/optim/", "mpu/gradients.py")
# file: the name of what it does outside of all layers
STEP = {
    _path(train_step.__code__.co_filename): "train_step",
    _path(Agreement.ask.__code__.co_filename): "agreement",
}


class Site(NamedTuple):
    """Where the program is, as file:line; "" outside of the trainer.

    call: the innermost line outside of CARRIERS. use: the innermost line outside of SERVANTS, which
    is a layer's or of the code above the layers.
    """

    call: str
    use: str

    @property
    def in_zero(self) -> bool:
        """True for a line that works on buckets."""
        return self.call.startswith(("mpu/zero/", "mpu/optim/"))

    @property
    def name(self) -> str:
        """Return what to print if no layer runs: a part of the step, or the file's name."""
        file = self.call.partition(":")[0]
        return STEP.get(file, Path(file).stem)


def site() -> Site:
    """Return the current site: walk up the Python stack, as far as autograd's engine."""
    call = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.autograd.backward.__code__:
        path = _path(frame.f_code.co_filename)
        if path and not path.startswith(CARRIERS):
            here = f"{path}:{frame.f_lineno}"
            call = call or here
            if not path.startswith(SERVANTS):
                return Site(call, here)
        frame = frame.f_back
    return Site(call, "")


class Operation(NamedTuple):
    """An operation that ran. name: without "aten::". read, written: addresses of its tensors."""

    name: str
    read: list[int]
    written: list[int]


class Operations(TorchDispatchMode):
    """Call `ran` with every operation that is not a view."""

    def __init__(self, ran: Callable[[Operation], None]) -> None:
        super().__init__()
        self.ran = ran

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation, and report it unless it is a view."""
        kwargs, schema = kwargs or {}, func._schema
        out = func(*args, **kwargs)
        if not func.is_view:
            names = (argument.name for argument in schema.arguments)
            given = dict(zip(names, args, strict=False)) | kwargs
            changed = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
            written = _memory([out, *(given.get(name) for name in changed)])
            name = schema.name.removeprefix("aten::")
            self.ran(Operation(name, _memory([args, kwargs]), written))
        return out


def _memory(values: Any) -> list[int]:
    return [memory(x) for x in tree_leaves(values) if isinstance(x, Tensor)]


def memory(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, the same for all its views."""
    return tensor.untyped_storage().data_ptr()
