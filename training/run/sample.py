# SPDX-License-Identifier: Apache-2.0
"""Continue a prompt with the model that is being trained, and print it (--sample-interval).

Every token takes an evaluation forward over a whole row of --seq-length, so sampling works in every
layout, and leaves weights, optimizer, data and random numbers unchanged: the run's losses are the
same with and without it. All ranks take part. tools/generate.py is faster, with a cache of keys and
values, for a saved model.
"""

import numpy as np
import torch
from torch import Tensor

from mpu.comm.collectives import all_gather, sum_in_order
from mpu.comm.transport import Axis, Label
from mpu.pipeline.schedules import forward_only
from training.data.batch import Batch, DocumentRules, make_batch
from training.data.build import Loaders
from training.data.context_part import context_part
from training.run.log import Log
from training.run.state import Run
from training.settings.config import Config

NEW = 32  # tokens of a sample
PROMPT_TOKENS = 16  # tokens of held-out text as the prompt, without --sample-prompt
TEMPERATURE = 0.8


def gather_logits(logits: Tensor, tp: Axis, vocab_size: int) -> Tensor:
    """Gather the last position's logits: [n, b, V/t] -> [b, V], without the padding of V."""
    last = logits[-1].t().contiguous()  # [V/t, b]
    return all_gather(last, tp)[0].t()[:, :vocab_size]  # [b, V]


def pick(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> Tensor:
    """Choose the next token of each row: logits [b, V] -> [b].

    Temperature 0 takes the likeliest. Otherwise the CPU draws from softmax(logits / temperature) of
    the top_k likeliest (0: all), and of those from the fewest whose probabilities reach top_p.
    """
    logits = logits.to("cpu", torch.float64)
    if temperature == 0:
        return logits.argmax(-1)
    order = logits.argsort(dim=-1, descending=True, stable=True)
    p = (logits.gather(-1, order) / temperature).softmax(-1)
    if top_k:
        p[:, top_k:] = 0
    p = p / p.sum(-1, keepdim=True)
    p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0)
    drawn = torch.multinomial(p, 1, generator=generator)
    return order.gather(-1, drawn)[:, 0]


def draw_sample(run: Run, loaders: Loaders, log: Log) -> None:
    """Print how the model continues a prompt."""
    run.monitor.enter("evaluation", f"a sample after iteration {run.iteration}")
    tokenizer, prompt = loaders.tokenizer, prompt_of(run.config, loaders)
    assert tokenizer is not None
    with log.timing("sample"):
        made = continue_prompt(run, prompt, min(NEW, run.config.model.seq_length - len(prompt)))
    if tokenizer.eod in made:
        made = made[: made.index(tokenizer.eod)]
    before = tokenizer.decode(prompt)
    text = tokenizer.decode([*prompt, *made]).removeprefix(before)
    log.note(f"sample at iteration {run.iteration}, after {before!r}:")
    for line in text.splitlines() or [""]:
        log.note(f"    {line}")


def prompt_of(config: Config, loaders: Loaders) -> list[int]:
    """Return the ids to continue: --sample-prompt, or the start of the first held-out sample."""
    tokenizer, most = loaders.tokenizer, config.model.seq_length - 1
    assert tokenizer is not None
    if config.log.sample_prompt is not None:
        ids = tokenizer.encode(config.log.sample_prompt, bos=tokenizer.starts_with_bos)
        if ids:
            return ids[-most:]
    held_out = next(iter(loaders.valid.values()), loaders.train)
    return [int(i) for i in held_out.dataset.sample(0)[: min(PROMPT_TOKENS, most)]]


def continue_prompt(run: Run, prompt: list[int], new: int) -> list[int]:
    """Return `new` tokens that continue the prompt, the same on every rank."""
    config, grid = run.config, run.grid
    seed = 1_000_003 * config.run.seed + 8191 * run.iteration
    row, made = np.zeros(config.model.seq_length + 1, np.int64), list[int]()
    row[: len(prompt)] = prompt
    rows = config.batch.micro_batch_size  # the same shapes as in a step
    for place in range(len(prompt) - 1, len(prompt) - 1 + new):
        full = make_batch(np.tile(row, (rows, 1)), DocumentRules(), 0)
        batch = context_part(full, grid.cp.rank, grid.cp.size).to(run.device)
        logits = _logits(run, batch, _local(batch, place))
        chosen = torch.zeros((), dtype=torch.float64, device=run.device)
        if logits is not None:  # this rank has the last stage and this token
            assert config.model.vocab_size is not None
            logits = gather_logits(logits, grid.tp, config.model.vocab_size)
            generator = torch.Generator().manual_seed((seed + place) % (1 << 63))
            chosen += pick(logits, TEMPERATURE, 0, 1.0, generator)[0].item()
        label = Label("draw_sample", "next token")
        chosen = sum_in_order(sum_in_order(chosen, grid.cp, label), grid.pp, label)
        made.append(int(chosen.item()))
        row[place + 1] = made[-1]
    return made


def _local(batch: Batch, place: int) -> int | None:
    """Return this context-parallel rank's index of the token at `place`, None on other ranks."""
    if batch.position_ids is None:
        return place
    at = (batch.position_ids[0] == place).nonzero()
    return int(at[0]) if len(at) else None


def _logits(run: Run, batch: Batch, place: int | None) -> Tensor | None:
    """Return the logits [1, 1, V/t] at `place` of this rank's part of the row, None elsewhere."""
    chunks: list[Tensor] = []
    p = run.config.parallel
    pp = p.pipeline_model_parallel_size
    count = p.microbatch_group_size_per_virtual_pipeline_stage or pp  # the fewest allowed

    def forward(chunk: int, i: int, hidden: Tensor | None) -> Tensor:
        ids = (batch.tokens, None, batch.position_ids, batch.packed_seq_params)
        out = run.model(*ids, hidden=hidden, chunk=chunk)
        if not run.model.stages[chunk].loss:
            return out
        if i == 0 and place is not None:
            chunks.append(out[place : place + 1, :1].clone())
        return out.new_zeros(())

    schedule = forward_only(run.schedule(count))
    during = f"of the sample after iteration {run.iteration}"
    run.engine.run(schedule, forward, run.model.hidden_shape(*batch.tokens.shape), during)
    return chunks[0] if chunks else None
