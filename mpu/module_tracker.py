# SPDX-License-Identifier: Apache-2.0
"""Track a model through a training step: which module runs, in which phase, on which tensors.

tools/explain.py, the rehearsal and the recorder of a step (training/run/watch/recorder.py) use it.
The trainer and the layers do not depend on it.

    forward             hooks before and after each module's forward keep a stack of names
    backward            the hook after a forward stores the module's name in the metadata of the
                        autograd nodes of its graph; the innermost module's name is kept
    weight gradients    work in the queue is wrapped with the name of the layer that put it there
    main gradients      the sink's register_grad_ready is wrapped
    file and line       from the Python stack, of which only files and line numbers are read

Collectives are events of their axis: mpu.comm.transport.Trace receives them.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from mpu import torch_private
from mpu.gradients import GradientSink, WeightGradientQueue

# kinds of events, in the order in which they occur in a micro-batch
INPUT, OUTPUT, OUTPUT_GRAD, MAIN_GRAD = "input", "output", "output gradient", "main gradient"
FORWARD, RECOMPUTE, BACKWARD, WGRAD = "forward", "recompute", "backward", "wgrad"  # phases
MARK = "weft: module"  # in the metadata of an autograd node


class Event(NamedTuple):
    """The inputs or outputs of a module, or a parameter's gradient.

    kind: one of the kinds above. name: of the module or of the parameter in the model. of: the
    module or the parameter. phase: one of the phases above. tensors: the inputs or outputs in the
    order of the call, including nested ones; the gradient of one output; the main gradient, to
    which one micro-batch has just been added.
    """

    kind: str
    name: str
    of: nn.Module | nn.Parameter
    phase: str
    tensors: tuple[Tensor, ...]


class _Running(threading.local):
    """The modules running in a thread; interleaved micro-batches have two (mpu/interleave.py).

    modules: names of those whose forward runs, outermost first. works: names of those whose weight
    gradient is being computed.
    """

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.works: list[str] = []


class ModuleTracker:
    """Tracks the modules of a model in training, from its creation until `close`.

    Like torch.utils.module_tracker, but also in deferred weight gradients and recomputation.

    readers: for each kind of event, the function to call. No events are made for a kind without a
    reader. A reader runs within the step, so it must not change a tensor. For readers of inputs and
    gradients layers materialise tensors that they would otherwise not, with the same bits. Raises
    TorchLacks if torch does not provide the running autograd node.
    """

    def __init__(
        self,
        model: nn.Module,
        queue: WeightGradientQueue,
        sink: GradientSink,
        readers: Mapping[str, Callable[[Event], None]] | None = None,
    ) -> None:
        self._node = torch_private.running_node()
        self._queue, self._sink, self._readers = queue, sink, dict(readers or {})
        self.names = {id(module): name for name, module in model.named_modules()}
        self._params = {id(param): name for name, param in model.named_parameters()}
        self._here = _Running()
        self._marked = ""  # the module of the last node that had a mark
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            if getattr(module, "output_layer", False) and module.ctx.loss_in_chunks is not None:
                continue  # it is not called: the loss in chunks uses its weight directly
            enter, leave = partial(self._enter, name), partial(self._leave, name)
            self._hooks += [
                module.register_forward_pre_hook(enter, with_kwargs=True),
                module.register_forward_hook(leave, with_kwargs=True),
            ]
        self._put, self._ready = queue.put, sink.register_grad_ready
        self._later = queue.later
        queue.put = self._noted  # type: ignore[method-assign]
        queue.later = self._noted_later  # type: ignore[method-assign]
        sink.watched = not self._readers.keys().isdisjoint((INPUT, OUTPUT_GRAD))
        if MAIN_GRAD in self._readers:
            sink.register_grad_ready = self._is_ready  # type: ignore[method-assign]

    def close(self) -> None:
        """Stop tracking; remove all hooks."""
        for hook in self._hooks:
            hook.remove()
        self._queue.put = self._put  # type: ignore[method-assign]
        self._queue.later = self._later  # type: ignore[method-assign]
        self._sink.watched = False
        if self._sink.register_grad_ready == self._is_ready:
            self._sink.register_grad_ready = self._ready  # type: ignore[method-assign]

    def running(self) -> str:
        """Return the name of the running module, or ""."""
        for names in (self._here.works, self._here.modules):
            if names:
                return names[-1]
        node = self._node()
        if node is None:
            return ""
        # a node without a mark, made by recomputation, belongs to the last module that had one
        self._marked = _marks(node).get(MARK, self._marked)
        return self._marked

    def new_action(self) -> None:
        """Forget the previous action's module: nodes after a stage's last module have no mark."""
        self._marked = ""

    @property
    def phase(self) -> str:
        """Return the current phase."""
        if self._here.works:
            return WGRAD
        if self._node() is None:
            return FORWARD
        return RECOMPUTE if self._here.modules else BACKWARD

    @property
    def in_backward(self) -> bool:
        """Return whether autograd's backward is running, including recomputation."""
        return self._node() is not None

    def _event(self, kind: str, name: str, of: nn.Module | nn.Parameter, values: Any) -> None:
        tensors = tuple(tensors_of((values,)))
        self._readers[kind](Event(kind, name, of, self.phase, tensors))

    def _enter(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._here.modules.append(name)
        if INPUT in self._readers:
            self._event(INPUT, name, module, (args, kwargs))

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        if OUTPUT in self._readers:
            self._event(OUTPUT, name, module, out)
        if OUTPUT_GRAD in self._readers:
            for x in tensors_of((out,)):
                if x.requires_grad:
                    x.register_hook(partial(self._event, OUTPUT_GRAD, name, module))
        self._here.modules.pop()
        done = {x.grad_fn for x in tensors_of((args, kwargs))} | {None}
        nodes: list[Any] = [x.grad_fn for x in tensors_of((out,))]
        while nodes:
            if (node := nodes.pop()) not in done:
                done.add(node)
                assert node is not None
                _marks(node).setdefault(MARK, name)
                nodes += [node for node, _ in node.next_functions]

    def _noted(self, work: Callable[[], None], *rest: Any, **more: Any) -> None:
        self._put(partial(self._work, self.running(), work), *rest, **more)

    def _noted_later(
        self, work: Callable[[], None], tensors: Sequence[Tensor] = ()
    ) -> Callable[[], None]:
        work = partial(self._work, self.running(), work)
        return lambda: self._put(work, tensors)

    def _work(self, name: str, work: Callable[[], None]) -> None:
        self._here.works.append(name)
        work()
        self._here.works.pop()

    def _is_ready(self, param: nn.Parameter) -> None:
        self._event(MAIN_GRAD, self._params.get(id(param), ""), param, self._sink.main_grad(param))
        self._ready(param)


def _marks(node: Node) -> dict[str, str]:
    """Return a node's metadata, which torch's type annotations declare as a method."""
    return cast(dict[str, str], node.metadata)


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among values, and in lists, tuples and dicts of them."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_of(value)
        elif isinstance(value, dict):
            found += tensors_of(value.values())
    return found


ROOT = Path(__file__).resolve().parents[1]
OURS = ("mpu", "model", "training", "pretrain_llama.py")
NOT_OURS = (
    __file__, torch_private.__file__, str(ROOT / "training" / "run" / "watch" / "recorder.py"),
)  # fmt: skip
# files that implement communication and products, which are never the site of a call
CARRIERS = ("mpu/comm/", "mpu/overlap/", "mpu/kernels/")
# files that work on behalf of a layer, which are never the site of a use
SERVANTS = (*CARRIERS, "mpu/zero/", "mpu/optim/", "mpu/gradients.py")


@cache
def path_of(file: str, fork: str = "") -> str:
    """Return a file's path in the repository, or "" if it is not part of the trainer.

    This file, the recorder and torch_private.py do not count as such. fork: the model's file, if it
    is not Weft's own; its path is returned unchanged.
    """
    if file in NOT_OURS:
        return ""
    try:
        path = Path(file).resolve().relative_to(ROOT)
    except ValueError:
        return fork if file == fork else ""
    return path.as_posix() if path.parts[0] in OURS or file == fork else ""


class Site(NamedTuple):
    """The current place in the program, as file:line; "" outside of the trainer.

    call: the innermost line outside of CARRIERS. use: the innermost line outside of SERVANTS: in a
    layer or in the code above the layers. function: the function that contains `use`.
    """

    call: str = ""
    use: str = ""
    function: str = ""


def site(fork: str = "", autograd: bool = True) -> Site:
    """Return the current site.

    autograd: if no line of a layer is on the stack inside autograd's engine, continue to the line
    that called the engine.
    """
    call = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not autograd and frame.f_code is torch.autograd.backward.__code__:
            break
        path = path_of(frame.f_code.co_filename, fork)
        if path and not path.startswith(CARRIERS):
            here = f"{path}:{frame.f_lineno}"
            call = call or here
            if not path.startswith(SERVANTS):
                return Site(call, here, frame.f_code.co_qualname)
        frame = frame.f_back
    return Site(call)
