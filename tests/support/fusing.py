"""Trainings whose optimizer runs the fused kernels that torch has for the CPU, which stand for those of a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from pipetransformer.optim import fused
from support.cases import Case
from support.trainings import Plans, Trace, train_elastic


@contextmanager
def fused_kernels() -> Iterator[None]:
    with mock.patch.object(fused, "DEVICES", frozenset({"cpu"})):
        yield


def train_fused(case: Case, plans: Plans, folder: str) -> Trace:
    with fused_kernels():
        return train_elastic(case, plans, folder)
