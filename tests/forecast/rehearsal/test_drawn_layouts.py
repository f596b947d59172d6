# SPDX-License-Identifier: Apache-2.0
"""No finding on layouts drawn at random from every flag that changes a step, and the dry run's
memory, traffic and FLOPs are the rehearsal's.

These are held on a model that is large enough that memory is not that of cuBLAS's workspaces, and
without documents, whose lengths are not known before a run, and A100s, whose workspaces are
smaller. With -s each such layout prints a row: bytes equal, the ratios of FLOPs and of memory to
the rehearsal's, ranks, the rank, flags.
"""

from typing import Any

import pytest

import pretrain_llama
from forecast import traffic
from forecast.dry_run import memory
from forecast.recording import record
from mpu.launch import Launch
from pretrain_llama import model_provider
from tests.forecast.rehearsal.drawn_layouts import MODEL as LITTLE
from tests.forecast.rehearsal.drawn_layouts import accepted
from training.flags.parse import parse
from training.run.model_profile import model_profile
from training.run.pipeline_stages import rank_stages
from training.settings import batch_size
from training.settings.config import Config
from training.settings.pipeline_schedule import recomputed_layers, schedule_of

SEEDS, MORE, WITHIN = range(200, 225), range(300, 335), 0.02
WITHOUT = ("--reset", "--eod", "--rehearse-device a100")
MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 32768 --hidden-size 1024
    --num-attention-heads 8 --group-query-attention --ffn-hidden-size 3072 --seq-length 1024
    --max-position-embeddings 1024 --lr 1e-3 --train-iters 8 --bf16 --swiglu
""".split()


def flops(config: Config, pp_rank: int) -> float:
    """Return the FLOPs of a rank's step, of the model's products: its profile by the tokens.

    A backward has two products for each of forward's, and attention's five for two. What the log
    computes (--log-max-attention-logit) and the optimizer's iterations are not in it.
    """
    model, p = model_profile(config, model_provider), config.parallel
    count = batch_size.micro_batches(config, 0)
    schedule = schedule_of(config, count)
    deferred = schedule.split or schedule.deferred
    fused = p.fused_linear_cross_entropy * (1 + deferred)  # its logits are made again, in W too
    selective, total = p.recompute_granularity == "selective", 0.0
    for stage in rank_stages(config, model_provider, pp_rank):
        again = recomputed_layers(config, stage)
        for n, layer in enumerate(stage.layers):
            core = model.core[layer]
            total += (model.layers[layer] - core) * (3 + (n < again))
            total += core * (3.5 + (selective or n < again))
        total += stage.loss * model.head * (3 + fused)
    tokens = count * config.batch.micro_batch_size * config.model.seq_length
    return total * tokens / p.tensor_model_parallel_size / p.context_parallel_size


@pytest.mark.prove
@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_layout_keeps_and_sends_what_is_said(seed: int, rehearse: Any) -> None:
    world, rank, flags = accepted(seed, MODEL, WITHOUT)
    words = [*MODEL, *flags.split()]
    config = parse([*words, "--dry-run"], world)
    pp_rank = pretrain_llama.make_grid(config, Launch(rank, world)).pp.rank
    recording = record(config, pretrain_llama, [pp_rank], member=rank)[pp_rank]
    stated = sum(memory(config, recording).values())
    rows = traffic.totals(traffic.rows(recording))
    code, report, text = rehearse(" ".join([*words, "--rehearse-rank", str(rank)]), world, False)
    assert report, text[-2000:]
    sent = dict.fromkeys(rows, 0)
    for row in report["collectives"]:
        key = row["axis"], row["verb"]
        if not str(row["label"]).endswith(": log"):  # of a step that is written to the log
            sent[key] = sent.get(key, 0) + row["sent"]
    rows_of_model = (row for row in report["launches"] if row["part"] not in ("glue", "optimizer"))
    done = sum(row["flops"] for row in rows_of_model)
    equal = {k: n for k, n in sent.items() if n} == {k: n for k, (_, n) in rows.items() if n}
    work = (flops(config, pp_rank) or 1) / (done or 1)
    ratio = stated / report["memory"]["peak_bytes"]
    print(f"\n{seed} {'equal' if equal else 'OTHER'} {work:.4f} {ratio:.4f} {world} {rank} {flags}")
    assert (code, report.get("findings")) == (0, []), text[-2000:]
    assert equal, (sent, rows)
    assert work == pytest.approx(1, abs=WITHIN)
    assert ratio == pytest.approx(1, abs=WITHIN), report["memory"]["by_kind"]


@pytest.mark.prove
@pytest.mark.parametrize("seed", MORE)
def test_a_drawn_layout_has_no_finding(seed: int, rehearse: Any) -> None:
    world, rank, flags = accepted(seed, LITTLE)
    words = " ".join([*LITTLE, flags, "--rehearse-rank", str(rank)])
    code, report, text = rehearse(words, world, small=False)
    assert (code, report.get("findings")) == (0, []), (world, rank, flags, text[-2000:])
