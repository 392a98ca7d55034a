"""A plugin: in every whole run the device's copies come late, as a GPU's do."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def copies_that_come_late(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.path.name != "test_device_runs.py":
        yield
        return
    import face  # the package makes the device before its first import of torch

    before = face.device.num_late()
    yield
    assert face.device.num_late() > before
