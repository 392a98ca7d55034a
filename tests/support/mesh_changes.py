"""Runs whose planner is told on which mesh to run each frozen prefix, and chooses the rest by itself."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.plan import Plan
from pipetransformer.mesh import StageMesh
from pipetransformer.planning.planner import Planner
from pipetransformer.training import build
from support.faults import Fault
from support.jobs import play

Changes = Mapping[int, StageMesh]
"""The mesh of plans with so many frozen blocks."""


@contextmanager
def changing_meshes(changes: Changes) -> Iterator[None]:
    """While it lasts, plans are on the meshes that are wanted; all of them are measured."""
    original, meshes = Planner._best, tuple(dict.fromkeys(changes.values()))

    def best(self: Planner, constraints: PlanConstraints, num_frozen: int = 0, cache_level: int = 0) -> Plan:
        return original(self, replace(constraints, meshes=(changes[num_frozen],)), num_frozen, cache_level)

    def choose(*_: Any) -> tuple[tuple[StageMesh, ...], list[str]]:
        return meshes, []

    with mock.patch.object(Planner, "_best", best), mock.patch.object(build, "choose_meshes", choose):
        yield


def play_with_meshes(changes: Changes, overrides: tuple[str, ...], folder: Path, fault: Fault | None = None) -> str:
    """One rank of a run, in a world that is open, to which a fault may happen; gives what the user can mend."""
    with changing_meshes(changes), fault.injected() if fault else nullcontext():
        return play(overrides, folder, made_up_times=True)
