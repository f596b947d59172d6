# SPDX-License-Identifier: Apache-2.0
"""Device files: each number has its unit and its source, and they are those that docs freeze."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import predict_published
from benchmarks.predict_published import DOCUMENT, frozen_files, stated_hashes
from forecast.device_file import FOLDER, DeviceFileError, path_of, read_device
from training.run.gpus import GPUS, named, of_driver

NAMES = ("a100", "b200", "h100", "h200")


def test_the_devices_are_there() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == list(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_device_file_is_whole_and_its_numbers_make_sense(name: str) -> None:
    device = read_device(name)
    assert 1e14 < device.peak("bfloat16") == device.peak("float16") < 1e16
    assert 1e12 < device["bandwidth"] < 1e13 and 4e10 <= device["memory"] < 1e12
    assert 100 <= device["sms"] < 200 and device["collective_sms"] < device["sms"] / 4
    assert 1e-6 <= device["launch_seconds"] < 1e-4 and 1e-6 <= device["kernel_seconds"] < 1e-5
    assert device.levels[0].ranks == 8 and device.levels[0].bandwidth > device.levels[1].bandwidth
    assert all(source_of(entry) for entry in entries(json.loads(path_of(name).read_text())))


@pytest.mark.parametrize("name", NAMES)
def test_the_log_compares_with_the_same_peak(name: str) -> None:
    device, gpu = read_device(name), of_driver(read_device(name).name)
    assert gpu.bf16 == device.peak("bfloat16") and gpu.capability == device.capability
    assert (gpu.memory, gpu.bandwidth) == (device["memory"], device["bandwidth"])


@pytest.mark.parametrize("name", [gpu.name for gpu in GPUS if gpu.name not in NAMES])
def test_a_gpu_without_a_file_has_its_data_sheet_and_anothers_shares(name: str) -> None:
    gpu, device = named(name), read_device(name)
    base = read_device(gpu.like)
    assert (device["memory"], device.peak("bfloat16")) == (gpu.memory, gpu.bf16)
    assert device.levels[0].bandwidth == gpu.link and device.capability == gpu.capability
    assert device["matmul"] == base["matmul"] and device.other == base.other


ROW = {
    "name": "L40S of ours", "like": "a100", "capability": [8, 9], "memory": 48, "bandwidth": 864,
    "bf16": 362, "float8": 733, "tf32": 183, "fp32": 91.6, "sms": 142, "l2": 96, "host": 25,
    "link": 20, "link_gpus": 4, "source": "measured here",
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({}, ""),
        ({"watts": 350}, "watts is unknown; the keys are bandwidth, bf16"),
        ({"sms": None}, "sms is None, not a number above 0"),
        ({"memory": -1}, "memory is -1, not a number above 0"),
        ({"like": "l40"}, "like is 'l40', not one of a100, b200, h100, h200"),
        ({"capability": 8.9}, "capability is 8.9, not two whole numbers"),
    ],
)
def test_a_small_file_describes_a_gpu(tmp_path: Path, change: dict[str, Any], rule: str) -> None:
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(ROW | change))
    if not rule:
        device = read_device(str(path))
        assert (device["memory"], device.levels[0].ranks, device.major) == (48e9, 4, 8)
        return
    with pytest.raises(DeviceFileError, match=f"ours.json: {rule}"):
        read_device(str(path))


def entries(value: Any) -> list[dict[str, Any]]:
    """Return every object with a value in a file."""
    if isinstance(value, list):
        return [entry for part in value for entry in entries(part)]
    if not isinstance(value, dict):
        return []
    own = [value] if "value" in value else []
    return own + entries([part for part in value.values() if isinstance(part, dict | list)])


def source_of(entry: dict[str, Any]) -> bool:
    """Tell whether a source names a document, a repository, a fit, or says what it is."""
    told = entry["source"]
    names = ("datasheet", "arXiv:", "NVIDIA/", "stas00/", "docs.nvidia.com", "fit_device.py")
    more = ("github.com", "assumed", "reference architecture", "gpu-results.md")
    return any(name in told for name in (*names, *more))


def test_the_device_files_are_those_of_the_document() -> None:
    assert frozen_files() == stated_hashes(), f"{DOCUMENT.name} freezes other files"


def test_nothing_is_predicted_with_files_that_are_not_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = "model,nodes,dp,tp,pp,mbs,grad_acc,gbs,zero,mfu_pct,tok_s_gpu,tok_s,mem_gb,status\n"
    run += "1B,1,8,1,1,2,16,256,0,40.0,40000,320000,50.0,ok\n1B,1,8,1,1,2,16,256,0,,,,,crashed\n"
    (tmp_path / "runs.csv").write_text(run)
    out = tmp_path / "errors.csv"
    flags = ["--runs", str(tmp_path), "--out", str(out)]
    assert predict_published.main(flags) == 0
    rows = out.read_text().splitlines()
    assert len(rows) == 3 and rows[1].startswith("runs.csv:2,ultrascale,playbook 1B 1 nodes,h100")
    assert rows[2].endswith("crashed")
    error = float(rows[1].split(",")[6])
    assert f"worst {error:+.0%} (runs.csv:2)" in capsys.readouterr().out
    other = tmp_path / "other.md"
    other.write_text(DOCUMENT.read_text().replace("h100.json` | `", "h100.json` | `0"))
    monkeypatch.setattr(predict_published, "DOCUMENT", other)
    assert predict_published.main(flags) == 1
    assert "states the sha256 of other device files" in capsys.readouterr().err


def test_a_device_that_nobody_measured_has_two_ends(tmp_path: Path) -> None:
    one, other = read_device("h100").ends()
    assert one["matmul"] < other["matmul"] and one["sms"] == other["sms"]
    assert len(other.ends()) == 2 and len(read_device("a100").ends()) == 1
    content = json.loads(path_of("h100").read_text())
    for entry in content["numbers"].values():  # as a check of the card writes it
        entry.pop("other", None)
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(content))
    assert len(read_device(str(path)).ends()) == 1


@pytest.mark.parametrize(
    "change, rule",
    [
        (
            {"sms": {"value": 1, "unit": "1", "source": "a datasheet", "other": {"value": 2}}},
            "sms must be an object with only value, unit and source",
        ),
        ({"sms": {"value": 132, "unit": "1"}}, "sms must be an object with only value, unit"),
        ({"sms": {"value": 1, "unit": "s", "source": "a datasheet"}}, "of sms must be 1, not s"),
        ({"sms": {"value": 1, "unit": "1", "source": ""}}, "the source of sms is .*: it must say"),
        ({"sms": {"value": "132", "unit": "1", "source": "a datasheet"}}, "sms is '132', not a"),
        ({"sms": {"value": -1, "unit": "1", "source": "a datasheet"}}, "sms is -1, not a number"),
        ({"watts": {"value": 1, "unit": "1", "source": "a datasheet"}}, "the unknown key watts"),
        (
            {"matmul": {"value": 1.2, "unit": "share of peak", "source": "a datasheet"}},
            "matmul is 1.2, but a share must be at most 1",
        ),
    ],
)
def test_a_file_that_breaks_a_rule_is_refused(
    tmp_path: Path, change: dict[str, Any], rule: str
) -> None:
    content = json.loads(path_of("h100").read_text())
    content["numbers"] |= change
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DeviceFileError, match=rule):
        read_device(str(path))


def test_levels_end_with_one_of_all_ranks(tmp_path: Path) -> None:
    content = json.loads(path_of("h100").read_text())
    content["levels"] = content["levels"][:1]
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DeviceFileError, match="the last level must have ranks 0"):
        read_device(str(path))


def test_an_unknown_name_lists_those_there_are() -> None:
    with pytest.raises(DeviceFileError, match="v100: it has no bfloat16.* by name are .*a100"):
        read_device("v100")
    with pytest.raises(DeviceFileError, match="no device file nowhere/h100.json"):
        read_device("nowhere/h100.json")
