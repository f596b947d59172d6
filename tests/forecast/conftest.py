# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of the forecast: a process that rehearses."""

from collections.abc import Iterator

import pytest

from tests.forecast.rehearsal.conftest import Process


@pytest.fixture(scope="session")
def rehearser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """The session's process that rehearses."""
    process = Process(tmp_path_factory.mktemp("rehearsal") / "report.json")
    yield process
    process.close()
