# SPDX-License-Identifier: Apache-2.0
"""Draw the loss of a run from its --log-json file, as a picture one would put in a README.

    python tools/plot_loss.py runs/quickstart/tp2/log.jsonl --output loss.png \\
        --reference 5.9 "unigram entropy" --title "Llama, 3.4 M parameters, TP 2"
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from tools.command_line import Parser, told
from training.untrusted import parse_json, read_plain

LARGEST = 1 << 30  # bytes of a log
Curve = list[tuple[int, float]]


def read_log(path: Path) -> dict[str, Curve]:
    """Return the curves {"loss": [(iteration, loss)], "validation_loss": ...} of a run as it went.

    Where a resumed run repeats iterations, the later line counts and what it replaces is dropped.
    """
    curves: dict[str, dict[int, float]] = {"loss": {}, "validation_loss": {}}
    last = 0
    for number, line in enumerate(read_plain(path, LARGEST).decode().splitlines(), 1):
        try:
            record = parse_json(line, "")
            iteration = int(record["iteration"])
            values = {name: record[name] for name in curves if record.get(name) is not None}
            if not all(type(value) in (int, float) for value in values.values()):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
            raise ValueError(f"{path}, line {number}: not a line of a --log-json file") from None
        if iteration < last:
            for curve in curves.values():
                for late in [i for i in curve if i >= iteration]:
                    del curve[late]
        last = iteration
        for name, value in values.items():
            curves[name][iteration] = value
    return {name: sorted(curve.items()) for name, curve in curves.items()}


def smooth(curve: Curve, share: float = 0.04) -> Curve:
    """Return the mean of a curve over a window centred on each point, narrower at both ends.

    The window holds about `share` of the points. Centred, it does not lag behind a falling loss.
    """
    half = round(share * len(curve) / 2)
    out = []
    for i, (iteration, _) in enumerate(curve):
        reach = min(half, i, len(curve) - 1 - i)
        window = [value for _, value in curve[i - reach : i + reach + 1]]
        out.append((iteration, sum(window) / len(window)))
    return out


def draw(
    curves: dict[str, Curve], output: Path, title: str, references: list[tuple[float, str]]
) -> None:
    """Draw the curves and write the picture to `output`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(
        {
            "font.size": 11,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.edgecolor": "#888888",
            "axes.grid": True,
            "grid.color": "#e6e6e6",
            "axes.axisbelow": True,
        }
    ):
        figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")
        blue, orange = "#1f5fa8", "#d9691b"
        loss, validation = curves["loss"], curves["validation_loss"]
        axes.plot(*zip(*loss, strict=True), color=blue, alpha=0.25, linewidth=0.8)
        axes.plot(*zip(*smooth(loss), strict=True), color=blue, linewidth=1.8, label="train")
        if validation:
            label = f"validation, {validation[-1][1]:.2f} at the end"
            axes.plot(
                *zip(*validation, strict=True),
                "o-",
                color=orange,
                markersize=5,
                label=label,
                clip_on=False,
                zorder=3,
            )
        for value, name in references:
            axes.axhline(value, color="#666666", linewidth=1.2, linestyle=(0, (5, 4)))
            axes.annotate(
                f"{name}, {value:.2f}",
                (loss[-1][0], value),
                xytext=(0, 5),
                textcoords="offset points",
                ha="right",
                color="#444444",
            )
        axes.set_title(title, loc="left", fontsize=12, fontweight="bold", pad=12)
        axes.set_xlabel("iteration")
        axes.set_ylabel("loss (nats a token)")
        axes.set_xlim(0, loss[-1][0])
        axes.legend(frameon=False, loc="center right")
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)
        pyplot.close(figure)


def main() -> None:
    """Read the log and draw it."""
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("log", type=Path, help="the file given to --log-json")
    parser.add_argument("--output", type=Path, required=True, help="the .png to write")
    parser.add_argument("--title", default="Loss", help="title of the picture")
    parser.add_argument(
        "--reference",
        nargs=2,
        action="append",
        default=[],
        metavar=("VALUE", "NAME"),
        help="a dashed line at a loss to compare with, in nats",
    )
    args = parser.parse_args()
    try:
        references = [(float(value), name) for value, name in args.reference]
        curves = read_log(args.log)
        if not curves["loss"]:
            raise ValueError(f"{args.log}: holds no loss yet")
        draw(curves, args.output, args.title, references)
    except (ValueError, OSError) as error:
        sys.exit(told("plot_loss.py", error))


if __name__ == "__main__":
    main()
