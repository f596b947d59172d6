# SPDX-License-Identifier: Apache-2.0
"""Stand in for torch.distributed over NCCL: communicators whose transfers a Recorder sees.

A group has a communicator with a stream of its own. A message that is not part of a batch has,
as in torch, a communicator for its pair of ranks in that group. Nothing arrives: tensors are fake.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from forecast.rehearsal.events import Transfer
from forecast.rehearsal.order import Finding
from forecast.rehearsal.patches import Patches
from forecast.rehearsal.record import Recorder
from mpu import grid
from mpu.comm import collectives, transport
from mpu.comm.transport import Handle, sent_bytes
from mpu.pipeline.engine import Payload

URGENT = "a stream of high priority"  # in place of NCCL's options


class Communicator:
    """The ranks that share one, and its stream. name: the same on all of them.

    urgent: the stream has high priority.
    """

    def __init__(
        self, ranks: tuple[int, ...], stream: int, name: str, urgent: bool = False
    ) -> None:
        self.ranks, self.stream, self.name, self.urgent = ranks, stream, name, urgent


class Group:
    """A process group. number: counts the groups of these ranks. urgent: as a Communicator's."""

    def __init__(self, ranks: tuple[int, ...], number: int, urgent: bool = False) -> None:
        self.ranks, self.number, self.urgent = ranks, number, urgent
        self.pairs: dict[tuple[int, ...], Communicator] = {}
        self.collectives: Communicator | None = None

    def communicator(self, recorder: Recorder, pair: tuple[int, ...] = ()) -> Communicator:
        """Return the group's own communicator, or that of a pair in it."""
        name = f"{self.number} of {self.ranks} {pair}"
        if pair and pair not in self.pairs:
            self.pairs[pair] = Communicator(pair, recorder.new_stream(), name, self.urgent)
        elif not pair and self.collectives is None:
            self.collectives = Communicator(self.ranks, recorder.new_stream(), name, self.urgent)
        found = self.pairs[pair] if pair else self.collectives
        assert found is not None
        return found

    def size(self) -> int:
        """Return how many ranks it has."""
        return len(self.ranks)


class P2POp(NamedTuple):
    """dist.P2POp."""

    op: Any
    tensor: Tensor
    peer: int
    group: Any = None


class Work:
    """What a start returns. `wait` orders the current stream, as NCCL's does.

    torch's own keeps the tensors until then, this one does not: that is for Weft's Handle to do.
    """

    def __init__(self, recorder: Recorder, transfer: Transfer) -> None:
        self.recorder, self.transfer = recorder, transfer.id
        self.uses = {*transfer.read, *transfer.written}
        self._polled = False

    def wait(self, timeout: Any = None) -> bool:
        """Let the current stream wait."""
        self.recorder.wait(self.recorder.stream, transfer=self.transfer)
        return True

    def is_completed(self) -> bool:
        """Return whether the transfer is over: from the second question on."""
        self._polled, polled = True, self._polled
        if polled:
            self.recorder.polled(self.transfer)
        return polled


class KeptHandle(Handle):
    """A Handle that must keep the tensors of its transfers until they are over."""

    def __init__(self, recorder: Recorder, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.recorder = recorder

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Note the tensors that are not kept."""
        recorder = self.recorder
        kept = {recorder.number(x) for x in self.keep}
        for one in getattr(self.work, "works", [self.work]):
            if isinstance(one, Work) and not one.uses <= kept:
                place, *lines = recorder.lines()
                what = f"a tensor of the {self.what} is freed before the wait"
                recorder.found.append(Finding("keep", place, what, "", tuple(lines)))
        super().__exit__(kind, error, trace)


class Distributed:
    """The functions of torch.distributed that mpu calls.

    answers: what each rank of an axis sends where this one sends some bytes; None: the same.
    exchange: sends for real, where all ranks are rehearsed (world.py).
    """

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self.recorder, self.rank = recorder, rank
        self.groups: Counter[tuple[int, ...]] = Counter()
        self.batches = 0
        self.batch = -1
        self.trace_axis, self.trace_label, self.trace_async = "", "", False
        self.exchange: Any = None
        self.starts: Any = None
        self.answers: Callable[[bytes, Any], list[bytes] | None] | None = None

    def install(self, patches: Patches) -> None:
        """Replace them."""
        self.patches = patches
        for name in (
            "init_process_group", "new_group", "is_initialized", "destroy_process_group",
            "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
            "isend", "irecv", "send", "recv", "batch_isend_irecv", "get_rank",
        ):  # fmt: skip
            patches.replace(dist, name, getattr(self, name))
        # of this transport alone: a recording's has its own (mpu/comm/meta.py)
        patches.replace(collectives.ProcessGroupTransport, "gather_bytes", self.gather_bytes)
        patches.replace(transport, "Handle", partial(KeptHandle, self.recorder))
        patches.replace(collectives, "_all_gather", self.all_gather_into_tensor)
        patches.replace(collectives, "_reduce_scatter", self.reduce_scatter_tensor)
        patches.replace(dist, "P2POp", P2POp)
        patches.replace(grid, "group_options", lambda timeout, urgent, settings: URGENT)

    def init_process_group(
        self, backend: str, store: Any = None, rank: int = 0, world_size: int = 1, **kwargs: Any
    ) -> None:
        """Make the group of the world."""
        from torch.distributed.distributed_c10d import GroupMember

        self.patches.replace(GroupMember, "WORLD", self._group(tuple(range(world_size))))

    def new_group(
        self, ranks: Sequence[int] | None = None, pg_options: Any = None, **kwargs: Any
    ) -> Group:
        """Make a group; with options, one whose stream has high priority."""
        world: Any = dist.group.WORLD
        return self._group(tuple(ranks) if ranks is not None else world.ranks, pg_options == URGENT)

    def _group(self, ranks: tuple[int, ...], urgent: bool = False) -> Group:
        self.groups[ranks] += 1
        return Group(ranks, self.groups[ranks] - 1, urgent)

    def is_initialized(self) -> bool:
        """Return that the world is there."""
        return True

    def destroy_process_group(self, group: Any = None) -> None:
        """Leave."""

    def get_rank(self, group: Any = None) -> int:
        """Return this rank."""
        return self.rank

    def all_reduce(
        self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        """Note an all-reduce."""
        return self._collective("all_reduce", group, (tensor,), (tensor,), tensor, async_op, op=op)

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Note an all-gather."""
        return self._collective("all_gather", group, (input,), (output,), input, async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = None, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Note a reduce-scatter."""
        verb = "reduce_scatter"
        return self._collective(verb, group, (input,), (output,), input, async_op, op=op)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, group: Any = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Note an all-to-all. input_split_sizes: of an uneven one, the rows for each rank."""
        sent_rows, rows = None, input_split_sizes
        if rows is not None:
            sent_rows = sum(rows) - rows[self._of(group).ranks.index(self.rank)]
        uses = ((input,), (output,), input)
        return self._collective("all_to_all", group, *uses, async_op, sent_rows=sent_rows)

    def gather_bytes(self, data: bytes, axis: Any, device: Any) -> list[bytes]:
        """Return the bytes of each rank, or this one's for all."""
        if self.exchange is not None:
            return list(self.exchange.gather(data, axis))
        answers = self.answers(data, axis) if self.answers is not None else None
        return answers if answers is not None else [data] * axis.size

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Work:
        """Note a message that leaves."""
        return self._message("send", tensor, dst, group)

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Work:
        """Note a message that comes."""
        return self._message("receive", tensor, src, group)

    def send(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
        """Note a message, and wait."""
        self.isend(tensor, dst, group).wait()

    def recv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> None:
        """Note a message, and wait."""
        self.irecv(tensor, src, group).wait()

    def batch_isend_irecv(self, ops: Sequence[P2POp]) -> list[Work]:
        """Note messages that start together, on the group's own communicator."""
        with self._batched():
            return [op.op(op.tensor, op.peer, op.group) for op in ops]

    @contextmanager
    def _batched(self) -> Any:
        self.batch = self.batches
        self.batches += 1
        try:
            yield
        finally:
            self.batch = -1

    def _of(self, group: Any) -> Group:
        found: Any = group if group is not None else dist.group.WORLD
        return found

    def _collective(
        self, verb: str, group: Any, read: tuple[Tensor, ...], written: tuple[Tensor, ...],
        tensor: Tensor, async_op: bool, op: Any = None, sent_rows: int | None = None,
    ) -> Work | None:  # fmt: skip
        group = self._of(group)
        name = str(op).removeprefix("RedOpType.") if op is not None else ""
        over = group.communicator(self.recorder)
        for x in (*read, *written):
            if not x.is_contiguous():  # as ProcessGroupNCCL's check of a collective's tensors
                made = self.recorder.birthplace(x)
                what = f"NCCL: Tensors must be contiguous ({verb} over {self.trace_axis} of "
                what += f"{tuple(x.shape)} with strides {x.stride()}"
                raise RuntimeError(what + (f", made at {made})" if made else ")"))
        work = self._start(verb, over, -1, read, written, tensor, op=name, sent_rows=sent_rows)
        if async_op:
            return work
        work.wait()
        return None

    def _message(self, verb: str, tensor: Tensor, peer: int, group: Any) -> Work:
        group = self._of(group)
        if peer == self.rank or peer not in group.ranks:
            raise RuntimeError(f"rank {self.rank}: {verb} with rank {peer} in {group.ranks}")
        pair = () if self.batch >= 0 else tuple(sorted((self.rank, peer)))
        over = group.communicator(self.recorder, pair)
        read, written = ((tensor,), ()) if verb == "send" else ((), (tensor,))
        if not tensor.is_contiguous():  # NCCL carries the bytes in memory's order, and warns
            lines = self.recorder.lines()
            what = (
                f"{verb} of {tuple(tensor.shape)} with strides {tensor.stride()}: NCCL takes its "
            )
            what += "bytes in the order of memory"
            born = self.recorder.birthplace(tensor)
            self.recorder.found.append(Finding("layout", lines[0], what, born, (born, *lines)))
        return self._start(verb, over, peer, read, written, tensor)

    def _start(
        self, verb: str, over: Communicator, peer: int, read: tuple[Tensor, ...],
        written: tuple[Tensor, ...], tensor: Tensor, op: str = "", sent_rows: int | None = None,
    ) -> Work:  # fmt: skip
        recorder = self.recorder
        for x in (*read, *written):
            if x.device.type != recorder.device:
                made = recorder.birthplace(x)
                raise RuntimeError(
                    f"NCCL carries no tensor in host memory ({verb} over {self.trace_axis})"
                    + (f"; it was made at {made}" if made else "")
                )
        where = recorder.where()
        reads, writes, spans = recorder.uses(read, written, where, over.stream)
        recorder.chain()
        sent = sent_bytes(verb, tensor, len(over.ranks), sent_rows)
        transfer = recorder.transfer(
            verb=verb,
            axis=self.trace_axis,
            group=over.ranks,
            peer=peer,
            bytes=tensor.numel() * tensor.element_size(),
            sent=sent,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            stream=over.stream,
            origin=recorder.stream,
            read=reads,
            written=writes,
            batch=self.batch,
            label=self.trace_label,
            spans=spans,
            op=op,
            communicator=over.name,
            urgent=over.urgent,
            is_async=self.trace_async,
        )
        return Work(recorder, transfer)

    def through_memory(self) -> None:
        """Note that what was just traced goes through memory, on no stream of its own.

        Its ranks write and read there in the order of their own work.
        """
        verb, ranks, kept = self.starts
        tensor = kept()
        over = Communicator(ranks, 0, f"shared memory of {ranks}")
        self._start(verb, over, -1, (tensor,), (), tensor)

    # a trace of the grid's axes: it names the axis and the label of what is about to start

    def issued(
        self, verb: str, axis: Any, tensor: Tensor, sent: int, is_async: bool, label: Any
    ) -> None:
        """Keep who starts the next transfer, and on which axis."""
        self.trace_axis, self.trace_label, self.trace_async = axis.name, "", is_async
        self.starts = verb, axis.ranks, weakref.ref(tensor)  # which may live no longer for this
        if label is not None:
            who = label.who if isinstance(label.who, str) else type(label.who).__name__
            if isinstance(label.who, Payload):  # the same at both ends
                who = f"{label.who.kind} of stage {label.who.stage}, {label.who.micro_batch}"
            self.trace_label = f"{who}: {label.phase}"
