# SPDX-License-Identifier: Apache-2.0
"""Worlds whose triton is the interpreter: it patches the language of a whole process."""

from multiprocessing import forkserver

import pytest

from mpu import native
from tests.conftest import World


@pytest.fixture(scope="package")
def interpreted():
    """interpreted(n) -> a world of n ranks whose triton is the interpreter.

    Their ranks are forked from a process of their own, which has begun with TRITON_INTERPRET.
    """
    if native.load() is None:
        pytest.skip(native.reason())
    worlds, server = {}, forkserver.ForkServer()
    server.set_forkserver_preload(["pretrain_llama", "tests.conftest"])

    def get(size):
        if size not in worlds or worlds[size].broken:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TRITON_INTERPRET", "1")
                patch.setattr(forkserver, "connect_to_new_process", server.connect_to_new_process)
                worlds[size] = World(size)
        return worlds[size]

    yield get
    for world in worlds.values():
        world.close()
