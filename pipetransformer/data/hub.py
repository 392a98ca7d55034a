"""Datasets of the hub through the ``datasets`` library, which caches them and respects ``HF_HUB_OFFLINE``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset


def load_hub(name: str, split: str, local_format: str, config: str | None = None) -> Dataset:
    """Loads one split.

    Args:
        name: Hub name, ``owner/dataset``.
        split: Name of the split on the hub.
        local_format: What ``dataset.path`` takes instead, for the message.
        config: The dataset's configuration on the hub.

    Raises:
        ValueError: The hub or the split cannot be reached.
    """
    from datasets import Dataset, load_dataset

    try:
        rows = load_dataset(name, config, split=split)
    except Exception as error:  # network, cache, access rights, unknown split: the remedy is the same for all
        raise ValueError(
            f"split {split!r} of {name} cannot be loaded from the hub ({error}); "
            f"connect to it once, or give local data with dataset.path=: {local_format}"
        ) from error
    assert isinstance(rows, Dataset)
    return rows


def fingerprint(rows: Dataset) -> str:
    """What the library names a dataset by: the revision on the hub, or the content of local data, and all changes."""
    return rows._fingerprint
