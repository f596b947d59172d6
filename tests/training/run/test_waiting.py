# SPDX-License-Identifier: Apache-2.0
"""A tool that is at work says so: lines in a file, one line on a terminal, nothing when quick."""

import io
import time
from types import SimpleNamespace

import pytest

from training.run import waiting as module
from training.run.waiting import Progress, duration, waiting


def test_lines_come_while_it_waits_and_none_when_it_is_quick(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(module.sys, "stderr", said)
    with waiting("quick"):
        pass
    assert said.getvalue() == ""
    monkeypatch.setattr(module, "AFTER", 0.05)
    with waiting("working", lambda: "step 2"):
        time.sleep(0.6)
    lines = said.getvalue().splitlines()
    assert 2 <= len(lines) <= 4, "the time between two lines doubles"
    assert set(lines) <= {"working: 0 s, step 2", "working: 1 s, step 2"}


def test_a_terminal_has_one_line_that_is_cleared(monkeypatch):
    said = io.StringIO()
    said.isatty = lambda: True
    monkeypatch.setattr(module.sys, "stderr", said)
    monkeypatch.setattr(module, "AFTER", 0.05)
    with waiting("working") as progress:
        progress.begin("files", 20)
        progress.add(5)
        time.sleep(0.2)
    assert "working: 0 s, files 5 of 20" in said.getvalue() and "\n" not in said.getvalue()
    assert said.getvalue().endswith("\r\x1b[K")


def test_what_is_left_follows_from_what_is_done(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    progress = Progress()
    assert str(progress) == ""
    progress.begin("looking")
    assert str(progress) == "looking"
    clock[0] += 7
    progress.begin("reading", 4_000_000_000, "B")
    assert str(progress) == "reading 0 B of 4 GB"
    clock[0] += 10
    progress.add(1_000_000_000)
    assert str(progress) == "reading 1 GB of 4 GB, about 30 s left"
    progress.add(3_000_000_000)
    assert str(progress) == "reading 4 GB of 4 GB"
    progress.begin("", 1200, "layouts")
    clock[0] += 5
    progress.add(50)
    assert str(progress) == "50 of 1,200 layouts, about 115 s left"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (119, "119 s"), (125, "2 min 5 s"), (12000, "3 h 20 min")],
)
def test_a_duration_in_words(seconds, words):
    assert duration(seconds) == words
