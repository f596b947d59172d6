# SPDX-License-Identifier: Apache-2.0
"""Draw docs/gpu_step.svg: the step measured in docs/gpu-results.md, beside torch's own stack.

    python benchmarks/draw_gpu_step.py            writes docs/gpu_step.svg
    python benchmarks/draw_gpu_step.py --check    writes nothing; exits 1 if the picture differs

Every figure is read from the page's tables. Above: tokens/s of the same step by each program, with
its peak memory and, if the page has it, its MFU. Below: milliseconds of the bf16 step by kind of
kernel.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # as a script, find tools

from tools.pictures.style import PALETTE, QUIET, axes_at, page, shapes  # noqa: E402

PAGE, PICTURE = ROOT / "docs" / "gpu-results.md", ROOT / "docs" / "gpu_step.svg"
PROGRAMS = {  # row of the first table: label
    "`run-bf16`": "Weft, bf16",
    "torch's own stack, eager": "torch's own stack, eager",
    "torch's own stack, torch.compile *": "torch's own stack, compiled *",
    "`--fp8-recipe blockwise` *": "Weft, float8 in blocks *",
}
STARS = "* on another start of the machine"
KINDS = {  # rows of the second table for a step in bf16: label
    "matmuls of bf16": "matmuls",
    "cuDNN's attention": "attention",
    "AdamW": "AdamW",
    "norms, SwiGLU, RoPE, loss, copies, norm of the gradient": "others",
}


def table(page: str, first: str) -> dict[str, list[str]]:
    """Return {first cell: the other cells} of the table whose first header is `first`.

    Raises ValueError if the page has no such table.
    """
    rows: dict[str, list[str]] = {}
    for line in page.partition(f"\n| {first} |")[2].splitlines()[2:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = cells[1:]
    if not rows:
        raise ValueError(f"{PAGE.name} has no table that begins with the column {first!r}")
    return rows


def number(cell: str) -> float:
    """Return the number of a cell, such as 47,116 or 58.2 %."""
    (found,) = re.findall(r"[\d.]+", cell.replace(",", ""))
    return float(found)


def draw(text: str, path: Path) -> None:
    """Draw the figures of the page `text` to `path`."""
    steps, kinds = table(text, "row"), table(text, "kernels")
    title = "A step of Llama 3 8B's layers on one H200"
    about = "6 layers, 4 micro-batches of 8,192 tokens a step; measured by make gpu-check"
    with page(path, 8.4, 3.1, title, about) as figure:
        above = axes_at(figure, 2.3, 0.75, 3.7, 1.15)
        for row, (name, label) in enumerate(PROGRAMS.items()):
            _, speed, _, mfu, memory, *_ = steps[name]
            ours = label.startswith("Weft")
            above.barh(row, number(speed), 0.72, color=PALETTE[0] if ours else PALETTE[5])
            told = f"{speed} tokens/s, " + f"{mfu} MFU, " * bool(mfu) + f"{number(memory):.1f} GB"
            above.annotate(told, (number(speed), row), (6, 0), textcoords="offset points",
                           va="center")  # fmt: skip
            where = {"transform": above.get_yaxis_transform(), "va": "center", "ha": "right"}
            above.text(-0.02, row, label, **where)
        above.set(ylim=(len(PROGRAMS) - 0.5, -0.5), xlim=(0, 52_000))
        above.axis("off")
        below = axes_at(figure, 2.3, 2.2, 5.3, 0.3)
        begin = 0.0
        for i, ((name, label), color) in enumerate(zip(KINDS.items(), PALETTE, strict=False)):
            took = number(kinds[name][0])
            below.barh(0, took, 0.8, begin, color=color)
            y, offset = ((-0.4, -9), (0.4, 3))[i % 2]  # alternate, as short bars are adjacent
            below.annotate(f"{label} {took:.0f}", (begin, y), (0, offset),
                           textcoords="offset points", color=color)  # fmt: skip
            begin += took
        below.text(-0.014, 0, "ms of kernels, bf16", va="center", ha="right",
                   transform=below.get_yaxis_transform())  # fmt: skip
        below.set(ylim=(-0.4, 0.4), xlim=(0, begin))
        below.axis("off")
        figure.text(0.3 / 8.4, 0.12 / 3.1, STARS, color=QUIET, fontsize=7)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check, text = parser.parse_args().check, PAGE.read_text()
    if not check:
        draw(text, PICTURE)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        draw(text, Path(folder) / "gpu_step.svg")
        return int(shapes(Path(folder) / "gpu_step.svg") != shapes(PICTURE))


if __name__ == "__main__":
    sys.exit(main())
