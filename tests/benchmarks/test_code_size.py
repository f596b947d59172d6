# SPDX-License-Identifier: Apache-2.0
"""Tokens of code are what a reader reads, whatever the layout."""

from benchmarks.code_size import of_cpp, of_python, room, table


def test_layout_comments_and_docstrings_do_not_count():
    plain = "def f(a, b):\n    return a + b\n"
    assert of_python(plain) == 12
    full = '"""A module."""\n\ndef f(\n    a,  # first\n    b\n):\n'
    full += '    """Add."""\n\n    return a + b\n'
    assert of_python(full) == of_python(plain)


def test_words_inside_strings_count():
    assert of_python("x = 'one two three'\n") == 5 and of_python("x = ''\n") == 3


def test_cpp_counts_without_comments():
    assert of_cpp("int f(int a) { /* add */ return a; } // end\n") == 11
    assert of_cpp('puts("two words");') == 6


def test_rooms_and_their_sums():
    assert room("mpu/zero/bucket.py") == "mpu/zero" and room("setup.py") == "setup.py"
    now = {("python", "mpu/zero"): (2, 50), ("python", "tests/mpu"): (1, 7)}
    base = {("python", "mpu/zero"): (4, 100)}
    lines = table(now, base)
    assert "-50.0%" in lines[0] and "4 files       100" in lines[0]
    assert lines[2].split()[-3:] == ["100", "50", "-50.0%"] and "= product" in lines[2]
