# SPDX-License-Identifier: Apache-2.0
"""The planner's constants, and their meanings.

Peaks, bandwidths and SMs come from the device file (forecast/device_file.py). Work other than
matmuls is counted in a rehearsal, or assumed, except that the constants of experts are fitted by
benchmarks/planning/experts.py. The constants of other programs, fitted on published runs, are in
benchmarks/planning/frameworks.py.
"""

from forecast.device_file import PROTOCOLS, read_device
from forecast.rehearsal.links import links_of
from forecast.rehearsal.roofline import ATTENTION_RAMP, MEASURED, attention_share

LINKS = ("link", "network")  # the first and the last level of a device file
WEFT: dict[str, float] = dict(
    # Bytes moved by passes over memory. Per token, in bf16: hidden_bytes in units of h (norms,
    # residuals), inner_bytes of h / tp, ffn_bytes of f / tp; scores_bytes per score of unfused
    # attention; logit_bytes per logit; backward_bytes: backward's as a multiple of forward's. Per
    # parameter: accumulate_bytes for a micro-batch's gradient, update_bytes, and the sent
    # gradient_bytes and parameter_bytes.
    # float8_bytes: per element of a cast to float8, which is read in bf16, for a scale too, and
    # written in rows and in columns of codes. split_backward: additional exposed transfers of
    # activations in backward if B and W are separate. fsdp: 1 if each micro-batch of ZeRO 3 sums a
    # layer's gradients. zero1_all_reduce: 1 if ZeRO 1 sums gradients by an all-reduce.
    # dispatch_forward, dispatch_backward: bytes moved by passes per element of a row that is sent
    # to an expert. expert_loop: 1 if each expert's weight gradient is a launch of its own.
    # expert_wgrad: 1 if one of B's all-to-alls overlaps the weight gradient of the experts' first
    # matmul
    # Values for this repository's fused kernels (docs/kernels.md: 3.43 GB between a layer's matmuls
    # for 8,192 tokens of 8B). Rates of kernels, links and host are the device file's: see `own`
        hidden_bytes=14, inner_bytes=6, ffn_bytes=6, backward_bytes=1.5, scores_bytes=0,
        logit_bytes=6, accumulate_bytes=0, update_bytes=42, gradient_bytes=4, parameter_bytes=2,
        sum_hidden=0.8, sum_hidden_0=0.8, sum_calls=0.1, message_exposed=0.3, jitter=0.005,
        gather_exposed=0.3, sharp=8.0, float8_bytes=6,
        network_decay=0.0, fsdp=0, zero1_all_reduce=0,
        split_backward=3.0,  # B hides none of its 4 transfers, and W gathers 4 operands
        # counted in a rehearsal: 38 and 78 bytes at ep 4, 30 and 71 at ep 1
        dispatch_forward=38, dispatch_backward=78, expert_loop=1, expert_wgrad=1,
    # expert_skew: rows of the fullest rank of ep divided by the mean. dispatch: seconds of ep's
    # transfers divided by those by the links' rates; both fitted by benchmarks/planning/experts.py
        expert_skew=1.05, dispatch=1.45,
    # Assumed. tp_backward: exposed transfers of activations in backward, of 6; host_recompute:
    # share by which recomputation increases the host's time; sum_calls_0: collectives per layer
    # that sum gradients without ZeRO; fsdp_hidden: share of a layer's time that hides its ZeRO 3
    # transfers; fsdp_least: share of those that is always exposed
    tp_backward=5.0, host_recompute=0.3, sum_calls_0=0.1, fsdp_hidden=0.8, fsdp_least=0.1,
    cp_hidden=0.5, sum_least=0.1,
)  # fmt: skip
HOST_SHARE = 0.73  # share of PCIe's rate that copies reach: 46.8 of 64 GB/s on nodes of 8 H100
HOST_COSTS = ("launch", "function", "triton", "triton_argument", "transfer", "message")
LAYER = {"launch": 15.0, "function": 16.0, "triton": 10.0, "triton_argument": 127.0}
# numbers of launches by HOST_COSTS, counted in a rehearsal: F and B of a layer, without and with
# tp; a stage; additional ones for each tp rank but one if tp's transfers are in a ring; the head
# and the embedding; a step
LAUNCHES: dict[str, dict[str, float]] = {
    "host_layer": LAYER, "host_layer_tp": {**LAYER, "transfer": 10}, "host_stage": {},
    "host_ring": {"launch": 14, "message": 10},
    "host_head": {"launch": 27, "function": 8, "triton": 5, "triton_argument": 52},
    "host_step": {"launch": 67},
}  # fmt: skip
TIMED = 14  # launches of a layer that are matmuls or attention, whose seconds include the start


def device_constants(name: str) -> dict[str, float]:
    """Return the numbers of a device file: peaks, SMs, bandwidths of memory and the inner links."""
    device = read_device(name)
    found = {
        **device.numbers,
        "peak.float8": device["peak.float8"] or device["peak.bfloat16"],
        "link": device.levels[0].bandwidth,
        "host_bandwidth": device["host_bandwidth"] * HOST_SHARE,
    }
    for key, level in zip(LINKS, (device.levels[0], device.levels[-1]), strict=True):
        for place, protocol in enumerate(PROTOCOLS):
            found[f"{key}.ring.{protocol}"] = level.step_seconds[place]
            found[f"{key}.tree.{protocol}"] = level.tree_seconds[place]
    return found


def own(name: str) -> dict[str, float]:
    """Return the constants of this repository on a device, with its host's launch costs.

    attention_ramp: tokens of keys at which attention reaches half of its share. attention_backward:
    backward's rate divided by forward's. expert_host: seconds of a launch.
    """
    device = read_device(name)
    found = {**WEFT, **device_constants(name)}
    kernel = "cudnn" if device.major >= 9 else "flash"
    found["attention_ramp"] = ATTENTION_RAMP[kernel]
    forward, backward = (attention_share(device, kernel, way) for way in (False, True))
    found["attention"] = forward * (1 + ATTENTION_RAMP[kernel] / MEASURED)  # of endless rows
    found["attention_backward"] = backward / forward
    costs = {name: device[f"{name}_seconds"] for name in HOST_COSTS}
    on_host = {key: sum(costs[name] * count for name, count in counts.items())
               for key, counts in LAUNCHES.items()}  # fmt: skip
    launched = sum(LAUNCHES["host_layer"][name] for name in ("launch", "triton"))
    return found | on_host | {
        "layer_start": (launched - TIMED) * device["kernel_seconds"],
        "expert_host": costs["launch"],
        "message_start": float(links_of(device).message[-1]),
    }  # fmt: skip
