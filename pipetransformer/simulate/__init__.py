"""Simulation of a run: the deciding rooms without devices."""

import sys
from types import ModuleType
from typing import Any


class _Simulate(ModuleType):
    """Makes ``pt.simulate`` callable: the package attribute is this module once anything has imported it."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from pipetransformer.simulate.run import simulate

        return simulate(*args, **options)


sys.modules[__name__].__class__ = _Simulate
