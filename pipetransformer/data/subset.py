"""Fixed draws of samples: they do not depend on the run's seed, so runs with different seeds see the same data."""

from __future__ import annotations

import numpy as np

SPLIT_SEED = 0


def choose(num_samples: int, at_most: int | None) -> np.ndarray:
    """Ids of the samples in use, ascending, at most ``at_most``; a smaller draw lies within a larger one."""
    if at_most is None or at_most >= num_samples:
        return np.arange(num_samples)
    return np.sort(np.random.default_rng(SPLIT_SEED).permutation(num_samples)[:at_most])


def hold_out(labels: np.ndarray, fraction: float, option: str) -> tuple[np.ndarray, np.ndarray]:
    """Splits off a stratified share.

    Args:
        labels: Class of each sample, shape (N,).
        fraction: Share of the samples to hold out, between 0 and 1.
        option: What the user would change, for the message.

    Returns:
        Ids that stay and ids held out, each ascending.

    Raises:
        ValueError: The share leaves some class without a sample on either side.
    """
    from sklearn.model_selection import train_test_split

    try:
        kept, held_out = train_test_split(
            np.arange(len(labels)), test_size=fraction, stratify=labels, random_state=SPLIT_SEED
        )
    except ValueError as error:
        raise ValueError(f"{option}={fraction} cannot be split off {len(labels)} samples by class: {error}") from error
    return np.sort(kept), np.sort(held_out)
