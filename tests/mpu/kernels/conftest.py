# SPDX-License-Identifier: Apache-2.0
"""Worlds whose triton is the interpreter: it patches the language of a whole process."""

import pytest

from mpu import native
from tests.conftest import World


@pytest.fixture(scope="package")
def interpreted():
    """interpreted(n) -> a world of n ranks whose triton is the interpreter."""
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
