# SPDX-License-Identifier: Apache-2.0
"""Constants of other programs: their meanings, their ranges, and profiles with their values.

A profile is a framework on a device: the framework's work besides matmuls (FRAMEWORKS, read in its
source), and a file of benchmarks/planning/fitted with the numbers that benchmarks/plan_fit.py
fitted on published runs. Weft's own constants are in forecast/planner/constants.py.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from forecast.device_file import PROTOCOLS
from forecast.planner.constants import WEFT, device_constants, own
from forecast.rehearsal.roofline import ATTENTION_RAMP
from training.files.untrusted import read_json

FOLDER = Path(__file__).resolve().parent / "fitted"
DEVICES = ("a100", "b200", "h100", "h200")


class ProfileError(ValueError):
    """A profile cannot be used. The message names the file, the key and the rule."""


class Constant(NamedTuple):
    """A fitted number: its initial value, its plausible range, its meaning."""

    start: float
    low: float
    high: float
    meaning: str


TIME = {
    "matmul": Constant(0.65, 0.3, 0.87, "share of the peak that long matmuls reach"),
    "ramp": Constant(96.0, 16.0, 1024.0, "length of k in which a tile's pipeline fills and drains"),
    "memory_share": Constant(0.8, 0.4, 0.95, "share of the memory's bandwidth"),
    "attention": Constant(0.35, 0.1, 0.8, "share of the peak that attention reaches"),
    "link_share": Constant(0.7, 0.2, 0.9, "share of the links in a node"),
    "network_share": Constant(0.7, 0.1, 0.97, "share of the network cards, between two nodes"),
    "network_decay": Constant(0.1, 0.001, 0.5, "power by which more nodes lower that share"),
    "network_step": Constant(
        1.4e-5, 1e-6, 3e-3, "seconds of a collective per additional rank, in a group across nodes"
    ),
    "link_step": Constant(3e-6, 5e-7, 5e-5, "the same, in a group within a node"),
    "collective_start": Constant(2e-5, 1e-6, 2e-4, "fixed seconds of each collective"),
    "tp_backward": Constant(5.0, 2.0, 6.0, "exposed transfers of activations in backward, of 6"),
    "host_layer": Constant(3e-3, 1e-5, 2e-2, "host seconds for F and B of a layer, tp 1"),
    "host_layer_tp": Constant(4.4e-3, 1e-5, 3e-2, "the same with tp above 1"),
    "host_beside": Constant(2e-3, 1e-7, 1e-2, "added per tp rank, if messages cross nodes"),
    "host_crossing": Constant(
        6e-4, 1e-7, 1e-2, "added per tp rank, if the tp group crosses nodes, too"
    ),
    "host_socket": Constant(1e-4, 1e-6, 1e-2, "added if tp is above 4, so that it crosses sockets"),
    "layer_start": Constant(1e-4, 1e-6, 3e-3, "seconds of gaps between a layer's kernels"),
    "sharp": Constant(8.0, 2.0, 16.0, "exponent of the soft maximum of host and device time"),
    "host_stage": Constant(1e-3, 1e-6, 5e-2, "host seconds per stage and micro-batch"),
    "host_step": Constant(1e-2, 1e-4, 0.5, "host seconds per step"),
    "host_recompute": Constant(0.3, 0.01, 1.0, "share of the host's seconds that recomputing adds"),
    "message_start": Constant(5e-4, 1e-6, 1e-2, "fixed seconds of a message between stages"),
    "message_exposed": Constant(0.8, 0.01, 2.0, "exposed share of the messages' time"),
    "sum_calls": Constant(0.3, 0.01, 3.0, "gradient reductions per layer, ZeRO 1"),
    "sum_calls_0": Constant(0.1, 0.01, 3.0, "the same without ZeRO"),
    "sum_hidden": Constant(0.05, 0.01, 1.5, "share of a backward that hides these, ZeRO 1"),
    "sum_hidden_0": Constant(0.5, 0.01, 1.5, "the same without ZeRO"),
    "gather_exposed": Constant(1.0, 0.05, 2.0, "exposed share of ZeRO's gather of weights"),
    "fsdp_hidden": Constant(0.8, 0.01, 2.0, "share of a layer that hides its ZeRO 3 transfers"),
    "fsdp_least": Constant(0.1, 0.01, 1.0, "share of those transfers that is always exposed"),
    "jitter": Constant(0.02, 1e-4, 0.1, "share by which each doubling of the nodes slows a step"),
    "matmul.float8": Constant(0.5, 0.2, 0.75, "share of the float8 peak that long matmuls reach"),
}
STARTS = {  # initial values measured on a device: 230.8 of 300 GB/s
    "a100": {"link_share": 0.77},
}
FRAMEWORKS: dict[str, dict[str, float]] = {
    # Bytes moved by passes over memory. Per token, in bf16: hidden_bytes in units of h (norms,
    # residuals), inner_bytes of h / tp, ffn_bytes of f / tp; scores_bytes per score of unfused
    # attention; logit_bytes per logit. Per parameter: accumulate_bytes for a micro-batch's
    # gradient, update_bytes, and the sent gradient_bytes and parameter_bytes. Memory that differs
    # from MEMORY: see TERMS of predict.py.
    "nanotron": dict(
        hidden_bytes=20, inner_bytes=20, ffn_bytes=12, backward_bytes=1.5, scores_bytes=0,
        logit_bytes=60, accumulate_bytes=10, update_bytes=34, gradient_bytes=4, parameter_bytes=2,
        zero1_all_reduce=1.0, update_unsharded=16,  # norm, clip and zero of float32 gradients
        work_gib=0.1,
    ),
    "megatron-deepspeed": dict(
        hidden_bytes=22, inner_bytes=8, ffn_bytes=4, backward_bytes=1.3, scores_bytes=10,
        logit_bytes=44, accumulate_bytes=6, update_bytes=38, gradient_bytes=2, parameter_bytes=2,
    ),
    "fsdp": dict(
        hidden_bytes=20, inner_bytes=12, ffn_bytes=4, backward_bytes=1.4, scores_bytes=0,
        logit_bytes=18, accumulate_bytes=0, update_bytes=60, gradient_bytes=4, parameter_bytes=2,
        fsdp=1.0, act_hidden=5, act_ffn=1.6, logit_memory=6,
    ),
    "titan": dict(  # torch.compile fuses the passes; attention is SDPA's FlashAttention 2
        hidden_bytes=16, inner_bytes=8, ffn_bytes=6, backward_bytes=1.5, scores_bytes=0,
        logit_bytes=18, accumulate_bytes=0, update_bytes=40, gradient_bytes=4, parameter_bytes=2,
        fsdp=1.0, act_hidden=5, act_ffn=1.6, logit_memory=6, attention=0.28, host_layer=1e-3,
        host_layer_tp=2e-3, jitter=0.004,
    ),
    "nemo": dict(
        hidden_bytes=16, inner_bytes=8, ffn_bytes=6, backward_bytes=1.5, scores_bytes=0,
        logit_bytes=26, accumulate_bytes=0, update_bytes=34, gradient_bytes=4, parameter_bytes=2,
        act_hidden=7, act_ffn=2.5, logit_memory=10, weight_bytes=4,  # gradients in bfloat16
        attention=0.5, attention_ramp=ATTENTION_RAMP["cudnn"],  # cuDNN's: devices/h100.json
        # initial values of a fit: with graphs and fused kernels there are few launches
        host_layer=1.5e-3, host_layer_tp=2e-3, matmul=0.72, memory_share=0.85, jitter=0.004,
        **{"matmul.float8": 0.65},
        sum_hidden=0.8, sum_hidden_0=0.8, gather_exposed=0.3, sum_calls=0.1,  # its overlap is on
    ),
    "megatron": dict(
        hidden_bytes=22, inner_bytes=8, ffn_bytes=4, backward_bytes=1.3, scores_bytes=0,
        logit_bytes=34, accumulate_bytes=0, update_bytes=34, gradient_bytes=4, parameter_bytes=2,
        act_hidden=8, act_ffn=2.3, act_scores=3, logit_memory=12,
    ),
}  # fmt: skip
FIXED = {  # of all of them
    **{name: WEFT[name] for name in ("cp_hidden", "sum_least", "expert_skew", "dispatch")},
    "attention_ramp": 0.0, "attention_backward": 1.0, "fsdp": 0.0, "host_head": 1e-3,
    "host_ring": 0.0, "split_backward": 0.0, "dispatch_forward": 12.0, "dispatch_backward": 14.0,
    "expert_host": 0.0, "expert_loop": 0.0, "expert_wgrad": 0.0, "zero1_all_reduce": 0.0,
    # update_unsharded: bytes that passes of the update move per parameter without sharding, such
    # as the clip's
    "update_unsharded": 0.0, "float8_bytes": 4.0,
    # only Simple rings: the fitted constants include the gain of NCCL's other protocols
    **{f"{kind}_base.{name}": math.inf for kind in ("ring", "tree") for name in PROTOCOLS},
    "ring_base.Simple": 0.0,
}  # fmt: skip
MEMORY = {
    "weight_bytes": 6.0, "state_bytes": 12.0, "act_hidden": 11.0, "act_ffn": 3.0, "act_scores": 0.0,
    "logit_memory": 13.0, "work_gib": 1.5,
}  # fmt: skip
NANOTRON = {  # only nanotron's host also waits for messages between nodes: off for others
    "host_beside": 1e-7, "host_crossing": 1e-7,
}  # fmt: skip
OF_DEVICE = ("matmul", "memory_share", "matmul.float8")  # do not depend on a program's kernels
SLOWER = {  # factors of a profile's constants: torchtitan's H100s have 500 W and 2.4 TB/s
    "titan_h100": {"matmul": 0.85, "matmul.float8": 0.85, "attention": 0.85,
                   "memory_share": 2.4 / 3.35},
}  # fmt: skip


def defaults(framework: str, device: str) -> dict[str, float]:
    """Return the initial constants for the fit of a profile."""
    fitted = {name: constant.start for name, constant in TIME.items()}
    fitted |= STARTS.get(device, {})
    return {
        **device_constants(device),
        **FIXED,
        **MEMORY,
        **fitted,
        **(NANOTRON if framework != "nanotron" else {}),
        **FRAMEWORKS[framework],
    }


def profile(name: str) -> dict[str, float]:
    """Return a profile's constants, by its name "framework_device".

    If the framework was only fitted on another device, its fitted shares and seconds are used with
    the device's own numbers. Raises ProfileError if the framework is unknown or a file is broken.
    """
    framework, _, device = name.rpartition("_")
    if framework == "weft":
        return own(device)
    if framework not in FRAMEWORKS or device not in DEVICES:
        known = ", ".join(sorted(FRAMEWORKS))
        raise ProfileError(f"{name}: must be FRAMEWORK_DEVICE; the frameworks are {known}")
    if framework == "titan":  # there are no runs to fit
        path = FOLDER / f"{'fsdp_a100' if device == 'a100' else 'nemo_h100'}.json"
        fitted = {key: read_fitted(path)[key] for key in OF_DEVICE}
        fitted |= {key: (defaults(framework, device) | fitted)[key] * by
                   for key, by in SLOWER.get(name, {}).items()}  # fmt: skip
        return {**defaults(framework, device), **fitted}
    path = FOLDER / f"{name}.json"
    for other in [f"{framework}_{d}" for d in ("h100", "a100")] + ["fsdp_h100", "fsdp_a100"]:
        path = path if path.is_file() else FOLDER / f"{other}.json"
    return {**defaults(framework, device), **read_fitted(path)}


def read_fitted(path: Path) -> dict[str, float]:
    """Return a file's constants. Raises ProfileError for an unknown key or a wrong value."""
    content = read_json(path)
    if not isinstance(content, dict) or not isinstance(content.get("constants"), dict):
        raise ProfileError(f"{path}: must be an object with constants")
    constants: Mapping[str, object] = content["constants"]
    allowed = {*TIME, *MEMORY}
    for key, value in constants.items():
        if key not in allowed:
            raise ProfileError(f"{path}: constants has the unknown key {key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e3:
            raise ProfileError(f"{path}: {key} is {value!r}, not a number from -1,000 to 1,000")
    return {key: float(value) for key, value in constants.items()}  # type: ignore[arg-type]
