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
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script, find its own parts

from mpu.launch import Launch, environment_defaults
from mpu.needs import explain_missing_packages

os.environ.update(environment_defaults(os.environ))
if __name__ == "__main__":
    explain_missing_packages()

import torch
from torch import Tensor

from model.llama import Llama
from model.load import model_file_of, saved_config
from mpu.accelerators import own_gpu, unusable_gpu
from mpu.context import LayerContext
from mpu.grid import Grid
from tools.command_line import Parser, add_tokenizer, integer, model_of
from training.checkpoint import Checkpoint, find_latest, load, weight_pieces
from training.checkpoint.find import at_or_below
from training.checkpoint.header import BY_NAME
from training.data.tokenizer import Tokenizer, build_tokenizer
from training.data.tokenizer_files import digests_of, same_tokenizer, tokenizer_in
from training.run.device import set_arithmetic
from training.run.rendezvous import meet
from training.run.sample import gather_logits, pick
from training.run.startup import as_process
from training.untrusted import nothing_downloaded, printable, sentence

TIMEOUT = timedelta(minutes=5)  # of a collective
PARAMETERS_A_THREAD = 30_000_000


@torch.inference_mode()
def generate(
    model: Llama,
    prompt: Sequence[int],
    *,
    samples: int = 1,
    max_new_tokens: int = 200,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 1234,
    stop: int | None = None,
    until: Callable[[list[int]], bool] | None = None,
) -> list[list[int]]:
    """Return `samples` continuations of the ids `prompt`, each cut before the token `stop`.

    until: asked about a continuation after each token; True ends it.
    """
    config, device = model.config, model.ctx.device
    generator = torch.Generator().manual_seed(seed)
    caches: list[list[Tensor]] = [[] for _ in range(config.num_layers)]
    model.rope(None, len(prompt) + max_new_tokens)  # once, at full length
    tokens = torch.tensor([list(prompt)] * samples, device=device)  # [b, n]
    position = 0
    ended = torch.zeros(samples, dtype=torch.bool)
    chosen: list[Tensor] = []
    while len(chosen) < max_new_tokens and not ended.all():
        logits = model.decode(tokens, position, caches)  # [n, b, V/t]
        position += tokens.shape[1]
        logits = gather_logits(logits, model.ctx.tp, config.vocab_size)
        new = pick(logits, temperature, top_k, top_p, generator)
        chosen.append(new)
        if stop is not None:
            ended |= new == stop
        if until is not None:
            ended |= torch.tensor([until(row) for row in torch.stack(chosen, 1).tolist()])
        tokens = new[:, None].to(device)
    rows = torch.stack(chosen, 1).tolist() if chosen else [[] for _ in range(samples)]
    return [row[: row.index(stop)] if stop in row else row for row in rows]


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
            "with (its SHA-256 differs); give --tokenizer-type and --tokenizer-model to use it all "
            "the same"
        )
    return tokenizer


def encode(tokenizer: Tokenizer, prompt: str, room: int, new: int) -> list[int]:
    """Return the ids to start from; an empty prompt begins a document. Raises ValueError."""
    ids = tokenizer.encode(prompt, bos=tokenizer.starts_with_bos)
    if not ids:
        first = tokenizer.bos if tokenizer.bos is not None else tokenizer.eod
        if first is None:
            raise ValueError("--prompt is empty and the tokenizer has no token to begin with")
        ids = [first]
    if len(ids) + new > room:
        raise ValueError(
            f"the prompt's {len(ids)} tokens and --max-new-tokens {new} are more than the model's "
            f"max_position_embeddings ({room})"
        )
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
    return shared.add_groups(device, TIMEOUT)  # it makes that of tp_kv alone, as tp is the world


def load_model(
    root: str, grid: Grid, device: torch.device, dtype: torch.dtype | None, own: str | None = None
) -> tuple[Llama, Checkpoint]:
    """Build and load the checkpoint's model on this rank; return it and the checkpoint.

    own: the model's file, where it is not one of Weft's.
    """
    at = device if grid.world.size > 1 else None
    root = str(at_or_below(root))
    newest = find_latest(root, grid, note=lambda line: None, device=at)
    if newest is None:
        raise ValueError(f"--load {root}: there is no checkpoint ({nothing_downloaded(root)})")
    sizes = newest.state.get("hf_config")
    if not isinstance(sizes, dict):
        raise ValueError(f"--load {root}: state.json has no hf_config, the model's sizes")
    embedding = newest.index.get("model.embed_tokens.weight", {"dtype": "F32"})
    stored = BY_NAME[embedding["dtype"]]  # a tensor that is missing is named below
    saved = newest.state.get("config")
    file = model_file_of(sizes, saved, own)
    config = saved_config(file, sizes, saved)
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
    model = file.Model(config, ctx).requires_grad_(False)
    for param in model.parameters():
        param.zero_()  # the padding of the vocabulary is in no file
    pieces = weight_pieces(model, file.hf_names(model), grid)

    def note(line: str) -> None:
        print(printable(line), file=sys.stderr)

    checkpoint = find_latest(
        root, grid, pieces=pieces, expect=sizes, cast=True, note=note, device=at
    )
    assert checkpoint is not None
    load(checkpoint, pieces, grid, at)
    return model, checkpoint


def threads_for(parameters: int, cores: int) -> int:
    """Return how many threads decode a model with so many parameters on this rank.

    A token of a small model is thousands of small operations, at each of which threads would wait
    for one another. Set OMP_NUM_THREADS to have another number.
    """
    return max(1, min(cores, parameters // PARAMETERS_A_THREAD))


def parse(argv: Iterable[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = Parser(description=__doc__.split("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="where checkpoints were saved")
    add("--prompt", default="", help="text to continue; default: begin a document")
    add(
        "--max-new-tokens",
        type=integer(),
        default=200,
        metavar="N",
        help="tokens a sample (200)",
    )
    add(
        "--num-samples",
        type=integer(high=1 << 16),
        default=1,
        metavar="N",
        help="continuations (1)",
    )
    add("--temperature", type=float, default=1.0, help="0 takes the likeliest token (1.0)")
    add("--top-k", type=integer(), default=0, help="draw among the k likeliest tokens (0: all)")
    add("--top-p", type=float, default=1.0, help="draw among those that sum to p (1.0: all)")
    add("--seed", type=integer(0), default=1234, help="of the draws (1234)")
    add_tokenizer(parser, "the checkpoint's")
    parser.add_trust_owner()
    add("--model-file", metavar="PATH", help="for a fork; default: Weft's own")
    add("--dtype", choices=("float32", "bfloat16", "float64"), help="default: as stored")
    add(
        "--expert-model-parallel-size", type=integer(), default=0, metavar="N",
        help="of a mixture: expert-parallel ranks (1)",
    )  # fmt: skip
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    args = parser.parse_args(None if argv is None else list(argv))
    rules = {
        "--max-new-tokens": (args.max_new_tokens, args.max_new_tokens >= 1, "at least 1"),
        "--num-samples": (args.num_samples, args.num_samples >= 1, "at least 1"),
        "--temperature": (args.temperature, 0 <= args.temperature < 1e9, "0 or more"),
        "--top-k": (args.top_k, args.top_k >= 0, "0 or more"),
        "--top-p": (args.top_p, 0 < args.top_p <= 1, "in (0, 1]"),
        "--expert-model-parallel-size": (
            args.expert_model_parallel_size,
            not Launch.from_env().world % max(args.expert_model_parallel_size, 1),
            f"a divisor of the {Launch.from_env().world} ranks",
        ),
    }
    for flag, (value, good, rule) in rules.items():
        if not good:
            parser.error(f"{flag} {value} must be {rule}")
    return args


def run(args: argparse.Namespace, grid: Grid, device: torch.device) -> None:
    """Load, generate, and print on rank 0."""
    dtype = getattr(torch, args.dtype) if args.dtype else None
    model, found = load_model(args.load, grid, device, dtype, args.model_file)
    tokenizer = tokenizer_of(args, found)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} entries and the model only "
            f"{model.config.vocab_size}: they do not match"
        )
    if device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        count = sum(param.numel() for param in model.parameters())
        cores = len(os.sched_getaffinity(0)) // grid.launch.local_world
        torch.set_num_threads(threads_for(count, cores))
    ids = encode(tokenizer, args.prompt, model.config.max_position_embeddings, args.max_new_tokens)
    begin = time.perf_counter()
    rows = generate(
        model,
        ids,
        samples=args.num_samples,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=tokenizer.eod,
    )
    seconds = time.perf_counter() - begin
    if grid.rank != 0:
        return
    start = ids[tokenizer.bos == ids[0] :]  # bos is no text
    for i, row in enumerate(rows):
        if len(rows) > 1:
            print(f"--- {i + 1} of {len(rows)}")
        print(tokenizer.decode([*start, *row]), flush=True)
    count = sum(map(len, rows))
    print(
        f"{found.directory.name}: {count} tokens, {count / seconds:.1f} tokens/s", file=sys.stderr
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
    except (ValueError, OSError) as error:
        who = f"rank {launch.rank}: " if launch.rank else ""  # every rank prints its own
        print(f"generate: {who}{sentence(error)}", file=sys.stderr)
        sys.exit(2)
    finally:
        grid.close()
    return 0


if __name__ == "__main__":
    as_process(main, None)
