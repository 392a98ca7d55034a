"""Gives a run its cache: whether there is one, how large, where, and how fast it reads."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipetransformer.autocache.bandwidth import seconds_per_byte
from pipetransformer.autocache.break_even import break_even, forward_seconds, read_seconds
from pipetransformer.autocache.buffer import GIB
from pipetransformer.autocache.cache import AutoCache, describe_os_error
from pipetransformer.autocache.capacity import CacheCapacity, FeatureFormat
from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autocache.persistent import lock_store_dir, others
from pipetransformer.autocache.source import SampleSource
from pipetransformer.autopipe.profile import Profile
from pipetransformer.config.names import in_options
from pipetransformer.config.options import Cache, Config
from pipetransformer.errors import StaleStore, StoreInUse, Unwritable
from pipetransformer.models.stack import LayerStack
from pipetransformer.training.cache_fingerprint import identity_of
from pipetransformer.training.communicator import WorldCommunicator
from pipetransformer.training.loader import BatchLoader
from pipetransformer.training.node import LocalRank


@dataclass
class CacheSetup:
    """Attributes:
    cache: ``None`` where frozen features are not stored.
    notes: What the user should know about it.
    read_s_per_byte: Measured, by tier.
    """

    cache: AutoCache | None = None
    notes: list[str] = field(default_factory=list)
    read_s_per_byte: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean_read_s_per_byte(self) -> float:
        """Over all that finds room."""
        num_bytes = {} if self.cache is None else self.cache.capacity.bytes_by_tier
        total = sum(self.read_s_per_byte[tier] * own for tier, own in num_bytes.items())
        return total / sum(num_bytes.values()) if total else 0.0

    def outlook(self, profile: Profile, train: BatchLoader) -> dict[str, Any] | None:
        """What the cache holds and from which block on it pays, for the record."""
        if self.cache is None:
            return None
        level = break_even(profile)
        return {
            "bytes_by_tier": self.cache.capacity.bytes_by_tier,
            "read_seconds_per_byte": dict(self.read_s_per_byte),
            "missing": self.cache.capacity.missing(train.source.name),
            "break_even_level": level,
            "read_seconds": None if level is None else read_seconds(profile, level),
            "forward_seconds": None if level is None else forward_seconds(profile, level),
        }


def wants_cache(config: Config) -> bool:
    """Whether frozen features may be stored, as far as the options tell."""
    return config.cache.enabled and not config.freeze.never_freezes and config.parallel.autopipe


def open_storage(
    config: Config, stack: LayerStack, loaders: Sequence[BatchLoader], device: torch.device, kind: FeatureFormat,
    run_dir: Path,
    closing: ExitStack,
) -> CacheSetup:  # fmt: skip
    """Finds room for features of the feeds' samples and tells them; every rank calls it.

    Args:
        run_dir: On whose disk the files lie that go when the run ends.
        closing: Takes what has to be given back at the end.
    """
    storage, communicator = CacheSetup(), WorldCommunicator()
    folders: dict[str, Path] = {}
    if config.cache.path is not None:
        identities = (identity_of(config, stack, loader, device, kind) for loader in loaders)
        folders = _lasting(Path(config.cache.path), identities, run_dir, closing, storage.notes, communicator)
    capacity = CacheCapacity(
        [loader.source for loader in loaders], kind, _budgets(config.cache), persistent=bool(folders)
    )
    folders = folders or {loader.source.name: run_dir for loader in loaders}
    problem = _shortage(config, capacity)
    if problem is None:
        problem, storage.read_s_per_byte = _bandwidths(capacity, loaders[0].source, folders, communicator)
    if problem is not None:
        storage.notes.append(f"the cache is off: {problem}")
        return storage
    storage.cache = AutoCache(capacity, folders, communicator)
    closing.callback(storage.cache.close)
    for loader in loaders:
        loader.cache = storage.cache
    return storage


def _bandwidths(
    capacity: CacheCapacity, source: SampleSource, folders: Mapping[str, Path], communicator: WorldCommunicator
) -> tuple[str | None, dict[str, float]]:
    """What stands against the cache, and the seconds per byte of each tier, on the slowest node."""
    problem, own = None, {}
    if communicator.local_rank == 0:
        try:
            num_tokens = int(np.median(source.lengths))
            own = seconds_per_byte(capacity.kind, num_tokens, capacity.bytes_by_tier, folders[source.name])
        except OSError as error:
            problem = in_options(describe_os_error(error))
    nodes = communicator.gathered((problem, own))
    problem = next((each for each, _ in nodes if each is not None), None)
    return problem, {tier: max(each.get(tier, 0.0) for _, each in nodes) for tier in capacity.bytes_by_tier}


def _budgets(cache: Cache) -> Budgets:
    return Budgets(int(cache.memory_gib * GIB), int(cache.disk_gib * GIB))


def _shortage(config: Config, capacity: CacheCapacity) -> str | None:
    """Why the room is too small to be of use, if it is."""
    given = f"cache.memory_gib={config.cache.memory_gib:g} and cache.disk_gib={config.cache.disk_gib:g}"
    whole = f"all features take {capacity.whole_bytes / GIB:.3g} GiB"
    if not capacity.bytes_by_tier:
        return f"{given} leave no room; {whole}"
    if capacity.is_partial and config.parallel.arrangement == "sharded":
        return (
            f"{given} have no room for all features, and no device of parallel=sharded has the frozen layers whole to "
            f"compute the others; {whole}"
        )
    return None


def _lasting(
    root: Path, identities: Iterable[StoreFingerprint], run_dir: Path, closing: ExitStack, notes: list[str],
    communicator: WorldCommunicator,
) -> dict[str, Path]:  # fmt: skip
    """Folders of stores that outlive the run, by split; worker 0 of each node holds their locks.

    None, and a note, where one cannot be had.
    """
    folders: dict[str, Path] = {}
    problem, held, node = None, ExitStack(), LocalRank.here().index
    if communicator.local_rank == 0:
        try:
            for identity in identities:
                place = held.enter_context(lock_store_dir(root, identity, str(run_dir), node))
                folders[identity.split_name] = place.path
                if place.is_new:
                    notes += _not_used(root, others(root, identity, node))
        except (StaleStore, StoreInUse, Unwritable) as error:
            problem = in_options(error)
    problem = communicator.first_not_none(problem)
    if problem is not None:
        held.close()
        notes.append(f"the cache is kept for this run only: {problem}")
        return {}
    closing.enter_context(held)
    return communicator.broadcast_from_local_leader(folders)


def _not_used(root: Path, found: Sequence[str]) -> list[str]:
    """Tells a user who expects to find features why there are none."""
    if not found:
        return []
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return [f"cache.path={root} has other features of the same samples, which are not used: {found[0]}{more}"]
