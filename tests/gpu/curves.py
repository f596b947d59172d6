# SPDX-License-Identifier: Apache-2.0
"""Losses of 160 million parameters in bf16 and in float8, from one seed, on one text.

    curve-bf16, curve-fp8-tensorwise, curve-fp8-blockwise    1,500 steps of 16,384 bytes each
    curve-bf16-seed                                          bf16 again, from another seed

The text is that of the machine: sources of Python's standard library and of torch, 30 MB, files in
the order of a hash of their paths (tools/build_corpus.py chooses which count as text). A token is a
byte, so no step sees a byte twice. Other versions have other texts: a line has the text's SHA-256,
and only runs on the same text are compared.

Each run compares its last losses with those of curve-bf16 in the file of lines, and draws the
picture anew, of all that are there: OUT/curves.png. How far the two seeds of bf16 end apart says
what a difference is worth.
"""

import hashlib
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.gpu.logged import logged
from tests.gpu.row import Row, Skip
from tests.gpu.small import batch_flags, small_flags
from tests.gpu.steps import VARIANTS
from tests.gpu.summary import read as read_lines
from tools.build_corpus import draw, held_out, read
from training.data.indexed import IndexedWriter

STEPS, SEQUENCES = 1500, 16  # sequences of a step, of 1,024 bytes
TEXT, HELD_OUT = 30_000_000, 5.0  # bytes; per cent of the files
END, WINDOW = 256, 50  # the token that ends a file; steps of which a drawn loss is the mean
LAST = 100  # steps that a final loss is the mean of, in groups of GROUP for its error
GROUP = 10
SEED = 1234
# name: the flags of its precision and its seed
CURVES = {
    "bf16": ("", SEED),
    "fp8-tensorwise": (VARIANTS["fp8-tensorwise"], SEED),
    "fp8-blockwise": (VARIANTS["fp8-blockwise"], SEED),
    "bf16-seed": ("", SEED + 1),
}
BASE, AGAIN = "bf16", "bf16-seed"
MOST = 0.02  # of the final loss: float8's may differ by so much; published runs by less than 0.01
PICTURE = "curves.png"


def curve(row: Row) -> None:
    """Train, and write the loss of every step, those of held-out text, and the speed."""
    words, seed = CURVES[row.name.removeprefix("curve-")]
    steps = 20 if row.tiny else STEPS
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        about = write_text(Path(folder), row.tiny)
        row.say("text", seconds=time.perf_counter() - begin, **about)
        begin = time.perf_counter()
        lines = logged(row, [*run_flags(row.tiny, steps), *words.split(), "--seed", str(seed),
                             "--train-data-path", f"{folder}/train",
                             "--valid-data-path", f"{folder}/heldout"])  # fmt: skip
    found = [line for line in lines if "step_seconds" in line]
    losses = [line["loss"] for line in found]
    steady = found[len(found) // 10 :]
    row.say(
        "losses", loss=losses, text=about["sha256"], device=row.device.type, seed=seed, flags=words,
        validation=[[line["iteration"], line["validation_loss"]]
                    for line in lines if "validation_loss" in line],
        seconds=statistics.median(line["step_seconds"] for line in steady),
        tokens_per_second=statistics.median(line["tokens_per_second"] for line in steady),
        peak_bytes=found[-1].get("peak_memory_bytes"), run_seconds=time.perf_counter() - begin,
    )  # fmt: skip
    row.check("steps that are missing", steps - len(losses), 0)
    tenth = len(losses) // 10
    share = statistics.mean(losses[-tenth:]) / statistics.mean(losses[:tenth])
    row.check("the last losses over the first", share, 1.0 if row.tiny else 0.5)
    runs = recorded(row)
    row.part("picture", lambda: picture(row.path.parent / PICTURE, runs))
    row.part("difference", lambda: compare(row, runs))


def run_flags(tiny: bool, steps: int) -> list[str]:
    """Return the flags that all runs have."""
    model = [word for word in small_flags(tiny) if word != "--mock-data"]
    return [*model, *batch_flags(SEQUENCES, 1), *f"""
        --train-iters {steps} --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine
        --lr-warmup-iters {steps // 15} --weight-decay 0.1 --adam-beta2 0.95 --log-interval 1
        --eval-interval {steps if tiny else steps // 3}
        {"--eval-iters 2" if tiny else "--full-validation"}
    """.split()]  # fmt: skip


def write_text(folder: Path, tiny: bool) -> dict[str, Any]:
    """Write train and heldout, pairs of .bin and .idx whose tokens are bytes; say what they hold.

    A file is held out by the hash that also orders them, so what is held out comes first.
    """
    library = Path(sysconfig.get_path("stdlib"))
    if tiny:
        texts = [(f"email/{path}", text) for path, text in read(library / "email")]
    else:
        texts = read(library)
        torchs = Path(torch.__file__).parent
        texts += [(f"torch/{path}", text) for path, text in read(torchs)]
    digest, size, files = hashlib.sha256(), 0, {"train": 0, "heldout": 0}
    percent = 20.0 if tiny else HELD_OUT
    with (
        IndexedWriter(str(folder / "train"), np.dtype(np.uint16)) as train,
        IndexedWriter(str(folder / "heldout"), np.dtype(np.uint16)) as heldout,
    ):
        for path, text in sorted(texts, key=lambda each: draw(each[0])):
            data = text.encode()
            if size + len(data) > TEXT:
                break
            digest.update(data)
            size += len(data)
            name = "heldout" if held_out(path, percent) else "train"
            files[name] += 1
            tokens = np.append(np.frombuffer(data, np.uint8).astype(np.uint16), np.uint16(END))
            (heldout if name == "heldout" else train).add(tokens)
    return {"bytes": size, "sha256": digest.hexdigest(), "files": files}


# ---- what they say together ----


def recorded(row: Row) -> dict[str, dict[str, Any]]:
    """Return the last losses of each run in the file of lines that can be compared with this one:
    on the same text and kind of device, and of as many steps. By name.
    """
    found, alike = dict[str, dict[str, Any]](), ("text", "device")
    for line in read_lines(row.path):
        name = str(line["row"]).removeprefix("curve-")
        if line["what"] == "losses" and name in CURVES:
            found[name] = line
    own = found[row.name.removeprefix("curve-")]
    return {
        name: line
        for name, line in found.items()
        if all(line[key] == own[key] for key in alike) and len(line["loss"]) == len(own["loss"])
    }


def compare(row: Row, runs: Mapping[str, Mapping[str, Any]]) -> None:
    """Write how far the run's last losses are from bf16's. Raises Skip where there are none."""
    name = row.name.removeprefix("curve-")
    if name == BASE:
        return
    if BASE not in runs:
        raise Skip(f"{row.path.name} has no such losses of curve-{BASE}")
    line, base = runs[name], runs[BASE]
    apart = difference(line["loss"], base["loss"])
    numbers: dict[str, Any] = {**apart, "final": final(line["loss"]), "bf16": final(base["loss"])}
    ends = [each["validation"][-1][1] if each["validation"] else None for each in (line, base)]
    numbers |= {"validation": ends[0], "validation_of_bf16": ends[1]}
    what = f"less bf16, mean of the last {apart['steps']} losses"
    short = f"{apart['mean']:+.4f} (error {apart['error_of_mean']:.4f}) of {numbers['bf16']:.4f}"
    numbers["in_short"] = short
    if name == AGAIN:  # no fault where two seeds differ
        return row.say(what, **numbers)
    row.check(what, abs(apart["mean"]), (1.0 if row.tiny else MOST) * numbers["bf16"], **numbers)


def final(losses: Sequence[float]) -> float:
    """Return the mean of a run's last losses."""
    return statistics.mean(losses[-last(losses) :])


def last(losses: Sequence[float]) -> int:
    """Return of how many steps the final loss is the mean."""
    return min(LAST, max(1, len(losses) // 4))


def difference(losses: Sequence[float], base: Sequence[float]) -> dict[str, float]:
    """Return the mean of a run's last losses less another's of the same steps, and its error.

    Step by step: the two see the same bytes, so what a batch does to both goes out. error: the
    standard error of the mean, of groups of GROUP steps, as neighbours are alike.
    """
    count = last(base)
    apart = [a - b for a, b in zip(losses[-count:], base[-count:], strict=True)]
    groups = [statistics.mean(apart[i : i + GROUP]) for i in range(0, count, GROUP)]
    error = statistics.stdev(groups) / len(groups) ** 0.5 if len(groups) > 1 else float("nan")
    return {"mean": statistics.mean(apart), "error_of_mean": error, "steps": count}


def smooth(losses: Sequence[float]) -> list[float]:
    """Return, for each step from WINDOW on, the mean of the WINDOW losses before it."""
    window = min(WINDOW, max(1, len(losses) // 4))
    sums = np.cumsum([0.0, *losses])
    return list((sums[window:] - sums[:-window]) / window)


def picture(path: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the losses, and below them the difference of each from bf16's. Raises Skip."""
    try:
        import matplotlib
    except ImportError:
        raise Skip("this Python has no matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    both = BASE in found and len(found) > 1
    fig, axes = pyplot.subplots(
        1 + both, 1, figsize=(8, 7 if both else 5), sharex=True, squeeze=False,
        gridspec_kw={"height_ratios": [3, 2][: 1 + both]},
    )  # fmt: skip
    top = axes[0, 0]
    for i, (name, line) in enumerate(found.items()):
        losses = smooth(line["loss"])
        steps = range(len(line["loss"]) - len(losses) + 1, len(line["loss"]) + 1)
        label = f"{name}: {final(line['loss']):.4f}"
        top.plot(steps, losses, color=f"C{i}", linewidth=1, label=label)
        if both and name != BASE:
            base = smooth(found[BASE]["loss"])
            apart = [a - b for a, b in zip(losses, base, strict=False)]
            axes[1, 0].plot(steps[: len(apart)], apart, color=f"C{i}", linewidth=1, label=name)
    top.set_ylabel("loss, nats a byte")
    top.set_yscale("log")
    for axis in (top.yaxis.set_major_formatter, top.yaxis.set_minor_formatter):
        axis("{x:g}")
    top.legend(title="mean of the last losses")
    top.grid(alpha=0.3)
    if both:
        axes[1, 0].axhline(0.0, color="black", linewidth=0.5)
        axes[1, 0].set_ylabel("less that of bf16")
        axes[1, 0].grid(alpha=0.3)
        limit = 0.05 * final(found[BASE]["loss"])
        axes[1, 0].set_ylim(-limit, limit)
    axes[-1, 0].set_xlabel("step")
    fig.tight_layout()
    fig.savefig(path, dpi=120)
    pyplot.close(fig)
