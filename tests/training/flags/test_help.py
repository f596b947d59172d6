# SPDX-License-Identifier: Apache-2.0
"""--help as a person reads it: where to start, a group, a flag."""

import re

import pytest

from training.flags.flag_table import live_flags
from training.flags.foreign import suggest
from training.flags.help import heading, page_of
from training.flags.megatron import known_flags
from training.flags.parse import build_parser, parse
from training.settings.arguments import GROUPS
from training.settings.config import UsageError


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as stop:
        parse(["--num-layers", "2", "--help", *words], 1)
    assert stop.value.code in (0, None)
    return capsys.readouterr().out


def test_help_alone_says_where_to_start(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys)
    usage = text.partition("\n\n")[0]
    assert usage.startswith("usage:") and usage.count("\n") == 5 and "--num-layers" not in usage
    assert max(map(len, usage.splitlines())) <= 100
    assert len(text.splitlines()) <= 80
    start = re.findall(r"^  (--[\w-]+)", text.partition("groups:")[0], re.MULTILINE)
    assert 12 <= len(start) <= 18 and start[0] == "--num-layers"
    required = {flag.name for flag in live_flags().values() if flag.row.required}
    assert required <= set(start) and {"--dry-run", "--train-iters"} <= set(start)
    assert re.findall(r"^  (\w+) +\d+ flags", text, re.MULTILINE) == list(GROUPS)


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_lists_its_flags(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, group)
    assert heading(group) in text and "usage" not in text
    shown = re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)
    assert shown == [flag.name for flag in live_flags().values() if flag.group == group]


def test_help_all_lists_every_flag_with_unit_and_off_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = " ".join(said(capsys, "all").split())
    for flag in live_flags().values():
        start = text.index(f" {flag.name} ")
        line = text[text.index(flag.text[:20], start) :]
        row = flag.row
        if row.unit or row.required or row.derived or row.default or row.needs:
            tail = line[line.index("[") + 1 : line.index("]", line.index("["))]
            assert tail.startswith(row.unit[:20]), flag.name
            known = ("default", "off", "required", "with")
            assert tail == row.unit or any(word in tail for word in known), tail


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("lr", ["--lr X", "peak learning rate", "required", "Value: a number >= 0"]),
        ("--ckpt-step", ["--ckpt-step N needs --load"]),
        ("--optimizer", ["--optimizer {adam,muon}"]),  # the group of this name has no dashes
        ("fp16", ["--fp16 is refused", "use --bf16"]),
        ("checksum-messages", ["was removed"]),
    ],
)
def test_a_flag_is_explained(
    word: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(said(capsys, word).split())
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("zeros", r"--help zeros: there is no group .* model, .*did you mean zero\?"),
        ("num-layer", r"--help num-layer: .*did you mean --num-layers\?"),
        ("deepspeed_config", r"--deepspeed_config: DeepSpeed is not used and its file is not read"),
        ("--universal-checkpoint", r"--universal-checkpoint is not a flag of this program nor of"),
        ("--context-parallel-algo", r"give --cp-comm-type, as in Megatron-LM"),
        ("--nonsense", r"--nonsense is not a flag of this program nor of Megatron-LM"),
    ],
)
def test_what_is_no_group_and_no_flag_is_explained(word: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse(["--help", word], 1)


def test_a_forks_own_flags_are_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    for word in ("", "--own"):
        with pytest.raises(SystemExit):
            parse(["--help", word], 1, lambda p: p.add_argument("--own", help="of a fork"))
        assert "of a fork" in capsys.readouterr().out


def test_choices_are_shown_and_values_have_names() -> None:
    text = " ".join(build_parser(page=page_of("all")).format_help().split())
    assert "--zero-stage {0,1,2,3}" in text
    assert "--lr-decay-style NAME" in text and "WSD" in text
    assert "--train-iters N" in text and "--lr X" in text and "--save DIRECTORY" in text


def test_a_default_that_is_the_off_value_is_said_once() -> None:
    text = " ".join(build_parser(page=page_of("all")).format_help().split())
    assert not re.search(r"off: (\S+); default: \1[\];,]", text)
    assert "off: 1, the default]" in text and "[rank in the world; default: 0;" in text


def test_a_typo_never_suggests_a_refused_flag() -> None:
    refused = [f.name for f in known_flags().values() if not f.usable]
    for name in refused[::25]:
        told = re.findall(r"--[\w-]+", suggest(name[:-1] + name[-1] * 2))
        assert not set(refused) & set(told), name
