# SPDX-License-Identifier: Apache-2.0
"""The rehearsal's clock against hand-made records whose times are known."""

import json

import pytest

from forecast.rehearsal.clock import time_record
from forecast.rehearsal.events import Action, Call, Event, HostWait, Launch, Record, Transfer, Wait
from forecast.rehearsal.roofline import matmul_of as product_seconds
from forecast.rehearsal.time_report import as_json, chrome_trace, lines
from tests.forecast.rehearsal.clock_device import HERE, device, gather, kernel, matmul


def test_kernels_of_a_stream_run_one_after_another() -> None:
    timing = time_record([kernel(1), kernel(2)], device())
    assert timing.step_seconds == 3
    assert [(s.begin, s.end) for s in timing.spans] == [(0, 1), (1, 3)]
    assert timing.exposed_seconds == {} and timing.host_seconds == 0


def test_streams_run_side_by_side_until_one_waits_for_an_event() -> None:
    events: list[Event] = [kernel(2, 3), Record(7, 3, ""), kernel(1), Wait(7, 0, ""), kernel(1)]
    timing = time_record(events, device())
    assert [(s.stream, s.begin, s.end) for s in timing.spans] == [(3, 0, 2), (0, 0, 1), (0, 2, 3)]


def test_a_transfer_waits_for_what_its_origin_was_asked_before() -> None:
    timing = time_record([kernel(2), gather(1, 1), kernel(3)], device())
    assert [(s.begin, s.end) for s in timing.spans] == [(0, 2), (2, 3), (2, 5)]
    assert timing.exposed_seconds == {}


def test_transfers_of_a_communicator_run_in_order_and_those_of_a_batch_together() -> None:
    apart = time_record([gather(1, 1), gather(2, 2)], device())
    assert [(s.begin, s.end) for s in apart.spans] == [(0, 1), (1, 3)]
    together = time_record([gather(1, 1, batch=5), gather(2, 2, batch=5)], device())
    assert [(s.begin, s.end) for s in together.spans] == [(0, 1), (0, 2)]


def test_only_what_nothing_hides_is_exposed_and_counts_for_its_axis() -> None:
    events: list[Event] = [
        gather(1, 3, "tp"), kernel(1), Wait(-1, 0, "", 1), kernel(1),
        gather(2, 2, "dp_cp"), kernel(4), Wait(-1, 0, "", 2), kernel(1),
    ]  # fmt: skip
    timing = time_record(events, device())
    assert timing.step_seconds == 3 + 1 + 4 + 1
    assert timing.exposed_seconds == {"tp": 2}
    assert timing.busy_seconds == {"passes": 7}


def test_two_waits_in_a_row_count_each_for_its_axis() -> None:
    """A kernel needs the gather over tp, which needs the exchange over cp."""
    events: list[Event] = [
        kernel(1), gather(1, 3, "cp"), Wait(-1, 0, "", 1), gather(2, 2, "tp"), Wait(-1, 0, "", 2),
        kernel(1),
    ]  # fmt: skip
    timing = time_record(events, device())
    assert timing.step_seconds == 1 + 3 + 2 + 1
    assert timing.exposed_seconds == {"cp": 3, "tp": 2}
    assert time_record(events[:-1], device()).exposed_seconds == {"cp": 3, "tp": 2}


def test_a_kernel_behind_a_transfer_is_waited_for_as_the_transfer_is() -> None:
    """A stream waits for a transfer, casts its result, and the computing stream waits for that."""
    events: list[Event] = [
        gather(1, 3, "dp_cp"), Wait(-1, 2, "", 1), kernel(1, 2), Record(7, 2, ""), kernel(1),
        Wait(7, 0, ""), kernel(1),
    ]  # fmt: skip
    timing = time_record(events, device())
    assert timing.step_seconds == 3 + 1 + 1
    assert timing.exposed_seconds == {"dp_cp": 3} and timing.busy_seconds == {"passes": 2}


def test_a_transfer_that_ends_after_all_else_is_exposed() -> None:
    timing = time_record([kernel(1), gather(1, 5, "dp_cp")], device())
    assert timing.step_seconds == 6 and timing.exposed_seconds == {"dp_cp": 5}
    waits = [kernel(1), gather(1, 5, "dp_cp"), Wait(-1, 0, "", 1), HostWait(-1, 0, "", HERE)]
    timing = time_record([*waits, gather(2, 1, "world")], device())
    assert timing.exposed_seconds == {"dp_cp": 5, "world": 1}
    assert timing.step_seconds == 7 and timing.busy_seconds == {"passes": 1}


def test_a_slow_host_keeps_the_device_waiting() -> None:
    timing = time_record([kernel(1), kernel(1), kernel(1)], device(launch_seconds=3))
    assert timing.step_seconds == 10
    assert timing.host_seconds == 3 + 2 + 2 and timing.busy_seconds == {"passes": 3}
    assert timing.launch_bound_share == 0.7
    assert timing.bound_by == "host" and timing.bound_seconds == 9


def test_what_the_host_alone_would_delay_is_not_exposed() -> None:
    events: list[Event] = [kernel(1), gather(1, 2), Wait(-1, 0, "", 1), kernel(1)]
    timing = time_record(events, device(launch_seconds=4))  # the transfer ends before the launch
    assert timing.exposed_seconds == {} and timing.step_seconds == 9


def test_the_host_waits_for_an_event_a_stream_or_the_device() -> None:
    for wait in (HostWait(3, 0, "", HERE), HostWait(-1, 0, "", HERE), HostWait(-1, -1, "", HERE)):
        events: list[Event] = [kernel(5), Record(3, 0, ""), wait, kernel(1)]
        assert time_record(events, device(launch_seconds=1)).step_seconds == 1 + 5 + 1 + 1


def test_a_host_that_waits_for_a_transfer_exposes_it() -> None:
    events: list[Event] = [gather(1, 4), HostWait(-1, 1, "", HERE), kernel(1)]
    timing = time_record(events, device())
    assert timing.step_seconds == 5 and timing.exposed_seconds == {"tp": 4}


def test_a_matmul_beside_a_collective_has_the_sms_that_it_leaves() -> None:
    slow = device(collective_sms=5)
    assert time_record([gather(1, 2), matmul(3)], slow).step_seconds == 4  # 1 of 3 done in 2
    assert time_record([gather(1, 9), matmul(3)], slow).step_seconds == 9
    assert time_record([gather(1, 9), matmul(3)], slow).spans[1].end == 6
    assert time_record([gather(1, 2), kernel(3)], slow).step_seconds == 3  # no matmul


def test_a_collective_of_equal_priority_gets_its_sms_in_the_tail_of_a_kernel() -> None:
    """The kernel needs no event, so it is there first; what computes next is there later."""
    for urgent, begin, end in ((True, 1, 3), (False, 4, 6)):
        events: list[Event] = [kernel(1), gather(1, 2, urgent=urgent), kernel(3), kernel(3)]
        spans = {s.name: s for s in time_record(events, device()).spans}
        assert spans["all_gather tp 20"][2:4] == (begin, end)
    events = [kernel(1), gather(1, 2, urgent=False), Wait(-1, 0, "", 1), kernel(3)]
    assert time_record(events, device()).step_seconds == 6  # nothing computes meanwhile
    late = [kernel(1), gather(1, 2, urgent=False), kernel(3), kernel(3)]
    slow = time_record(late, device(launch_seconds=2, transfer_seconds=9))  # the host: both late
    assert {s.name: s.begin for s in slow.spans}["all_gather tp 20"] == 11


def test_collectives_of_equal_priority_queue_in_their_communicator_s_order() -> None:
    events: list[Event] = [
        kernel(1), gather(1, 1, urgent=False), gather(2, 2, urgent=False), kernel(3), kernel(2),
        Wait(-1, 0, "", 2), kernel(1),
    ]  # fmt: skip
    timing = time_record(events, device())
    begins = [s.begin for s in timing.spans if s.stream == 1]
    assert begins == [4, 6]  # the second is ready at 5, beside the next kernel
    assert timing.step_seconds == 9 and timing.exposed_seconds == {"tp": 2}


def test_a_collective_that_another_stream_calls_queues_behind_what_computes_then() -> None:
    events: list[Event] = [kernel(2), kernel(3), kernel(1, 3), gather(1, 1, urgent=False, origin=3)]
    spans = {s.name: s.begin for s in time_record(events, device()).spans}
    assert spans["all_gather tp 10"] == 2


def test_a_matmul_whose_last_wave_leaves_sms_has_a_tail() -> None:
    fast = device(bandwidth=1e9, tile_cost=1e9, collective_sms=4)
    # 10 tiles of 10 SMs; 13 in eighths of k, of which the last wave has 4
    full, part = (product_seconds(fast, 2, n, 64, "bfloat16") for n in (20, 26))
    assert full.tail == 0 and 0 < part.tail < part.seconds
    shapes = ((2, 64), (64, 26), (2, 26))
    product = Launch("aten::mm", 0, shapes, "bfloat16", (), (), 0, 1.0, HERE)
    events: list[Event] = [gather(1, 1, urgent=False), product]
    begin = {s.name: s.begin for s in time_record(events, fast).spans}["all_gather tp 10"]
    assert begin == pytest.approx(part.seconds - part.tail)


def test_each_kind_of_call_costs_the_host_its_own_number() -> None:
    costs = device(
        launch_seconds=1, function_seconds=10, triton_seconds=100, triton_argument_seconds=1000,
        message_seconds=1e4, transfer_seconds=1e5,
    )  # fmt: skip
    triton = kernel(0)._replace(op="triton::rope_kernel", arguments=3)
    send = gather(1, 0)._replace(verb="send", group=(0, 1), peer=1)
    events: list[Event] = [kernel(0), Call("_Rope"), triton, send, gather(2, 0)]
    assert time_record(events, costs).bounds["host"] == 1 + 10 + 3100 + 1e4 + 1e5
    pair: list[Event] = [send._replace(batch=-7), send._replace(verb="receive", id=3, batch=-7)]
    assert time_record(pair, costs).bounds["host"] == 1e4  # one call


def test_bounds_are_what_each_resource_alone_would_need() -> None:
    timing = time_record([kernel(2), matmul(3), gather(1, 1)], device(), flops=1500)
    assert timing.bounds == {"host": 0, "memory": 2, "matmul": 3, "node": 1}
    assert (timing.bound_by, timing.bound_seconds) == ("matmul", 3)
    assert timing.mfu == pytest.approx(1500 / (timing.step_seconds * 1000))


def test_only_the_last_iteration_is_the_step() -> None:
    words = ("F chunk 0 micro-batch 0 in stage 0 of iteration {}", "the update of iteration {}")
    events: list[Event] = []
    for iteration, seconds in ((1, 9), (2, 3)):
        for word in words:
            events += [Action(word.format(iteration)), kernel(seconds)]
    timing = time_record(events, device())
    assert timing.step_seconds == 6 and timing.bounds["memory"] == 6
    assert [a.end - a.begin for a in timing.actions] == [9, 9, 3, 3]


def test_what_was_recorded_before_the_step_is_over() -> None:
    events: list[Event] = [Wait(99, 0, ""), Wait(-1, 0, "", 98), kernel(1)]
    assert time_record(events, device()).step_seconds == 1


def test_a_timing_is_told_as_json_as_text_and_as_a_trace() -> None:
    action = "F chunk 0 micro-batch 0 in stage 0 of iteration 1"
    events: list[Event] = [Action(action), gather(1, 3), Wait(-1, 0, "", 1), kernel(1)]
    timing = time_record(events, device(), flops=1000)
    told = as_json(timing)
    assert json.loads(json.dumps(told)) == told
    assert told["step_seconds"] == 4 and told["exposed_seconds"] == {"tp": 3}
    assert told["bound_seconds"] == 3 and told["bound_by"] == "node" and told["mfu"] == 0.25
    assert lines(timing, device())[0] == "4000.0 ms a step on round, MFU 25.0 %"
    assert "exposed: tp 3000.0 ms, 75.0 %" in lines(timing, device())
    trace = chrome_trace(timing)["traceEvents"]
    drawn = {(e["name"], e["tid"], e["ts"], e["dur"]) for e in trace if e["ph"] == "X"}
    assert drawn == {("all_gather tp 30", 1, 0, 3e6), ("add", 0, 3e6, 1e6), (action, -1, 0, 4e6)}


def test_a_message_costs_its_sender_the_link_between_the_two() -> None:
    def send(peer: int) -> Transfer:
        return Transfer(1, "send", "pp", (0, 3, 6), peer, 0, 20, 20, "bfloat16", (), 2, 0, (), (),
                        -1, "", HERE)  # fmt: skip

    assert time_record([send(3)], device(), rank=0).step_seconds == 2
    assert time_record([send(6)], device(), rank=0).step_seconds == 20
    assert time_record([send(6)], device(), rank=5).step_seconds == 2
    assert time_record([send(3)._replace(verb="receive")], device()).step_seconds == 0
