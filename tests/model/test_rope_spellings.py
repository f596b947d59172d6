# SPDX-License-Identifier: Apache-2.0
"""A config.json's rotary positions are read as transformers 5 reads them, or are refused, and what
is written is read alike by transformers 4 and 5 (tests/model/rope_spellings.py).

    pytest tests/model/test_rope_spellings.py -rP               prints the counts; -m "" of more
"""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from model.llama import Llama, LlamaConfig
from model.load import model_file_of, read_sizes
from mpu.layers.rope import Yarn
from tests.model.rope_spellings import Form, asked, forms, whole
from tests.sampling import sampled

FOUR = Path(__file__).with_name("rope_transformers_4.json")
KEPT = 250  # forms that transformers 4 was asked
CLOSE = 2e-6  # transformers computes in fp32


def read(form: Form) -> tuple[Any, str]:
    """Return the sizes that Weft reads, or None and why it refuses."""
    hf = whole(form)
    try:
        return read_sizes(model_file_of(hf), hf), ""
    except ValueError as error:
        return None, str(error)


def computed(sizes: Any) -> list[float]:
    """Return the frequencies and the attention factor of a model of these sizes."""
    frequencies = Llama.frequencies(SimpleNamespace(config=sizes))  # type: ignore[arg-type]
    factor = 1.0 if sizes.yarn is None else sizes.yarn.attention_factor
    return [*frequencies.tolist(), factor]


def exported(form: Form, sizes: Any) -> Form:
    """Return the rotary positions of the config.json that Weft writes."""
    hf = model_file_of(whole(form)).hf_config(sizes)
    return {k: hf[k] for k in ("model_type", "rope_theta", "rope_scaling")}


def kept() -> list[Form]:
    """Return what transformers 4 is asked: forms, and what Weft writes of those that it reads."""
    every = [*forms(KEPT)]
    written = [exported(form, sizes) for form in every if (sizes := read(form)[0]) is not None]
    return every + [json.loads(text) for text in dict.fromkeys(map(json.dumps, written))]


@cache
def four() -> dict[str, list[float] | None]:
    """Return what transformers 4 answered, by the JSON of a form."""
    found = json.loads(FOUR.read_text())
    assert found["transformers"].startswith("4.57")
    return {json.dumps(form): found["answers"][at] for form, at in found["forms"]}


def same(ours: list[float], theirs: list[float]) -> bool:
    return ours == pytest.approx(theirs, rel=CLOSE)


@pytest.mark.parametrize("count", sampled([100, KEPT], 2))
def test_every_spelling_is_read_as_transformers_reads_it_or_refused(count: int) -> None:
    """Where only transformers 4 reads a form, its answer is the right one."""
    counts = dict.fromkeys(("right", "refused, though read there", "refused there too"), 0)
    wrong = []
    for i, form in enumerate(forms(count)):
        theirs = asked(form) or (four()[json.dumps(form)] if i < KEPT else None)
        sizes, why = read(form)
        if sizes is None:
            counts["refused, though read there" if theirs else "refused there too"] += 1
            assert "config.json: " in why or "yarn's" in why or "rope" in why, why
        elif theirs and same(computed(sizes), theirs):
            counts["right"] += 1
        else:
            wrong.append((form, theirs, computed(sizes)))
    print(f"{count} forms were played: {counts}, wrong {len(wrong)}")
    assert not wrong, wrong[0]
    assert counts["right"] > count / 4


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("factor", 0.5, "from 1 on"), ("factor", math.inf, "from 1 on"), ("factor", "4", "from 1"),
        ("beta_fast", -1.0, "above 0"), ("attention_factor", math.nan, "above 0"),
        ("original_length", 0, "a whole number from 1 to"), ("beta_slow", 40.0, "beta_fast is 32"),
    ],
)  # fmt: skip
def test_a_scaling_that_cannot_be_is_named(name: str, value: Any, rule: str) -> None:
    yarn = replace(Yarn(4.0, 16), **{"attention_factor": 1.0, name: value})
    with pytest.raises(ValueError, match=f"yarn's .*{rule}"):
        LlamaConfig(96, 32, 48, 2, 4, 2, yarn=yarn)


def test_what_is_written_is_read_alike_by_transformers_4_and_5() -> None:
    count = 0
    for form in kept():
        sizes, _ = read(form)
        if sizes is None:
            continue
        written = exported(form, sizes)
        ours = computed(sizes)
        for theirs in (asked(written), four()[json.dumps(written)]):
            assert theirs is not None and same(ours, theirs), (written, ours, theirs)
        assert read(written)[0] == sizes or written["model_type"] != form["model_type"]
        count += 1
    print(f"{count} forms were written and read by both")
