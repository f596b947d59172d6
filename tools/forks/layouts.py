# SPDX-License-Identifier: Apache-2.0
"""The layouts of tools/fork_check.py, their sizes, and the causes of patterns of failures."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from mpu.pipeline.schedules import CHUNKS
from tools.forks.case import ONE_RANK, Case

LATENT = {  # of a model with latent attention: its own flags, and each head has a key
    "--q-lora-rank": 10,
    "--kv-lora-rank": 6,
    "--qk-head-dim": 12,
    "--qk-pos-emb-head-dim": 4,
    "--v-head-dim": 7,
    "--num-query-groups": 8,
}


# sizes that a model may need: heads that are together as wide as hidden states; a key for each
# head, or one for all
NEEDS: tuple[dict[str, Any], ...] = tuple(
    {**width, **groups}
    for groups in ({}, {"--num-query-groups": 8}, {"--num-query-groups": 1})
    for width in ({}, {"--hidden-size": 128})
)
LAYERS: tuple[dict[str, Any], ...] = ({}, {"--num-layers": 6}, {"--num-layers": 12})


def sizes(
    experts: int = 0,
    fields: Container[str] = (),
    needs: Mapping[str, Any] = NEEDS[0],
) -> tuple[str, ...]:
    """Return the flags of every case: small sizes, odd where possible. At tp 4 two ranks share a
    key/value head. experts: the model's number. fields: of its config. needs: other sizes.
    """
    given = {
        "--num-layers": 4,
        "--hidden-size": 28,
        "--ffn-hidden-size": 20,
        "--num-attention-heads": 8,
        "--num-query-groups": 2,
        "--kv-channels": 16,  # a quarter of it, 2 pairs, may be rotated
        "--vocab-size": 97,
        "--make-vocab-size-divisible-by": 3,
        "--seq-length": 16 if experts else 12,
        "--global-batch-size": 4,
        "--micro-batch-size": 2,
        "--init-method-std": 0.2,
        "--lr": 1e-2,
        "--clip-grad": 0,
        "--train-iters": 3,
        "--ddp-bucket-size": 1000,
        "--device": "cpu",
        **({"--num-experts": experts, "--expert-tensor-parallel-size": 1} if experts else {}),
        **(LATENT if "kv_lora_rank" in fields else {}),
        **needs,
    }
    switches = ("--group-query-attention", "--mock-data", "--fp64", "--overlap-grad-reduce")
    return (*(str(word) for pair in given.items() for word in pair), *switches)


def layout(
    tp: int = 1,
    sp: bool = False,
    pp: int = 1,
    schedule: str = "1f1b",
    dp: int = 1,
    zero: int = 0,
    recompute: str = "",
    tied: bool = False,
    micro: int = 2,
    save: str = "",
    cp: int = 1,
    comm: str = "p2p",
    ep: int = 1,
    dispatcher: str = "alltoall",
) -> Case:
    """Return a case with the name and the flags of a layout."""
    words, flags = [], []
    if tp > 1:
        words.append(f"tp {tp}" + " + SP" * sp)
        flags += ["--tensor-model-parallel-size", str(tp), *["--sequence-parallel"] * sp]
    if cp > 1:
        words.append(f"cp {cp} {comm}")
        flags += ["--context-parallel-size", str(cp), "--cp-comm-type", comm]
    if pp > 1:
        words.append(f"pp {pp} {schedule}")
        flags += ["--pipeline-model-parallel-size", str(pp), "--pipeline-schedule", schedule]
        flags += ["--num-virtual-stages-per-pipeline-rank", str(CHUNKS[schedule])]
        micro = 1
    if dp > 1:
        words.append(f"dp {dp}" + f" + ZeRO {zero}" * (zero > 0))
        micro = 1
    if ep > 1:
        words.append(f"ep {ep} {dispatcher}")
        flags += ["--expert-model-parallel-size", str(ep)]
        flags += ["--moe-token-dispatcher-type", dispatcher]
    if zero:
        flags += ["--zero-stage", str(zero), "--overlap-param-gather"]
    if recompute:
        words.append(f"recompute {recompute}")
        flags += ["--recompute-granularity", recompute]
    words = words or ["one rank"]
    if words == ["one rank"] and micro == 1:
        words.append("4 micro-batches")
    if tied:
        words.append("tied")
    flags += ["--micro-batch-size", str(micro)]
    return Case(", ".join(words), tp * cp * pp * dp, tuple(flags), tied, save=save)


def one_rank(tied: bool) -> Case:
    """Return the case with which the others are compared."""
    flags = ("--micro-batch-size", "4")
    return Case(ONE_RANK + ", tied" * tied, 1, flags, tied, oracle=True)


def cases(experts: bool = False) -> list[Case]:
    """Return the cases, the references first. experts: the model has experts."""
    oracle = [one_rank(tied) for tied in (False, True)]
    every = [
        layout(micro=1),
        layout(recompute="selective"),
        layout(recompute="full"),
        layout(tp=2),
        layout(tp=2, sp=True, save="a"),
        layout(tp=4),
        layout(tp=2, sp=True, recompute="full", tied=True),
        *(layout(pp=2, schedule=schedule) for schedule in CHUNKS),
        layout(pp=2, tied=True, save="b"),
        layout(pp=2, schedule="zb-v", tied=True),
        layout(dp=2),
        layout(dp=2, zero=3),
        layout(tp=2, sp=True, dp=2, zero=3, tied=True),
        layout(tp=2, sp=True, pp=2, schedule="zb-h1"),
        layout(cp=2, comm="all_gather"),
        layout(tp=2, sp=True, cp=2, recompute="full", tied=True),
    ]
    if experts:
        every += [
            layout(dp=2, ep=2, dispatcher="allgather"),
            layout(tp=2, sp=True, ep=2, save="c"),
            layout(cp=2, comm="all_gather", ep=2, recompute="full"),
            layout(dp=4, zero=3, ep=2),
            layout(tp=2, sp=True, dp=2, zero=1, ep=4, tied=True),
            layout(pp=2, schedule="zb-v", dp=2, ep=2),
        ]
    loads = [
        (layout(pp=2), "a", "tp 2 + SP"),
        (layout(tp=2, dp=2, zero=3, tied=True), "b", "pp 2 1f1b"),
    ]
    if experts:
        loads.append((layout(dp=4, ep=4), "c", "tp 2 + SP, ep 2"))
    every += [
        case._replace(name=f"{case.name}, loads {what}", load=folder)
        for case, folder, what in loads
    ]
    return oracle + every


class Pattern(NamedTuple):
    """A common property of layouts, and the usual cause of a failure in exactly these."""

    what: str
    has: Callable[[str], bool]  # by the case's name
    hint: str


SPLIT = "one rank, 4 micro-batches"
PATTERNS = (  # of two that fit the same layouts, the first is reported
    Pattern(
        "with tensor parallelism",
        lambda name: "tp " in name,
        "a rank computes something from its own heads or features that needs all of them (a norm, "
        "a mean, a softmax), or a Placement cuts wrongly (its dim, its sections)",
    ),
    Pattern(
        "at tp without SP",
        lambda name: "tp " in name and "SP" not in name,
        "a replicated weight applied to a shard of heads or features, whose gradient is not "
        "summed: "
        "give it region=Region.TENSOR_PARALLEL",
    ),
    Pattern(
        "under SP",
        lambda name: "SP" in name,
        "hidden states have only a part of the sequence there, [s/t, b, h]: positions counted from "
        "x.shape[0], a mean or a norm over s, or a weight that needs Region.SEQUENCE_PARALLEL",
    ),
    Pattern(
        "under context parallelism",
        lambda name: "cp " in name,
        "a rank has a part of each row's tokens there: attention that does not go through "
        "core_attention with the packed_seq_params it is given, or their `chunked`, and so reads "
        "other keys; positions counted from 0 instead of position_ids; a mean or a shift over s",
    ),
    Pattern(
        "at tp 4",
        lambda name: "tp 4" in name,
        "a size divisible by 2 but not by 4, a hard-coded number of ranks, or a term added to qkv "
        "where two ranks share a head of k and v (use mpu.layers.qkv.add_bias)",
    ),
    Pattern(
        "with data-parallel ranks",
        lambda name: "dp " in name,
        "something in the model depends on which rows of the batch a rank has",
    ),
    Pattern(
        "with expert parallelism",
        lambda name: ", ep " in name,
        "a rank computes from its own experts or tokens something that needs all of them (a count, "
        "a mean over rows), or a weight of an expert has no Placement on ep",
    ),
    Pattern(
        "at ZeRO 3",
        lambda name: "ZeRO 3" in name,
        "a weight is used outside of its layer's acquire: use mpu.gradients.use(weight, ctx.sink)",
    ),
    Pattern(
        "under recomputation",
        lambda name: "recompute" in name,
        "the block's second forward is not its first: it has a state, or draws random numbers",
    ),
    Pattern(
        "in pipelines",
        lambda name: "pp " in name,
        "a module keeps something from one stage to the next, hidden states carry less than the "
        "next stage needs, a layer does not know its number in the whole model, or a parameter is "
        "made on the wrong stage",
    ),
    Pattern(
        "in tied pipelines",
        lambda name: "pp " in name and "tied" in name,
        "embedding and head hold copies of one weight: call mpu.param.tie(weight, ctx.grid.embd) "
        "once on a rank with one of them, and never on a rank with both",
    ),
    Pattern(
        "where a rank has several stages",
        lambda name: any(s in name for s, chunks in CHUNKS.items() if chunks > 1),
        "chunk_of names the wrong stage of a parameter, a layer does not know its number in the "
        "whole model, a module keeps something from one stage to the next, or embedding and head "
        "are on one rank and are treated as two weights",
    ),
    Pattern(
        "where weight gradients are deferred",
        lambda name: any(s in name for s in ("zb-h1", "zb-v", "v-half")),
        "a layer's own backward reads something that changes before W runs: keep it in the queue",
    ),
    Pattern(
        "with tied embeddings",
        lambda name: "tied" in name,
        "embedding and head share a weight, which is used, added or scaled once too often",
    ),
    Pattern(
        "where a micro-batch is a part of the batch",
        lambda name: name not in ("one rank", "one rank, tied"),
        "the model depends on which rows, or how many, are in a micro-batch, or keeps something "
        "from one to the next",
    ),
)
CAUSES = {  # by the kind of the first difference, and whether it is of a gradient
    ("a sum twice", True): (
        "its gradient is added more than once: by the layer itself (a function of "
        "mpu.comm.mappings) and by what its Placement says (a Region, reduce_axes, tie)"
    ),
    ("divided", True): (
        "its gradient is divided by the number of ranks: a mean instead of a sum"
    ),
    ("a missing sum", True): (
        "a replicated weight applied to a part of the features or of the tokens, whose gradient is "
        "not summed: its Region says where it is used"
    ),
    ("a sum twice", False): (
        "a second sum over tp: RowParallelLinear and VocabParallelEmbedding already return whole "
        "hidden states"
    ),
    ("a missing sum", False): (
        "partial hidden states must be summed over tp, by RowParallelLinear or by "
        "reduce_from_tensor_model_parallel_region of mpu.comm.mappings"
    ),
    ("an auxiliary loss", False): (
        "ctx.auxiliary_loss takes a sum over the tokens that a block has, no mean; its region is "
        "that of the tensors from which it is computed. A loss of statistics of a micro-batch, as "
        "the balance loss of experts, depends on the size of micro-batches by definition"
    ),
    ("a bias of each rank", False): "RowParallelLinear(..., bias=True) adds it once, after its sum",
}


def pattern(failed: Sequence[str], ran: Sequence[str], kind: tuple[str, bool]) -> str:
    """Return the common property of the failed layouts and the likely cause, or "".

    ran: the names of the layouts that were compared; what one of them loads does not count. The
    pattern that the fewest of them have is used. kind: a key of `CAUSES`.
    """
    fits = []
    for number, one in enumerate(PATTERNS):
        having = [name for name in ran if one.has(name.partition(", loads ")[0])]
        if set(failed) <= set(having) and (one is not PATTERNS[-1] or SPLIT in failed):
            fits.append((len(having), number, one))
    cause = CAUSES.get(kind, "")
    if not failed or not fits:
        return f"likely cause: {cause}" if failed and cause else ""
    count, _, best = min(fits)
    some = "" if count == len(set(failed)) else "some layouts "
    return f"likely cause (only {some}{best.what}): {cause or best.hint}"
