# SPDX-License-Identifier: Apache-2.0
"""A picture holds a box for every action, to scale, and is the same file every time."""

import itertools
import re
import struct
import subprocess
import sys
from xml.etree import ElementTree

import numpy
import pytest

from mpu.pipeline.schedules import CHUNKS, build, forward_only
from mpu.pipeline.simulate import Costs, simulate
from tests.sampling import sampled
from tools.pictures.schedule import _shade, caption, draw, heading
from tools.pictures.style import KINDS, lighter
from tools.pictures.timeline import rows


def simulated(schedule, send=0.0):
    n = schedule.stages
    return simulate(schedule, Costs([1.0] * n, [1.5] * n, [0.5] * n, send))


def boxes_of(svg):
    """Return {name: (left, right)} of the boxes in an SVG, in points."""
    found = {}
    for group in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}g"):
        name = group.get("id", "")
        if name.startswith("rank"):
            (path,) = group
            across = [float(x) for x in re.findall(r"[ML] (\S+) ", path.get("d"))]
            assert name not in found
            found[name] = (min(across), max(across))
    return found


def texts_of(svg):
    return ["".join(text.itertext()) for text in ElementTree.fromstring(svg).iter() if text.text]


@pytest.mark.parametrize("name", sampled(list(CHUNKS), 2))
def test_every_action_has_its_box_to_scale(name, tmp_path):
    schedule = build(name, 4, 8, CHUNKS[name])
    ran = simulated(schedule, 0.25)
    draw(ran, schedule, tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    found = boxes_of(svg)
    expected = {
        f"rank{rank}-{kind}-chunk{chunk}-{i}": (begin, end)
        for rank, spans in enumerate(rows(ran.timeline, schedule))
        for (kind, chunk, i), begin, end in spans
    }
    assert found.keys() == expected.keys()
    assert len(found) == 4 * 8 * CHUNKS[name] * (3 if schedule.split else 2)
    left = found["rank0-F-chunk0-0"][0]
    scale = (found["rank0-F-chunk0-0"][1] - left) / 1.0
    for box, (begin, end) in expected.items():
        assert found[box] == pytest.approx((left + scale * begin, left + scale * end), abs=1e-3)
    numbers = [int(text) for text in texts_of(svg) if re.fullmatch(r"[0-7]", text)]
    assert len(numbers) >= len(found)  # each box has one; the time axis has some


def test_the_same_picture_is_the_same_file(tmp_path):
    schedule = build("zb-v", 2, 3, 2)
    for name in "ab":
        draw(simulated(schedule), schedule, tmp_path / f"{name}.svg")
        draw(simulated(schedule), schedule, tmp_path / f"{name}.png")
    for suffix in ("svg", "png"):
        first, second = (tmp_path / f"{name}.{suffix}" for name in "ab")
        assert first.read_bytes() == second.read_bytes()
    assert "<dc:date>" not in (tmp_path / "a.svg").read_text()


def test_a_png_is_as_wide_as_a_page(tmp_path):
    schedule = build("1f1b", 2, 3)
    draw(simulated(schedule), schedule, tmp_path / "deep" / "a.png")
    head = (tmp_path / "deep" / "a.png").read_bytes()[:24]
    width, height = struct.unpack(">II", head[16:])
    assert head[:8] == b"\x89PNG\r\n\x1a\n" and 1500 < width < 2000 and 400 < height < width


def test_the_picture_says_its_numbers(tmp_path):
    schedule = build("1f1b", 4, 8)
    draw(simulated(schedule), schedule, tmp_path / "a.svg", axis="ms")
    said = texts_of((tmp_path / "a.svg").read_text())
    assert "1F1B: 4 ranks, 8 micro-batches" in said
    assert "step 33, 9 of it bubble (27%); at most 4 activations on a rank" in said
    assert said.count("idle 27%") == 4 and "time (ms)" in said
    assert [text for text in said if text.startswith("peak")] == [f"peak {n}" for n in (4, 3, 2, 1)]
    assert "the most that 1F1B holds, 4" in said


def test_pictures_share_a_scale(tmp_path):
    schedule = build("1f1b", 2, 2)
    for name, until in (("a", 0.0), ("b", 18.0), ("c", 1.0)):
        draw(simulated(schedule), schedule, tmp_path / f"{name}.svg", until=until)
    a, b, c = (boxes_of((tmp_path / f"{name}.svg").read_text()) for name in "abc")
    width = {key: right - left for key, (left, right) in a.items()}
    assert a == c  # nothing is cut off
    for key, (left, right) in b.items():
        assert right - left == pytest.approx(width[key] / 2, abs=1e-3)


@pytest.mark.prove
def test_a_long_schedule_keeps_its_boxes_without_numbers(tmp_path):
    schedule = build("interleaved", 8, 16, 4)
    draw(simulated(schedule), schedule, tmp_path / "a.svg")
    svg = (tmp_path / "a.svg").read_text()
    assert len(boxes_of(svg)) == 8 * 16 * 4 * 2
    said = texts_of(svg)
    assert "stages 7, 15, 23, 31" in said
    assert not {"1", "7", "15"} & set(said)


def test_an_evaluation_has_no_strip(tmp_path):
    schedule = forward_only(build("1f1b", 2, 3))
    draw(simulated(schedule), schedule, tmp_path / "a.svg")
    said = " ".join(texts_of((tmp_path / "a.svg").read_text()))
    assert "F, forward" in said and "backward" not in said and "activations" not in said
    assert "peak" not in said


def test_one_of_a_thing_is_not_many():
    schedule = build("gpipe", 1, 1)
    assert heading(schedule) == "GPipe: 1 rank, 1 micro-batch"
    said = caption(simulated(schedule))
    assert said == "step 3, 0 of it bubble (0%); at most 1 activation on a rank"


def test_what_cannot_be_drawn_is_refused(tmp_path):
    schedule = build("1f1b", 2, 2)
    with pytest.raises(ValueError, match=r"a\.gif: a picture must be a \.png or \.svg file"):
        draw(simulated(schedule), schedule, tmp_path / "a.gif")
    assert not list(tmp_path.iterdir())


def test_the_library_comes_without_matplotlib():
    code = "import sys, tools.pictures.schedule; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# What a colour looks like to an eye without red, green or blue cones (Machado et al. 2009).
BLINDNESS = {
    "none": numpy.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
TO_XYZ = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]]  # D65 = 1


@pytest.mark.parametrize("blindness", BLINDNESS)
def test_kinds_and_chunks_are_told_apart_by_every_eye(blindness):
    """Any two shades differ by far more in CIELAB than the 2.3 that one can just notice."""

    def lab(colour):
        rgb = numpy.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        linear = numpy.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
        seen = numpy.clip(numpy.asarray(BLINDNESS[blindness]) @ linear, 0, 1)
        x, y, z = numpy.cbrt(numpy.asarray(TO_XYZ) @ seen)
        return numpy.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    shades = [lab(lighter(c, _shade(i, 2))) for c in KINDS.values() for i in range(2)]
    distances = [numpy.linalg.norm(a - b) for a, b in itertools.combinations(shades, 2)]
    assert min(distances) > 8
