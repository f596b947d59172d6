# SPDX-License-Identifier: Apache-2.0
"""Train a SentencePiece tokenizer that gives back every text exactly, newlines and indentation too.

    python tools/train_tokenizer.py --input corpus/train.jsonl --vocab-size 2048 \\
        --output-prefix tokenizer/weft --check corpus/heldout.jsonl

Pieces are byte pairs over untouched text (no normalization, no space added or removed), and single
bytes for what no piece covers. A newline with each usual indentation is one piece, so that most
lines of code begin with one token. A space belongs to the word BEFORE it: a prompt that ends in a
space, such as "def ", then ends in a whole piece, and sampling goes on naturally. (One character
does not come back: U+2581, SentencePiece's own sign for a space, becomes one.)
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from tools.command_line import Parser, told, whole
from training.data.shards import documents

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
NEWLINES = ["\n", *("\n" + SPACE * n for n in (4, 8, 12, 16, 20))]
BLANK_LINES = ["\n\n" + SPACE * n for n in (4, 8)]


def lines(files: list[Path], limit: int) -> Iterator[str]:
    """Yield the texts' lines that are not blank, up to `limit` bytes of text."""
    for line in (line for file in files for text in documents(file) for line in text.split("\n")):
        limit -= len(line.encode())
        if limit < 0:
            return
        if line.strip():
            yield line


def train(files: list[Path], prefix: Path, vocab_size: int, limit: int = 100_000_000) -> int:
    """Write {prefix}.model and {prefix}.vocab; return the vocabulary's size.

    A text too small for vocab_size pieces gets as many as it can fill.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines(files, limit),
                model_prefix=str(prefix),
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
        except RuntimeError as error:
            most = re.search(r"value <= (\d+)", str(error))
            if most is None or int(most[1]) >= vocab_size:
                raise ValueError(f"--input: SentencePiece cannot learn from it ({error})") from None
            vocab_size = int(most[1])


def check(model: Path, files: list[Path]) -> float:
    """Return the files' characters a token. Raises ValueError if a text does not come back."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    characters = tokens = 0
    for number, document in enumerate((text for file in files for text in documents(file)), 1):
        ids = processor.encode(document)
        if processor.decode(ids) != document.replace(SPACE, " "):
            raise ValueError(f"--check: text {number} is not given back as it was by {model}")
        characters, tokens = characters + len(document), tokens + len(ids)
    return characters / max(tokens, 1)


def main() -> None:
    """Train, check, and print the results."""
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--input", type=Path, nargs="+", required=True, help=".txt or .jsonl(.gz)")
    parser.add_argument("--output-prefix", type=Path, required=True, help="PREFIX of PREFIX.model")
    parser.add_argument(
        "--vocab-size", type=whole(1, 1 << 24), default=2048, help="pieces, at most"
    )
    parser.add_argument("--check", type=Path, nargs="+", default=[], help="texts to round-trip")
    args = parser.parse_args()
    try:
        size = train(args.input, args.output_prefix, args.vocab_size)
        ratio = check(Path(f"{args.output_prefix}.model"), args.check or args.input)
    except (ValueError, OSError) as error:
        sys.exit(told("train_tokenizer.py", error))
    print(
        f"tokenizer: {size} pieces, {ratio:.2f} characters a token, every text given back exactly"
    )


if __name__ == "__main__":
    main()
