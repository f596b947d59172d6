# SPDX-License-Identifier: Apache-2.0
"""Count the tokens of code in each room, in this checkout and in another commit.

    python benchmarks/code_size.py [BASE]

A token is a name, a number, an operator or a word inside a string. Comments, docstrings and layout
do not count, so neither joining lines nor splitting files changes the figure. Python and C++ are
counted separately; JSON and TOML are data, counted in bytes. A room is a top-level folder, or a
folder in it. The product is everything but tests/, benchmarks/ and setup.py. Only files that git
tracks are counted.
"""

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip
CPP = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\w+|[^\w\s]', re.DOTALL)
DATA = "data bytes"
KINDS = {".py": "python", ".cpp": "C++", ".h": "C++", ".cu": "C++", ".json": DATA, ".toml": DATA}
OUTSIDE = ("tests", "benchmarks", "setup.py")


def of_python(source: str) -> int:
    """Count the tokens of a Python file."""
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        and ast.get_docstring(node, clean=False) is not None
    }
    count = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.STRING:
            if token.start[0] not in docstrings:
                count += max(1, len(re.findall(r"\w+", token.string)))
        elif token.type not in LAYOUT:
            count += 1
    return count


def of_cpp(source: str) -> int:
    """Count the tokens of a C++ file."""
    count = 0
    for found in CPP.findall(source):
        if found[0] == '"':
            count += max(1, len(re.findall(r"\w+", found)))
        elif not found.startswith(("//", "/*")):
            count += 1
    return count


def size(name: str, source: str) -> int:
    """Return the size of a file in the unit of its kind: tokens, or bytes of data."""
    suffix = Path(name).suffix
    if KINDS[suffix] == DATA:
        return len(source.encode())
    return of_python(source) if suffix == ".py" else of_cpp(source)


def room(name: str) -> str:
    """Return the room of a file: its top-level folder, and the folder in it if there is one."""
    parts = Path(name).parts
    return "/".join(parts[:2]) if len(parts) > 2 else parts[0]


def rooms(commit: str | None = None) -> dict[tuple[str, str], tuple[int, int]]:
    """Return {(kind, room): (files, size)} of a commit, or of this checkout."""
    files, sizes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for name, source in sources(commit):
        key = KINDS[Path(name).suffix], room(name)
        files[key] += 1
        sizes[key] += size(name, source)
    return {key: (files[key], sizes[key]) for key in files}


def sources(commit: str | None) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every counted file, in a commit or in this checkout."""
    if commit is None:
        for name in _git("ls-files").decode().splitlines():
            if Path(name).suffix in KINDS and (ROOT / name).exists():
                yield name, (ROOT / name).read_text()
        return
    with tarfile.open(fileobj=io.BytesIO(_git("archive", "--format=tar", commit))) as archive:
        for member in archive:
            if member.isfile() and Path(member.name).suffix in KINDS:
                data = archive.extractfile(member)
                assert data is not None
                yield member.name, data.read().decode()


def table(
    now: dict[tuple[str, str], tuple[int, int]], base: dict[tuple[str, str], tuple[int, int]] | None
) -> list[str]:
    """Return a row for each room, and the sums of product, tests and benchmarks."""
    sides = [now] if base is None else [base, now]
    lines = []
    for kind in dict.fromkeys(KINDS.values()):
        names = sorted({name for side in sides for which, name in side if which == kind})
        sums: list[Counter[str]] = [Counter() for _ in sides]
        for name in names:
            cells = [side.get((kind, name), (0, 0)) for side in sides]
            top = name.split("/")[0]
            part = "product" if top not in OUTSIDE else "tests" if top == "tests" else "benchmarks"
            for total, (_, count) in zip(sums, cells, strict=True):
                total[part] += count
            lines.append(_row(kind, name, cells))
        for part in ("product", "tests", "benchmarks"):
            if any(total[part] for total in sums):
                lines.append(_row(kind, f"= {part}", [(0, total[part]) for total in sums]))
    return lines


def _row(kind: str, name: str, cells: list[tuple[int, int]]) -> str:
    text = f"{kind:<11}{name:<26}"
    for files, count in cells:
        text += f"{f'{files} files' if files else '':>11}{count:>10,}"
    if len(cells) == 2 and cells[0][1]:
        text += f"{cells[1][1] / cells[0][1] - 1:>+9.1%}"
    return text


def _git(*words: str) -> bytes:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True)
    if done.returncode:
        sys.exit(f"code_size: {done.stderr.decode().strip()}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", nargs="?", help="a commit to count beside this checkout")
    args = parser.parse_args()
    print("\n".join(table(rooms(), rooms(args.base) if args.base else None)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
