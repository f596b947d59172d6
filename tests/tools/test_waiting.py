# SPDX-License-Identifier: Apache-2.0
"""A tool that is at work says so: lines in a file, one line on a terminal, nothing when quick."""

import io
import time

from tools import waiting as module
from tools.waiting import waiting


def test_lines_come_while_it_waits_and_none_when_it_is_quick(monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(module.sys, "stderr", said)
    with waiting("quick"):
        pass
    assert said.getvalue() == ""
    monkeypatch.setattr(module, "EVERY", 0.1)
    with waiting("working", lambda: "step 2"):
        time.sleep(0.4)
    lines = said.getvalue().splitlines()
    assert 2 <= len(lines) <= 5 and set(lines) == {"working: 0 s, step 2"}


def test_a_terminal_has_one_line_that_is_cleared(monkeypatch):
    said = io.StringIO()
    said.isatty = lambda: True
    monkeypatch.setattr(module.sys, "stderr", said)
    monkeypatch.setattr(module, "AFTER", 0.05)
    with waiting("working"):
        time.sleep(0.2)
    assert "working: 0 s" in said.getvalue() and "\n" not in said.getvalue()
    assert said.getvalue().endswith("\r\x1b[K")
