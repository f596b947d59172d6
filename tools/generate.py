#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Continue a prompt with a trained model, in one process or tensor-parallel over several.

    python tools/generate.py --load runs/llama --prompt "def " --temperature 0.8
    torchrun --nproc-per-node 2 tools/generate.py --load runs/llama --prompt "def "

--load takes a run's checkpoints or a Hugging Face directory. Both hold their tokenizer; the flags
--tokenizer-type and --tokenizer-model name another one. Every rank gathers the same logits and
draws with the same seed, so all pick the same token and none is sent.
"""

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.launch import Launch, cores, environment_defaults
from mpu.needs import explain_missing_packages

os.environ.update(environment_defaults(os.environ))
if __name__ == "__main__":
    explain_missing_packages()

import torch
from torch import Tensor

from model.llama import Llama
from model.load import ModelFile, model_file_of, saved_config
from mpu.accelerators import own_gpu, unusable_gpu
from mpu.context import LayerContext
from mpu.grid import Grid
from tools.command_line import Parser, add_tokenizer, integer, model_of, number
from training.checkpoint import Checkpoint, find_latest, load, weight_pieces
from training.checkpoint.agree import on_all
from training.checkpoint.find import at_or_below, nothing_at
from training.checkpoint.header import BY_NAME
from training.data.tokenizer import Tokenizer, build_tokenizer
from training.data.tokenizer_files import digests_of, same_tokenizer, tokenizer_in
from training.files.untrusted import printable, sentence
from training.run.device import set_arithmetic
from training.run.process import as_process
from training.run.rendezvous import meet
from training.run.sample import gather_logits, pick
from training.run.waiting import waiting

TIMEOUT = timedelta(minutes=5)  # of a collective
PARAMETERS_A_THREAD = 30_000_000
NOT_WHOLE = "\ufffd"  # what tokenizers decode the bytes of an incomplete character to


@torch.inference_mode()
def new_tokens(
    model: Llama,
    prompt: Sequence[int],
    *,
    samples: int = 1,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1234,
) -> Iterator[Tensor]:
    """Yield the next token [b] of each of `samples` continuations of the ids `prompt`.

    If the text is longer than the model's context (max_position_embeddings), each token is computed
    from the last tokens that fit, at positions from 0 on. That is a forward over all of them, since
    the cached keys and values depend on the tokens that are now left out.
    """
    config, device = model.config, model.ctx.device
    context = config.max_position_embeddings
    generator = torch.Generator().manual_seed(seed)
    model.rope(None, min(len(prompt) + max_new_tokens, context))  # once, at full length
    text = torch.tensor([list(prompt)] * samples, device=device)  # [b, n]
    caches: list[list[Tensor]] = []
    position = context  # end of the tokens in the caches; this value fills them first
    for _ in range(max_new_tokens):
        if position >= context:
            text, position = text[:, -context:], 0
            caches = [[] for _ in range(config.num_layers)]
        logits = model.decode(text[:, position:], position, caches)  # [n, b, V/t]
        position = text.shape[1]
        logits = gather_logits(logits, model.ctx.tp, config.vocab_size)
        new = pick(logits, temperature, top_k, top_p, generator)  # [b]
        text = torch.cat([text, new[:, None].to(device)], 1)
        yield new


def generate(
    model: Llama,
    prompt: Sequence[int],
    *,
    stop: int | None = None,
    until: Callable[[list[int]], bool] | None = None,
    on_token: Callable[[list[list[int]]], None] = lambda rows: None,
    **sampling: Any,
) -> list[list[int]]:
    """Return continuations of the ids `prompt`, each cut before the token `stop`.

    sampling: arguments of `new_tokens`. until: called with a continuation after each token; True
    ends it. on_token: called with the continuations so far after each token, cut in the same way.
    """
    rows: list[list[int]] = [[] for _ in range(sampling.get("samples", 1))]
    open_rows = set(range(len(rows)))  # those without a `stop`
    ended = set[int]()
    for new in new_tokens(model, prompt, **sampling):
        for i, token in enumerate(new.tolist()):
            if token == stop:
                open_rows.discard(i)
            if i in open_rows:
                rows[i].append(token)
                if until is not None and until(rows[i]):
                    ended.add(i)
        on_token(rows)
        if not open_rows - ended:
            break
    return rows


class Stream:
    """Prints a text to stdout while its tokens are generated. decode: returns the text of ids.

    The bytes of a character may come from several tokens: an incomplete one is held back.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode, self._printed, self._next = decode, "", 0.0

    def show(self, ids: list[int]) -> None:
        """Print the new text; less often where the text is so long that decoding it is slow.

        Raises OSError.
        """
        began = time.monotonic()
        if began >= self._next:
            self._print(self._decode(ids).rstrip(NOT_WHOLE), "")
            self._next = began + 20 * (time.monotonic() - began)

    def end(self, ids: list[int]) -> None:
        """Print the rest. Raises OSError."""
        self._print(self._decode(ids), "\n")

    def _print(self, text: str, end: str) -> None:
        if not text.startswith(self._printed):  # a later token changed the text before it
            if not end:
                return
            print()
            self._printed = ""
        print(text[len(self._printed) :], end=end, flush=True)
        self._printed = text


def tokenizer_of(args: argparse.Namespace, found: Checkpoint) -> Tokenizer:
    """Build the flags' tokenizer, else the checkpoint's. Raises ValueError if that has changed."""
    state, directory = found.state, found.directory
    size = state["hf_config"]["vocab_size"]
    kind = args.tokenizer_type
    path = model_of(kind, args.tokenizer_model, args.vocab_file)
    if kind is not None or path is not None:
        kind, path = kind or state.get("tokenizer_type"), path or state.get("tokenizer_model")
        return build_tokenizer(kind, path, size, args.merge_file)
    tokenizer = tokenizer_in(state, str(directory), size)
    if tokenizer is None:
        raise ValueError(
            f"{directory} names no tokenizer: give --tokenizer-type and --tokenizer-model"
        )
    known = state.get("tokenizer_digest")
    if known and not same_tokenizer(known, digests_of(tokenizer), found.manifest["files"]):
        raise ValueError(
            f"the tokenizer {state.get('tokenizer_model')} is not the one {directory} was trained "
            "with (its SHA-256 differs); give --tokenizer-type and --tokenizer-model to use it "
            "anyway"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the ids to start from; an empty prompt begins a document. Raises ValueError."""
    ids = tokenizer.encode(prompt, bos=tokenizer.starts_with_bos)
    if not ids:
        first = tokenizer.bos if tokenizer.bos is not None else tokenizer.eod
        if first is None:
            raise ValueError("--prompt is empty, and the tokenizer has no token to begin with")
        ids = [first]
    return ids


def with_groups(grid: Grid, query_groups: int, device: torch.device) -> Grid:
    """Return the grid in which ranks share key/value heads, where these are fewer. Collective."""
    if query_groups >= grid.tp.size:
        return grid
    shared = Grid(
        grid.world_size, grid.tp_size, launch=grid.launch, query_groups=query_groups,
        ep_size=grid.ep_size,
    )  # fmt: skip
    shared.backend = grid.backend
    return shared.add_groups(device, TIMEOUT)  # only that of tp_kv is new, as tp is the world


def load_model(
    root: str, grid: Grid, device: torch.device, dtype: torch.dtype | None, own: str | None = None
) -> tuple[Llama, Checkpoint]:
    """Build and load the checkpoint's model on this rank; return it and the checkpoint.

    own: the model's file, if it is not one of Weft's.
    """
    at = device if grid.world.size > 1 else None
    root = str(at_or_below(root))
    newest = find_latest(root, grid, note=lambda line: None, device=at)
    if newest is None:
        raise nothing_at("--load", root)
    sizes = newest.state.get("hf_config")
    if not isinstance(sizes, dict):
        raise ValueError(f"--load {root}: state.json has no hf_config, the model's sizes")
    dtypes = Counter(newest.index[name]["dtype"] for name in newest.weights())
    stored = BY_NAME[max(dtypes, key=dtypes.__getitem__, default="F32")]
    saved = newest.state.get("config")

    def describe() -> tuple[ModelFile, Any]:
        file = model_file_of(sizes, saved, own)
        return file, saved_config(file, sizes, saved)

    file, config = on_all(describe, grid.world, at)
    if grid.ep_size > 1 and not getattr(config, "num_experts", 0):
        raise ValueError(
            f"--expert-model-parallel-size {grid.ep_size}: the model of {root} has no experts"
        )
    ctx = LayerContext(
        with_groups(grid, config.num_query_groups, device),
        dtype=dtype or stored,
        accumulate=torch.float64 if (dtype or stored) == torch.float64 else torch.float32,
        device=device,
    )

    def build() -> Any:
        model = file.Model(config, ctx).requires_grad_(False)
        for param in model.parameters():
            param.zero_()  # the padding of the vocabulary is in no file
        return model, weight_pieces(model, file.hf_names(model), grid)

    model, pieces = on_all(build, grid.world, at)

    def note(line: str) -> None:
        print(printable(line), file=sys.stderr)

    checkpoint = find_latest(
        root, grid, pieces=pieces, expect=sizes, cast=True, note=note, device=at
    )
    assert checkpoint is not None
    load(checkpoint, pieces, grid, at)
    return model, checkpoint


def threads_for(parameters: int, cores: int) -> int:
    """Return the number of threads that decode a model of this size on this rank.

    A token of a small model takes thousands of small operations, at each of which threads would
    wait for one another. OMP_NUM_THREADS overrides the number.
    """
    return max(1, min(cores, parameters // PARAMETERS_A_THREAD))


def parse(argv: Iterable[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = Parser(__doc__)
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="checkpoints, or a Hugging Face folder")
    add("--prompt", default="", help="text to continue; default: begin a document")
    add("--max-new-tokens", type=integer(1), default=200, metavar="N", help="default: 200")
    many = integer(1, 1 << 16)
    add("--num-samples", type=many, default=1, metavar="N", help="continuations; default: 1")
    add("--temperature", type=number(0), default=1.0, help="0: the likeliest token; default: 1.0")
    add("--top-k", type=integer(0), default=0, help="draw among the k likeliest; default: 0, all")
    add("--top-p", type=float, default=1.0, help="draw among the likeliest, of total probability p")
    add("--seed", type=integer(0), default=1234, help="of the sampling; default: 1234")
    add_tokenizer(parser, "the checkpoint's")
    parser.add_trust_owner()
    add("--model-file", metavar="PATH", help="a fork's model file; default: Weft's")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="default: as stored")
    add(
        "--expert-model-parallel-size", type=integer(), default=0, metavar="N",
        help="expert-parallel ranks of a mixture of experts; default: 1",
    )  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    args = parser.parse_args(None if argv is None else list(argv))
    try:
        args.prompt.encode()
    except UnicodeEncodeError as error:  # the command line's bytes that Python could not decode
        parser.error(f"--prompt is not UTF-8 after {args.prompt[: error.start][-40:]!r}")
    if not 0 < args.top_p <= 1:
        parser.error(f"--top-p {args.top_p} must be in (0, 1]")
    ep, world = args.expert_model_parallel_size, Launch.from_env().world
    if world % max(ep, 1):
        parser.error(f"--expert-model-parallel-size {ep} must divide the {world} ranks")
    return args


def run(args: argparse.Namespace, grid: Grid, device: torch.device) -> None:
    """Load, generate, and print on rank 0."""
    dtype = getattr(torch, args.dtype) if args.dtype else None
    with waiting(f"reading {args.load}") if grid.rank == 0 else nullcontext():
        model, found = load_model(args.load, grid, device, dtype, args.model_file)
        tokenizer = tokenizer_of(args, found)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's vocabulary only "
            f"{model.config.vocab_size}: give the model's own (--tokenizer-type, --tokenizer-model)"
        )
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        count = sum(param.numel() for param in model.parameters())
        share = cores() // grid.launch.local_world
        torch.set_num_threads(threads_for(count, share))
    ids = encode(tokenizer, args.prompt)
    context = model.config.max_position_embeddings
    if grid.rank == 0 and len(ids) + args.max_new_tokens > context:
        print(
            f"the prompt's {len(ids)} tokens and --max-new-tokens {args.max_new_tokens} are more "
            f"than the model's context (max_position_embeddings {context}): beyond it each token "
            f"is drawn from the last {context} only, by a forward over all of them (slower)",
            file=sys.stderr,
        )
    start = ids[tokenizer.bos == ids[0] :]  # bos is not text
    stream = Stream(tokenizer.decode)
    rows: list[list[int]] = [[] for _ in range(args.num_samples)]

    def show(so_far: list[list[int]]) -> None:
        rows[:] = so_far
        if grid.rank == 0:
            stream.show([*start, *rows[0]])

    if grid.rank == 0 and args.num_samples > 1:
        print(f"--- 1 of {args.num_samples}")
    show(rows)
    begin = time.perf_counter()
    try:
        generate(
            model,
            ids,
            samples=args.num_samples,
            max_new_tokens=args.max_new_tokens,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            stop=tokenizer.eod,
            on_token=show,
        )
    finally:  # print the text so far, also after Ctrl-C
        if grid.rank == 0:
            stream.end([*start, *rows[0]])
            for i, row in enumerate(rows[1:], 2):
                print(f"--- {i} of {len(rows)}")
                print(tokenizer.decode([*start, *row]), flush=True)
    seconds = time.perf_counter() - begin
    count = sum(map(len, rows))
    if grid.rank == 0:
        print(
            f"{found.directory.name}: {count} tokens, {count / seconds:.1f} tokens/s",
            file=sys.stderr,
        )


def main(argv: Iterable[str] | None = None) -> int:
    """Connect the ranks and run; print a refusal as one sentence and exit with code 2."""
    args = parse(argv)
    launch = Launch.from_env()
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    ep = args.expert_model_parallel_size
    grid = Grid(launch.world, tp_size=launch.world, launch=launch, ep_size=ep)
    try:
        if args.device != "cpu" and (why := unusable_gpu()):
            raise ValueError(f"{why}; or generate on the CPU with --device cpu")
        set_arithmetic(deterministic=False)
        device = own_gpu(launch) if kind == "cuda" else torch.device("cpu")
        if launch.world > 1:
            launch.check_rendezvous()
            grid.connect(device, meet(TIMEOUT, launch), TIMEOUT)
        run(args, grid, device)
    except BrokenPipeError:  # the reader of the text has closed the pipe
        return 1
    except (ValueError, OSError) as error:
        who = f"rank {launch.rank}: " if launch.rank else ""  # every rank prints its own
        print(f"generate: {who}{sentence(error)}", file=sys.stderr)
        sys.exit(2)
    finally:
        grid.close()
    return 0


if __name__ == "__main__":
    as_process(main, None, "generate")
