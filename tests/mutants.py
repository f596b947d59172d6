# SPDX-License-Identifier: Apache-2.0
"""Break the product in many places, one at a time, and see which test finds each.

    python tests/mutants.py --seed 0 --count 120 --out runs/mutants
    python tests/mutants.py --out runs/other --like runs/mutants   the same at another commit

A mutant is one edit in a clone of HEAD: an operator, a constant, an axis, an order or a call.
First the tests run once in a clone where every chosen place notes the test file that reaches it
(map.json). Then each mutant runs the test files that reach it, the nearest and shortest first,
until one test fails or the time is over. A place outside functions, or in a Triton kernel, cannot
be marked: its files are those that name its module. results.jsonl has one line for each mutant,
so that an interrupted run goes on where it was.

With --like, a mutant counts as killed where the other run's killing test is collected here with the
same code; the others run, against the files of the other run's map that are here.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# How many of 120 mutants each room gets. In a room each kind gets the same number, if it can.
ROOMS = {"mpu": 40, "training": 34, "tools": 12, "model": 7, "pretrain_llama.py": 5,
         "forecast": 13}  # fmt: skip
KINDS = ("operator", "constant", "axis", "order", "call")
OPERATORS: dict[type[ast.AST], type[Any]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.Pow: ast.Mult,
    ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv, ast.And: ast.Or, ast.Or: ast.And,
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
AXES = {
    "tp": "cp", "cp": "tp", "dp": "tp", "pp": "dp", "ep": "tp", "edp": "ep", "dp_cp": "tp",
    "dp_cp_shard": "dp_cp_replicate", "dp_cp_replicate": "dp_cp_shard", "embd": "pp",
    "pp_back": "pp", "tp_kv": "tp", "tp_cp": "tp",
}  # fmt: skip
TOUCH = """
import mmap, os
folder = os.path.dirname(__file__)
worker = os.environ.get("PYTEST_XDIST_WORKER", "none")
with open(f"{folder}/file.{worker}", "rb") as source:
    now = mmap.mmap(source.fileno(), 4, access=mmap.ACCESS_READ)
seen = set()
def hit(site):
    note = site, now[:4]
    if note not in seen:
        seen.add(note)
        log = os.open(f"{folder}/hits", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        os.write(log, f"{site} {worker} {int.from_bytes(note[1], 'little')}\\n".encode())
        os.close(log)
"""


@dataclass(frozen=True)
class Site:
    """One mutant: `old` becomes `new`. within: its function. nth: of those alike in the function.

    start, end: bytes of the file. mark: where a note that it was reached may stand: "expression",
    "statement" or "" for nowhere.
    """

    file: str
    within: str
    kind: str
    old: str
    new: str
    nth: int
    line: int
    start: int
    end: int
    mark: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What the mutant is, where lines may have moved."""
        return self.file, self.within, self.kind, self.old, self.new, self.nth

    def __str__(self) -> str:
        old, new = (" ".join(text.split())[:60] for text in (self.old, self.new))
        return f"{self.file}:{self.line} {self.kind}: {old} -> {new}"


def product_files(root: Path = ROOT) -> list[str]:
    """List the product's files of Python."""
    found = [root / name for name in ROOMS if name.endswith(".py")]
    found += [path for name in ROOMS for path in root.glob(f"{name}/**/*.py")]
    return sorted(path.relative_to(root).as_posix() for path in found)


def room_of(file: str) -> str:
    """Return the room of a file."""
    return file.split("/")[0]


class Finder(ast.NodeVisitor):
    """Lists the mutants of a file."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.source = file, text.encode()
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.names: list[str] = []
        self.marks = False
        self.found: list[Site] = []
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self.visit(ast.parse(text))

    def span(self, node: Any) -> tuple[int, int]:
        """Return the bytes of a node."""
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def add(self, kind: str, node: Any, new: str, mark: str, last: Any = None) -> None:
        """Note a mutant that replaces what stands from `node` to the end of `last`."""
        start, end = self.span(node)[0], self.span(last or node)[1]
        old = self.source[start:end].decode()
        key = ".".join(self.names), kind, old, new
        mark = mark if self.marks else ""
        self.counts[key] += 1
        nth = self.counts[key]
        self.found.append(
            Site(self.file, key[0], kind, old, new, nth, node.lineno, start, end, mark)
        )

    def replace(self, kind: str, node: Any, **fields: Any) -> None:
        """Note a mutant in which an expression has other fields."""
        other = type(node)(**{**dict(ast.iter_fields(node)), **fields})
        self.add(kind, node, f"({ast.unparse(ast.fix_missing_locations(other))})", "expression")

    def visit_body(self, statements: Sequence[ast.stmt]) -> None:
        """Note dropped calls and exchanged neighbours."""
        for one in statements:
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call):
                self.add("call", one, "pass", "statement")
        for one, two in zip(statements, statements[1:], strict=False):
            simple = all(isinstance(s, (ast.Assign, ast.AugAssign, ast.Expr)) for s in (one, two))
            calls = any(isinstance(n, ast.Call) for s in (one, two) for n in ast.walk(s))
            text = any(isinstance(getattr(s, "value", 0), ast.Constant) for s in (one, two))
            if simple and calls and not text and one.col_offset == two.col_offset:
                (a, b), (c, d) = self.span(one), self.span(two)
                pieces = self.source[c:d], self.source[b:c], self.source[a:b]
                self.add("order", one, b"".join(pieces).decode(), "statement", last=two)

    def visit(self, node: ast.AST) -> None:
        """Look at a node, and at what may be changed below it."""
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statements := getattr(node, name, None), list):
                self.visit_body(statements)
        super().visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Look at defaults and body: no annotation, no decorator."""
        self.names.append(node.name)
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        before = self.marks
        self.marks = not any("jit" in ast.unparse(d) for d in node.decorator_list)
        for statement in node.body:
            self.visit(statement)
        self.marks = before
        self.names.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Look at the body."""
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Look at the value alone."""
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        """Leave out what only a type checker or a script's start reads."""
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "__name__ == '__main__'"):
            self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave out text."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave out messages."""

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Change the operator, or the order of operands."""
        text = any(isinstance(n, (ast.JoinedStr, ast.Constant)) and not isinstance(
            getattr(n, "value", ""), (int, float)) for n in (node.left, node.right))  # fmt: skip
        if type(node.op) in OPERATORS and not text:
            self.replace("operator", node, op=OPERATORS[type(node.op)]())
        if isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.MatMult)):
            self.replace("order", node, left=node.right, right=node.left)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Exchange and, or."""
        self.replace("operator", node, op=OPERATORS[type(node.op)]())
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Change the first comparison."""
        self.replace("operator", node, ops=[OPERATORS[type(node.ops[0])](), *node.ops[1:]])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Leave out not, and the sign of what is no number."""
        number = isinstance(node.operand, ast.Constant)
        if isinstance(node.op, (ast.Not, ast.USub)) and not number:
            self.add("operator", node, f"({ast.unparse(node.operand)})", "expression")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Change a number, a truth value or the name of an axis."""
        value = node.value
        if isinstance(value, bool):
            self.add("constant", node, str(not value), "expression")
        elif isinstance(value, (int, float)):
            new = value + 1 if isinstance(value, int) else value * 2 or 1.0
            self.add("constant", node, repr(new), "expression")
        elif isinstance(value, str) and value in AXES:
            self.add("axis", node, repr(AXES[value]), "expression")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Take another axis."""
        if node.attr in AXES and isinstance(node.ctx, ast.Load):
            new = f"{ast.unparse(node.value)}.{AXES[node.attr]}"
            self.add("axis", node, new, "expression")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Take another dimension of a shape."""
        name, index = getattr(node.value, "attr", ""), node.slice
        if name == "shape" and isinstance(index, (ast.Constant, ast.UnaryOp)):
            new = "0" if ast.unparse(index) == "-1" else "-1"
            self.add("axis", node, f"{ast.unparse(node.value)}[{new}]", "expression")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Exchange two arguments, or take another dimension."""
        two = node.args[:2]
        if len(two) == 2 and not any(isinstance(a, (ast.Starred, ast.Constant)) for a in two):
            new = ast.Call(node.func, [two[1], two[0], *node.args[2:]], node.keywords)
            self.add("order", node, ast.unparse(ast.fix_missing_locations(new)), "expression")
        for keyword in node.keywords:
            value = keyword.value
            if keyword.arg == "dim" and isinstance(value, (ast.Constant, ast.UnaryOp)):
                new_dim = "0" if ast.unparse(value) == "-1" else "-1"
                self.add("axis", value, new_dim, "expression")
        self.generic_visit(node)


def every_site(root: Path = ROOT) -> dict[str, list[Site]]:
    """Return all mutants, by room."""
    sites: dict[str, list[Site]] = {room: [] for room in ROOMS}
    for file in product_files(root):
        sites[room_of(file)] += Finder(file, (root / file).read_text(encoding="utf-8")).found
    return sites


def choose(seed: int, count: int) -> list[Site]:
    """Choose mutants: each room its part of them, each kind in turn."""
    random_ = random.Random(seed)
    chosen: list[Site] = []
    total = sum(ROOMS.values())
    for room, sites in every_site().items():
        by_kind = [[s for s in sites if s.kind == kind] for kind in KINDS]
        for each in by_kind:
            random_.shuffle(each)
        for turn in range(round(count * ROOMS[room] / total)):
            left = [each for each in by_kind[turn % len(KINDS) :] + by_kind if each]
            chosen.append(left[0].pop())
    return chosen


def edited(source: bytes, edits: Sequence[tuple[int, int, bytes]]) -> bytes:
    """Return a text in which spans are replaced. The spans are apart, or one holds the other."""
    for start, end, new in sorted(edits, reverse=True):
        source = source[:start] + new + source[end:]
    return source


def marked(source: bytes, sites: Sequence[tuple[int, Site]]) -> bytes:
    """Return a file's text in which each site notes that it is reached; lines stay as they are."""
    edits = []
    for number, site in sites:
        call = f'__import__("weft_touch").hit({number})'.encode()
        if site.mark == "expression":
            edits += [(site.start, site.start, b"(" + call + b" or "), (site.end, site.end, b")")]
        elif site.mark == "statement":
            edits.append((site.start, site.start, call + b"; "))
    return edited(source, edits)


def clone(folder: Path) -> Path:
    """Clone HEAD into a folder, with this checkout's environment and native library."""
    if folder.exists():
        shutil.rmtree(folder)
    subprocess.run(
        [
            "git",
            "-c",
            "advice.detachedHead=false",
            "clone",
            "-q",
            "--shared",
            str(ROOT),
            str(folder),
        ],
        check=True,
    )
    for name in (".venv", "build"):
        if (ROOT / name).exists():
            os.symlink((ROOT / name).resolve(), folder / name)
    return folder


def environment(folder: Path, **own: str) -> dict[str, str]:
    """Return the environment of a pytest in a clone."""
    path = [str(folder), *filter(None, (own.pop("path", ""), os.environ.get("PYTHONPATH")))]
    more = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(path)}
    return os.environ | more | own


WORDS = ["-q", "-p", "tests.mutants", "-p", "no:cacheprovider"]


def forked(folder: Path, words: Sequence[str], limit: float, env: dict[str, str]) -> int:
    """Run pytest in a fork of this process, which has imported torch; 124 if the time is over."""
    import pytest

    pid = os.fork()
    if not pid:
        os.setsid()
        with open(folder / "pytest.log", "w") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(env)
        os.chdir(folder)
        sys.path[:0] = env["PYTHONPATH"].split(os.pathsep)
        for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
            del sys.modules[name]
        sys.dont_write_bytecode = True
        os._exit(pytest.main([*WORDS, "-x", *words]))
    stop, status = time.monotonic() + limit, (0, 0)
    while status[0] == 0 and time.monotonic() < stop:
        time.sleep(0.05)
        status = os.waitpid(pid, os.WNOHANG)
    late = status[0] == 0
    if late:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    end_all(env["MUTANTS_KILLER"], pid)
    if late:
        return 124
    return os.waitstatus_to_exitcode(status[1])


def end_all(mark: str, session: int) -> None:
    """Kill what tests left behind: every process of a session, and every one that has the path
    `mark` in its environment, which a fork does not show.
    """
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            own = int((process / "stat").read_text().rpartition(")")[2].split()[3])
            marked = f"MUTANTS_KILLER={mark}".encode() in (process / "environ").read_bytes()
            if own == session or marked:
                os.kill(int(process.name), signal.SIGKILL)


def pytest_configure(config: Any) -> None:
    """Follow pytest where it runs for a mutant: its variables are set."""
    if "MUTANTS_MAP" in os.environ:
        config.pluginmanager.register(Mapper(Path(os.environ["MUTANTS_MAP"])))
    if "MUTANTS_KILLER" in os.environ:
        config.pluginmanager.register(Killer(Path(os.environ["MUTANTS_KILLER"])))


class Mapper:
    """Tells marked lines which test file runs, and writes down each file's seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.files = folder, [""]
        self.worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        (folder / f"file.{self.worker}").write_bytes(bytes(4))
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_protocol(self, item: Any) -> None:
        """Write the number of the test file."""
        name = item.nodeid.split("::")[0]
        if name != self.files[-1]:
            self.files.append(name)
            with open(self.folder / f"file.{self.worker}", "r+b") as file:
                file.write((len(self.files) - 1).to_bytes(4, "little"))
            (self.folder / f"files.{self.worker}").write_text(json.dumps(self.files))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add up seconds."""
        self.seconds[report.nodeid.split("::")[0]] += report.duration
        (self.folder / f"seconds.{self.worker}").write_text(json.dumps(self.seconds))


class Killer:
    """Writes down the first test that fails."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def note(self, report: Any) -> None:
        """Note a report that failed."""
        if report.failed and not self.file.exists():
            said = str(report.longrepr).strip().splitlines() or [""]
            self.file.write_text(json.dumps([report.nodeid, said[-1][:300]]))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """See a test's report."""
        self.note(report)

    def pytest_collectreport(self, report: Any) -> None:
        """See the report of a file that could not be read."""
        self.note(report)


def make_map(out: Path, sites: Sequence[Site]) -> dict[str, Any]:
    """Run the tests once; return which files reach each site, and each file's seconds."""
    folder, touch = clone(out / "clone"), out / "touch"
    shutil.rmtree(touch, ignore_errors=True)
    touch.mkdir()
    (touch / "weft_touch.py").write_text(TOUCH)
    (touch / "file.none").write_bytes(bytes(4))  # where tests clear the environment
    (touch / "hits").touch()
    by_file = defaultdict(list)
    for number, site in enumerate(sites):
        by_file[site.file].append((number, site))
    for file, here in by_file.items():
        path = folder / file
        path.write_bytes(marked(path.read_bytes(), here))
        compile(path.read_bytes(), file, "exec")
    env = environment(folder, path=str(touch), MUTANTS_MAP=str(touch))
    with open(out / "map.log", "w") as log:
        code = subprocess.run(
            [sys.executable, "-B", "-m", "pytest", *WORDS, "-n", "2", "--dist", "loadfile"],
            cwd=folder, env=env, check=False,
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        ).returncode  # fmt: skip
    print(f"the map: pytest ended with {code} (a test that reads sources may fail)", flush=True)
    names, seconds = {"none": [""]}, dict[str, float]()
    for path in touch.glob("files.gw*"):
        worker = path.suffix.removeprefix(".")
        names[worker] = json.loads(path.read_text())
        seconds |= json.loads((touch / f"seconds.{worker}").read_text())
    reached: dict[int, set[str]] = defaultdict(set)
    for line in (touch / "hits").read_text().splitlines():
        number, worker, file_number = line.split()
        reached[int(number)].add(names[worker][int(file_number)])
    for number, site in enumerate(sites):
        if not site.mark:
            reached[number] |= files_that_name(site.file, list(seconds))
    files = [sorted(reached[number] - {""}) for number in range(len(sites))]
    found = {"seconds": seconds, "files": files}
    (out / "map.json").write_text(json.dumps(found))
    return found


@cache
def texts_of_tests() -> dict[str, str]:
    """Return {file: text} of all Python below tests/."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in files}


def files_that_name(file: str, names: Collection[str]) -> set[str]:
    """List the test files that name a file's module, by way of their helpers too, or are its own.

    names: the test files. A helper that names it stands for the files that name the helper.
    """
    found, again = set[str](), [file]
    while again:
        module, stem = again[-1].removesuffix(".py").replace("/", "."), Path(again.pop()).stem
        imported = rf"from {re.escape(module.rpartition('.')[0])} import [^\n]*\b{stem}\b"
        for name, text in texts_of_tests().items():
            if name not in found and (module in text or re.search(imported, text)):
                found.add(name)
                again += [name] * (name not in names and not name.endswith("conftest.py"))
    own = f"test_{Path(file).stem}.py"
    return {name for name in names if name in found or Path(name).name == own}


def in_order(site: Site, files: Sequence[str], seconds: dict[str, float]) -> list[str]:
    """Sort test files: the one that mirrors the site's, those of its folder, then by seconds."""
    path = Path(site.file)

    def rank(name: str) -> tuple[bool, bool, float]:
        mirror = Path("tests") / path.parent
        own = Path(name) == mirror / f"test_{path.stem}.py"
        slow = seconds.get(name, 0.0)
        return not own, not (Path(name).is_relative_to(mirror) and slow < 20), slow

    return sorted(files, key=rank)


def one(out: Path, site: Site, files: Sequence[str], limit: float) -> dict[str, Any]:
    """Run one mutant; return its line of the results. The clone is as it was when it ends."""
    folder, killer = out / "clone", out / "killer.json"
    killer.unlink(missing_ok=True)
    path, began = folder / site.file, time.monotonic()
    source = path.read_bytes()
    path.write_bytes(edited(source, [(site.start, site.end, site.new.encode())]))
    try:
        code = forked(folder, files, limit, environment(folder, MUTANTS_KILLER=str(killer)))
    finally:
        path.write_bytes(source)
    by, said = json.loads(killer.read_text()) if killer.exists() else ("", "")
    outcome = "killed" if code else "survived"
    if code and not by:
        outcome = "out of time" if code == 124 else f"pytest ended with {code}"
    seconds = round(time.monotonic() - began)
    return {"outcome": outcome, "by": by, "said": said, "seconds": seconds, "files": len(files)}


def test_code(text: str, test: str) -> str:
    """Return what a test of a file runs: its function, and all of the file but other tests."""
    tree = ast.parse(text)

    def other(node: ast.AST) -> bool:
        is_test = isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        return is_test and getattr(node, "name", "") != test

    return ast.dump(ast.Module([n for n in tree.body if not other(n)], []))


def same_test(name: str, commit: str, collected: set[str]) -> bool:
    """Return whether a test is collected, with the code that it had at a commit."""
    if name not in collected:
        return False
    file, test = name.split("::")[0], name.split("::")[-1].split("[")[0]
    old = subprocess.run(["git", "show", f"{commit}:{file}"], cwd=ROOT, capture_output=True)
    now = (ROOT / file).read_text(encoding="utf-8")
    return old.returncode == 0 and test_code(old.stdout.decode(), test) == test_code(now, test)


def results(out: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a run."""
    if (out / "results.jsonl").exists():
        for line in (out / "results.jsonl").read_text().splitlines():
            yield json.loads(line)


def from_other(other: Path, out: Path) -> tuple[list[Site], dict[str, Any]]:
    """Return the mutants of another run that must run here, and their map; write down the rest."""
    words = [sys.executable, "-m", "pytest", "-q", "--collect-only"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    collected = set(listed.splitlines())
    now = {site.key: site for sites in every_site().values() for site in sites}
    found = json.loads((other / "map.json").read_text())
    keys = [Site(**each).key for each in json.loads((other / "chosen.json").read_text())]
    files_of = dict(zip(keys, found["files"], strict=True))
    again: list[Site] = []
    for line in results(other):
        there = Site(**line["site"])
        site = now.get(there.key)
        if site is None:
            write(out, there, {"outcome": "gone", "by": "", "files": 0})
        elif line["outcome"] == "killed" and same_test(line["by"], line["commit"], collected):
            write(out, site, {k: line[k] for k in ("outcome", "by", "said", "files")})
        else:
            again.append(site)
    files = [[f for f in files_of[site.key] if (ROOT / f).exists()] for site in again]
    return again, {"seconds": found["seconds"], "files": files}


def write(out: Path, site: Site, result: dict[str, Any]) -> None:
    """Add a mutant's line to the results."""
    commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
    line = {**result, "commit": commit, "key": str(site.key), "site": asdict(site)}
    with open(out / "results.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def confirm(out: Path) -> None:
    """Run every killing test in a clone without a mutant; forget the kills of those that fail."""
    folder, lines = clone(out / "clean"), list(results(out))
    killers = sorted({line["by"] for line in lines if line["outcome"] == "killed"})
    log = folder / "pytest.log"
    with open(log, "w") as file:
        subprocess.run(
            [sys.executable, "-B", "-m", "pytest", "-q", "-rfE", *killers], cwd=folder,
            env=environment(folder), check=False, stdout=file, stderr=file,
        )  # fmt: skip
    bad = {name for name in killers if f"FAILED {name}" in log.read_text()}
    kept = [line for line in lines if line["by"] not in bad]
    text = "".join(json.dumps(line) + "\n" for line in kept)
    (out / "results.jsonl").write_text(text)
    print(f"{len(killers)} tests kill; without a mutant these fail too: {sorted(bad)}")


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Write how many mutants of each room and kind were killed, and those that were not."""
    head = f"{'':18}{'mutants':>8}{'killed':>8}{'survived':>9}{'unreached':>10}{'late':>6}"
    rows = [head]
    order = ("killed", "survived", "unreached", "out of time")
    for what in [*ROOMS, *KINDS, "all"]:
        mine = Counter(
            line["outcome"] for line in lines
            if what in ("all", room_of(line["site"]["file"]), line["site"]["kind"])
        )  # fmt: skip
        counts = [mine.total(), *(mine[name] for name in order)]
        widths = (8, 8, 9, 10, 6)
        cells = (f"{c:{w}}" for c, w in zip(counts, widths, strict=True))
        rows.append(f"{what:18}{''.join(cells)}")
    for line in lines:
        if line["outcome"] != "killed":
            rows.append(f"{line['outcome']:12} {Site(**line['site'])}")
    return "\n".join(rows)


def main(argv: Sequence[str]) -> int:
    """Choose mutants, map them, run those that have no result, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds for one mutant")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no mutant after them")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "mutants")
    parser.add_argument("--part", default="0/1", help="of several processes: which, of how many")
    parser.add_argument("--confirm", action="store_true", help="run the killing tests unmutated")
    parser.add_argument("--near", action="store_true", help="no map: only what names the module")
    parser.add_argument("--like", type=Path, help="the folder of a run at another commit")
    parser.add_argument("--table", action="store_true", help="print the results that are there")
    asked = parser.parse_args(argv)
    out, stop = asked.out.resolve(), time.monotonic() + 60 * asked.minutes
    out.mkdir(parents=True, exist_ok=True)
    if asked.confirm:
        confirm(out)
    elif not asked.table:
        chosen, map_file = out / "chosen.json", out / "map.json"
        if not chosen.exists():
            if asked.like:
                sites, found = from_other(asked.like, out)
                map_file.write_text(json.dumps(found))
            else:
                sites = choose(asked.seed, asked.count)
            chosen.write_text(json.dumps([asdict(site) for site in sites]))
        sites = [Site(**each) for each in json.loads(chosen.read_text())]
        if asked.near:
            names = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")]
            near = [sorted(files_that_name(site.file, names)) for site in sites]
            known = out / "seconds.json"  # {test file: seconds}, where somebody knows them
            seconds = json.loads(known.read_text()) if known.exists() else {}
            found = {"seconds": seconds, "files": near}
        else:
            found = json.loads(map_file.read_text()) if map_file.exists() else make_map(out, sites)
        part, parts = map(int, asked.part.split("/"))
        place = out / f"part-{part}"
        place.mkdir(exist_ok=True)
        clone(place / "clone")
        import torch.distributed  # noqa: F401  (for all mutants)

        done = {line["key"] for line in results(out)}
        mine = list(zip(sites, found["files"], strict=True))[part::parts]
        for site, files in mine:
            if str(site.key) in done or time.monotonic() > stop or asked.near and not files:
                continue
            files = in_order(site, files, found["seconds"])
            result = one(place, site, files, asked.limit) if files else {"outcome": "unreached"}
            if result["outcome"] == "killed" or not asked.near:
                write(out, site, {"by": "", "files": 0} | result)
            print(f"{result['outcome']:12} {site}", flush=True)
    print(table(list(results(out))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
