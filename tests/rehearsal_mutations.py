# SPDX-License-Identifier: Apache-2.0
"""Break the product's GPU path in many places, one at a time, and see whether a rehearsal tells.

    python tests/rehearsal_mutations.py --seed 7 --count 100

Every mutation is one edit on one line of a copy: a wait removed, a host read added, a device or a
dtype changed, a message's peer, an axis, what a transfer keeps. A first run of each layout says
which sites it reaches, and with what: a device that is no GPU, or a dtype that would stay the same,
is no mutation. A mutant counts as found where a finding names a line within 5 of it, as one of its
two places or on the way to them. The unmutated layouts must have no finding.
"""

import argparse
import ast
import builtins
import json
import os
import pickle
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "pretrain_llama.py", "model/llama.py", "training/run/stop.py", "training/data/batch.py",
    "mpu/gradients.py", "mpu/recompute.py", "mpu/comm/collectives.py", "mpu/comm/mappings.py",
    "mpu/overlap/method.py", "mpu/overlap/ring.py", "mpu/comm/p2p.py", "mpu/comm/transport.py",
    "mpu/layers/attention/core.py", "mpu/layers/cross_entropy.py", "mpu/layers/embedding.py",
    "mpu/layers/fused.py", "mpu/layers/linear.py", "mpu/layers/packed_seq_params.py",
    "mpu/layers/rope.py", "mpu/pipeline/engine.py",
    "mpu/optim/adam.py", "mpu/zero/bucket.py", "mpu/optim/offload.py", "mpu/optim/optimizer.py",
    "mpu/zero/param_and_grad_buffer.py", "mpu/zero/reduce.py", "mpu/zero/gather.py",
)  # fmt: skip
COPIED = ("mpu", "model", "training", "forecast", "tools", "csrc", "docs")
COPIED += ("pretrain_llama.py",)
MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 200 --num-layers 2 --hidden-size 64
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 96
    --seq-length 64 --max-position-embeddings 64 --swiglu --micro-batch-size 1 --lr 1e-3
    --train-iters 8 --bf16 --device cuda --ddp-bucket-size 16384 --global-batch-size 4
"""
SP = "--tensor-model-parallel-size 2 --sequence-parallel "
GRADS = "--overlap-grad-reduce "
LAYOUTS = [  # world, flags
    (4, SP + GRADS + "--zero-stage 1 --overlap-param-gather"),
    (4, SP + GRADS + "--zero-stage 3 --overlap-param-gather --tp-comm-overlap ring"),
    (2, "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 1"),
    (2, "--tensor-model-parallel-size 2"),
    (2, SP + "--recompute-granularity full"),
    (2, "--zero-stage 2 --optimizer-cpu-offload"),
    (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --num-layers 4"),
    (2, GRADS + "--zero-stage 2 --zero-reduce-each-microbatch"),
]
MOST_LAYOUTS = 3  # in which a mutant is tried
AXES = {"tp": "dp_cp", "dp_cp": "tp", "pp": "pp_back", "pp_back": "pp", "shard": "replicate"}
VERBS = {
    "send", "receive", "exchange", "all_gather", "reduce_scatter", "all_reduce", "sum_in_order",
    "all_reduce_in_order", "sum_over_extra_axes", "start",
}  # fmt: skip
WAITS = {"wait", "wait_stream", "wait_event", "synchronize", "record_stream"}


class Site(NamedTuple):
    """One mutation. column, end: what is replaced on the line, in bytes. needs: what is looked at
    when the line runs ("" for nothing), and must be `must`."""

    kind: str
    file: str
    line: int
    column: int
    end: int
    new: str
    needs: str = ""
    must: str = ""

    @property
    def name(self) -> str:
        return f"{self.file}:{self.line}:{self.column} {self.kind} -> {self.new or 'nothing'}"


def sites_of(file: str, text: str) -> list[tuple[Site, ast.stmt]]:
    """Return the mutations of a file, each with its statement."""
    found: list[tuple[Site, ast.stmt]] = []

    def add(kind: str, node: Any, new: str, at: ast.stmt, needs: str = "", must: str = "") -> None:
        if node.lineno == node.end_lineno:
            where = node.col_offset, node.end_col_offset
            found.append((Site(kind, file, node.lineno, *where, new, needs, must), at))

    def of_call(call: ast.Call, at: ast.stmt) -> None:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        for keyword in call.keywords:
            value = keyword.value
            simple = isinstance(value, (ast.Name, ast.Attribute))
            text = ast.unparse(value)
            if keyword.arg == "device" and simple:
                add("device", value, '"cpu"', at, text, "device")
            if keyword.arg == "dtype" and simple:
                for wide in ("float64", "float32"):
                    add("dtype", value, f'__import__("torch").{wide}', at, text, wide)
        if name in ("to", "new_empty", "new_zeros", "empty", "zeros") and call.args:
            for value in call.args:
                if isinstance(value, ast.Attribute) and value.attr in ("dtype", "wire_dtype"):
                    for wide in ("float64", "float32"):
                        new = f'__import__("torch").{wide}'
                        add("dtype", value, new, at, ast.unparse(value), wide)
        if name in ("float", "double") and isinstance(call.func, ast.Attribute) and not call.args:
            other = "double" if name == "float" else "float"
            new = f"{ast.unparse(call.func.value)}.{other}()"
            add("dtype", call, new, at)
        if name in VERBS:
            for value in [*call.args, *(k.value for k in call.keywords)]:
                if isinstance(value, ast.Attribute) and value.attr in AXES:
                    new = f"{ast.unparse(value.value)}.{AXES[value.attr]}"
                    add("axis", value, new, at, f"({ast.unparse(value)}, {new})", "axes")
                if name == "start" and isinstance(value, (ast.Tuple, ast.Name)):
                    text = ast.unparse(value)
                    if text == "keep" or isinstance(value, ast.Tuple):
                        add("keep", value, "()", at)
            if isinstance(at, ast.Expr) and at.value is call and name != "start":
                add("collective", at, "pass", at)
        for value in call.args:
            if isinstance(value, ast.Subscript) and getattr(value.value, "attr", "") == "ranks":
                inner = ast.unparse(value.slice)
                new = f"{ast.unparse(value.value)}[({inner}) - 1]"
                add("peer", value, new, at)

    tree = ast.parse(text)
    for at in ast.walk(tree):
        if not isinstance(at, ast.stmt) or isinstance(at, (ast.FunctionDef, ast.ClassDef)):
            continue
        parts: list[ast.AST] = [
            part for part in ast.iter_child_nodes(at)
            if not isinstance(part, (ast.stmt, ast.excepthandler))
        ]  # fmt: skip
        for part in parts:
            for node in ast.walk(part):
                if isinstance(node, ast.Call):
                    of_call(node, at)
        if isinstance(at, ast.Expr) and isinstance(at.value, ast.Call):
            if getattr(at.value.func, "attr", "") in WAITS:
                add("wait", at, "pass", at)
            if ast.unparse(at.value.func) == "self._flying.append":
                add("keep", at, "pass", at)
        if isinstance(at, ast.Assign) and isinstance(at.targets[0], ast.Name):
            name = at.targets[0].id
            if isinstance(at.value, (ast.Call, ast.BinOp)) and at.lineno == at.end_lineno:
                end, read = at.end_col_offset or 0, f"; {name}.tolist()"
                site = Site("host read", file, at.lineno, end, end, read, name, "gpu")
                found.append((site, at))
    return found


def every_site() -> dict[str, list[tuple[Site, int, int]]]:
    """Return all mutations by file, with the lines of their statements."""
    every = {}
    for file in FILES:
        found = sites_of(file, (ROOT / file).read_text(encoding="utf-8"))
        every[file] = [(site, at.lineno, at.end_lineno or 0) for site, at in found]
    return every


def mutated(text: str, site: Site) -> str:
    """Return a file's text with one mutation."""
    lines = text.splitlines(keepends=True)
    line = lines[site.line - 1].encode()
    lines[site.line - 1] = (line[: site.column] + site.new.encode() + line[site.end :]).decode()
    return "".join(lines)


class Marker(ast.NodeTransformer):
    """Puts a call beside each statement with sites, which notes that it ran, and what it saw."""

    def __init__(self, file: str, text: str) -> None:
        self.at: dict[tuple[int, int, str], list[Site]] = defaultdict(list)
        for site, at in sites_of(file, text):
            self.at[at.lineno, at.col_offset, type(at).__name__].append(site)

    def visit(self, node: Any) -> Any:
        self.generic_visit(node)
        if not isinstance(node, ast.stmt):
            return node
        key = (node.lineno, node.col_offset, type(node).__name__)
        before, after = [], []
        for site in self.at.pop(key, []):
            value = f"(lambda: {site.needs})" if site.needs else "None"
            call = ast.parse(f"__hit__({site.name!r}, {site.must!r}, {value})").body[0]
            (after if site.kind == "host read" else before).append(call)
        return [*before, node, *after]


def hit_list(hits: set[str], steps: list[int]) -> Any:
    """Return the function that marked lines call. steps: not empty once a step has begun."""
    import torch

    def hit(name: str, must: str, value: Any) -> None:
        if name in hits or must == "gpu" and not steps:
            return
        try:
            seen = value() if value else None
        except Exception:
            return
        if must == "gpu":
            there = isinstance(seen, torch.Tensor) and seen.device.type == "cuda"
        elif must == "device":
            there = str(seen).startswith("cuda")
        elif must == "axes":
            there = seen[0].size > 1
        elif must:
            there = isinstance(seen, torch.dtype) and seen.is_floating_point
            there = there and seen != getattr(torch, must)
        else:
            there = True
        if there:
            hits.add(name)

    return hit


def copy_to(folder: Path) -> None:
    """Copy the product."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, folder / name, ignore=skip)
        elif source.exists():
            shutil.copy(source, folder / name)
    os.symlink(ROOT / "build", folder / "build")


def in_child(folder: Path, world: int, flags: str, rank: int | None, hits: bool) -> tuple[Any, Any]:
    """Rehearse a copy in a forked process; return its findings and what it hit. rank: None, all."""
    out = folder / f"result-{os.getpid()}-{time.monotonic_ns()}"
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setsid()
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            found: set[str] = set()
            steps: list[int] = []  # before the first one the host may read
            builtins.__hit__ = hit_list(found, steps)  # type: ignore[attr-defined]
            os.chdir(folder)  # where --model-file is looked for
            sys.path[0] = str(folder)
            os.environ["WORLD_SIZE"] = str(world)
            argv = [*MODEL.split(), *flags.split(), "--rehearse", "--rehearse-json", f"{out}.json"]
            argv += ["--rehearse-all-ranks"] if rank is None else ["--rehearse-rank", str(rank)]
            import pretrain_llama
            from forecast.rehearsal.main import main

            step = pretrain_llama.train_step

            def train_step(*args: Any, **named: Any) -> Any:
                steps.append(1)
                return step(*args, **named)

            pretrain_llama.train_step = train_step
            code = main(pretrain_llama, argv)
            read = json.loads(Path(f"{out}.json").read_text()) if code < 2 else None
            out.write_bytes(pickle.dumps((read and read["findings"], found if hits else None)))
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            out.write_bytes(pickle.dumps((said, None)))
        os._exit(0)
    late = time.monotonic() + LIMIT
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > late:
            os.killpg(pid, 9)
            os.waitpid(pid, 0)
            return "it did not end", None
        time.sleep(0.05)
    return pickle.loads(out.read_bytes()) if out.exists() else ("it said nothing", None)


LIMIT = 600.0


def near(found: Any, site: Site, how_near: int = 5) -> str:
    """Return how findings name a mutation's line: "place", "way", "elsewhere" or ""."""
    if not isinstance(found, list) or not found:
        return ""

    def is_near(place: str) -> bool:
        file, _, line = place.partition(":")
        return file == site.file and line.isdigit() and abs(int(line) - site.line) <= how_near

    if any(is_near(f["place"]) or is_near(f["also"]) for f in found):
        return "place"
    if any(is_near(place) for f in found for place in f["through"]):
        return "way"
    return "elsewhere"


def reached(log: Any) -> dict[str, list[int]]:
    """Return the sites that the layouts reach, each with the layouts that reach it."""
    found: dict[str, list[int]] = {}
    for number, (world, flags) in enumerate(LAYOUTS):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            copy_to(folder)
            for file in FILES:
                text = (ROOT / file).read_text(encoding="utf-8")
                tree = ast.fix_missing_locations(Marker(file, text).visit(ast.parse(text)))
                (folder / file).write_text(ast.unparse(tree))
            answer, hits = in_child(folder, world, flags, world - 1, True)
            log(f"layout {number}: {len(hits or ())} sites; findings: {answer}")
            for hit in sorted(hits or ()):
                found.setdefault(hit, []).append(number)
    return found


def try_all(site: Site, layouts: list[int]) -> tuple[str, Any, int]:
    """Return how a mutant is found, the findings, and in which of the layouts that reach it."""
    best: tuple[str, Any, int] = "", None, layouts[0]
    for layout in [*layouts[:1], *layouts[:0:-1]][:MOST_LAYOUTS]:  # the last are the most unlike
        how, answer = try_one(site, layout)
        if how in ("place", "way"):
            return how, answer, layout
        if how and not best[0]:
            best = how, answer, layout
    return best


def try_one(site: Site, layout: int) -> tuple[str, Any]:
    """Return how a mutant is found in a layout, and the findings."""
    world, flags = LAYOUTS[layout]
    how, best = "", None
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_to(folder)
        text = (ROOT / site.file).read_text(encoding="utf-8")
        (folder / site.file).write_text(mutated(text, site))
        for rank in (world - 1, None):
            answer, _ = in_child(folder, world, flags, rank, False)
            if answer and not how:
                how, best = near(answer, site) or ("elsewhere" if answer else ""), answer
            if near(answer, site) in ("place", "way"):
                return near(answer, site), answer
            if isinstance(answer, list) and answer and site.kind not in ("axis", "peer"):
                break
    return how, best


def main(argv: list[str]) -> int:
    """Sample mutants, try them, print each and the sums."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--part", default="0/1", help="of several processes: which, of how many")
    parser.add_argument("--sites", help="file that keeps which sites the layouts reach")
    asked = parser.parse_args(argv)
    prepare()
    sites = {site.name: site for each in every_site().values() for site, _, _ in each}
    kept = Path(asked.sites) if asked.sites else None
    if kept is not None and kept.exists():
        where = json.loads(kept.read_text())
    else:
        where = reached(print)
        if kept is not None:
            kept.write_text(json.dumps(where))
    names = sorted(where)
    counts = Counter(sites[name].kind for name in names)
    print(f"{len(names)} sites are reached of {len(sites)}: {dict(counts)}", flush=True)
    chosen = random.Random(asked.seed).sample(names, min(asked.count, len(names)))
    part, parts = map(int, asked.part.split("/"))
    how_many: Counter[str] = Counter()
    for name in chosen[part::parts]:
        how, answer, layout = try_all(sites[name], where[name])
        how_many[how or "not found"] += 1
        first = answer if isinstance(answer, str) else (answer or [{}])[0]
        said = first if isinstance(first, str) else f"{first.get('place')}: {first.get('what')}"
        print(f"{how or 'NOT FOUND':10} {name} | layout {layout} | {said[:160]}", flush=True)
    print(dict(how_many))
    return 0


def prepare() -> None:
    """Load torch with the device that does nothing, once for all mutants; none of the product."""
    sys.path.insert(0, str(ROOT))
    from forecast.rehearsal import guard

    guard.load()
    import numpy  # noqa: F401
    import torch  # noqa: F401
    import torch._subclasses.fake_tensor
    import torch.distributed
    import torch.utils.flop_counter  # noqa: F401

    for name in list(sys.modules):
        if name.split(".")[0] in ("tools", "mpu", "training", "model", "forecast"):
            del sys.modules[name]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
