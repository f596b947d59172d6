# SPDX-License-Identifier: Apache-2.0
"""What is read is a plain file within limits; what is printed obeys nobody; what is written is
private."""

import math
import os
import pwd
import stat
from types import SimpleNamespace

import pytest
import torch

from tools.command_line import Parser
from training.files.untrusted import (
    DEPTH,
    nothing_downloaded,
    open_plain,
    parse_json,
    printable,
    read_json,
    read_plain,
    trust_owners,
    trusted,
)
from training.flags.parse import parse
from training.run.log import Log
from training.settings.config import UsageError

FLAGS = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --lr 1e-3
    --train-iters 1 --mock-data --vocab-size 64"""
BAD_JSON = [
    (b"[" * 100_000, "levels"),
    (b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), "levels"),
    (b'{"a": "\\ud800"}', "surrogates not allowed"),
    (b'{"a": "\xed\xa0\x80"}', "utf-8"),
    (b"\xff\xfe{\0}\0", "utf-8"),
    (b'{"a": 1e999}', "1e999 is not a finite number"),
    (b'{"a": -Infinity}', "-Infinity is not a JSON number"),
    (b'{"a": 9223372036854775808}', "does not fit into 64 bits"),
    (b"1" * 5000, "does not fit into 64 bits"),
    (b'{"a": 1, "a": 2}', "'a' occurs twice"),
    (b'{"a": 1', "Expecting"),
    (b"", "Expecting"),
]


@pytest.mark.parametrize(("data", "says"), BAD_JSON, ids=range(len(BAD_JSON)))
def test_json_that_is_none_is_refused_by_name(data, says):
    with pytest.raises(ValueError, match=f"^the file is not JSON: .*{says}"):
        parse_json(data, "the file")


def test_json_within_the_limits_is_read():
    assert parse_json(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00", "b": [-9223372036854775808]}', "x") == {
        "a": "\N{GRINNING FACE}",
        "b": [-(1 << 63)],
    }
    assert parse_json("[" * DEPTH + "]" * DEPTH, "x")


# What Python's json and people write into files of Hugging Face, in keys that nobody here reads.
FOREIGN = [
    b'{"a": 1, "model_max_length": 1000000000000000019884624838656}',
    b'{"a": 1, "time_step_limit": [0.0, Infinity]}\n\n',
    b'\xef\xbb\xbf{"a": 1, "x": NaN, "y": -Infinity, "z": 1e999}',
    b'{"a": 1, "a": 1, "b": 2, "b": 3}',
    b'{"a": 1, "b": {"c": [[1e400]], "c": 2}}',
    b'{"a": 1, "b": ' + b"9" * 5000 + b"}",
]


@pytest.mark.parametrize("data", FOREIGN, ids=range(len(FOREIGN)))
def test_a_foreign_file_is_refused_only_where_a_bad_value_is_read(data):
    found = parse_json(data, "config.json", foreign=True)
    assert found["a"] == found.get("a") == 1 and found.get("none") is None
    with pytest.raises(ValueError, match="the file is not JSON"):
        parse_json(data, "the file")
    bad = [key for key in found if key not in "ab"] or ["b"]
    if found.keys() - "a" == {"b"} and isinstance(dict.get(found, "b"), dict):
        found, bad = found["b"], ["c"]
    for key in bad:
        for read in (found.__getitem__, found.get):
            with pytest.raises(ValueError, match=f"^config.json: {key}: .*(not a|64 bits|twice)"):
                read(key)


def test_a_foreign_file_still_is_json():
    for data, says in BAD_JSON[:5] + BAD_JSON[-2:]:
        with pytest.raises(ValueError, match=f"^the file is not JSON: .*{says}"):
            parse_json(data, "the file", foreign=True)
    with pytest.raises(ValueError, match="the file is not JSON: NaN is not a JSON number"):
        parse_json(b"[1, NaN]", "the file", foreign=True)


def test_only_plain_files_are_opened_and_nothing_hangs(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", "/dev/zero"):
        with pytest.raises(OSError, match="not a plain file"):
            open_plain(path)
    with pytest.raises(IsADirectoryError):
        open_plain(tmp_path)
    with pytest.raises(OSError, match="null byte"):
        open_plain("a\0b")
    (tmp_path / "large").write_bytes(bytes(100))
    assert read_plain(tmp_path / "large", 100) == bytes(100)
    with pytest.raises(ValueError, match="large: it has more than 99 bytes"):
        read_json(tmp_path / "large", 99)


def test_what_a_terminal_obeys_is_written_out():
    assert printable("plain, \N{GREEK SMALL LETTER PI}") == "plain, \N{GREEK SMALL LETTER PI}"
    told = printable("a\x1b[31m\r\n\x9b\u202e\udc80")
    assert told == "a\\x1b[31m\\r\\n\\x9b\\u202e\\udc80"
    assert printable("one\ntwo\x07", lines=True) == "one\ntwo\\x07"
    assert printable("a\n" * 9, most=6) == "a\\na..."


def test_logs_are_their_owners_alone(tmp_path, capsys):
    umask = os.umask(0o022)
    os.umask(umask)
    os.mkfifo(tmp_path / "pipe")
    config = SimpleNamespace(
        log_interval=1,
        log_json=str(tmp_path / "log.jsonl"),
        tensorboard_dir=str(tmp_path / "events"),
        wandb_project=None,
        wandb_exp_name=None,
    )
    about = dict(rank=0, world_size=1, flops_per_token=1.0, dtype=torch.float32, device="cpu")
    with Log(config, **about, total_iterations=1) as log:
        log.validation(1, math.log(2))
        log.note("a file named \x1b[2J")
    assert os.umask(umask) == umask, "files that are made after it"
    made = [tmp_path / "log.jsonl", tmp_path / "events", *(tmp_path / "events").iterdir()]
    assert len(made) == 3 and not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in made)
    assert "a file named \\x1b[2J" in capsys.readouterr().out
    config.log_json = str(tmp_path / "pipe")
    with pytest.raises(ValueError, match="--log-json .*pipe: cannot be written"):
        Log(config, **about, total_iterations=1)


def test_a_name_on_hugging_face_gets_the_command_that_downloads_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    said = nothing_downloaded("meta-llama/Llama-3.2-1B")
    assert said.startswith("nothing is downloaded; if that is a model on Hugging Face, `hf downl")
    for path in ("runs/mine", "own/model", "/a/b", "../a", "a/b/c", "name", "a b/c", "", "a/$(x)"):
        assert nothing_downloaded(path) == "nothing is downloaded"


def test_a_folder_of_models_names_one(tmp_path):
    assert nothing_downloaded(tmp_path) == "nothing is downloaded"
    for inside in ("checkpoint-500", "snapshots/0a1b"):
        (tmp_path / inside).mkdir(parents=True)
        (tmp_path / inside / "config.json").touch()
        assert nothing_downloaded(tmp_path).endswith(f"give one, such as {tmp_path}/{inside}")


def test_whose_files_count():
    """--trust-owner takes names and numbers, also of users who have no name on this host."""
    name = pwd.getpwuid(1).pw_name

    def counts() -> list[int]:
        assert trusted(0) and trusted(os.geteuid())
        return [owner for owner in (1, 8, 70123) if trusted(owner)]

    try:
        parse(f"{FLAGS} --trust-owner {name} 70123".split(), 1)
        assert counts() == [1, 70123]
        with pytest.raises(UsageError, match="--trust-owner nobody-here: no user has this name"):
            parse(f"{FLAGS} --trust-owner nobody-here".split(), 1)
        parser = Parser()
        parser.add_trust_owner()
        assert parser.parse_args(["--trust-owner", name, "--trust-owner=8"]).trust_owner
        assert counts() == [1, 8]
        with pytest.raises(SystemExit):
            parser.parse_args(["--trust-owner", "-1"])
        parse(FLAGS.split(), 1)
        assert counts() == []
    finally:
        trust_owners([])
