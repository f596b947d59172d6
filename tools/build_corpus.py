# SPDX-License-Identifier: Apache-2.0
"""Build a small corpus of text that every machine has: the sources of Python's standard library.

    python tools/build_corpus.py --output-dir runs/quickstart/corpus

writes train.jsonl and heldout.jsonl, one JSON object {"text", "path"} for each source file, and
corpus.json, which describes them. They have about 10 MB; nothing is downloaded. Tests, the tables
of encodings/ and generated files are left out: they are long and teach a model little. A file is
held out by a hash of its path, so every machine and every Python hold out the same files.

With --input the corpus is made of those files, folders or patterns instead (.txt, .jsonl, both also
as .gz or .zst, .parquet). A long text is cut, at line ends if it has some, into pieces of about
16,000 characters, or fewer if there is little text, and a piece is held out by its own hash: about
a tenth of the text, and always at least one piece. Of a single .txt the last tenth is held out, to
the character, as nanoGPT does with Shakespeare. --data is --input in one word, as make's DATA gives
it. --check-only checks the files and builds nothing; --source FILE writes the sizes and times of
the files that the corpus would be made from, and does not touch a FILE with the same content: make
compares its time.
"""

import hashlib
import json
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from io import StringIO
from pathlib import Path
from typing import Any, BinaryIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from tools.command_line import Parser, error_line
from training.data.bad_documents import POLICIES, BadDocuments
from training.data.files import replacing, write_text
from training.data.shards import documents, keys_of
from training.data.text_files import ending_of, find_files, split_names, stat_files
from training.files.owned import check, json_with, refuse
from training.files.untrusted import open_plain, parse_json, read_json, read_plain
from training.run.waiting import waiting

SKIP = "--on-bad-document skip (of make train: ON_BAD_DOCUMENT=skip)"
PERCENT, OWN_PERCENT = 5.0, 10.0  # held out: of the library's files, of the pieces of --input
PIECE, LEAST, FEWEST = 16_000, 200, 20  # characters of a piece, usual and least; wanted pieces

LARGEST = 1 << 28  # bytes of a source of the library, and of the file of --source
PARTS = ("train.jsonl", "heldout.jsonl")
ABOUT = "corpus.json"

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


def accepted(path: str, text: str) -> bool:
    """Return whether a file, given by its path below the library, is text worth learning from."""
    folders = path.split("/")[:-1]
    if SKIPPED_FOLDERS.intersection(folders) or path in SKIPPED_FILES:
        return False
    head = "\n".join(text.splitlines()[:10])
    return bool(text.strip()) and not GENERATED.search(head)


def held_out(path: str, percent: float) -> bool:
    """Return whether a text belongs to the held-out part, which depends on its path only."""
    return draw(path) < percent / 100 * 2**64


def draw(path: str) -> int:
    """Return a number below 2**64, evenly distributed, that is a hash of the path."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")


def read(library: Path) -> list[tuple[str, str]]:
    """Return (path below the library, text) of every wanted file, in the order of their paths."""
    found = []
    for file in library.rglob("*.py"):
        path = file.relative_to(library).as_posix()
        try:
            data = read_plain(file, LARGEST)
            text = StringIO(data.decode(), newline=None).read()  # newlines of any kind become \n
        except (OSError, ValueError):
            continue
        if accepted(path, text):
            found.append((path, text))
    return sorted(found)


def pieces(
    files: list[str],
    size: int = PIECE,
    bad: BadDocuments | None = None,
    keys: Sequence[str] = ("text",),
) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every document of the files, with long ones cut into pieces.

    A piece ends at the first line end after `size` characters; if there is none within `size` more,
    after a space, or at 2 `size`.
    """
    each = [(file, key) for file in files for key in keys_of(file, keys)]
    total = sum(Path(file).stat().st_size for file, _ in each)
    with waiting("reading the texts") as progress:
        progress.begin("", total, "B")
        for file, key in each:
            for text in documents(file, key, bad, progress.add):
                yield from _cut(text, size)


def _cut(text: str, size: int) -> Iterator[tuple[str, str]]:
    """Yield (name, piece) of a text."""
    begin = 0
    while begin < len(text):
        end = _end(text, begin, size)
        piece = text[begin:end]
        yield hashlib.sha256(piece.encode()).hexdigest(), piece
        begin = end


def _end(text: str, begin: int, size: int) -> int:
    least, most = begin + size, begin + 2 * size
    if least >= len(text):
        return len(text)
    for sign in ("\n", " "):
        if end := text.find(sign, least, most) + 1:
            return end
    return min(most, len(text))


def build(
    texts: Iterable[tuple[str, str]],
    output: Path,
    percent: float,
    aside: int | None = None,
    last: int | None = None,
) -> dict[str, Any]:
    """Write the two files and corpus.json, text after text; return the content of corpus.json.

    aside: the number of one more text to hold out. last: hold out the texts from this number on,
    and no others. Raises TooFew if one of the two files would be empty.
    """
    refuse("--output-dir", output, may_build, "a folder without files of these names, or a corpus")
    new = not output.exists()
    output.mkdir(parents=True, exist_ok=True)
    counts, size, lowest = {"train": 0, "heldout": 0}, 0, (1 << 64, 0)
    with ExitStack() as stack:
        if new:
            stack.push(lambda kind, *error: output.rmdir() if kind is TooFew else None)
        end, *files_of = (
            stack.enter_context(replacing(str(output / name))) for name in (ABOUT, *PARTS)
        )
        files = dict(zip(counts, files_of, strict=True))
        for i, (path, text) in enumerate(texts):
            for_validation = i == aside or held_out(path, percent) if last is None else i >= last
            name = "heldout" if for_validation else "train"
            counts[name] += 1
            size += len(text.encode())
            files[name].write((json.dumps({"text": text, "path": path}) + "\n").encode())
            lowest = min(lowest, (draw(path), i))
        if not all(counts.values()):
            raise TooFew(counts, percent, lowest[1])
        about = {
            "sha256": digest_of(files_of),
            "texts": sum(counts.values()),
            "heldout_texts": counts["heldout"],
            "bytes": size,
            "python": platform.python_version(),
        }
        end.write((json.dumps(about, indent=1) + "\n").encode())
    return about


def digest_of(files: Iterable[BinaryIO]) -> str:
    """Return the SHA-256 of files, one after another, from their beginnings."""
    digest = hashlib.sha256()
    for file in files:
        file.seek(0)
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def may_build(output: Path) -> bool:
    """Return whether a corpus may be written to a folder: files in the way are a corpus that this
    command wrote, by the digest in its corpus.json.
    """
    if not any((output / name).is_symlink() or (output / name).exists() for name in PARTS):
        return json_with("sha256")(output / ABOUT) or not (output / ABOUT).exists()
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(open_plain(output / name)) for name in PARTS]
            return text_of(output) == digest_of(files)
    except (OSError, ValueError):
        return False


def text_of(corpus: Path) -> str:
    """Return the digest of a corpus's text, which corpus.json has. Raises OSError, ValueError."""
    about = read_json(corpus / ABOUT)
    if not isinstance(about, dict) or not isinstance(about.get("sha256"), str):
        raise ValueError(f"{corpus / ABOUT} was not written by tools/build_corpus.py")
    return str(about["sha256"])


def take(new: Path, old: Path) -> None:
    """Replace a corpus by an equal one; raise ValueError if a run was trained on another one.

    Nothing of the run's own is replaced before that check.
    """
    try:
        same = text_of(new) == text_of(old)
    except (OSError, ValueError):
        drop(new)
        raise
    if not same:
        drop(new)
        raise ValueError(
            f"{old.parent} holds a run of another text: rm -r {old.parent} to start anew, or give "
            "OUT=another/folder"
        )
    check(old, may_build)
    for name in (*PARTS, ABOUT):
        (new / name).replace(old / name)
    drop(new)


def drop(corpus: Path) -> None:
    """Remove a corpus that this call has built, and its folder if it is then empty."""
    for name in (*PARTS, ABOUT):
        (corpus / name).unlink(missing_ok=True)
    with suppress(OSError):
        corpus.rmdir()


class TooFew(ValueError):
    """All texts are in one part. least: the number of the text to hold out, if one must be."""

    def __init__(self, counts: dict[str, int], percent: float, least: int) -> None:
        self.counts, self.least = counts, least
        super().__init__(f"{sum(counts.values())} texts are too few to hold {percent}% of them out")


def build_listed(
    names: list[str],
    output: Path,
    percent: float,
    bad: BadDocuments,
    keys: Sequence[str] = ("text",),
    flag: str = "--input",
    report: Callable[[str], object] | None = None,
) -> dict[str, Any]:
    """Build the corpus of the user's files. Raises ValueError for too little text.

    flag: the flag that names the files, for messages. report: as in `find_files`.
    """
    files = find_files(names, flag, report)
    total = sum(size for _, size, _ in stat_files(files, flag))
    size = min(PIECE, max(LEAST, total // FEWEST))
    if len(files) == 1 and ending_of(files[0]) == ".txt":
        text = "".join(text for _, text in pieces(files, size, bad, keys))
        at = int((1 - percent / 100) * len(text))
        if len(text) - at >= size:
            train = list(_cut(text[:at], size))
            return build([*train, *_cut(text[at:], size)], output, percent, last=len(train))
        bad.kinds.clear()  # the same are found again
    try:
        return build(pieces(files, size, bad, keys), output, percent)
    except TooFew as few:
        if sum(few.counts.values()) < 2:
            left_out = f" ({bad.line()})" * bool(bad.kinds)
            named = f"{flag} {names[0]}{', ...' * (len(names) > 1)}"
            if not sum(few.counts.values()):
                raise ValueError(
                    f"{named}: no document with text in {len(files)} file(s){left_out}"
                ) from None
            raise ValueError(
                f"{named}: {total:,} bytes of text are too few to hold a part out for validation: "
                f"give two documents, or one of more than {2 * LEAST} characters{left_out}"
            ) from None
        bad.kinds.clear()  # the same are found again
        percent = percent if few.counts["train"] else 0
        return build(pieces(files, size, bad, keys), output, percent, few.least)


def write_source(path: Path, names: list[str] | None, how: list[Any]) -> None:
    """Write sizes and times of the files that a corpus is made from, unless `path` has the same."""
    what: list[Any] = [platform.python_version(), sysconfig.get_path("stdlib")]
    if names:
        what = [file[1:] for file in stat_files(find_files(names))]
    text = json.dumps([what, how]) + "\n"
    try:
        same = read_plain(path, LARGEST) == text.encode()
    except (OSError, ValueError):
        same = False
    if not same:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text, _is_source)


def _is_source(path: Path) -> bool:
    """Return whether `write_source` wrote a file: two lists, or part of such a text."""
    data = b""
    try:
        found = parse_json(data := read_plain(path, LARGEST), str(path))
    except OSError:
        return False
    except ValueError:
        return len(data) < 100 or data.startswith(b"[[")
    return isinstance(found, list) and len(found) == 2 and isinstance(found[0], list)


def main() -> None:
    """Build the corpus and print a summary of it."""
    parser = Parser(__doc__)
    parser.add_argument("--output-dir", type=Path, metavar="DIR", help="folder to write into")
    parser.add_argument(
        "--library",
        type=Path,
        default=Path(sysconfig.get_path("stdlib")),
        help="folder of Python sources (default: this Python's standard library)",
    )
    parser.add_argument(
        "--input", nargs="+", metavar="PATH", help="files, folders or patterns of your own text"
    )
    parser.add_argument(
        "--heldout-percent",
        type=float,
        metavar="P",
        help="share held out, in %% (default: 10 of --input, 5 of --library)",
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (text)"
    )
    parser.add_argument(
        "--on-bad-document", choices=POLICIES, help="default: skip empty ones, refuse others"
    )
    parser.add_argument("--data", metavar="PATHS", help="--input as one word: paths between spaces")
    parser.add_argument("--check-only", action="store_true", help="check the files; build nothing")
    parser.add_argument("--source", type=Path, metavar="FILE", help="write it; build nothing")
    args = parser.parse_args()
    bad = BadDocuments(args.on_bad_document, SKIP)
    said: list[str] = []
    if args.heldout_percent is not None and not 0 < args.heldout_percent < 100:
        parser.error(f"--heldout-percent {args.heldout_percent:g} must lie between 0 and 100")
    try:
        if args.data:
            args.input = split_names(args.data)
        if args.check_only:
            stat_files(find_files(args.input, "DATA"), "DATA")
            return
        if args.source is not None:
            write_source(args.source, args.input, [args.json_keys, args.on_bad_document])
            return
        if args.output_dir is None:
            parser.error("--output-dir is missing: the folder to write into")
        place = args.output_dir
        runs = list(place.parent.glob("*/run.json"))  # of tools/quickstart.py
        if runs and (place / "corpus.json").exists():
            place = place.with_name("corpus.new")
        if args.input:
            percent = OWN_PERCENT if args.heldout_percent is None else args.heldout_percent
            flag = "DATA" if args.data else "--input"
            about = build_listed(
                args.input, place, percent, bad, args.json_keys, flag=flag, report=said.append
            )
        else:
            percent = PERCENT if args.heldout_percent is None else args.heldout_percent
            about = build(read(args.library), place, percent)
        if place != args.output_dir:
            take(place, args.output_dir)
    except (ValueError, OSError) as error:
        program = "make train" if args.check_only else "build_corpus.py"
        sys.exit(error_line(program, error, f"--output-dir {args.output_dir}"))
    source = "the given files" if args.input else f"Python {about['python']}'s standard library"
    print(
        f"corpus: {source}, {about['texts']} texts, {about['bytes']:,} bytes,"
        f" {about['heldout_texts']} texts held out, SHA-256 {about['sha256']}"
    )
    for line in filter(None, (*said, bad.line())):
        print(line)


if __name__ == "__main__":
    main()
