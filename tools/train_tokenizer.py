# SPDX-License-Identifier: Apache-2.0
"""Train a SentencePiece tokenizer that restores every text exactly, with newlines and indentation.

    python tools/train_tokenizer.py --input corpus/train.jsonl --vocab-size 2048 \\
        --output-prefix tokenizer/weft --check corpus/heldout.jsonl

Pieces are byte pairs over the original text (no normalization, no space added or removed), and
single bytes for text that no piece covers. A newline with each usual indentation is one piece, so
most lines of code begin with one token. A space belongs to the word BEFORE it: a prompt that ends
in a space, such as "def ", then ends in a whole piece, and sampling continues naturally. (One
character is not restored: U+2581, SentencePiece's own sign for a space, becomes a space.)
"""

import re
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

from tools.command_line import Parser, error_line, integer, prefix
from training.data.bad_documents import POLICIES, BadDocuments
from training.data.files import replacing
from training.data.shards import documents, keys_of
from training.data.text_files import find_files, stat_files
from training.data.token_texts import SPACE
from training.files.owned import refuse
from training.files.untrusted import read_plain
from training.run.waiting import Progress, waiting

NEWLINES = ["\n", *("\n" + SPACE * n for n in (4, 8, 12, 16, 20))]
BLANK_LINES = ["\n\n" + SPACE * n for n in (4, 8)]
META = 3 + 256 + len(NEWLINES) + len(BLANK_LINES)  # pieces that do not depend on the text


@dataclass(frozen=True)
class Texts:
    """Files of text, and how they are read; the fields are the flags of the same names."""

    files: list[Path]
    json_keys: tuple[str, ...] = ("text",)
    lines: bool = False
    on_bad_document: str | None = None

    def read(self, progress: Progress, bad: BadDocuments | None = None) -> Iterator[str]:
        """Yield the documents, and count their bytes. bad: collects unreadable ones."""
        bad = bad or BadDocuments(self.on_bad_document)
        each = [(file, key) for file in self.files for key in keys_of(file, self.json_keys)]
        progress.begin("reading", sum(file.stat().st_size for file, _ in each), "B")
        for file, key in each:
            yield from documents(file, key, bad, progress.add, self.lines)


def lines(
    texts: Texts, limit: int, progress: Progress, hashes: set[str] | None = None
) -> Iterator[str]:
    """Yield the texts' lines that are not blank, up to `limit` bytes of text.

    A line of more than 10,000 characters is split. hashes: characters to keep, None for all.
    """
    for text in texts.read(progress):
        for line in text.split("\n"):
            if limit <= 0:
                return
            text_bytes = line.encode()
            line, limit = text_bytes[:limit].decode(errors="ignore"), limit - len(text_bytes)
            if hashes is not None:
                line = "".join(c for c in line if c in hashes)
            if line.strip():
                yield from (line[at : at + 10_000] for at in range(0, len(line), 10_000))


def train(texts: Texts, prefix: Path, vocab_size: int, limit: int = 100_000_000) -> int:
    """Write {prefix}.model; return the vocabulary's size.

    A text too small for vocab_size pieces gets as many as it can fill. If it has more distinct
    characters than that, the rarest become single bytes. Raises ValueError for a vocabulary that is
    too small, and for a document that cannot be read, according to Texts.on_bad_document.
    """
    model = f"{prefix}.model"
    refuse("--output-prefix", model, is_ours, "a tokenizer of this command")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    learned = BytesIO()
    with waiting("learning pieces") as progress:
        size = _learn(texts, learned, vocab_size, limit, progress)
    with replacing(model, is_ours) as file:
        file.write(learned.getvalue())
    return size


def _learn(
    texts: Texts, learned: BytesIO, vocab_size: int, limit: int, progress: Progress
) -> int:
    hashes: set[str] | None = None
    refused: list[ValueError] = []  # SentencePiece wraps errors of its iterator

    def sentences() -> Iterator[str]:
        try:
            yield from lines(texts, limit, progress, hashes)
        except ValueError as error:
            refused.append(error)
            raise
        progress.begin("merging")

    while True:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=sentences(),
                model_writer=learned,
                model_type="bpe",
                vocab_size=vocab_size,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                treat_whitespace_as_suffix=True,
                allow_whitespace_only_pieces=True,
                byte_fallback=True,
                split_digits=True,
                user_defined_symbols=NEWLINES + BLANK_LINES,
                max_sentence_length=1 << 16,
                minloglevel=2,
            )
            return vocab_size
        except (RuntimeError, ValueError) as error:
            if refused:
                raise refused[0] from None
            if "sentences_.empty()" in str(error):
                raise ValueError("--input: the texts have no characters to learn from") from None
            if "required_chars" in str(error) and hashes is None:
                count = Counter(chain.from_iterable(lines(texts, limit, progress)))
                hashes = kept([c for c, _ in count.most_common()], vocab_size)
                continue
            most = re.search(r"value <= (\d+)", str(error))
            if most is None or int(most[1]) >= vocab_size:
                raise ValueError(f"--input: SentencePiece cannot learn from it ({error})") from None
            vocab_size = int(most[1])


def kept(characters: list[str], vocab_size: int) -> set[str]:
    """Return the characters that get pieces of their own, in at most half of the free pieces.

    characters: those of the text, the most frequent first. A space is always kept, since its bytes
    are those of SPACE, and one that is not whitespace. Raises ValueError if there is no room.
    """
    always = {next(c for c in characters if not c.isspace())} | ({" "} & {*characters})
    room = vocab_size - META
    if room < len(always):
        raise ValueError(
            f"--vocab-size {vocab_size} is too small: {META} pieces are fixed, 256 of them single "
            f"bytes, and the text has {len(characters)} different character(s) besides newlines. "
            f"The least is {META + len(always)}; from {META + len(characters)} on, each character "
            "has a piece"
        )
    return always | {*characters[: min(room // 2, room - len(always))]}


def is_ours(model: Path) -> bool:
    """Return whether a file is a model that `train` wrote: it has all of its own symbols."""
    try:
        data = read_plain(model, 1 << 29)
    except (OSError, ValueError):
        return False
    return all(symbol.encode() in data for symbol in NEWLINES + BLANK_LINES)


def check(model: Path, texts: Texts, bad: BadDocuments | None = None) -> float:
    """Return the texts' characters per token. Raises ValueError if a text is not restored."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.read_bytes())
    characters = tokens = 0
    with waiting("checking pieces") as progress:
        for number, document in enumerate(texts.read(progress, bad), 1):
            ids = processor.encode(document)
            if processor.decode(ids) != document.replace(SPACE, " "):
                raise ValueError(f"--check: {model} does not restore text {number} exactly")
            characters, tokens = characters + len(document), tokens + len(ids)
    return characters / max(tokens, 1)


def main() -> None:
    """Train, check, and print the results."""
    parser = Parser(__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help=".txt, .jsonl (also .gz, .zst) or .parquet files, folders of them, or patterns",
    )
    parser.add_argument(
        "--output-prefix", type=prefix, required=True, help="writes PREFIX.model", metavar="PREFIX"
    )
    parser.add_argument(
        "--vocab-size", type=integer(1, 1 << 24), default=2048, metavar="N", help="pieces, at most"
    )
    parser.add_argument(
        "--check", nargs="+", default=[], metavar="PATH", help="texts to encode and decode"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (text)"
    )
    parser.add_argument("--lines", action="store_true", help="make each line of a .txt a text")
    parser.add_argument(
        "--on-bad-document", choices=POLICIES, help="default: skip empty ones, refuse others"
    )
    args = parser.parse_args()
    bad = BadDocuments(args.on_bad_document)
    said: list[str] = []
    try:
        files, checked = (
            [Path(at) for at, _, _ in stat_files(find_files(names, flag, said.append), flag)]
            for names, flag in ((args.input, "--input"), (args.check, "--check"))
        )
        texts = Texts(files, tuple(args.json_keys), args.lines, args.on_bad_document)
        size = train(texts, Path(args.output_prefix), args.vocab_size)
        checked_texts = replace(texts, files=checked or files)
        ratio = check(Path(f"{args.output_prefix}.model"), checked_texts, bad)
    except (ValueError, OSError) as error:
        output = f"--output-prefix {args.output_prefix}"
        sys.exit(error_line("train_tokenizer.py", error, output))
    few = f" (--vocab-size {args.vocab_size}, but the text has no more)"
    few *= size < args.vocab_size
    found = f"{size} pieces{few}, {ratio:.2f} characters a token"
    print(f"tokenizer: {found}, every text restored exactly")
    for line in filter(None, (*said, bad.line())):
        print(line)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C in make train: no traceback
    main()
