# SPDX-License-Identifier: Apache-2.0
"""Turn text into the .bin/.idx pair that training reads, with Megatron's flags and file names.

    python tools/preprocess_data.py --input corpus/*.jsonl --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model \\
        --append-eod --workers 8

writes data/corpus_text_document.bin and .idx, and .json, which records the tokenizer: a run with
another tokenizer refuses the pair. A .jsonl line is one document, with its text under "text"
(--json-keys), and so is a row of a .parquet; a .txt file is one document, with --lines each of its
lines. .txt and .jsonl may be compressed as .gz or .zst. A folder means all such files below it,
except hidden ones, copies and the like, which are counted (docs/data.md). A .json is read as a
.jsonl if it is named explicitly.

    ... --json-keys prompt answer --loss-on answer

makes one document of the texts of a line, one after another, and writes the mask of the loss next
to data/corpus_prompt_answer_document.bin: training finds it, and counts only the tokens of answers.

An older pair is replaced only if this command wrote it, according to data/corpus.written.json.

The input is cut into shards, which the workers tokenize into a folder next to the output. If the
run is interrupted, the same command continues after the complete shards. The files appear only at
the end, complete.
"""

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, compress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.needs import explain_missing_packages

if __name__ == "__main__":
    explain_missing_packages()

import numpy as np

from tools.command_line import Parser, add_tokenizer, error_line, integer, model_of, prefix
from training.data.bad_documents import POLICIES, BadDocuments
from training.data.cache import IndexCache
from training.data.files import replacing
from training.data.indexed import IndexedTokens, IndexedWriter, token_dtype
from training.data.loss_mask import ENDS, SUFFIX
from training.data.made_with import is_record, record_of
from training.data.shards import Shard, cut_files
from training.data.text_files import find_files, kind_of, stat_files
from training.data.tokenizer import Tokenizer, build_tokenizer
from training.files.owned import plain_files, refuse
from training.files.written import Written
from training.run.waiting import waiting

SHARD = 1 << 20, 64 << 20  # least and most bytes of input that a worker takes at a time
INPUT = ".txt, .jsonl (also .gz, .zst) or .parquet files, folders of them, or patterns"
LOSS_ON = """keys of --json-keys whose tokens count in the loss, such as answers: the texts of all
keys are one document, and a mask of the loss is written beside the pair"""
BAD = """what to do with a document that is not UTF-8, not JSON, without a text, empty or longer
than 1 GiB: skip leaves it out and counts it, error refuses it with its file, line and
byte (default: empty ones are skipped, others refused)"""


# Flags of Megatron-LM's tool that change nothing here: documents stay in order, in one pair.
MEGATRON: dict[str, dict[str, Any]] = {
    "--dataset-impl": {"choices": ["mmap"]},
    "--partitions": {"type": integer(1)},
    "--keep-sequential-samples": {"action": "store_true"},
    "--log-interval": {"type": integer(1)},
}


IN_WORKER: dict[str, Tokenizer] = {}  # sent once to each worker


@dataclass(frozen=True)
class Job:
    """The settings that all shards share; the fields are the flags of the same names."""

    tokenizer_type: str
    tokenizer_model: str | None
    merge_file: str | None
    vocab_size: int | None
    json_keys: tuple[str, ...]
    loss_on: tuple[str, ...]
    append_eod: bool
    lines: bool
    on_bad_document: str | None

    def pairs(self) -> dict[str, tuple[str, ...]]:
        """Return {name: keys} of the pairs to write: one a key, or one of all with a loss mask."""
        if self.loss_on:
            return {"_".join(self.json_keys): self.json_keys}
        return {key: (key,) for key in self.json_keys}

    @property
    def empty(self) -> str:
        """Return the error of a document without text, or without text that counts."""
        if not self.loss_on:
            return "an empty document"
        return f"no text that counts in the loss: {' and '.join(map(repr, self.loss_on))} empty"


@dataclass(frozen=True)
class Summary:
    """The size of one output pair."""

    prefix: str
    documents: int
    tokens: int


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    *,
    merge_file: str | None = None,
    json_keys: Sequence[str] = ("text",),
    loss_on: Sequence[str] = (),
    append_eod: bool = False,
    lines: bool = False,
    on_bad_document: str | None = None,
    workers: int = 1,
    shard_bytes: int | None = None,
    report: Callable[[str], None] = print,
) -> list[Summary]:
    """Tokenize files into {output_prefix}_{key}_document.bin/.idx, one pair for each key.

    loss_on: the keys of a document whose tokens count in the loss. If given, there is one pair,
    whose documents have the texts of all keys, one after another, and its loss mask. The result
    does not depend on workers, shards or interruptions. Raises ValueError naming the flag, file or
    line that cannot be tokenized; shards complete by then are kept for the next call.
    """
    if workers < 1:
        raise ValueError(f"--workers {workers} must be at least 1")
    job = Job(
        *(tokenizer_type, tokenizer_model, merge_file, vocab_size, tuple(json_keys)),
        *(tuple(loss_on), append_eod, lines, on_bad_document),
    )
    for key in loss_on:
        if key not in json_keys:
            raise ValueError(
                f"--loss-on {key}: --json-keys {' '.join(json_keys)} does not name this key"
            )
    inputs = find_files(inputs, report=report)
    if loss_on and (plain := [path for path in inputs if kind_of(path) == "txt"]):
        raise ValueError(
            f"--loss-on {' '.join(loss_on)}: {plain[0]} has no keys: give .jsonl or .parquet files"
        )
    files = stat_files(inputs)
    written = Written(Path(f"{output_prefix}.written.json"))
    ends = (".bin", ".idx", *(ENDS if loss_on else ()))
    for name in job.pairs():
        _check_output(output_prefix, name, written, ends)
    tokenizer = build_tokenizer(tokenizer_type, tokenizer_model, vocab_size, merge_file)
    if append_eod and tokenizer.eod is None:
        raise ValueError(
            "--append-eod: this tokenizer has no end-of-document token; a Hugging Face folder "
            "names it as eos_token in tokenizer_config.json"
        )
    record = record_of(tokenizer, tokenizer.eod if append_eod else None)
    if shard_bytes is None:
        shard_bytes = min(max(sum(size for _, size, _ in files) // 64, SHARD[0]), SHARD[1])
    facts = [asdict(job), record["tokenizer_digest"], files, shard_bytes]
    folder = _folder(facts, output_prefix)
    shards = cut_files(inputs, lines, shard_bytes)
    tasks = [Task(job, shard, os.path.join(folder, f"{i:06}")) for i, shard in enumerate(shards)]
    missing = [task for task in tasks if not task.done()]
    if len(missing) < len(tasks):
        report(f"{len(tasks) - len(missing)} of {len(tasks)} shards were complete already")
    started = time.monotonic()
    tokens = _run_all(missing, workers, tokenizer)
    seconds = time.monotonic() - started
    summaries = []
    for name in job.pairs():
        prefix = f"{output_prefix}_{name}_document"
        bad = BadDocuments(on_bad_document)
        about_loss = ""
        if loss_on:  # before the pair, whose record names the mask
            with IndexedWriter(prefix + SUFFIX, np.dtype(np.uint8)) as mask_writer:
                for task in tasks:
                    mask_writer.add_file(task.output(name) + SUFFIX)
            mask_of = IndexedTokens(prefix + SUFFIX)
            record |= {"loss_mask": mask_of.digest, "loss_on": list(loss_on)}
            counted = mask_of.occurrences(1)
            about_loss = f"; the loss counts {counted:,} of them ({', '.join(loss_on)})"
        with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size), record) as writer:
            for task in tasks:
                writer.add_file(task.output(name))
                bad.add(task.left_out(name))
            if writer.documents == 0:
                left_out = f"; {bad.line()}" * bool(bad.kinds)
                raise ValueError(
                    f"--input: no document with text in {len(inputs)} file(s){left_out}"
                )
        if bad.kinds:
            report(f"{prefix}: {bad.line()}")
        cache = IndexCache(os.path.join(os.path.dirname(prefix), "cache"), report)
        tokens_of = IndexedTokens(prefix, cache)
        for end in ends:
            written.add(os.path.basename(prefix) + end, Path(prefix + end), {})
            written.settle(latest=os.path.basename(prefix) + end)
        about = f"{len(tokens_of):,} documents, {tokens_of.count:,} tokens, {tokens_of.digest}"
        report(f"{prefix}: {about}{about_loss}")
        summaries.append(Summary(prefix, len(tokens_of), tokens_of.count))
    if _is_parts(Path(folder)):
        shutil.rmtree(folder)
    if missing:
        report(f"{tokens / seconds:,.0f} tokens/s with {workers} worker(s), {seconds:.1f} s")
    return summaries


def _check_output(output_prefix: str, name: str, written: Written, ends: Sequence[str]) -> None:
    """Raise ValueError unless a pair may be replaced: it is absent, or as this command wrote it.

    ends: the suffixes of its files, with those of a loss mask.
    """
    prefix = f"{output_prefix}_{name}_document"
    refuse("--output-prefix", f"{prefix}.json", is_record, "the record of a pair")
    for end in ends:
        refuse("--output-prefix", Path(prefix + end), written.ours, "as this command wrote it")


@dataclass(frozen=True)
class Task:
    """One shard to tokenize, and the prefix of its pairs: {prefix}_{key}.bin and .idx."""

    job: Job
    shard: Shard
    prefix: str

    def output(self, key: str) -> str:
        """Return the prefix of a key's pair."""
        return f"{self.prefix}_{key}"

    def done(self) -> bool:
        """Return whether every pair exists and is complete."""
        masks = SUFFIX if self.job.loss_on else ""
        try:
            for name in self.job.pairs():
                for end in dict.fromkeys(("", masks)):
                    IndexedTokens(self.output(name) + end)
        except ValueError:
            return False
        return True

    def left_out(self, key: str) -> dict[str, tuple[int, str]]:
        """Return the documents that `run` left out, as BadDocuments.kinds."""
        try:
            with open(self.output(key) + ".bad", encoding="utf-8") as file:
                return {kind: (count, first) for kind, (count, first) in json.load(file).items()}
        except FileNotFoundError:
            return {}

    def run(self, tokenizer: Tokenizer) -> int:
        """Tokenize the shard; return the number of tokens."""
        eod = tokenizer.eod if self.job.append_eod else None  # not None: see preprocess
        tokens = 0
        for name, keys in self.job.pairs().items():
            counts = [not self.job.loss_on or key in self.job.loss_on for key in keys]
            bad = BadDocuments(self.job.on_bad_document)
            with ExitStack() as open_writers:
                opened = open_writers.enter_context
                kind = token_dtype(tokenizer.vocab_size)
                writer = opened(IndexedWriter(self.output(name), kind))
                if self.job.loss_on:
                    mask = opened(IndexedWriter(self.output(name) + SUFFIX, np.dtype(np.uint8)))
                for where, texts in self.shard.texts_of(keys, self.job.lines, bad):
                    place = functools.partial(self.shard.place, where)
                    if not any(compress(texts, counts)):
                        bad.found("empty", place, self.job.empty)
                        continue
                    try:
                        parts = [
                            tokenizer.encode(text, bos=tokenizer.starts_with_bos and not i)
                            for i, text in enumerate(texts)
                        ]
                    except ValueError as error:
                        raise ValueError(f"{place()}: {error}") from error
                    if not any(compress(parts, counts)):
                        bad.found("empty", place, "a document without a token")
                        continue
                    if eod is not None:
                        parts[-1].append(eod)
                    writer.add(list(chain.from_iterable(parts)))
                    if self.job.loss_on:
                        mask.add(np.repeat(counts, list(map(len, parts))))
                if bad.kinds:  # before the pair, which marks the shard as done
                    with replacing(self.output(name) + ".bad") as file:
                        file.write(json.dumps(bad.kinds).encode())
                tokens += writer.tokens
        return tokens


def _run_all(tasks: Sequence[Task], workers: int, tokenizer: Tokenizer) -> int:
    """Run tasks in this process or in several; return the number of tokens."""
    tokens = 0
    with waiting("tokenizing") as progress:
        progress.begin("", sum(task.shard.size for task in tasks), "B")
        for task, count in _each(tasks, workers, tokenizer):
            progress.add(task.shard.size)
            tokens += count
    return tokens


def _each(
    tasks: Sequence[Task], workers: int, tokenizer: Tokenizer
) -> Iterator[tuple[Task, int]]:
    """Yield tasks as they are done, each with its number of tokens."""
    if workers == 1 or len(tasks) < 2:
        for task in tasks:
            yield task, task.run(tokenizer)
        return
    context = multiprocessing.get_context("spawn")
    count = min(workers, len(tasks))
    pool = ProcessPoolExecutor(count, context, _start_worker, initargs=(tokenizer,))
    try:
        futures = {pool.submit(_run, task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # a shard that was begun is finished and kept


def _folder(facts: list[Any], output_prefix: str) -> str:
    """Return the folder for parts, named by a hash of all that they depend on; remove others."""
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    parent, base = os.path.split(os.path.abspath(output_prefix))
    folder = os.path.join(parent, f"{base}.{name}.parts")
    if os.path.isdir(parent):
        for other in os.listdir(parent):
            if re.fullmatch(re.escape(base) + r"\.[0-9a-f]{16}\.parts", other):
                if other != os.path.basename(folder) and _is_parts(Path(parent, other)):
                    shutil.rmtree(os.path.join(parent, other))
    return folder


def _is_parts(folder: Path) -> bool:
    """Return whether a folder has nothing but the output of shards."""
    part = re.compile(r"\d{6}_.*\.(bin|idx|bad|json)(\.[0-9a-f]{16}\.tmp)?", re.DOTALL)
    files = plain_files(folder)
    return files is not None and all(part.fullmatch(name) for name in files)


def _run(task: Task) -> int:
    """Run a task in a worker."""
    return task.run(IN_WORKER["tokenizer"])


def _start_worker(tokenizer: Tokenizer) -> None:
    """Ignore Ctrl-C, since the main process waits for begun shards; exit when it dies."""
    IN_WORKER["tokenizer"] = tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    assert parent is not None, "this is a worker"

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def main(argv: Sequence[str] | None = None) -> int:
    """Read the flags and tokenize; return the exit status."""
    parser = Parser(__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help=INPUT)
    add(
        "--output-prefix", required=True, type=prefix, metavar="PREFIX",
        help="path of the files, to which _KEY_document is appended",
    )  # fmt: skip
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="keys to read (text)")
    add("--loss-on", nargs="+", default=[], metavar="KEY", help=LOSS_ON)
    add_tokenizer(parser)
    add(
        "--vocab-size",
        type=integer(1, (1 << 31) - 1),
        metavar="N",
        help="for NullTokenizer: ids below this are tokens",
    )
    add("--append-eod", action="store_true", help="end each document with the eod token")
    add("--lines", action="store_true", help="make each line of a .txt a document")
    add("--on-bad-document", choices=POLICIES, help=BAD)
    add("--workers", type=integer(1, 1024), default=1, metavar="N", help="processes (default: 1)")
    for flag, options in MEGATRON.items():
        add(flag, **options, help=argparse.SUPPRESS)
    args = vars(parser.parse_args(argv))
    for flag in MEGATRON:
        args.pop(flag[2:].replace("-", "_"))
    try:
        files = args["tokenizer_type"], args["tokenizer_model"], args.pop("vocab_file")
        args["tokenizer_model"] = model_of(*files)
        preprocess(args.pop("input"), **args)
    except (ValueError, OSError) as error:
        output = f"--output-prefix {args['output_prefix']}"
        print(error_line("preprocess_data.py", error, output), file=sys.stderr)
        return 1
    except BrokenProcessPool:
        print("a worker was killed (out of memory?); the same command continues", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
