# SPDX-License-Identifier: Apache-2.0
"""Plant the mistakes of rehearsal_faults.toml in a copy of the program, one by one, and play each.

    python tests/rehearsal_faults.py                      all of them
    python tests/rehearsal_faults.py --seed 32 --count 100    so many, drawn by the seed
    python tests/rehearsal_faults.py --kind "a prefetch is lost" --findings
    python tests/rehearsal_faults.py --json found.json    go on with those that the file lacks

A fault that changes numbers names the `test` that is red on it, and that test is run. One that
changes time, memory or the order of streams names the `rule`, which is the kind of the finding that
a rehearsal has. It counts as found where such a finding names

    place     a line within 5 of the edit, as one of its two places
    way       such a line, on the way to the finding
    effect    the edited function, or one that the fault's `shows` names

A finding at another place is printed as `elsewhere` and does not count. The table has one line for
each kind. The last rank drawn by the fault's seed is rehearsed, then all ranks if nothing is found.
A fault with `missed` is found by neither; it says why.
"""

import argparse
import ast
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("mpu", "model", "training", "forecast", "tools", "csrc", "docs", "pretrain_llama.py")
MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 200 --num-layers 2 --hidden-size 64
    --num-attention-heads 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 96
    --seq-length 64 --max-position-embeddings 64 --swiglu --micro-batch-size 1 --lr 1e-3
    --train-iters 8 --bf16 --device cuda --ddp-bucket-size 16384 --global-batch-size 4
"""
LIMIT = 600.0  # seconds
FILE = Path(__file__).with_suffix(".toml")
NEAR = 5  # lines
FOUND = ("place", "way", "effect", "red")
BESIDE = ("tests", "benchmarks", "examples", "pyproject.toml", "README.md", "Makefile")  # of tests


class Fault(NamedTuple):
    """One edit, and the world and the flags that run it."""

    number: int
    kind: str
    file: str
    old: str
    new: str
    world: int
    flags: str
    seed: int
    shows: tuple[str, ...]
    rule: str
    test: str
    missed: str

    def lines(self) -> range:
        """Return the lines that the edit changes, as they are numbered after it."""
        before, _, _ = (ROOT / self.file).read_text().partition(self.old)
        same = 0
        for old, new in zip(self.old.splitlines(), self.new.splitlines(), strict=False):
            if old != new:
                break
            same += 1
        first = before.count("\n") + 1 + same
        last = before.count("\n") + max(1, len(self.new.splitlines()))
        return range(min(first, last), last + 1)

    def text(self) -> str:
        """Return the file with the edit."""
        text = (ROOT / self.file).read_text()
        assert text.count(self.old) == 1, f"fault {self.number}: {self.old!r} in {self.file}"
        return text.replace(self.old, self.new)


def faults() -> list[Fault]:
    """Read the faults."""
    read = tomllib.loads(FILE.read_text())
    return [
        Fault(
            i, each["kind"], each["file"], each["old"], each["new"], *read["layouts"][each["at"]],
            each["seed"], tuple(each.get("shows", ())),
            *(each.get(key, "") for key in ("rule", "test", "missed")),
        )
        for i, each in enumerate(read["fault"])
    ]  # fmt: skip


@functools.cache
def functions(text: str) -> list[tuple[str, range]]:
    """Return the functions and classes of a file by their qualified names, with their lines."""
    found: list[tuple[str, range]] = []

    def walk(node: ast.AST, names: tuple[str, ...]) -> None:
        for each in ast.iter_child_nodes(node):
            here = names
            if isinstance(each, (ast.FunctionDef, ast.ClassDef)):
                here = (*names, each.name)
                first = min([each.lineno, *(one.lineno for one in each.decorator_list)])
                found.append((".".join(here), range(first, (each.end_lineno or 0) + 1)))
            walk(each, here)

    walk(ast.parse(text), ())
    return found


def how_found(fault: Fault, findings: Any) -> str:
    """Return "place", "way", "effect", "elsewhere" or "" for a fault's findings of its rule."""
    if not isinstance(findings, list):
        return ""
    findings = [one for one in findings if one["kind"] == fault.rule or not fault.rule]
    if not findings:
        return ""
    edit, effects = fault.lines(), list[tuple[str, range]]()
    near = range(edit.start - NEAR, edit.stop + NEAR)
    around = [(name, at) for name, at in functions(fault.text()) if edit.start in at]
    classes = {name for name, _ in around if name[name.rfind(".") + 1 :].lstrip("_")[:1].isupper()}
    if own := [at for name, at in around if name not in classes]:
        effects.append((fault.file, max(own, key=len)))  # a method, with what is defined in it
    for shown in fault.shows:
        file, _, name = shown.partition("::")
        text = fault.text() if file == fault.file else (ROOT / file).read_text()
        every = range(1, len(text.splitlines()) + 1)
        effects.append((file, dict(functions(text))[name] if name else every))

    def within(place: str, spans: list[tuple[str, range]]) -> bool:
        file, _, line = place.partition(":")
        return any(file == name and line.isdigit() and int(line) in at for name, at in spans)

    places = [place for one in findings for place in (one["place"], one["also"])]
    ways = [place for one in findings for place in one["through"]]
    if any(within(place, [(fault.file, near)]) for place in places):
        return "place"
    if any(within(place, [(fault.file, near)]) for place in ways):
        return "way"
    return "effect" if any(within(place, effects) for place in places) else "elsewhere"


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


def in_child(folder: Path, world: int, flags: str, rank: int | None) -> Any:
    """Rehearse a copy in a forked process; return its findings, or a text. rank: None, all."""
    out = folder / f"result-{os.getpid()}-{time.monotonic_ns()}"
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            quiet = os.open(os.devnull, os.O_WRONLY)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            os.chdir(folder)  # where --model-file is looked for
            sys.path[0] = str(folder)
            os.environ["WORLD_SIZE"] = str(world)
            argv = [*MODEL.split(), *flags.split(), "--rehearse", "--rehearse-json", f"{out}.json"]
            argv += ["--rehearse-all-ranks"] if rank is None else ["--rehearse-rank", str(rank)]
            import pretrain_llama
            from forecast.rehearsal.main import main

            code = main(pretrain_llama, argv)
            read = json.loads(Path(f"{out}.json").read_text()) if code < 2 else None
            out.write_text(json.dumps(read and read["findings"]))
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            out.write_text(json.dumps(said))
        os._exit(0)
    late = time.monotonic() + LIMIT
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > late:
            os.killpg(pid, 9)
            os.waitpid(pid, 0)
            return "it did not end"
        time.sleep(0.05)
    return json.loads(out.read_text()) if out.exists() else "it said nothing"


def prepare() -> None:
    """Load torch with the device that does nothing, once for all copies; none of the product."""
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


def red(fault: Fault, folder: Path) -> tuple[str, str]:
    """Run a fault's test in a copy with the fault; return "red" if it fails, and what it said."""
    for name in BESIDE:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / name)
    words = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=line", "-m", "", fault.test]
    try:
        done = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return "red", "it hangs"
    return ("red" if done.returncode == 1 else ""), done.stdout[-300:]


def plant(fault: Fault) -> tuple[str, Any]:
    """Play a copy with the fault; return how it was found, and the findings or the test's words."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_to(folder)
        (folder / fault.file).write_text(fault.text())
        if fault.test:
            return red(fault, folder)
        one = random.Random(fault.seed).randrange(fault.world)
        flags, best = f"{fault.flags} --seed {fault.seed}", ("", None)
        for rank in (one, None) if fault.world > 1 else (one,):
            answer = in_child(folder, fault.world, flags, rank)
            how = how_found(fault, answer)
            if how in FOUND:
                return how, answer
            best = (how, answer) if how or not best[0] else best
    return best


def clean(log: Any) -> int:
    """Rehearse the layouts of the faults without one; return how many have findings."""
    bad = 0
    for world, flags in tomllib.loads(FILE.read_text())["layouts"].values():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            copy_to(folder)
            answer = in_child(folder, world, flags, world - 1)
        bad += answer != []
        log(f"{flags or 'no flags'}: {'clean' if answer == [] else answer}", flush=True)
    return bad


def main(argv: list[str]) -> int:
    """Plant the faults that are asked for; print each, and a table by kind."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, help="draw --count of them")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--rest", action="store_true", help="those that are not drawn")
    parser.add_argument("--kind")
    parser.add_argument("--number", type=int, nargs="*")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--findings", action="store_true", help="print all findings")
    parser.add_argument("--clean", action="store_true", help="rehearse the layouts alone")
    parser.add_argument("--json", help="keeps how each was found")
    asked = parser.parse_args(argv)
    prepare()
    if asked.clean:
        return min(clean(print), 1)
    todo = faults()
    if asked.seed is not None:
        drawn = set(random.Random(asked.seed).sample(range(len(todo)), asked.count))
        todo = [fault for fault in todo if (fault.number in drawn) != asked.rest]
    if asked.kind:
        todo = [fault for fault in todo if fault.kind == asked.kind]
    if asked.number:
        todo = [fault for fault in todo if fault.number in asked.number]
    kept = Path(asked.json) if asked.json else None
    known = json.loads(kept.read_text()) if kept is not None and kept.exists() else {}
    todo = [one for one in todo if not one.missed]
    began, chosen = time.monotonic(), todo
    todo = [one for one in todo if str(one.number) not in known]
    with ThreadPoolExecutor(asked.processes) as pool:  # each rehearsal is a process of its own
        for fault, (how, answer) in zip(todo, pool.map(plant, todo), strict=True):
            some = answer if isinstance(answer, list) else [{"place": "", "what": str(answer)}]
            what = "; ".join(f"{one['place']}: {one['what'][:150]}" for one in some[:2])
            if asked.findings:
                what = "".join(f"\n      {json.dumps(one)[:700]}" for one in some)
            named = f"{fault.number:3} {fault.file}:{fault.lines().start}"
            print(f"{how or 'NOT FOUND':10}{named} | {fault.kind} | {what}", flush=True)
            known[str(fault.number)] = how
            if kept is not None:
                kept.write_text(json.dumps(known))
    results = [(fault, known[str(fault.number)]) for fault in chosen]
    planted = Counter(fault.kind for fault, _ in results)
    found = Counter(fault.kind for fault, how in results if how in FOUND)
    print(*(f"{kind:55}{planted[kind]:4}{found[kind]:4}" for kind in planted), sep="\n")
    print(
        f"{sum(found.values())} of {sum(planted.values())} found, of {len(planted)} kinds, in "
        f"{time.monotonic() - began:.0f} s; {dict(Counter(how or 'none' for _, how in results))}"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
