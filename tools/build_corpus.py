# SPDX-License-Identifier: Apache-2.0
"""Build a small corpus of text that every machine has: the sources of Python's standard library.

    python tools/build_corpus.py --output-dir runs/quickstart/corpus

writes train.jsonl and heldout.jsonl, one JSON object {"text", "path"} a source file, and
corpus.json, which says what they hold. They have about 10 MB; nothing is downloaded. Tests, the
tables of encodings/ and generated files are left out: they are long and teach a model little. A
file is held out by a hash of its path, so every machine and every Python hold out the same files.

With --input FILES (.txt or .jsonl, also .gz) the corpus is made of those instead. A long text is
cut at line ends into pieces of about 16,000 characters, and a piece is held out by its own hash.
"""

import hashlib
import json
import platform
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from tools.command_line import Parser, told
from training.data.shards import documents

SKIPPED_FOLDERS = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idle_test",
    "lib-dynload",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
# A table of names, and decimal arithmetic at such length that a small model would recite it.
SKIPPED_FILES = {"html/entities.py", "_pydecimal.py"}
GENERATED = re.compile(r"^#.*generated|this file is .*generated", re.IGNORECASE | re.MULTILINE)


def wanted(path: str, text: str) -> bool:
    """Return whether a file, given by its path below the library, is text worth learning from."""
    folders = path.split("/")[:-1]
    if SKIPPED_FOLDERS.intersection(folders) or path in SKIPPED_FILES:
        return False
    head = "\n".join(text.splitlines()[:10])
    return bool(text.strip()) and not GENERATED.search(head)


def held_out(path: str, percent: float) -> bool:
    """Return whether a text belongs to the held-out part, which depends on its path only."""
    draw = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")
    return draw < percent / 100 * 2**64


def read(library: Path) -> list[tuple[str, str]]:
    """Return (path below the library, text) of every wanted file, in the order of their paths."""
    found = []
    for file in library.rglob("*.py"):
        path = file.relative_to(library).as_posix()
        try:
            text = file.read_text(encoding="utf-8")  # newlines of any kind become \n
        except (OSError, UnicodeDecodeError):
            continue
        if wanted(path, text):
            found.append((path, text))
    return sorted(found)


def pieces(files: list[Path], size: int = 16_000) -> list[tuple[str, str]]:
    """Return (name, text) of every document of the files, cut at line ends where it is long."""
    found = []
    for file in files:
        for text in documents(file):
            begin = 0
            while begin < len(text):
                end = text.find("\n", begin + size) + 1 or len(text)
                piece = text[begin:end]
                found.append((hashlib.sha256(piece.encode()).hexdigest(), piece))
                begin = end
    return found


def build(texts: list[tuple[str, str]], output: Path, percent: float) -> dict[str, Any]:
    """Write the two files and corpus.json; return the content of corpus.json."""
    parts: dict[str, list[tuple[str, str]]] = {"train": [], "heldout": []}
    for path, text in texts:
        parts["heldout" if held_out(path, percent) else "train"].append((path, text))
    if not all(parts.values()):
        raise ValueError(f"{len(texts)} texts are too few to hold {percent}% of them out")
    output.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for name, files in parts.items():
        lines = [json.dumps({"text": text, "path": path}) + "\n" for path, text in files]
        content = "".join(lines).encode()
        digest.update(content)
        (output / f"{name}.jsonl").write_bytes(content)
    about = {
        "sha256": digest.hexdigest(),
        "texts": sum(map(len, parts.values())),
        "heldout_texts": len(parts["heldout"]),
        "bytes": sum(len(text.encode()) for files in parts.values() for _, text in files),
        "python": platform.python_version(),
    }
    (output / "corpus.json").write_text(json.dumps(about, indent=1) + "\n")
    return about


def main() -> None:
    """Build the corpus and print what it holds."""
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--output-dir", type=Path, required=True, help="folder to write into")
    parser.add_argument(
        "--library",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder of Python sources (default: this Python's standard library)",
    )
    parser.add_argument(
        "--input", type=Path, nargs="+", help="files to take in the library's place"
    )
    parser.add_argument("--heldout-percent", type=float, default=5.0, help="share held out, in %%")
    args = parser.parse_args()
    try:
        texts = pieces(args.input) if args.input else read(args.library)
        about = build(texts, args.output_dir, args.heldout_percent)
    except (ValueError, OSError) as error:
        sys.exit(told("build_corpus.py", error))
    source = "the given files" if args.input else f"Python {about['python']}'s standard library"
    print(
        f"corpus: {source}, {about['texts']} texts, {about['bytes']:,} bytes,"
        f" {about['heldout_texts']} texts held out, SHA-256 {about['sha256']}"
    )


if __name__ == "__main__":
    main()
