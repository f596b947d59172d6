# SPDX-License-Identifier: Apache-2.0
"""Worlds whose triton is the interpreter: it patches the language of a whole process."""

import numpy as np
import pytest

from mpu import native
from tests.conftest import World


@pytest.fixture(scope="package")
def interpreted():
    """interpreted(n) -> a world of n ranks whose triton is the interpreter."""
    if np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        why = "the interpreter of a triton before 3.7 fails on numpy 2.4"
        pytest.importorskip("triton", "3.7", reason=why)
    if native.load() is None:
        pytest.skip(native.reason())
    worlds = {}

    def get(size):
        if size not in worlds or worlds[size].broken:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TRITON_INTERPRET", "1")
                worlds[size] = World(size, "spawn")
        return worlds[size]

    yield get
    for world in worlds.values():
        world.close()
