# SPDX-License-Identifier: Apache-2.0
"""gpu-check's file of JSON lines, and what it prints last: thirty lines of the file's numbers."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.untrusted import parse_json, read_plain

LARGEST = 1 << 28  # bytes of the file
LINES = "gpu-check.jsonl"
MOST, WIDTH, ROWS = 5500, 180, 30  # characters of the summary, of a line; lines
SKIPPED = 3  # the exit code of a row that cannot run here
Line = Mapping[str, Any]


def append(path: Path, line: dict[str, Any]) -> None:
    """Append a line of JSON to a file and flush it to disk. Numbers not finite become text.

    Where a process died within its line, that is ended first.
    """
    text = json.dumps({key: plain(value) for key, value in line.items()}) + "\n"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        begin = b"\n" if size and os.pread(file, 1, size - 1) != b"\n" else b""
        os.write(file, begin + text.encode())
        os.fsync(file)
    finally:
        os.close(file)


def plain(value: Any) -> Any:
    """Return a value that strict JSON can hold, with floats of six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; one that a killed process left unfinished is left out."""
    found = []
    for text in read_plain(path, LARGEST).splitlines() if path.exists() else ():
        try:
            line = parse_json(text, str(path))
        except ValueError:
            continue
        if isinstance(line, dict) and {"row", "what"} <= line.keys():
            found.append(line)
    return found


def last(lines: Sequence[Line], row: str, what: str) -> Line:
    """Return the last line of a row that says something, or {}."""
    mine = [line for line in lines if line["row"] == row and line["what"] == what]
    return mine[-1] if mine else {}


def text(lines: Sequence[Line], outcomes: Mapping[str, str]) -> str:
    """Return the summary: at most ROWS lines and MOST characters. outcomes: of this call's rows."""
    made = ["== summary", *machine(lines), *failures(outcomes), *numbers(lines)]
    lines_left, room = list[str](), MOST
    for line in made[:ROWS]:
        line = line[:WIDTH]
        room -= len(line) + 1
        if room < 0:
            break
        lines_left.append(line)
    return "\n".join(lines_left)


def machine(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what the machine is."""
    gpu, packages = last(lines, "facts", "gpu"), last(lines, "facts", "packages")
    smi = last(lines, "facts", "nvidia-smi")
    if packages:
        yield (
            f"{gpu.get('count', 0)} x {gpu.get('name', 'no GPU')}; torch {packages['torch']}, CUDA "
            f"{packages['cuda']}, cuDNN {packages['cudnn']}, Triton {packages['triton']}, driver "
            f"{smi.get('driver_version', '-')}, {smi.get('power.limit', '-')}"
        )


def failures(outcomes: Mapping[str, str]) -> Iterator[str]:
    """Yield how many rows passed, and which failed or were skipped, with the reasons."""
    by = {kind: [n for n, o in outcomes.items() if o.startswith(kind)] for kind in
          ("passed", "failed", "skipped")}  # fmt: skip
    yield "rows: " + ", ".join(f"{len(names)} {kind}" for kind, names in by.items())
    for name in by["failed"][:8]:
        yield f"FAILED {name}: {outcomes[name].removeprefix('failed: ')}"
    if by["failed"][8:]:
        yield f"FAILED too: {', '.join(by['failed'][8:])}"
    if by["skipped"]:
        yield "skipped: " + "; ".join(
            f"{n} ({outcomes[n].removeprefix('skipped: ')[:40]})" for n in by["skipped"]
        )


def numbers(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the numbers of steps, kernels, variants, the peer and the predictions."""
    two, six = (last(lines, f"step-{n}", f"steps of {n} layers") for n in (2, 6))
    for n, columns in ((2, two), (6, six)):
        if columns:
            memory = last(lines, f"step-{n}", "memory").get("peak_bytes", 0)
            yield (
                f"{n} layers: {1e3 * columns['seconds']:.1f} ms a step, "
                f"{columns['tokens_per_second']:,.0f} tokens/s, MFU {columns['mfu']:.1%}, "
                f"{memory / 1e9:.1f} GB"
            )
    if two and six:
        layer = (six["micro_batch"] - two["micro_batch"]) / 4
        one = last(lines, "step-6", "a step of 1 micro-batches").get("seconds", 0.0)
        yield (
            f"a layer {1e3 * layer:.2f} ms, embedding and head "
            f"{1e3 * (two['micro_batch'] - 2 * layer):.2f} ms of a micro-batch; the update of 6 "
            f"layers {1e3 * (one - six['micro_batch']):.2f} ms"
        )
    fitted = [line for line in lines if line["what"].startswith("fitted ")]
    if fitted:
        yield "device file: " + ", ".join(
            f"{line['what'].removeprefix('fitted ')} {line['value']:.3f}" for line in fitted
        )
    hosts = [line for line in lines if line["what"].startswith("host: ")]
    if hosts:
        yield "host us: " + ", ".join(
            f"{line['what'][6:30]} {1e6 * line['seconds']:.1f}" for line in hosts
        )
    for start in ("attention ", "scaled_mm "):
        rates = [line for line in lines if line["what"].startswith(start) and "tflops" in line]
        if rates:
            yield f"{start}TFLOP/s: " + ", ".join(
                f"{line['what'].removeprefix(start)[:26]} {line['tflops']:.0f}" for line in rates
            )
    speeds = [line for line in lines if "times_torch" in line]
    if speeds:
        yield "kernels, GB/s (times torch): " + ", ".join(
            f"{line['what'][:16]} {line['gb_per_second']:.0f} ({line['times_torch']:.1f})"
            for line in speeds
        )
    told: dict[str, list[str]] = {}
    for line in lines:
        if "in_short" in line:
            told.setdefault(line["row"], []).append(line["in_short"])
    for row, each in told.items():
        yield from packed(f"{row}: ", each)
    worst = sorted(
        (
            line
            for line in lines
            if "limit" in line and line["limit"] and isinstance(line["error"], float)
        ),
        key=lambda line: -line["error"] / line["limit"],
    )
    if worst:
        yield "nearest to their limits: " + "; ".join(
            f"{line['row']} {line['what'][:24]} {line['error'] / line['limit']:.2f}"
            for line in worst[:4]
        )
    yield from runs(lines)
    yield from predictions(lines)


def runs(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the program's and the peers' tokens a second, as ratios."""
    found = {
        line["row"]: line for line in lines if line["what"] in ("a run of the program", "the peer")
    }
    base = found.get("run-bf16", {}).get("tokens_per_second")
    parts = []
    for row, line in found.items():
        ratio = (
            f" ({line['tokens_per_second'] / base:.3f})" if base and line.get("ranks") == 1 else ""
        )
        parts.append(f"{row.removeprefix('run-')} {line['tokens_per_second']:,.0f}{ratio}")
    yield from packed("tokens/s (of bf16): ", parts)


def packed(label: str, parts: Sequence[str]) -> Iterator[str]:
    """Yield lines of at most WIDTH characters that list all parts, none of them split."""
    line = label
    for i, part in enumerate(parts):
        part += ", " if i + 1 < len(parts) else ""
        if len(line) + len(part.rstrip()) > WIDTH and line.strip():
            yield line.rstrip()
            line = "  "
        line += part
    if parts:
        yield line


def measured(lines: Sequence[Line], row: str) -> Line:
    """Return what a row measured of a step: seconds and, on a GPU, peak_bytes."""
    if row.startswith("step-"):
        layers = row.removeprefix("step-")
        memory = last(lines, row, "memory")
        return {**last(lines, row, f"steps of {layers} layers"), **memory}
    return last(lines, row, "a run of the program")


def predictions(lines: Sequence[Line]) -> Iterator[str]:
    """Yield, for each device file, measured over predicted of each step, in seconds and bytes."""
    predicted = {
        (line["device"], line["row"]): line for line in lines if line["what"] == "prediction"
    }
    for device in dict.fromkeys(name for name, _ in predicted):
        parts = []
        for (name, row), line in predicted.items():
            real = measured(lines, row)
            if name == device:
                ratio = f"{real['seconds'] / line['seconds']:.2f}" if real.get("seconds") and \
                    line.get("seconds") else "-"  # fmt: skip
                ends = line.get("ends") or [line.get("seconds", 0)]
                span = " to ".join(f"{1e3 * end:.0f}" for end in ends)
                parts.append(f"{row} {span} ms ({ratio})")
        yield from packed(f"predicted, {Path(device).stem} (measured / predicted): ", parts)
