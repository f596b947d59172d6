#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compare pipeline schedules with torch.distributed.pipelining, and with our own simulator.

    python benchmarks/bench_pipeline.py [--cases tiny/1f1b/4 ...] [--peer PATH]
    sudo python benchmarks/bench_pipeline.py --link 200mbit [--cases tiny/1f1b/8 tiny/zb-h1/8]

Two ranks have one thread each. Weft runs as users run it: pretrain_llama.py, whose log is read. The
peer runs the same sizes, micro-batches and precision through torch's own schedule classes; for
zb-h1, which torch lacks, InterleavedZeroBubble with two stages per rank. Launches alternate, so
that drifts of the machine's speed affect both equally; a figure is the median over the timed steps
of all launches. Three more columns are printed:

    bound      the slowest rank's matmuls and attention alone, divided by 1 - bubble (bubble: of
               the schedule itself, with equal stages and F = B = W)
    pipeline   measured time of the schedule's part of Weft's step (--profile)
    simulated  the same by mpu/pipeline/simulate.py, from each stage's median F, B and W

--link RATE runs only Weft, the cases in turn, with the two ranks in two network namespaces joined
by a link of that rate (Linux, root, iproute2).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.bench_step import (  # noqa: E402
    PEER,
    SIZES,
    command,
    environment,
    model_flags,
    output,
    products,
)
from mpu.pipeline.schedules import CHUNKS, Schedule, build  # noqa: E402
from mpu.pipeline.simulate import Costs, simulate  # noqa: E402
from mpu.pipeline.stage_layout import Stage  # noqa: E402
from pretrain_llama import model_provider  # noqa: E402
from training.flags.parse import parse  # noqa: E402
from training.run.pipeline_stages import stages_of  # noqa: E402

P = 2
THEIRS = {  # our schedule: torch's class, and its stages per rank
    "1f1b": ("1F1B", 1),
    "interleaved": ("Interleaved1F1B", 2),
    "zb-h1": ("InterleavedZeroBubble", 2),
    "zb-v": ("ZBVZeroBubble", 2),
}
WARM = {"tiny": 3, "small": 1}  # steps before the timed ones
CASES = [f"{size}/{name}/{m}" for size in SIZES for name in THEIRS for m in (4, 8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, default=PEER, help="the peer's script")
    parser.add_argument("--cases", nargs="+", default=CASES, metavar="SIZE/SCHEDULE/M")
    parser.add_argument("--launches", type=int, default=3, help="of each, taken in turn")
    parser.add_argument("--steps", type=int, default=0, help="timed (0: 10 tiny, 2 small)")
    parser.add_argument("--link", metavar="RATE", help="as tc writes it: 200mbit, 1gbit")
    parser.add_argument("--products", metavar="SIZE", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.products:
        print(json.dumps(products(args.products, "fp32", 1, 1)))
        return
    for case in args.cases:
        if case not in CASES:
            parser.error(f"--cases {case}: one of {', '.join(CASES)}")
    if args.link:
        on_a_link(args)
    else:
        against_the_peer(args)


def against_the_peer(args: argparse.Namespace) -> None:
    """Print a line for each case: Weft, the peer, the bound and the simulation."""
    print("p = 2, fp32, micro-batch 1; seconds a step, medians of alternating launches")
    print(f"{'case':<22}{'Weft':>8}{'peer':>8}{'ratio':>7}{'bound':>8}{'of bound':>9}"
          f"{'pipeline':>10}{'simulated':>10}{'off by':>8}{'bubble':>8}  layers")  # fmt: skip
    bounds: dict[str, list[tuple[float, float]]] = {}
    for case in args.cases:
        size, name, _ = case.split("/")
        steps = args.steps or (10 if size == "tiny" else 2)
        runs, theirs = [], []
        for _ in range(args.launches):
            runs.append(run_weft(case, steps))
            theirs += run_peer(args.peer, case, steps)
            bounds.setdefault(size, []).append(run_products(size))
        ours = [second for run in runs for second in run["steps"]]
        mine, peer = statistics.median(ours), statistics.median(theirs)
        measured, predicted = predict(case, runs)
        bound, bubble = bound_of(case, [min(each) for each in zip(*bounds[size], strict=True)])
        cut = " ".join(f"{s.last - s.first}" for s in cut_of(case))
        print(f"{case:<22}{mine:>8.4f}{peer:>8.4f}{mine / peer:>7.2f}{bound:>8.4f}"
              f"{bound / mine:>9.0%}{measured:>10.4f}{predicted:>10.4f}"
              f"{predicted / measured - 1:>+8.1%}{bubble:>8.1%}  {cut}", flush=True)  # fmt: skip


def on_a_link(args: argparse.Namespace) -> None:
    """Print a line for each case: Weft's steps over the link of --link."""
    print(f"p = 2 over a link of {args.link}; seconds a step, medians of alternating launches")
    seconds: dict[str, list[float]] = {case: [] for case in args.cases}
    with Link(args.link) as link:
        for _ in range(args.launches):
            for case in args.cases:
                steps = args.steps or (10 if case.startswith("tiny") else 2)
                seconds[case] += run_weft(case, steps, link)["steps"]
    first = statistics.median(seconds[args.cases[0]])
    for case, found in seconds.items():
        median = statistics.median(found)
        print(f"{case:<22}{median:>8.4f}{median / first:>7.2f} of the first")


def schedule_of(case: str) -> Schedule:
    """Return the schedule of a case."""
    _, name, m = case.split("/")
    return build(name, P, int(m), CHUNKS[name])


def flags_of(case: str) -> list[str]:
    """Return the flags of pretrain_llama.py for a case."""
    size, name, m = case.split("/")
    flags = [*model_flags(size), "--pipeline-model-parallel-size", str(P)]
    flags += ["--pipeline-schedule", name, "--micro-batch-size", "1", "--global-batch-size", m]
    if CHUNKS[name] > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(CHUNKS[name])]
    return flags


def cut_of(case: str) -> tuple[Stage, ...]:
    """Return the case's stages, as in the run."""
    return stages_of(parse([*flags_of(case), "--train-iters", "1"], P), model_provider)


class Link:
    """Two network namespaces joined by a pair of virtual cards with a limited rate."""

    def __init__(self, rate: str, burst: str = "64kb") -> None:
        self.rate, self.burst = rate, burst
        self.spaces = [f"weft{os.getpid()}{end}" for end in "ab"]

    def __enter__(self) -> "Link":
        a, b = self.spaces
        for space in self.spaces:
            tell(f"ip netns add {space}")
        tell(f"ip link add {a} netns {a} type veth peer name {b} netns {b}")
        for i, space in enumerate(self.spaces, 1):
            tell(f"ip -n {space} addr add 10.77.0.{i}/24 dev {space}")
            tell(f"ip -n {space} link set {space} up")
            tell(f"ip -n {space} link set lo up")
            tell(f"tc -n {space} qdisc add dev {space} root tbf rate {self.rate} "
                 f"burst {self.burst} latency 400ms")  # fmt: skip
        return self

    def __exit__(self, *error: Any) -> None:
        for space in self.spaces:
            tell(f"ip netns del {space}")

    def run(self, words: list[str], apart: bool = False) -> None:
        """Run one rank in each namespace, and wait for both.

        {end} in a word is replaced by the namespace's number. apart: start two runs of one rank.
        """
        ranks = []
        for rank, space in enumerate(self.spaces):
            here = [word.replace("{end}", str(rank)) for word in words]
            environment = {"RANK": str(rank), "WORLD_SIZE": str(P), "LOCAL_RANK": "0"}
            environment |= {"RANK": "0", "WORLD_SIZE": "1"} if apart else {}
            environment |= {
                "MASTER_ADDR": "10.77.0.1",
                "MASTER_PORT": "29777",
                "OMP_NUM_THREADS": "1",
            }
            environment |= {"GLOO_SOCKET_IFNAME": space}
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", space, *here],
                    env={**os.environ, **environment},
                    stdout=subprocess.DEVNULL,
                )
            )
        if any([rank.wait() for rank in ranks]):
            sys.exit(f"{' '.join(words)} failed over the link")


def tell(line: str) -> None:
    """Run a command of iproute2."""
    try:
        subprocess.run(line.split(), check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"--link needs Linux, root and iproute2: {error}")


def run_weft(case: str, steps: int, link: Link | None = None) -> dict[str, Any]:
    """Run pretrain_llama.py; return the timed steps' seconds, and each rank's spans in them."""
    warm = WARM[case.split("/")[0]]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.json"
        flags = [*flags_of(case), "--train-iters", str(warm + steps), "--log-json", str(log)]
        flags += ["--profile", "--profile-step-start", str(warm), "--profile-ranks"]
        flags += ["--profile-step-end", str(warm + steps), "--tensorboard-dir", folder]
        if link is None:
            output([*command(P), str(ROOT / "pretrain_llama.py"), *flags], P)
        else:
            link.run([sys.executable, str(ROOT / "pretrain_llama.py"), *flags])
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        ranks = [
            json.loads((Path(folder) / f"pipeline_rank{r}.json").read_text()) for r in range(P)
        ]
    seconds = [row["step_seconds"] for row in rows if "step_seconds" in row][warm:]
    return {"steps": seconds, "spans": [[s["spans"] for s in rank["steps"]] for rank in ranks]}


def run_peer(peer: Path, case: str, steps: int) -> list[float]:
    """Run the peer; return the seconds of the timed steps."""
    size, name, m = case.split("/")
    theirs, chunks = THEIRS[name]
    flags = f"--size {size} --pp {P} --schedule {theirs} --vpp {chunks} --microbatches {m} "
    flags += f"--warmup {WARM[size]} --steps {WARM[size] + steps}"
    text = output([*command(P), str(peer), *flags.split()], P)
    return json.loads(text[text.index("JSON ") + 5 :].splitlines()[0])["times"]


def run_products(size: str) -> tuple[float, float]:
    """Return the seconds of a layer's and of the head's matmuls in two processes at once."""
    words = [sys.executable, __file__, "--products", size]
    ranks = [
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment(P))
        for _ in range(P)
    ]
    layer, head = zip(*[json.loads(rank.communicate()[0]) for rank in ranks], strict=True)
    return max(layer), max(head)


def bound_of(case: str, seconds: list[float]) -> tuple[float, float]:
    """Return the least possible seconds of a step in this schedule, and the schedule's bubble."""
    schedule, (layer, head) = schedule_of(case), seconds
    work = [0.0] * P
    for number, stage in enumerate(cut_of(case)):
        cost = (stage.last - stage.first) * layer + stage.loss * head
        work[schedule.place(number)[0]] += schedule.micro_batches * cost
    even = [1.0] * schedule.stages
    found = simulate(schedule, Costs(even, even, even))
    bubble = found.bubble / found.step
    return max(work) / (1 - bubble), bubble


def predict(case: str, runs: list[dict[str, Any]]) -> tuple[float, float]:
    """Return the seconds of a step's pipeline part: the measured median, and as simulated."""
    schedule = schedule_of(case)
    took: dict[tuple[str, int], list[float]] = {}
    lasted = []
    for run in runs:
        for step in zip(*run["spans"], strict=True):
            flat = [span for rank in step for span in rank]
            lasted.append(max(s[4] for s in flat) - min(s[3] for s in flat))
            for r, rank in enumerate(step):
                for kind, chunk, _, begin, end in rank:
                    took.setdefault((kind, schedule.stage(r, chunk)), []).append(end - begin)

    def cost(*kinds: str) -> list[float]:
        return [
            sum(statistics.median(took.get((kind, stage), [0.0])) for kind in kinds)
            for stage in range(schedule.stages)
        ]

    costs = Costs(cost("F"), cost("B", "BW"), cost("W"))
    return statistics.median(lasted), simulate(schedule, costs).step


if __name__ == "__main__":
    main()
