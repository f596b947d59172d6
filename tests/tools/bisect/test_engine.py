# SPDX-License-Identifier: Apache-2.0
"""The engine on records that are written here: parts are joined, and the first difference named."""

import json

import pytest
import torch

from tools.compare.first_difference import Allowed, allowed, compare
from tools.compare.join import Key, Side
from tools.compare.verdict import verdict_of

S, B, H, V = 8, 3, 6, 10
EXACT, LOOSE = Allowed(True), Allowed(False)
GENERATOR = torch.Generator().manual_seed(5)
TOKENS = torch.randint(0, V, (B, S), generator=GENERATOR)
HIDDEN = torch.randn(S, B, H, generator=GENERATOR, dtype=torch.float64)
FEATURES = torch.randn(S, B, 12, generator=GENERATOR, dtype=torch.float64)
WEIGHT = torch.randn(12, H, generator=GENERATOR, dtype=torch.float64)
GRADIENT = torch.randn(12, H, generator=GENERATOR, dtype=torch.float64)


class Record:
    """Writes one rank's record as training/run/watch/recorder.py does."""

    def __init__(self, folder, rank=0, sp=False, **axes):
        folder.mkdir(exist_ok=True)
        self.folder, self.rank, self.sp = folder, rank, sp
        self.axes = {name: axes.get(name, [0, 1]) for name in ("tp", "cp", "dp", "pp")}
        self.data, self.entries, self.numbers = b"", [], {}

    def add(self, group, name, x, **more):
        flat = x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(x.dtype).removeprefix("torch.")
        entry = {"group": group, "name": name, "shape": list(x.shape), "dtype": dtype}
        self.entries.append({**entry, "at": len(self.data), "bytes": len(flat), **more})
        self.data += flat

    def batch(self, tokens=TOKENS, places=None, first=0, micro_batch=0):
        where = {"first": first, "rows": len(tokens), "micro_batch": micro_batch}
        self.add("batch", "tokens", tokens, **where)
        if places is None:
            places = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
        self.add("places", "places", places, **where)

    def activation(self, name, x, region="", sections=(), kind="output", first=0, phase="forward"):
        more = {"index": 0, "call": 1, "of": "Linear", "site": f"model.py:{len(self.entries)}"}
        more |= {"micro_batch": 0, "stage": 0, "first": first, "rows": x.shape[1]}
        more |= {"region": region, "sections": sections, "phase": phase, "kind": kind}
        self.add("activation", name, x, **more)

    def parameter(self, kind, x, when="", shape=(12, H), start=0, data=(0,), sums=(), first=0,
                  local=None, cut=""):  # fmt: skip
        local = list(local or x.shape)
        pieces = [["w", list(shape), 0, start, local[0], 0]]
        more = {"data": list(data), "sums": list(sums), "cut": cut, "first": first}
        self.add("parameter", "w", x.flatten(), module="layer.weight", kind=kind, when=when,
                 local=local, pieces=pieces, **more)  # fmt: skip

    def close(self):
        head = {"rank": self.rank, "axes": self.axes, "sp": self.sp, "numbers": self.numbers}
        text = json.dumps({**head, "entries": self.entries})
        (self.folder / f"rank-{self.rank}.json").write_text(text)
        (self.folder / f"rank-{self.rank}.bin").write_bytes(self.data)


def one_rank(folder, fill):
    record = Record(folder)
    record.batch()
    fill(record)
    record.close()
    return Side(folder)


def two_ranks(folder, fill, axis="tp", sp=False, **batch):
    for rank in range(2):
        record = Record(folder, rank, sp, **{axis: [rank, 2]})
        record.batch(**{name: value[rank] for name, value in batch.items()})
        fill(record, rank)
        record.close()
    return Side(folder)


def hidden(x=HIDDEN):
    return lambda record: record.activation("norm", x)


def test_a_tensor_is_joined_from_what_the_layer_states(tmp_path):
    one = one_rank(tmp_path / "one", hidden())
    half = S // 2
    cut = two_ranks(
        tmp_path / "sp",
        lambda record, rank: record.activation("norm", HIDDEN[rank * half :][:half]),
        sp=True,
    )
    assert compare(one, cut, LOOSE).first is None
    same = two_ranks(tmp_path / "whole", lambda record, rank: record.activation("norm", HIDDEN))
    assert compare(one, same, LOOSE).first is None
    key = Key("activation", "output", "qkv", "forward")
    sections = [[4, 2], [2, 2], [6, 4]]  # cut; shared by both ranks; padded from 6 to 8
    each = [FEATURES[..., [0, 1, 4, 5, 6, 7, 8, 9]], FEATURES[..., [2, 3, 4, 5, 10, 11, 0, 0]]]
    ranks = two_ranks(
        tmp_path / "sections",
        lambda record, rank: record.activation("qkv", each[rank], "tensor-parallel", sections),
    )
    assert torch.equal(ranks.activation(key).values, FEATURES.transpose(0, 1))
    free = two_ranks(
        tmp_path / "free", lambda record, rank: record.activation("qkv", each[rank][..., :6])
    )
    like = (B, S, 12)
    assert free.activation(key, like).values.shape == like  # cut, by the other side's shape


def test_tokens_of_context_ranks_and_of_micro_batches_come_to_their_places(tmp_path):
    one = one_rank(tmp_path / "one", hidden())
    places = [torch.tensor([0, 1, 6, 7]), torch.tensor([2, 3, 4, 5])]
    two = two_ranks(
        tmp_path / "cp",
        lambda record, rank: record.activation("norm", HIDDEN[places[rank]]),
        "cp",
        places=[p.repeat(B, 1) for p in places],
        tokens=[TOKENS[:, p] for p in places],
    )
    assert compare(one, two, LOOSE).first is None
    rows = [slice(0, 1), slice(1, 3)]
    data = two_ranks(
        tmp_path / "dp",
        lambda record, rank: record.activation("norm", HIDDEN[:, rows[rank]], first=rank),
        "dp",
        tokens=[TOKENS[r] for r in rows],
        first=[0, 1],
    )
    assert compare(one, data, EXACT).first is None


@pytest.mark.parametrize(
    "factors, kind, words",
    [
        ((0.25, 0.75), "a missing sum", "a sum over tp is missing"),
        ((2.0, 2.0), "a sum twice", "added over tp twice"),
        ((0.5, 0.5), "divided", "divided by the ranks of tp"),
        ((1.0, 3.0), "one rank", "only on rank 1 of tp"),
        ((0.1, 0.1), "a factor", "0.1 times"),
    ],
)
def test_a_sum_over_tp_that_is_wrong_is_recognised(tmp_path, factors, kind, words):
    one = one_rank(tmp_path / "one", hidden())
    wrong = two_ranks(
        tmp_path / "two", lambda record, rank: record.activation("norm", factors[rank] * HIDDEN)
    )
    found = verdict_of(one, wrong, LOOSE)
    assert (found.kind, found.name, found.phase) == (kind, "norm", "forward"), found
    assert words in found.sentence and "model.py:2" in found.sentence, found.sentence


def test_shards_of_an_optimizer_make_a_weight(tmp_path):
    one = one_rank(tmp_path / "one", lambda r: r.parameter("weight", WEIGHT, "before"))
    low = 30  # in the middle of a row
    flat = [WEIGHT.flatten()[:low], WEIGHT.flatten()[low:]]
    two = two_ranks(
        tmp_path / "two",
        lambda r, rank: r.parameter(
            "weight", flat[rank], "before", data=(0, 1), first=rank * low, local=(12, H)
        ),
        "dp",
        tokens=[TOKENS, TOKENS],
    )
    assert compare(one, two, EXACT).first is None


def flipped(x, at, bit):
    bits = x.clone().view(torch.int64)
    bits[at] ^= 1 << bit
    return bits.view(x.dtype)


def test_kinds_of_one_rank(tmp_path):
    one = one_rank(tmp_path / "one", lambda r: r.parameter("weight", WEIGHT, "before"))
    cases = {
        "a flipped bit": flipped(WEIGHT, (3, 2), 40),
        "a rounding": WEIGHT.bfloat16().double(),
        "a factor": 1.5 * WEIGHT,
        "another order of sums": WEIGHT * (1 + 2**-51),
    }
    for kind, x in cases.items():
        other = one_rank(
            tmp_path / kind.replace(" ", "-"),
            lambda r, x=x: r.parameter("weight", x, "before"),
        )
        found = verdict_of(one, other, EXACT)
        assert found.kind == kind and found.name == "w", (kind, found.sentence)
    assert (
        "bit 40 of element [3, 2]"
        in verdict_of(one, Side(tmp_path / "a-flipped-bit"), EXACT).sentence
    )


def test_samples_in_another_order_are_not_other_samples(tmp_path):
    one = one_rank(tmp_path / "one", lambda r: None)
    for name, tokens, kind in (
        ("order", TOKENS[[1, 0, 2]], "another order"),
        ("other", (TOKENS + (torch.arange(B) == 1)[:, None]) % V, "other samples"),
    ):
        record = Record(tmp_path / name)
        record.batch(tokens)
        record.close()
        found = verdict_of(one, Side(tmp_path / name), EXACT)
        assert found.kind == kind and found.name == "tokens", found.sentence


def test_rows_of_experts_are_compared_by_rank_and_may_be_none(tmp_path):
    rows, none = torch.randn(5, H, generator=GENERATOR), torch.empty(0, H)

    def sides(name, x):
        return two_ranks(
            tmp_path / name, lambda record, rank: record.activation("rows", x if rank else none)
        )

    one, same, other = sides("one", rows), sides("same", rows), sides("other", 2 * rows)
    assert compare(one, same, EXACT).first is None
    assert compare(one, other, EXACT).first.key.name == "rows"


def test_weights_may_be_as_far_apart_as_the_steps_before_allow(tmp_path):
    one = one_rank(tmp_path / "one", lambda r: r.parameter("weight", WEIGHT, "before"))
    near = WEIGHT * (1 + 1e-6 * torch.randn(12, H, generator=GENERATOR, dtype=torch.float64))
    other = one_rank(tmp_path / "other", lambda r: r.parameter("weight", near, "before"))
    for apart, same in ({}, False), ({"w": 1e-5}, True), ({"": 1e-5}, True), ({"w": 1e-8}, False):
        found = compare(one, other, Allowed(False, begins=False, distances=apart)).first
        assert (found is None) == same, apart


def test_which_layouts_have_equal_bits():
    base = {"parallel.world_size": 1, "parallel.pipeline_model_parallel_size": 1, "run.seed": 1}
    pipeline = base | {"parallel.world_size": 2, "parallel.pipeline_model_parallel_size": 2}
    assert allowed(base, base | {"run.seed": 2, "parallel.zero_stage": 3}).exact
    assert allowed(base, pipeline).exact
    assert not allowed(base, base | {"parallel.world_size": 2}).exact
    found = allowed(base, base | {"parallel.tensor_model_parallel_size": 2})
    assert not found.exact


def test_the_side_that_a_sentence_is_about_is_named(tmp_path):
    """By its letter, or by its name: who lacks a tensor, and who has values that are not finite."""
    broken = HIDDEN.clone()
    broken[0, 0, :2] = float("nan")

    def more(record):
        record.activation("norm", HIDDEN)
        record.activation("mlp", HIDDEN)

    fills = {"one": hidden(), "more": more, "broken": hidden(broken)}
    sides = {name: one_rank(tmp_path / name, fill) for name, fill in fills.items()}
    names = ("one rank", "this layout")
    for one, other, said in (("one", "more", ("only B has", "only this layout has")),
                             ("more", "one", ("only A has", "only one rank has")),
                             ("broken", "one", (": 2 of 144 values of A", "values of one rank")),
                             ("one", "broken", (": 2 of 144 values of B", "of this layout are")),
                             ):  # fmt: skip
        assert said[0] in verdict_of(sides[one], sides[other], EXACT).sentence
        assert said[1] in verdict_of(sides[one], sides[other], EXACT, names).sentence


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_is_said(lost, tmp_path):
    def with_loss(loss):
        return lambda record: record.numbers.update(loss=loss)

    one, other = (one_rank(tmp_path / f"{x}", with_loss(x)) for x in (2.3, lost))
    for pair in ((one, other), (other, one)):
        verdict = verdict_of(*pair, EXACT)
        assert verdict.kind == "not finite" and "one of them is not finite" in verdict.sentence
