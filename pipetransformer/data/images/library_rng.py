"""Draws of libraries that know no generator but the global ones of Python, NumPy and torch.

Around such a call the three are seeded by what the draw belongs to, and have their state back afterwards: so that the
draw is the same on every rank and after a restart, and nobody else's draws change.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restores the state of the global generators on the CPU; inside, :func:`seed_generators` may set it.

    A transform of a picture runs on the CPU, so that those of other devices have no part in it.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - what libraries draw from
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def seed_generators(*key: int) -> None:
    """Seeds the global generators on the CPU by numbers of 0 or more; other numbers give unrelated draws."""
    words = np.random.SeedSequence(key).generate_state(6)  # (6,), uint32
    np.random.seed(words[:4])  # noqa: NPY002
    own = int.from_bytes(words[4:].tobytes(), "little") >> 1  # torch takes 63 bits
    random.seed(own)
    torch.default_generator.manual_seed(own)  # torch.manual_seed would seed the GPUs as well
