# SPDX-License-Identifier: Apache-2.0
"""Check the layering: which module may import which, and where collectives and os.environ are used.

MAY lists what each room may import, FLOORS which rooms are above which.
"""

import ast
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = (
    "mpu", "model", "training", "pretrain_llama", "forecast", "tools", "tests",
    "benchmarks",
)  # fmt: skip

# the first prefix that fits a file says what it may import of ours
MAY = {
    "mpu/kernels": ("mpu.kernels",),
    "mpu/native.py": (),
    "mpu/launch.py": (),
    "mpu/needs.py": (),
    "mpu/host_memory.py": (),
    "mpu/mup.py": (),
    "mpu/torch_private.py": (),
    "mpu/activation_offload.py": ("mpu.host_memory", "mpu.torch_private"),
    "mpu/recompute.py": ("mpu.activation_offload",),
    "mpu/gradients.py": (),
    "mpu/worker.py": (),
    "mpu/interleave.py": ("mpu.torch_private", "mpu.worker"),
    "mpu/module_tracker.py": ("mpu.gradients", "mpu.torch_private"),
    "mpu/driver.py": (),
    "mpu/accelerators.py": ("mpu.driver", "mpu.kernels", "mpu.launch"),
    "mpu/comm": ("mpu.comm", "mpu.kernels", "mpu.native", "mpu.interleave", "mpu.worker",
                 "mpu.torch_private"),
    "mpu/param.py": ("mpu.comm.transport", "mpu.gradients"),
    "mpu/grid.py": ("mpu.comm", "mpu.launch", "mpu.torch_private"),
    "mpu/connect.py": ("mpu.comm", "mpu.grid", "mpu.kernels"),
    "mpu/auxiliary_loss.py": ("mpu.comm",),
    "mpu/context.py": ("mpu.comm.transport", "mpu.auxiliary_loss", "mpu.gradients", "mpu.grid",
                       "mpu.param", "mpu.interleave"),
    "mpu/param_grad.py": ("mpu.comm", "mpu.gradients", "mpu.grid", "mpu.param",
                          "mpu.torch_private"),
    "mpu/overlap": ("mpu.overlap", "mpu.comm", "mpu.kernels"),
    "mpu/layers": ("mpu.layers", "mpu.comm", "mpu.overlap", "mpu.kernels", "mpu.param",
                   "mpu.gradients", "mpu.context", "mpu.recompute", "mpu.native",
                   "mpu.launch", "mpu.accelerators", "mpu.host_memory", "mpu.interleave",
                   "mpu.torch_private"),
    "mpu/pipeline": ("mpu.pipeline", "mpu.comm", "mpu.gradients", "mpu.grid", "mpu.interleave",
                     "mpu.worker"),
    "mpu/zero": ("mpu.zero", "mpu.comm", "mpu.kernels", "mpu.param", "mpu.gradients", "mpu.grid",
                 "mpu.native"),
    "mpu/optim": ("mpu.optim", "mpu.zero", "mpu.comm", "mpu.kernels", "mpu.param", "mpu.grid",
                  "mpu.accelerators", "mpu.host_memory", "mpu.torch_private"),
    "mpu/meta_tensors.py": ("mpu.layers", "mpu.torch_private"),
    "mpu/__init__.py": (),
    "model": ("mpu", "model"),
    "training/files": ("training.files",),
    "training/faults": ("training.faults", "training.files", "mpu"),
    "training/settings": ("training.settings", "training.files", "mpu"),
    "training/data": ("training.data", "training.faults.activity", "training.settings.config",
                      "training.settings.batch_size", "training.settings.stages",
                      "training.files", "mpu"),
    "training/checkpoint": ("training.checkpoint", "training.files", "mpu"),
    "training/flags": ("training.flags", "training.data", "training.checkpoint",
                       "training.settings", "training.files", "mpu"),
    "training/run": ("training", "mpu"),
    "pretrain_llama.py": ("training", "model", "mpu"),
    "forecast": ("training", "model", "mpu", "forecast", "pretrain_llama"),
    "tools": ("training", "model", "mpu", "tools", "pretrain_llama", "forecast"),
}  # fmt: skip
# rooms from the ground up: a file imports from floors below its own, and from its own room
FLOORS = (
    ("mpu/host_memory.py", "mpu/mup.py", "mpu/worker.py", "mpu/torch_private.py"),
    (
        "mpu/kernels",
        "mpu/native.py",
        "mpu/driver.py",
        "mpu/launch.py",
        "mpu/needs.py",
        "mpu/activation_offload.py",
        "mpu/gradients.py",
        "mpu/interleave.py",
    ),
    ("mpu/comm", "mpu/recompute.py", "mpu/accelerators.py", "mpu/module_tracker.py"),
    ("mpu/grid.py", "mpu/param.py", "mpu/auxiliary_loss.py", "mpu/overlap"),
    ("mpu/connect.py", "mpu/context.py", "mpu/param_grad.py"),
    ("mpu/layers", "mpu/pipeline", "mpu/zero"),
    ("mpu/meta_tensors.py",),
    ("mpu/optim",),
    ("mpu/__init__.py",),
    ("model",),
    ("training/files",),
    ("training/faults",),
    ("training/settings",),
    ("training/data", "training/checkpoint"),
    ("training/flags",),
    ("training/run",),
    ("pretrain_llama.py",),
    ("forecast",),
    ("tools",),
)
COLLECTIVES = {
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single",
    "broadcast", "send", "recv", "isend", "irecv", "batch_isend_irecv", "barrier", "gather",
    "scatter", "reduce", "all_gather_object", "broadcast_object_list", "new_group",
}  # fmt: skip
BANNED = (
    "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining", "pickle",
)  # fmt: skip
# what runs code that comes as data: calls, and keywords with the value that makes them do so
RUNS_DATA = {
    "eval", "exec", "__import__", "torch.load", "torch.save", "os.system", "os.popen",
    "torch.hub.load", "marshal.load", "marshal.loads", "shelve.open",
    "yaml.load", "yaml.load_all", "yaml.full_load", "yaml.full_load_all", "yaml.unsafe_load",
    "yaml.unsafe_load_all", "dist.all_gather_object", "dist.broadcast_object_list",
    "dist.gather_object", "dist.scatter_object_list", "dist.send_object_list",
    "dist.recv_object_list",
}  # fmt: skip
RUNS_WITH = {
    ("weights_only", False), ("allow_pickle", True), ("shell", True), ("trust_remote_code", True),
}  # fmt: skip
# who may write a pickle: Megatron reads no other common.pt and no other .distcp file
WRITES = {("tools/checkpoints/mcore_export.py", "torch.save")}
ROOMS = ("mpu", "model", "training", "forecast", "tools")
PRODUCT = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
PRODUCT.append(ROOT / "pretrain_llama.py")


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(), str(path))))


@pytest.fixture(autouse=True, scope="module")
def free_nodes() -> Iterator[None]:
    """A million nodes would make each later collection of garbage slow."""
    yield
    nodes_of.cache_clear()


@cache
def imports(path: Path) -> set[str]:
    """Name every module of ours that a file imports, wherever in it."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in OURS}


def module_of(path: Path) -> str:
    """Return the dotted name of a file: mpu/comm/p2p.py is mpu.comm.p2p, a package its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def arrows(paths: list[Path]) -> dict[str, set[str]]:
    """Return, for each module of the product, the modules of the product that it imports.

    Imports inside of functions and under TYPE_CHECKING count too. A submodule imports its package
    only where it names it.
    """
    modules = {module_of(path): path for path in paths}

    def target(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]

    return {
        module: {target(name) for name in imports(path)} & modules.keys() - {module}
        for module, path in modules.items()
    }


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of nodes that reach one another, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def room_of(name: str) -> tuple[int, str]:
    """Return the floor and the room of a file, by the longest prefix that fits its path."""
    fits = [
        (room, number)
        for number, rooms in enumerate(FLOORS)
        for room in rooms
        if name == room or name.startswith(room + "/")
    ]
    assert fits, f"{name} stands on no floor of the house"
    room, number = max(fits, key=lambda fit: len(fit[0]))
    return number, room


def climbs(name: str, other: str) -> bool:
    """Whether an import of file `other` by file `name` points up, or across its own floor."""
    (here, room), (there, its_room) = room_of(name), room_of(other)
    return there > here or (there == here and room != its_room)


def test_no_circle_of_imports():
    found = circles(arrows(PRODUCT))
    assert not found, "; ".join("a circle: " + ", ".join(circle) for circle in found)


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert not circles({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    two = circles({"a": {"b"}, "b": {"a", "c"}, "c": {"d"}, "d": {"c"}})
    assert sorted(two) == [["a", "b"], ["c", "d"]]


def test_no_arrow_points_up():
    names = {module_of(path): path.relative_to(ROOT).as_posix() for path in PRODUCT}
    up = [
        f"{names[module]} imports {names[other]}"
        for module, others in arrows(PRODUCT).items()
        for other in sorted(others)
        if climbs(names[module], names[other])
    ]
    assert not up, up


def test_an_arrow_that_points_up_is_found():
    assert climbs("mpu/comm/p2p.py", "mpu/layers/linear.py")
    assert climbs("mpu/zero/bucket.py", "mpu/pipeline/stage_layout.py")  # across a floor
    assert not climbs("mpu/zero/bucket.py", "mpu/zero/bucket_layout.py")
    assert not climbs("pretrain_llama.py", "mpu/grid.py")


def test_what_may_be_imported_stands_below():
    """MAY and FLOORS agree: no room may import what stands above it."""
    for room, allowed in MAY.items():
        for prefix in allowed:
            inside = [p for p in PRODUCT if f"{module_of(p)}.".startswith(prefix + ".")]
            assert inside, f"{room} may import {prefix}, which is not there"
            for path in inside:
                floor, _ = room_of(path.relative_to(ROOT).as_posix())
                assert floor <= room_of(room)[0], f"{room} may import {prefix}"


def breaches(path: Path, name: str) -> list[str]:
    rule = next(
        (MAY[prefix] for prefix in MAY if name == prefix or name.startswith(prefix + "/")), None
    )
    assert rule is not None, f"{name} stands in no room of the house"
    return [
        f"{name} imports {module}"
        for module in sorted(imports(path))
        if not any(module == allowed or module.startswith(allowed + ".") for allowed in rule)
    ]


def test_imports_point_one_way():
    assert not [b for path in PRODUCT for b in breaches(path, path.relative_to(ROOT).as_posix())]


def test_the_rule_catches_a_breach(tmp_path):
    bad = tmp_path / "x.py"
    bad.write_text("def f():\n    from training.settings.config import Config\n    return Config\n")
    found = breaches(bad, "mpu/layers/x.py")
    assert found == ["mpu/layers/x.py imports training.settings.config.Config"]
    assert not breaches(bad, "tools/x.py")
    bad = tmp_path / "y.py"
    bad.write_text("def f():\n    from benchmarks.planning import odds\n    return odds\n")
    assert breaches(bad, "tools/x.py") == ["tools/x.py imports benchmarks.planning.odds"]


ASK = "ask LayerContext.on_gpu, Axis.on_gpu, or mpu/kernels/available.py before a launch"


def test_collectives_argparse_environment_and_the_device_stay_in_their_rooms():
    for path in PRODUCT:
        stays_in_its_room(path)


def stays_in_its_room(path: Path) -> None:
    name = path.relative_to(ROOT).as_posix()
    comm = name.startswith("mpu/comm/") or name == "mpu/grid.py"
    doors = {"pretrain_llama.py", "training/flags/parse.py", "mpu/launch.py",
             "forecast/rehearsal/guard.py"}  # fmt: skip
    door = name in doors or name.startswith("tools/")
    wire = name.startswith(("mpu/comm/", "mpu/kernels/", "forecast/", "tools/"))
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute) and node.attr == "is_cuda":
            assert wire, f"{name}:{node.lineno} asks a tensor, which may be recorded: {ASK}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            where = f"{name}:{node.lineno}"
            if node.value.id == "dist" and node.attr in COLLECTIVES:
                assert comm, f"{where} calls torch.distributed.{node.attr}"
            if node.value.id == "os" and node.attr in ("environ", "getenv", "putenv"):
                assert door, f"{where} reads the environment"
            if node.value.id == "torch" and node.attr == "compile":
                raise AssertionError(f"{where} compiles")
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            if module == "argparse":
                assert door, f"{name} imports argparse"
            # it lists opcodes only
            if (name, module) != ("tools/checkpoints/inert_pickle.py", "pickletools"):
                assert not (module or "").startswith(BANNED), f"{name} imports {module}"


def is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def what_runs_data(path: Path) -> list[str]:
    """List the calls in a file that may run what they read."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            given = {(k.arg, k.value.value) for k in node.keywords if is_constant(k.value)}
            found += [name] * (name in RUNS_DATA)
            found += [f"{name}({key}={value})" for key, value in given & RUNS_WITH]
    return found


def test_nothing_runs_what_it_reads(tmp_path):
    for path in PRODUCT:
        name = path.relative_to(ROOT).as_posix()
        assert not [call for call in what_runs_data(path) if (name, call) not in WRITES], path
    bad = tmp_path / "x.py"
    bad.write_text("torch.load(f, weights_only=False)\neval('1')\nnp.load(f, allow_pickle=True)\n")
    assert len(what_runs_data(bad)) == 4


def test_no_module_level_state():
    """No file of mpu, model or training rebinds a module's name from inside a function."""
    for path in PRODUCT:
        for node in nodes_of(path):
            assert not isinstance(node, ast.Global), f"{path}:{node.lineno} has a global"


def test_train_step_fits_on_a_screen():
    for node in nodes_of(ROOT / "pretrain_llama.py"):
        if isinstance(node, ast.FunctionDef) and node.name == "train_step":
            assert node.end_lineno - node.lineno < 40
            return
    raise AssertionError("pretrain_llama.py has no train_step")


# What may be called with more than MOST arguments in a row. Operators written in C, C++ or Triton
# take pointers and sizes by place; these functions take any number of one thing; the columns of the
# table of sizes have a heading.
MOST = 6
BY_PLACE = {"call", "build"} | {"pip", "ask", "format", "core"} | {"_size"}


def long_calls(path: Path) -> list[str]:
    """List the calls in a file with more than MOST positional arguments; a starred one counts 1."""
    found = []
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and len(node.args) > MOST:
            name = ast.unparse(node.func)
            if not BY_PLACE & {name, name.split(".")[-1]}:
                found.append(f"{path}:{node.lineno}: {name} has {len(node.args)} in a row")
    return found


def test_long_calls_name_their_arguments(tmp_path):
    for path in PRODUCT:
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("mpu/kernels/"):
            assert not long_calls(path)
    bad = tmp_path / "x.py"
    bad.write_text("f(1, 2, 3, 4, 5, 6)\ng(1, 2, 3, 4, 5, 6, *more)\npip(1, 2, 3, 4, 5, 6, 7)\n")
    assert long_calls(bad) == [f"{bad}:2: g has 7 in a row"]


def test_nothing_is_skipped_in_silence():
    """Every source has the licence line; no test directory is a package (it would shadow ours)."""
    for path in PRODUCT:
        assert "SPDX-License-Identifier: Apache-2.0" in path.read_text()[:200], path
    assert not [f for _, _, files in os.walk(ROOT / "tests") for f in files if f == "__init__.py"]


def test_the_page_lists_the_floors():
    """docs/design.md has FLOORS from the top down, a line each."""
    page = (ROOT / "docs" / "design.md").read_text()
    lines = page.partition("## 3.")[2].partition("## 4.")[0].splitlines()
    listed = [line.split() for line in lines if line.startswith("    ")]
    floors = [[room if room.endswith(".py") else f"{room}/" for room in f] for f in FLOORS]
    assert listed == floors[::-1]


def test_a_package_lists_modules_that_exist():
    """The first column of a table of contents, in the docstring of an __init__.py."""
    wrong, found = [], 0
    for file in sorted(ROOT.glob("[efmt]*/**/__init__.py")):
        text = ast.get_docstring(ast.parse(file.read_text())) or ""
        for line in re.findall(r"^(\w+(?:\.py)?(?:, \w+)*) {2,}\S", text, re.MULTILINE):
            for name in line.replace(".py", "").split(", "):
                found += 1
                there = [file.with_name(f"{name}.py"), file.with_name(name)]
                wrong += [f"{file}: {name}"] * (not any(path.exists() for path in there))
    assert found > 100 and not wrong, wrong
