# SPDX-License-Identifier: Apache-2.0
"""--help as a person reads it."""

import re

from training.flags.foreign import suggest
from training.flags.parse import build_parser
from training.flags.table import known_flags

HELP = build_parser().format_help()


def test_usage_is_five_lines_and_not_every_flag() -> None:
    usage = HELP.partition("\n\n")[0]
    assert usage.startswith("usage:") and usage.count("\n") == 4 and "--num-layers" not in usage
    assert max(map(len, usage.splitlines())) <= 100


def test_choices_are_shown_and_values_have_names() -> None:
    text = " ".join(HELP.split())
    assert "--zero-stage {0,1,2,3}" in text or "--zero-stage N" in text
    assert "--lr-decay-style NAME" in text and "WSD" in text
    assert "--train-iters N" in text and "--lr X" in text and "--save DIRECTORY" in text


def test_a_default_that_is_the_off_value_is_said_once() -> None:
    assert not re.search(r"off: (\S+); default: \1[\];,]", " ".join(HELP.split()))
    assert "off: 1, the default]" in " ".join(HELP.split())


def test_a_typo_never_suggests_a_refused_flag() -> None:
    refused = [f.name for f in known_flags().values() if not f.usable]
    for name in refused[::25]:
        told = re.findall(r"--[\w-]+", suggest(name[:-1] + name[-1] * 2))
        assert not set(refused) & set(told), name
