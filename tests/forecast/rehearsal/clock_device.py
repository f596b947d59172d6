# SPDX-License-Identifier: Apache-2.0
"""A device with round numbers, and events on it, for the tests of the rehearsal's clock."""

from forecast.device_file import NUMBERS, PROTOCOLS, Device, Level
from forecast.rehearsal.events import Launch, Transfer, Where

HERE = Where()
ZERO = (0.0,) * len(PROTOCOLS)


def device(**numbers: float) -> Device:
    """100 B/s of memory, 1,000 FLOP/s, 10 SMs, links of 10 B/s in blocks of 4, then 1 B/s.

    Nothing costs a start unless told: see Device.changed.
    """
    base = dict.fromkeys(NUMBERS, 0.0)
    base |= {"bandwidth": 100.0, "memory_share": 1.0, "matmul": 1.0, "matmul.float8": 1.0}
    base |= {"peak.bfloat16": 1000.0, "peak.float32": 100.0, "sms": 10.0, "l2": 1e9}
    base |= {"tile_m": 2.0, "tile_n": 2.0, "link_share": 1.0, "network_share": 1.0}
    base |= {"oversubscription": 1.0, "low_latency_bandwidth": 5.0, "attention.flash.forward": 0.5}
    base |= {"attention.flash.backward": 0.4}
    levels = (Level("node", 4, 10.0, ZERO, ZERO), Level("network", 0, 1.0, ZERO, ZERO))
    return Device("round", base, levels).changed(**numbers)


def kernel(seconds: float, stream: int = 0) -> Launch:
    """Return a kernel that moves memory for so long."""
    return Launch("add", stream, (), "bfloat16", (), (), int(seconds * 100), 0.0, HERE)


def matmul(seconds: float) -> Launch:
    """Return a kernel of matmuls, of no known shape, of so many seconds at the peak."""
    return Launch("fused", 0, (), "bfloat16", (), (), 0, 1000.0 * seconds, HERE)


def gather(
    number: int, seconds: float, axis: str = "tp", batch: int = -1, urgent: bool = True,
    origin: int = 0,
) -> Transfer:  # fmt: skip
    """Return an all-gather of two ranks of a node, on stream 1, that takes so long."""
    sent = int(seconds * 10)
    return Transfer(
        number, "all_gather", axis, (0, 1), -1, number, sent, sent, "bfloat16", (), 1, origin, (),
        (), batch, "", HERE, urgent=urgent,
    )  # fmt: skip
