# SPDX-License-Identifier: Apache-2.0
"""Public Megatron scripts for dense Llamas: what parses, what is refused and why, as docs say."""

import re
from pathlib import Path

import pytest

from tests.training.flags.public_scripts import refusal, rows, scripts
from training.flags.foreign import unknown as foreign

SCRIPTS = scripts()
# What a refusal must name: a feature that is not here, a file that is, or a mistake in the script.
REASONS = (
    r"(is not a flag|are not flags) of this program",
    r"is refused: (--fp8-recipe delayed|fp16 with its loss scaling) is not available here",
    r"--dataloader-type cyclic: only single is accepted; samples are read once",
    r"--global-batch-size \d+ is not a multiple of --micro-batch-size",
    r"--normalization (rmsnorm|layernorm): only RMSNorm is accepted",
)


def named(script):
    return f"{script.repository}-{Path(script.path).name}-{script.edit or 'as published'}"


@pytest.mark.parametrize("script", SCRIPTS, ids=named)
def test_a_script_parses_or_the_refusal_names_what_is_missing(script):
    """Any other exception than UsageError, a traceback for the user, fails the test."""
    why = refusal(script.flags, script.world)
    assert not why or any(re.search(reason, why) for reason in REASONS), why
    assert "\n" not in why and (len(why) < 300 or "leaves them out: --ignore-flags" in why)


def test_enough_of_them_parse_as_published():
    unchanged = [s for s in SCRIPTS if not s.edit and not refusal(s.flags, s.world)]
    assert len(unchanged) >= 12
    assert len({s.repository.split("/")[0] for s in unchanged}) >= 5


def test_a_fork_s_flags_can_be_left_out_where_nothing_else_is_in_the_way():
    open_ = [s for s in SCRIPTS if foreign(s.flags)]
    names = [[*s.flags, "--ignore-flags", *foreign(s.flags)] for s in open_]
    parsed = [s for s, flags in zip(open_, names, strict=True) if not refusal(flags, s.world)]
    assert {s.repository for s in parsed} >= {"swiss-ai/Megatron-LM", "llm-jp/scripts"}


def test_the_table_of_the_docs_is_what_the_command_prints():
    docs = Path(__file__).parents[3] / "docs" / "megatron.md"
    assert "\n".join(rows()) in docs.read_text(), (
        "print it again: python -m tests.training.flags.public_scripts"
    )
