# SPDX-License-Identifier: Apache-2.0
"""Replace torch.distributed over NCCL by communicators whose transfers are recorded.

A group has a communicator with a stream of its own. A message outside of a batch uses, as in torch,
a communicator of its pair of ranks in that group. No data is sent: tensors are fake.
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

URGENT = "a stream of high priority"  # replaces NCCL's options object


class Communicator:
    """A communicator: its ranks and its stream. name: equal on all its ranks.

    urgent: the stream has high priority.
    """

    def __init__(
        self, ranks: tuple[int, ...], stream: int, name: str, urgent: bool = False
    ) -> None:
        self.ranks, self.stream, self.name, self.urgent = ranks, stream, name, urgent


class Group:
    """A process group. number: among the groups of these ranks. urgent: as in Communicator."""

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
        """Return the number of ranks."""
        return len(self.ranks)


class P2POp(NamedTuple):
    """Replaces dist.P2POp."""

    op: Any
    tensor: Tensor
    peer: int
    group: Any = None


class Work:
    """Replaces torch's Work of a transfer. `wait` blocks the current stream, as NCCL's does.

    torch's own keeps the tensors alive until the wait. This one does not: Weft's Handle must.
    """

    def __init__(self, recorder: Recorder, transfer: Transfer) -> None:
        self.recorder, self.transfer = recorder, transfer.id
        self.uses = {*transfer.read, *transfer.written}
        self._polled = False

    def wait(self, timeout: Any = None) -> bool:
        """Make the current stream wait for the transfer."""
        self.recorder.wait(self.recorder.stream, transfer=self.transfer)
        return True

    def is_completed(self) -> bool:
        """Return whether the transfer is complete: True from the second call on."""
        self._polled, polled = True, self._polled
        if polled:
            self.recorder.polled(self.transfer)
        return polled


class KeptHandle(Handle):
    """A Handle that checks that it keeps the tensors of its transfers until their end."""

    def __init__(self, recorder: Recorder, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.recorder = recorder

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Record a finding if tensors are not kept."""
        recorder = self.recorder
        kept = {recorder.number(x) for x in self.keep}
        for one in getattr(self.work, "works", [self.work]):
            if isinstance(one, Work) and not one.uses <= kept:
                place, *lines = recorder.lines()
                what = f"a tensor of the {self.what} is freed before the wait"
                recorder.found.append(Finding("keep", place, what, "", tuple(lines)))
        super().__exit__(kind, error, trace)


class Distributed:
    """Replacements of the functions of torch.distributed that mpu calls.

    answers: maps bytes of this rank to those of each rank of an axis, or to None if they are equal.
    exchange: exchanges bytes between processes if all ranks are rehearsed (world.py), else None.
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
        """Install the replacements."""
        self.patches = patches
        for name in (
            "init_process_group", "new_group", "is_initialized", "destroy_process_group",
            "all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single",
            "isend", "irecv", "send", "recv", "batch_isend_irecv", "get_rank",
        ):  # fmt: skip
            patches.replace(dist, name, getattr(self, name))
        # only of this transport: MetaTransport has its own (mpu/comm/meta.py)
        patches.replace(collectives.ProcessGroupTransport, "gather_bytes", self.gather_bytes)
        patches.replace(transport, "Handle", partial(KeptHandle, self.recorder))
        patches.replace(collectives, "_all_gather", self.all_gather_into_tensor)
        patches.replace(collectives, "_reduce_scatter", self.reduce_scatter_tensor)
        patches.replace(dist, "P2POp", P2POp)
        patches.replace(grid, "group_options", lambda timeout, urgent, settings: URGENT)

    def init_process_group(
        self, backend: str, store: Any = None, rank: int = 0, world_size: int = 1, **kwargs: Any
    ) -> None:
        """Make the world's group."""
        from torch.distributed.distributed_c10d import GroupMember

        self.patches.replace(GroupMember, "WORLD", self._group(tuple(range(world_size))))

    def new_group(
        self, ranks: Sequence[int] | None = None, pg_options: Any = None, **kwargs: Any
    ) -> Group:
        """Make a group; with URGENT as its options, its stream has high priority."""
        world: Any = dist.group.WORLD
        return self._group(tuple(ranks) if ranks is not None else world.ranks, pg_options == URGENT)

    def _group(self, ranks: tuple[int, ...], urgent: bool = False) -> Group:
        self.groups[ranks] += 1
        return Group(ranks, self.groups[ranks] - 1, urgent)

    def is_initialized(self) -> bool:
        """Return True."""
        return True

    def destroy_process_group(self, group: Any = None) -> None:
        """Do nothing."""

    def get_rank(self, group: Any = None) -> int:
        """Return this rank."""
        return self.rank

    def all_reduce(
        self, tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Any:
        """Record an all-reduce."""
        return self._collective("all_reduce", group, (tensor,), (tensor,), tensor, async_op, op=op)

    def all_gather_into_tensor(
        self, output: Tensor, input: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Record an all-gather."""
        return self._collective("all_gather", group, (input,), (output,), input, async_op)

    def reduce_scatter_tensor(
        self, output: Tensor, input: Tensor, op: Any = None, group: Any = None,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Record a reduce-scatter."""
        verb = "reduce_scatter"
        return self._collective(verb, group, (input,), (output,), input, async_op, op=op)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None, group: Any = None, async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Record an all-to-all. input_split_sizes: rows for each rank; None: equal parts."""
        sent_rows, rows = None, input_split_sizes
        if rows is not None:
            sent_rows = sum(rows) - rows[self._of(group).ranks.index(self.rank)]
        uses = ((input,), (output,), input)
        return self._collective("all_to_all", group, *uses, async_op, sent_rows=sent_rows)

    def gather_bytes(self, data: bytes, axis: Any, device: Any) -> list[bytes]:
        """Return the bytes of each rank; this rank's for all if the others' are not known."""
        if self.exchange is not None:
            return list(self.exchange.gather(data, axis))
        answers = self.answers(data, axis) if self.answers is not None else None
        return answers if answers is not None else [data] * axis.size

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Work:
        """Record the start of a send."""
        return self._message("send", tensor, dst, group)

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Work:
        """Record the start of a receive."""
        return self._message("receive", tensor, src, group)

    def send(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> None:
        """Record a send and wait for it."""
        self.isend(tensor, dst, group).wait()

    def recv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> None:
        """Record a receive and wait for it."""
        self.irecv(tensor, src, group).wait()

    def batch_isend_irecv(self, ops: Sequence[P2POp]) -> list[Work]:
        """Record a batch of messages, on the group's own communicator."""
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
            if not x.is_contiguous():  # as ProcessGroupNCCL checks a collective's tensors
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
        if not tensor.is_contiguous():  # torch warns, and NCCL sends the bytes in memory order
            lines = self.recorder.lines()
            what = f"{verb} of {tuple(tensor.shape)} with strides {tensor.stride()}: "
            what += "NCCL sends its bytes in memory order"
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
                    f"NCCL cannot send a tensor in host memory ({verb} over {self.trace_axis})"
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
        """Record that the collective traced last goes through shared memory, without a stream.

        It is ordered like other work of the computing stream.
        """
        verb, ranks, kept = self.starts
        tensor = kept()
        over = Communicator(ranks, 0, f"shared memory of {ranks}")
        self._start(verb, over, -1, (tensor,), (), tensor)

    # hook of the grid's axes, called with the axis and the label before each transfer

    def issued(
        self, verb: str, axis: Any, tensor: Tensor, sent: int, is_async: bool, label: Any
    ) -> None:
        """Store the axis and the label of the transfer that is about to start."""
        self.trace_axis, self.trace_label, self.trace_async = axis.name, "", is_async
        self.starts = verb, axis.ranks, weakref.ref(tensor)  # weak: must not keep it alive
        if label is not None:
            who = label.who if isinstance(label.who, str) else type(label.who).__name__
            if isinstance(label.who, Payload):  # the same at both ends
                who = f"{label.who.kind} of stage {label.who.stage}, {label.who.micro_batch}"
            self.trace_label = f"{who}: {label.phase}"
