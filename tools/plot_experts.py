# SPDX-License-Identifier: Apache-2.0
"""Draw how evenly tokens went to experts, from a --log-json file with --moe-per-layer-logging.

    python tools/plot_experts.py runs/mixture/log.jsonl --output load.png

At the left the load of each layer over the run: the tokens of its fullest expert over the mean, 1
being even. At the right the tokens of each expert over the mean of its layer, in the last line that
has them.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from tools.command_line import Parser, error_line
from tools.pictures.style import PALETTE, QUIET, axes_at, check_name, page
from training.files.untrusted import parse_json, read_plain

LARGEST = 1 << 30  # bytes of a log
NAMED = len(PALETTE)  # layers that have a line of their own; of more, the highest and the mean
Counts = dict[int, list[int]]  # tokens of each expert, by layer


def read_counts(path: Path) -> dict[int, Counts]:
    """Return {iteration: tokens of each expert by layer}; of a resumed run the later line counts.

    Raises ValueError where there are none.
    """
    found: dict[int, Counts] = {}
    for number, line in enumerate(read_plain(path, LARGEST).splitlines(), 1):
        try:
            record = parse_json(line, "")
            iteration = int(record["iteration"])
            if "loss" in record:  # the run went back to before it
                found = {i: counts for i, counts in found.items() if i < iteration}
            rows = [(int(layer), [int(n) for n in counts])
                    for layer, counts in record.get("expert_tokens") or ()]  # fmt: skip
            if any(min(counts) < 0 or not sum(counts) for _, counts in rows):
                raise ValueError
            if {len(counts) for _, counts in rows} - {len(rows[0][1])} if rows else False:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise ValueError(f"{path}, line {number}: not a line of a --log-json file") from None
        if rows:
            found[iteration] = dict(rows)
    if not found:
        raise ValueError(f"{path}: has no tokens of experts: train with --moe-per-layer-logging")
    return found


def over_mean(counts: list[int]) -> list[float]:
    """Return each expert's tokens over the mean of its layer."""
    return [count * len(counts) / sum(counts) for count in counts]


def loads(found: dict[int, Counts]) -> dict[str, list[tuple[int, float]]]:
    """Return the lines of the left half: {name: (iteration, load)}."""
    layers = sorted({layer for counts in found.values() for layer in counts})
    each = {
        f"layer {layer}": [(i, max(over_mean(c[layer]))) for i, c in found.items() if layer in c]
        for layer in layers
    }
    if len(layers) <= NAMED:
        return each
    every = [(i, [max(over_mean(counts)) for counts in c.values()]) for i, c in found.items()]
    return {
        "highest layer": [(i, max(some)) for i, some in every],
        "mean of layers": [(i, sum(some) / len(some)) for i, some in every],
    }


def draw(found: dict[int, Counts], output: Path, title: str) -> None:
    """Draw both halves to `output`, a .png or .svg by its suffix."""
    last, counts = max(found.items())
    layers = sorted(counts)
    shares = [over_mean(counts[layer]) for layer in layers]
    about = f"{len(layers)} layers of {len(shares[0])} experts, iterations {min(found)} to {last}"
    with page(output, 9, 4.2, title, about, dpi=150) as figure:
        axes = axes_at(figure, 0.6, 0.8, 3.6, 2.8)
        axes.grid()
        for colour, (name, line) in zip(PALETTE, loads(found).items(), strict=False):
            axes.plot(*zip(*line, strict=True), color=colour, linewidth=1.4, label=name, marker=".")
        axes.axhline(1.0, color=QUIET, linewidth=1, linestyle=(0, (5, 4)))
        axes.set(xlabel="iteration", ylabel="fullest expert, tokens over the mean")
        axes.legend(loc="best")
        heat: Any = axes_at(figure, 4.9, 0.8, 3.2, 2.8)
        most = max(max(row) for row in shares)
        image = heat.imshow(shares, aspect="auto", cmap="viridis", vmin=0.0, vmax=max(most, 1.0))
        heat.set(xlabel="expert", ylabel="layer")
        heat.set_yticks(range(len(layers)), [str(layer) for layer in layers])
        bar = axes_at(figure, 8.25, 0.8, 0.12, 2.8)
        figure.colorbar(image, cax=bar, label=f"tokens over the mean, iteration {last}")


def main() -> None:
    """Read the log and draw it."""
    parser = Parser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("log", type=Path, metavar="LOG", help="a file of --log-json")
    parser.add_argument(
        "--output", type=Path, help="the .png or .svg to write (default: LOG with -experts.png)"
    )
    parser.add_argument("--title", default="Load of experts", help="title of the picture")
    args = parser.parse_args()
    output = args.output or args.log.with_name(f"{args.log.stem}-experts.png")
    try:
        check_name(output)
        draw(read_counts(args.log), output, args.title)
        print(f"drawn: {output}")
    except (ValueError, OSError) as error:
        sys.exit(error_line("plot_experts.py", error))


if __name__ == "__main__":
    main()
