# SPDX-License-Identifier: Apache-2.0
"""Tests of a GPU are skipped where torch sees none. With `--on cpu` those that take the fixture
`device` run on a CPU, so that a mistake in a test is found before a GPU is there.
"""

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on", default="cuda", choices=("cuda", "cpu"), help="tests/gpu run here")


def chosen(config: pytest.Config) -> str:
    return config.getoption("--on", "cuda")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip before fixtures start processes."""
    if chosen(item.config) == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
    if chosen(item.config) == "cpu" and "device" not in getattr(item, "fixturenames", ()):
        pytest.skip("this test has no form for a CPU")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The kind of device that a test runs on: "cuda", or "cpu" with `--on cpu`."""
    return chosen(request.config)
