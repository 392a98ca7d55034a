"""Datasets of the hub through the ``datasets`` library, which caches them and respects ``HF_HUB_OFFLINE``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from pipetransformer import hub
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from datasets import Dataset


def find_on_hub(name: str, local_format: str, config: str | None = None, revision: str | None = None) -> None:
    """Asks the hub once whether it has a dataset, unless it lies in a folder or in the cache of ``datasets``.

    Args:
        name: Hub name, ``owner/dataset``.
        local_format: What ``dataset.path`` takes instead, for the message.
        config: The dataset's configuration on the hub; ``None``: any that lies in the cache will do.
        revision: Branch, tag or commit.

    Raises:
        UserError: The hub does not have it, or does not answer in time.
    """
    if Path(name).exists() or any(cache_folder().glob(f"{name.replace('/', '___')}/{config or '*'}")):
        return
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"{name} was not loaded before, and HF_HUB_OFFLINE=1 keeps from asking the hub; unset it, or give local "
            f"data with dataset.path=: {local_format}"
        )
    try:
        hub.ask(lambda: HfApi().dataset_info(name, revision=revision))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise UserError(
            f"neither disk nor hub has the data {name}; log in with 'hf auth login' where they are private, or give "
            f"local data with dataset.path=: {local_format}"
        ) from error
    except Exception as error:  # network, access rights: the remedy is the same for all
        raise UserError(unreachable(name, error, local_format)) from error


def load_hub(name: str, split: str, local_format: str, config: str | None = None) -> Dataset:
    """Loads one split.

    Args:
        name: Hub name, ``owner/dataset``.
        split: Name of the split on the hub.
        local_format: What ``dataset.path`` takes instead, for the message.
        config: The dataset's configuration on the hub.

    Raises:
        UserError: The hub or the split cannot be reached.
    """
    from datasets import Dataset, load_dataset

    try:
        rows = load_dataset(name, config, split=split)
    except Exception as error:  # network, cache, access rights, unknown split: the remedy is the same for all
        raise UserError(unreachable(f"split {split!r} of {name}", error, local_format)) from error
    assert isinstance(rows, Dataset)
    return rows


def download_folders(name: str) -> list[Path]:
    """Returns the folders in which files of a dataset lie: the caches of the hub's libraries, and a local one."""
    from datasets import config
    from huggingface_hub import constants

    caches = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, constants.HF_HUB_CACHE)
    return [*map(Path, map(str, caches)), *([Path(name)] if Path(name).is_dir() else [])]


def fingerprint(rows: Dataset) -> str:
    """Returns the library's name for the content: the revision on the hub, or local data, and all changes."""
    return rows._fingerprint


def unreachable(what: str, error: Exception, local_format: str) -> str:
    """Returns one line about what cannot be loaded from the hub, and about the local way."""
    return (
        f"{what} cannot be loaded from the hub ({hub.reason(error)}); connect to it once and set HF_HUB_OFFLINE=1 from "
        f"then on, or give local data with dataset.path=: {local_format}"
    )


def cache_folder() -> Path:
    """Returns where ``datasets`` keeps what it has loaded, without the second that importing it takes."""
    home = Path(os.environ.get("HF_HOME", Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface"))
    return Path(os.environ.get("HF_DATASETS_CACHE", home / "datasets")).expanduser()
