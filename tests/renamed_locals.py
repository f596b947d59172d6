# SPDX-License-Identifier: Apache-2.0
"""Run tools/explain.py's steps with every local variable of the trainer renamed.

    python -m tests.renamed_locals PORT RANK

The modules of mpu/, model/, training/ and pretrain_llama.py are changed as they are imported: each
local variable of each function gets a suffix. Line numbers and the names of parameters stay.
"""

import ast
import sys
from collections.abc import Iterator
from datetime import timedelta
from importlib.machinery import SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUFFIX = "_by_another_name"
RENAMED = 1000  # fewer would show that this does not rename
CASES = [  # tp, dp, pp, the rest of tiny's arguments
    (2, 1, 1, {"more": ("--recompute-granularity", "selective")}),
    (1, 2, 1, {"zero": 3, "layers": 3, "more": ("--recompute-granularity", "full")}),
    (1, 1, 2, {"schedule": "zb-v", "micro_batches": 3, "tied": True}),
]


class Renamer(ast.NodeTransformer):
    """Gives every local variable of every function another name; counts them."""

    def __init__(self) -> None:
        self.count = 0
        self._scopes: list[dict[str, bool]] = []  # name -> whether it gets another one

    def visit_FunctionDef(self, node):
        for outside in (*node.decorator_list, node.args, node.returns):
            if outside is not None:
                self.visit(outside)
        self._enter(node.args, node.body)
        return node

    def visit_Lambda(self, node):
        self.visit(node.args)
        self._enter(node.args, [node.body])
        return node

    def visit_Name(self, node):
        node.id = self._other(node.id)
        return node

    def visit_Nonlocal(self, node):
        node.names = [self._other(name) for name in node.names]
        return node

    def _other(self, name: str) -> str:
        for scope in reversed(self._scopes):
            if name in scope:
                return name + SUFFIX if scope[name] else name
        return name

    def _enter(self, args: ast.arguments, body: list[ast.AST]) -> None:
        scope: dict[str, bool] = {}
        declared: set[str] = set()
        for node in (found for statement in body for found in _same_scope(statement)):
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                scope.setdefault(node.id, True)
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                scope[node.name] = False
            elif isinstance(node, ast.alias):
                scope[(node.asname or node.name).partition(".")[0]] = False
            elif isinstance(node, ast.ExceptHandler) and node.name:
                scope[node.name] = False
            elif isinstance(node, (ast.Global, ast.Nonlocal)):
                declared.update(node.names)
        named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        scope |= {arg.arg: False for arg in named if arg is not None}
        self._scopes.append({name: way for name, way in scope.items() if name not in declared})
        self.count += sum(self._scopes[-1].values())
        for statement in body:
            self.visit(statement)
        self._scopes.pop()


def _same_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, but not what stands in functions and classes below it."""
    yield node
    if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
        for child in ast.iter_child_nodes(node):
            yield from _same_scope(child)


class Loader(SourceFileLoader):
    """Import a module with its locals renamed."""

    renamed = 0

    def source_to_code(self, data, path, *, _optimize=-1):
        """Parse, rename, compile."""
        renamer = Renamer()
        tree = renamer.visit(ast.parse(data, path))
        Loader.renamed += renamer.count
        return compile(tree, path, "exec", dont_inherit=True, optimize=_optimize)

    def get_code(self, fullname):
        """Compile from the source: a cached file has the old names."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class Finder:
    """Find the product's own modules, for `Loader`."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        """Return the spec of a module of the product, None for others."""
        parts = name.split(".")
        if parts[0] not in ("mpu", "model", "training", "pretrain_llama"):
            return None
        base = ROOT.joinpath(*parts)
        package = base / "__init__.py"
        file = package if package.exists() else base.with_suffix(".py")
        if not file.exists():
            return None  # a folder without __init__.py, or no module
        where = [str(base)] if file is package else None
        loader = Loader(name, str(file))
        return spec_from_file_location(name, file, loader=loader, submodule_search_locations=where)


def explained(comm) -> list[str]:
    """Explain the cases on a rank of a world."""
    from tools.explain import explain, tiny

    return [
        explain(tiny(tp, dp, pp, **rest), comm.grid(tp, pp=pp)).text for tp, dp, pp, rest in CASES
    ]


def main(port: int, rank: int) -> None:
    """Be one of two ranks; rank 0 leaves the texts in the store."""
    sys.meta_path.insert(0, Finder)
    import torch
    import torch.distributed as dist

    from mpu.launch import Launch
    from pretrain_llama import make_grid
    from tools.explain import explain, tiny

    torch.set_num_threads(1)
    timeout = timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    for i, (tp, dp, pp, rest) in enumerate(CASES):
        config = tiny(tp, dp, pp, **rest)
        grid = make_grid(config, Launch(rank, 2, rank, 2))
        grid.connect(torch.device("cpu"), dist.PrefixStore(f"case {i}", store), timeout)
        text = explain(config, grid).text
        if rank == 0:
            store.set(f"text {i}", text)
        grid.close()
    if rank == 0:
        store.set("renamed", str(Loader.renamed))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
