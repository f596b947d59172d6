# SPDX-License-Identifier: Apache-2.0
"""Write a timing as JSON's types, as lines of text, and as a trace for Chrome and Perfetto."""

from typing import Any

from forecast.device_file import Device
from forecast.rehearsal.clock import Timing

NAMES = {0: "compute"}  # of streams


def as_json(timing: Timing, other: Timing | None = None) -> dict[str, Any]:
    """Return the contents of `time` in the rehearsal's report; all times in seconds.

    other: the timing with the device file's other values. "range" has the shorter step first.
    """
    ends = sorted([timing, other or timing], key=lambda one: one.step_seconds)
    return {
        "step_seconds": timing.step_seconds,
        "mfu": timing.mfu,
        "range": [{"step_seconds": one.step_seconds, "mfu": one.mfu} for one in ends],
        "busy_seconds": timing.busy_seconds,
        "exposed_seconds": timing.exposed_seconds,
        "host_seconds": timing.host_seconds,
        "bound_seconds": timing.bound_seconds,
        "bound_by": timing.bound_by,
        "bounds": timing.bounds,
        "launch_bound_share": timing.launch_bound_share,
    }


def lines(timing: Timing, device: Device, other: Timing | None = None) -> list[str]:
    """Return the timing as lines of text. other: with the device file's other values."""
    step = timing.step_seconds
    out = [
        f"{1e3 * step:.1f} ms a step on {device.name}, MFU {100 * timing.mfu:.1f} %",
        *(
            f"{1e3 * end.step_seconds:.1f} ms, MFU {100 * end.mfu:.1f} %, with the device "
            "file's other values: no GPU of this type has been measured"
            for end in [other]
            if end
        ),
        f"bound by {timing.bound_by}: at least {1e3 * timing.bound_seconds:.1f} ms",
        f"the device waits for the host {100 * timing.launch_bound_share:.1f} % of the step",
    ]
    for kind, seconds in sorted(timing.busy_seconds.items(), key=lambda item: -item[1]):
        out.append(f"busy: {kind} {1e3 * seconds:.1f} ms, {100 * seconds / step:.1f} %")
    for axis, seconds in sorted(timing.exposed_seconds.items(), key=lambda item: -item[1]):
        out.append(f"exposed: {axis} {1e3 * seconds:.1f} ms, {100 * seconds / step:.1f} %")
    return out


def chrome_trace(timing: Timing) -> dict[str, Any]:
    """Return the spans in the Trace Event Format, a thread for each stream, in microseconds."""
    streams = sorted({span.stream for span in timing.spans})
    events: list[dict[str, Any]] = [
        {
            "ph": "M", "pid": 0, "tid": stream, "name": "thread_name",
            "args": {"name": NAMES.get(stream, f"stream {stream}")},
        }
        for stream in streams
    ]  # fmt: skip
    for span in timing.spans:
        events.append(
            {
                "ph": "X", "pid": 0, "tid": span.stream, "name": span.name,
                "ts": 1e6 * span.begin, "dur": 1e6 * (span.end - span.begin),
                "args": span.where._asdict(),
            }
        )  # fmt: skip
    for action in timing.actions:
        events.append(
            {
                "ph": "X", "pid": 0, "tid": -1, "name": action.words,
                "ts": 1e6 * action.begin, "dur": 1e6 * (action.end - action.begin),
            }
        )  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}
