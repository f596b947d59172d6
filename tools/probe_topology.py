#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measure a cluster's links, and write the cluster file that tools/plan.py reads.

    torchrun --nnodes 16 --nproc-per-node 8 ... tools/probe_topology.py --device h100 \\
        --out my_cluster.json
    srun ... tools/probe_topology.py --device h100 --out my_cluster.json

It measures the latency and the bandwidth of every pair of ranks, and warns if a rank is bound to
another NUMA node than its GPU's. Beyond 64 ranks the pairs are those inside the first node and
those of the nodes' first ranks. --report writes every measurement. The exit code is 2 if an
argument is wrong.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from mpu.launch import Launch, environment_defaults

os.environ.update(environment_defaults(os.environ))

import numpy as np
import torch

from forecast.device_file import DeviceFileError, read_device
from forecast.planner.cluster import content_of
from mpu.accelerators import own_gpu, unusable_gpu
from mpu.comm.collectives import gather_bytes
from mpu.grid import Grid
from tools.command_line import Parser, error_line
from tools.topology import host
from tools.topology.levels import Matrix, levels_of
from tools.topology.measure import Prober
from training.data.files import write_text
from training.files.owned import json_with
from training.run.rendezvous import meet

EVERY = 64  # ranks up to which every pair is measured
ALONE = 16  # ranks up to which one pair is measured at a time


def gpu(name: str) -> str:
    """Return the name of a GPU that has a device file or a data sheet, for add_argument."""
    try:
        read_device(name)
    except DeviceFileError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def build_parser() -> Parser:
    """Return the command line's parser."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", required=True, help="cluster file")
    parser.add_argument("--report", type=Path, metavar="FILE", help="file for all measurements")
    parser.add_argument("--device", type=gpu, required=True, help="the GPU: h100, a100-40, ...")
    parser.add_argument("--name", default="probed", help="name of the cluster")
    parser.add_argument("--distributed-backend", choices=("nccl", "gloo"))
    return parser


def pairs(grid: Grid, prober: Prober, node: int) -> tuple[Matrix, Matrix]:
    """Return alpha and beta of every two ranks.

    In a large world, a pair of ranks on two nodes gets the values of those nodes' first ranks, and
    a pair inside a node those of the same pair in the first node.
    """
    n = grid.world_size
    if n <= EVERY:
        return prober.all_pairs(range(n), 1 if n <= ALONE else n)
    inner = prober.all_pairs(range(node), 1)
    firsts = list(range(0, n, node))
    outer = prober.all_pairs(firsts, len(firsts))
    number = np.arange(n)
    home, place = number // node, number % node
    same = home[:, None] == home[None, :]
    alpha, beta = (
        np.where(same, a[place[:, None], place[None, :]], b[home[:, None], home[None, :]])
        for a, b in zip(inner, outer, strict=True)
    )
    return alpha, beta


def place() -> host.Place:
    """Return this rank's place on its host."""
    address = None
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(torch.cuda.current_device())
        where = [getattr(about, f"pci_{name}_id", 0) for name in ("domain", "bus", "device")]
        address = "{:04x}:{:02x}:{:02x}.0".format(*where)
    return host.place_of(address)


def measured(args: argparse.Namespace, launch: Launch) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the cluster file's content and the report, on every rank."""
    cuda = args.distributed_backend != "gloo" and torch.cuda.is_available()
    if args.distributed_backend != "gloo" and (why := unusable_gpu()):
        raise ValueError(f"{why}; or measure CPUs with --distributed-backend gloo")
    device = own_gpu(launch) if cuda else torch.device("cpu")
    timeout = timedelta(minutes=10)
    grid = Grid(launch.world, pp_size=launch.world, launch=launch,
                backend=args.distributed_backend)  # fmt: skip
    grid.connect(device, meet(timeout, launch), timeout)
    node = launch.local_world
    alpha, beta = pairs(grid, Prober(grid.pp, device), node)
    here = place()
    mine = {"place": asdict(here), "findings": host.findings(here, launch.rank)}
    measurements = [
        json.loads(each) for each in gather_bytes(json.dumps(mine).encode(), grid.pp, device)
    ]
    levels = levels_of(alpha, beta, node)
    source = f"tools/probe_topology.py on {launch.world} ranks over {grid.backend}"
    content = content_of(args.name, args.device, launch.world // node, node, levels, source)
    report = {
        "alpha_seconds": alpha.tolist(),
        "beta_bytes_per_second": beta.tolist(),
        "ranks": measurements,
    }
    grid.close()
    return content, report


def lines(content: dict[str, Any], report: dict[str, Any]) -> list[str]:
    """Return the results as lines for people."""
    out = [
        f"{level['name']}: blocks of {level['gpus'] or 'all'} ranks, latency "
        f"{level['latency_us']:.1f} us, {level['gbps_per_gpu']:.3g} Gb/s a rank"
        for level in content["levels"]
    ]
    return out + [line for rank in report["ranks"] for line in rank["findings"]]


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the exit code."""
    args = build_parser().parse_args(argv)
    try:
        launch = Launch.from_env()
        if launch.world < 2:
            raise ValueError("a probe needs several ranks: start it with torchrun or srun")
        if launch.world % launch.local_world:
            raise ValueError(f"{launch.world} ranks are no multiple of the {launch.local_world} of "
                             "this node: start as many on each node")  # fmt: skip
        launch.check_rendezvous()
        content, report = measured(args, launch)
        if launch.rank == 0:
            write_text(args.out, json.dumps(content, indent=1) + "\n", json_with(*content))
            if args.report is not None:
                write_text(args.report, json.dumps(report, indent=1) + "\n", json_with(*report))
            print("\n".join([*lines(content, report), f"written: {args.out}"]))
    except (ValueError, OSError) as error:
        print(error_line("probe_topology.py", error), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # gloo's threads may block the interpreter's shutdown
