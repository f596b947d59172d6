# SPDX-License-Identifier: Apache-2.0
"""gpu-check's file of JSON lines, and what it prints last: thirty lines of the file's numbers."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from training.files.untrusted import parse_json, read_plain

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


def calls(lines: Sequence[Line]) -> list[tuple[Line, list[Line]]]:
    """Return each call of gpu-check: its own line, {} before the first, and those that follow."""
    found: list[tuple[Line, list[Line]]] = [({}, [])]
    for line in lines:
        if line["what"] == "call":
            found.append((line, []))
        else:
            found[-1][1].append(line)
    return found


def of_kind(lines: Sequence[Line], kind: tuple[str, bool]) -> list[Line]:
    """Return the lines of the calls of a kind, (device, tiny), and those of no call."""
    return [
        line
        for call, others in calls(lines)
        if not call or (call["device"], call["tiny"]) == kind
        for line in ((call, *others) if call else others)
    ]


def finished(lines: Sequence[Line]) -> set[str]:
    """Return the rows that ended by themselves or in vain, and were not skipped."""
    ends = [line for line in lines if line["what"] == "outcome"]
    return {line["row"] for line in ends if not line["outcome"].startswith("skipped")}


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
    why: dict[str, list[str]] = {}
    for name in by["skipped"]:
        why.setdefault(outcomes[name].removeprefix("skipped: ")[:60], []).append(name)
    yield from packed("skipped: ", [f"{', '.join(names)} ({each})" for each, names in why.items()])


def numbers(lines: Sequence[Line]) -> Iterator[str]:
    """Yield the numbers of steps, kernels, variants, the peer and the predictions."""
    yield from compared(lines)
    lines = list({(line["row"], line["what"]): line for line in lines}.values())  # each the last
    watts = [line for line in lines if line["what"] == "power and clocks" and "watts" in line]
    yield from packed("W, MHz of a step (least, mean, most): ", [
        f"{line['row']} " + ", ".join(
            " ".join(f"{line[of][end]:.0f}" for end in ("min", "mean", "max"))
            for of in ("watts", "mhz")
        )
        for line in watts
    ])  # fmt: skip
    fitted = [line for line in lines if line["what"].startswith("fitted ")]
    if fitted:
        yield "device file: " + ", ".join(
            f"{line['what'].removeprefix('fitted ')} {line['value']:.3f}" for line in fitted
        )
    hosts = [line for line in lines if line["what"].startswith("host: ") and "seconds" in line]
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
    yield from predictions(lines)


def compared(lines: Sequence[Line]) -> Iterator[str]:
    """Yield, call by call, steps and the tokens a second of rows, as ratios of the same call."""
    for number, (call, mine) in enumerate(calls(lines)):
        found = {line["row"]: line for line in mine if "tokens_per_second" in line}
        parts: dict[str, list[str]] = {}
        for row, line in found.items():
            base, rate = call.get("bases", {}).get(row, ""), line["tokens_per_second"]
            if base in found:
                ratio = rate / found[base]["tokens_per_second"]
                parts.setdefault(base, []).append(f"{short(row, base)} {rate:,.0f} ({ratio:.3f})")
            else:
                parts.setdefault("", []).append(f"{row} {rate:,.0f}" + mfu(line))
        if parts:
            began = time.strftime(", %Y-%m-%d %H:%M", time.localtime(call.get("begins")))
            yield f"tokens/s of call {number}{began}: {call.get('machine', '-')}"
        for base, each in sorted(parts.items()):
            yield from packed(f"  (of {base}): " if base else "  ", each)
        yield from a_layer(mine)


def short(row: str, base: str) -> str:
    """Return a row's name without the words before the last "-" that its base begins with, too."""
    common = os.path.commonprefix([row, f"{base}-"])
    return row[common.rfind("-") + 1 :]


def mfu(line: Line) -> str:
    """Return the MFU that a line has, and the peak of its memory, as the end of a part."""
    said = f" MFU {line['mfu']:.1%}" if line.get("mfu") else ""
    return said + (f" {line['peak_bytes'] / 1e9:.1f} GB" if line.get("peak_bytes") else "")


def a_layer(lines: Sequence[Line]) -> Iterator[str]:
    """Yield what steps of 2 and of 6 layers of one call tell of a layer, the head, the update."""
    two, six = (last(lines, f"step-{n}", "steps") for n in (2, 6))
    if two and six:
        layer = (six["micro_batch"] - two["micro_batch"]) / 4
        one = last(lines, "step-6", "a step of 1 micro-batches").get("seconds", 0.0)
        yield (
            f"a layer {1e3 * layer:.2f} ms, embedding and head "
            f"{1e3 * (two['micro_batch'] - 2 * layer):.2f} ms of a micro-batch; the update of 6 "
            f"layers {1e3 * (one - six['micro_batch']):.2f} ms"
        )


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
    """Return what a row measured of a step, by the last call that has it."""
    return last(lines, row, "steps") or last(lines, row, "a run of the program")


def predictions(lines: Sequence[Line]) -> Iterator[str]:
    """Yield, for each device file, measured over predicted of each step, in seconds and bytes."""
    predicted = {
        (line["device"], line["row"]): line for line in lines if line["what"] == "prediction"
    }
    # of all rows only where none was measured yet
    some = {row for _, row in predicted if measured(lines, row)} or {row for _, row in predicted}
    for device in dict.fromkeys(name for name, _ in predicted):
        parts = []
        for (name, row), line in predicted.items():
            real = measured(lines, row)
            if name == device and row in some:
                ratio = f"{real['seconds'] / line['seconds']:.2f}" if real.get("seconds") and \
                    line.get("seconds") else "-"  # fmt: skip
                ends = line.get("ends") or [line.get("seconds", 0)]
                span = " to ".join(f"{1e3 * end:.0f}" for end in ends)
                parts.append(f"{row} {span} ms ({ratio})")
        yield from packed(f"predicted, {Path(device).stem} (measured / predicted): ", parts)
