#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predict steps on an H100 or H200 before this code has run on one, and freeze them by a hash.

    python benchmarks/freeze_predictions.py           write frozen_predictions.json
    python benchmarks/freeze_predictions.py --show    print what is frozen as a table
    python benchmarks/freeze_predictions.py --peer    the peer's record alone, as JSON (used above)

The steps have 2 and 6 layers of Llama 3 8B and four micro-batches of 8,192 tokens, as in `make
gpu-check`; those of 6 layers also in float8, and in torch's own eager stack
(benchmarks/peers/native.py: autocast to bf16, fp32 weights, fused AdamW). All are recorded and
timed in the same way. Each prediction is a range: by the device file's values, and by its "other"
values. The hash covers the files from which the numbers result (MADE_BY) and the flags; a test
recomputes it.
"""

import argparse
import hashlib
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

FROZEN = ROOT / "benchmarks" / "frozen_predictions.json"
DEVICES, PEER_LAYERS, MICRO_BATCHES = ("h100", "h200"), 6, 4
STEPS = {  # the row of `make gpu-check`: layers, further flags
    "step-2": (2, ""),
    "step-6": (6, ""),
    "step-6-fp8-tensorwise": (6, "--fp8-format hybrid --fp8-recipe tensorwise"),
    "step-6-fp8-blockwise": (6, "--fp8-format e4m3 --fp8-recipe blockwise"),
}
REHEARSAL = "forecast/rehearsal/"
MADE_BY = (
    REHEARSAL + "clock.py", REHEARSAL + "roofline.py", "forecast/device_file.py",
    *(f"forecast/devices/{name}.json" for name in DEVICES),
)  # fmt: skip
PEER = dict(
    dim=4096, layers=PEER_LAYERS, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=8192,
    gqa="native", rope="complex", compile=False, tp=1,
)  # fmt: skip


def flags(step: str) -> list[str]:
    """Return the flags of a step, to be added to benchmarks/fused_launches.py's FLAGS."""
    layers, more = STEPS[step]
    return [f"--num-layers={layers}", f"--global-batch-size={MICRO_BATCHES}", *more.split()]


def fingerprint() -> str:
    """Return the sha256 of the files and flags from which the predictions result."""
    found = hashlib.sha256()
    for name in MADE_BY:
        found.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    asked = [*map(flags, STEPS), sorted(PEER.items()), MICRO_BATCHES]
    found.update(json.dumps(asked).encode())
    return found.hexdigest()


def freeze() -> dict[str, Any]:
    """Return the frozen content: a hash, and for each device and step a range and the launches."""
    from benchmarks.fused_launches import report

    steps: dict[str, dict[str, Any]] = {}
    for device in DEVICES:
        found = steps[device] = {}
        for step in STEPS:
            made = report(ROOT, [*flags(step), f"--rehearse-device={device}"], True)
            found[step] = _entry(made["time"]["range"], made)
    for device, made in peer().items():
        steps[device][f"peer, {PEER_LAYERS} layers, eager"] = _entry(made["range"], made)
    return {"sha256": fingerprint(), "made_by": list(MADE_BY), "steps": steps}


def _entry(ends: list[dict[str, float]], made: dict[str, Any]) -> dict[str, Any]:
    seconds, mfu = ([float(f"{end[key]:.4g}") for end in ends] for key in ("step_seconds", "mfu"))
    launches = sum(row["count"] for row in made["launches"])
    return {"seconds": seconds, "mfu": mfu, "launches": launches}


def peer() -> dict[str, dict[str, Any]]:
    """Return the range and the launches of the peer's step on each device.

    The step is recorded in a process of its own.
    """
    import subprocess

    words = [sys.executable, str(Path(__file__).resolve()), "--peer"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the peer's record ended with {done.returncode}: {done.stderr[-2000:]}")
    made: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return made


def record_peer() -> dict[str, dict[str, Any]]:
    """Record two steps of the peer on the fake device, and time the second on each device."""
    from forecast.rehearsal import guard

    guard.load()
    import torch

    guard.check(torch)
    from benchmarks.peers import native
    from forecast.device_file import read_device
    from forecast.rehearsal import report
    from forecast.rehearsal.clock import time_record
    from forecast.rehearsal.device import Reads, install
    from forecast.rehearsal.fakes import fake_tensor_mode
    from forecast.rehearsal.patches import Patches
    from forecast.rehearsal.record import Recorder
    from forecast.rehearsal.watch import Watch

    recorder, h100, a = Recorder("cuda"), read_device("h100"), Namespace(**PEER)
    install(recorder, {
        "name": h100.name, "major": h100.major, "minor": 0, "uuid": "",
        "multi_processor_count": int(h100["sms"]), "total_memory": int(h100["memory"]),
    })  # fmt: skip
    for module in (torch.nn.Linear, torch.nn.Embedding, torch.nn.RMSNorm):
        module.reset_parameters = lambda self: None  # type: ignore[method-assign]
    with fake_tensor_mode(), Watch(recorder, fake=True), Patches() as patches:
        Reads(recorder).install(patches)
        with torch.device("cuda"):
            model = native.Transformer(a)
            params = list(model.parameters())
            optimizer = torch.optim.AdamW(params, lr=1e-4, betas=(0.9, 0.95), fused=True)
            for step in (1, 2):
                recorder.acts(f"iteration {step}")
                optimizer.zero_grad(set_to_none=True)
                for _ in range(MICRO_BATCHES):
                    tokens = torch.zeros(1, a.seq, dtype=torch.long)
                    with torch.autocast("cuda", torch.bfloat16):
                        loss = native.ce(model(tokens), tokens) / MICRO_BATCHES
                    loss.backward()
                    del loss
                norm = torch.nn.utils.get_total_norm([p.grad for p in params], foreach=True)
                torch.nn.utils.clip_grads_with_norm_(params, 1.0, norm, foreach=True)
                optimizer.step()
            recorder.paused = True
    events = recorder.events
    first = max(i for i, e in enumerate(events) if getattr(e, "words", "") == "iteration 2")
    step_events, flops = events[first:], _model_flops(a)
    found = {}
    for name in DEVICES:
        ends = [time_record(step_events, end, flops) for end in read_device(name).ends()]
        ends.sort(key=lambda timing: timing.step_seconds)
        found[name] = {
            "range": [{"step_seconds": t.step_seconds, "mfu": t.mfu} for t in ends],
            "launches": report.launches(step_events),
        }
    return found


def _model_flops(a: Namespace) -> float:
    """Return the FLOPs of a step's matmuls, half for causal attention, as for the trainer's MFU."""
    head = a.dim // a.heads
    layer = a.dim * (a.heads + 2 * a.kv_heads) * head + a.dim * a.dim + 3 * a.dim * a.ffn
    token = 6.0 * (a.layers * layer + a.dim * a.vocab) + 6.0 * a.layers * a.seq * a.dim
    return token * a.seq * MICRO_BATCHES


def show(frozen: dict[str, Any]) -> list[str]:
    """Return the lines of a table."""
    lines = ["| device | step | ms | MFU | launches |", "|---|---|---|---|---|"]
    for device, steps in frozen["steps"].items():
        for name, made in steps.items():
            ms = " to ".join(f"{1e3 * seconds:.0f}" for seconds in made["seconds"])
            mfu = " to ".join(f"{100 * share:.1f} %" for share in made["mfu"])
            lines.append(f"| {device} | {name} | {ms} | {mfu} | {made['launches']:,} |")
    return lines


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", action="store_true", help="print what is frozen")
    parser.add_argument("--peer", action="store_true", help="print the peer's prediction as JSON")
    args = parser.parse_args(argv)
    if args.peer:
        print(json.dumps(record_peer()))
        return 0
    if not args.show:
        FROZEN.write_text(json.dumps(freeze(), indent=1) + "\n", encoding="utf-8")
    print("\n".join(show(json.loads(FROZEN.read_text(encoding="utf-8")))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
