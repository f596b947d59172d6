# SPDX-License-Identifier: Apache-2.0
"""`make prove` in parts: every test file is in one part, and a part that fails is reported."""

from tests import prove


def test_every_file_is_in_exactly_one_part():
    found = [file for part in prove.PARTS for file in prove.files_of(part)]
    every = {path.relative_to(prove.ROOT).as_posix() for path in prove.ROOT.rglob("test_*.py")}
    tests = {name for name in every if name.startswith("tests/")}
    assert sorted(found) == sorted(n for n in tests if not n.startswith(prove.GPU + "/"))
    assert all(prove.files_of(part) for part in prove.PARTS), "a part is empty"


def test_every_path_of_a_part_is_there():
    paths = [path for paths in prove.PARTS.values() for path in paths]
    assert len(paths) == len(set(paths)), "two parts name one path"
    assert all((prove.ROOT / path).exists() for path in paths)


def test_the_nearest_folder_decides():
    parts = {"all": ("t",), "deep": ("t/deep", "t/one.py"), "file": ("t/deep/two.py",)}
    names = ("t/x.py", "t/one.py", "t/deep/x.py", "t/deep/two.py", "t/deeper/x.py")
    assert [prove.part_of(n, parts) for n in names] == ["all", "deep", "deep", "file", "all"]


def test_a_part_that_fails_is_told(tmp_path, monkeypatch, capfd):
    good, bad, empty = (tmp_path / f"test_{name}.py" for name in ("good", "bad", "empty"))
    mark = "import pytest\n@pytest.mark.prove\n"
    good.write_text(f"{mark}def test_a(): pass\ndef test_b(): pass\n")
    bad.write_text("def test_a(): pass\ndef test_b(): assert False, 'seen'\n")
    empty.write_text("")
    files = {"good": [str(good)], "bad": [str(bad)], "empty": [str(empty)]}
    monkeypatch.setattr(prove, "PARTS", dict.fromkeys((*files, "later"), ()))
    monkeypatch.setattr(prove, "KEPT", tmp_path / "proved.csv")
    monkeypatch.setattr(prove, "files_of", files.__getitem__)
    assert prove.main(["good"]) == 0
    capfd.readouterr()
    assert prove.main(["good", "bad", "empty"]) == 1
    out = capfd.readouterr().out
    assert "AssertionError: seen" in out
    rows = [" ".join(line.split()[:-1]) for line in out.splitlines()[-5:]]  # but for the seconds
    assert rows == [
        "part tests result",
        "good 2 passed",
        "bad 2 1 FAILED",
        "empty 0 EXIT 5",
        "all 4 2 of 3 parts FAILED",
    ]
    assert prove.main(["nothing"]) == 2
    assert "PART nothing is none of good, bad, empty, later" in capfd.readouterr().err
    assert prove.main(["--kept"]) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [row[:4] for row in rows] == [
        ["part", "tests", "failed", "skipped"],
        ["good", "2", "0", "0"],
        ["bad", "2", "1", "0"],
        ["empty", "0", "1", "0"],
        ["later", "never"],
    ]
    assert all(len(row) == len(prove.COLUMNS) for row in rows[:4])
