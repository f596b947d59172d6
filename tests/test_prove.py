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


def test_the_kept_parts_are_summed_with_their_commit_if_it_is_one(monkeypatch, tmp_path):
    monkeypatch.setattr(prove, "KEPT", tmp_path / "proved.csv")
    counts = {"tests": 5, "failures": 1, "errors": 0, "skipped": 2}
    for part, commit, told in (("mpu", "abc", "abc"), ("kills", "abc", "abc"), ("mpu", "def", "2")):
        prove.keep(prove.Outcome(part, counts, 1, 61.4), commit)
        lines = prove.kept_table().splitlines()
        assert len(lines) == len(prove.PARTS) + 2
        parts = len(prove.kept())
        want = ["all", *(str(n * parts) for n in (5, 1, 2, 61)), told]
        assert lines[-1].split()[:6] == want
    assert lines[-1].endswith("2 commits")
    assert sum("never" in line for line in lines) == len(prove.PARTS) - 2
