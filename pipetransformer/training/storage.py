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
from pipetransformer.autocache.cache import AutoCache, in_words
from pipetransformer.autocache.identity import Identity
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autocache.region import GIB
from pipetransformer.autocache.room import Kind, Room
from pipetransformer.autocache.shelf import InUse, StaleStore, open_place, others
from pipetransformer.autocache.source import Source
from pipetransformer.autocache.writable import Unwritable
from pipetransformer.autopipe.cost import Profile
from pipetransformer.config.options import Cache, Config
from pipetransformer.models.stack import LayerStack
from pipetransformer.training.feed import Feed
from pipetransformer.training.fingerprint import identity_of
from pipetransformer.training.node import Node
from pipetransformer.training.peers import WorldPeers


@dataclass
class Storage:
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
        num_bytes = {} if self.cache is None else self.cache.room.bytes_by_tier
        total = sum(self.read_s_per_byte[tier] * own for tier, own in num_bytes.items())
        return total / sum(num_bytes.values()) if total else 0.0

    def outlook(self, profile: Profile, train: Feed) -> dict[str, Any] | None:
        """What the cache holds and from which block on it pays, for the record."""
        if self.cache is None:
            return None
        level = break_even(profile)
        return {
            "bytes_by_tier": self.cache.room.bytes_by_tier,
            "read_seconds_per_byte": dict(self.read_s_per_byte),
            "missing": self.cache.room.missing(train.source.name),
            "break_even_level": level,
            "read_seconds": None if level is None else read_seconds(profile, level),
            "forward_seconds": None if level is None else forward_seconds(profile, level),
        }


def wants_cache(config: Config) -> bool:
    """Whether frozen features may be stored, as far as the options tell."""
    return config.cache.enabled and not config.freeze.never_freezes and config.parallel.autopipe


def open_storage(
    config: Config, stack: LayerStack, feeds: Sequence[Feed], device: torch.device, kind: Kind, run_dir: Path,
    closing: ExitStack,
) -> Storage:  # fmt: skip
    """Finds room for features of the feeds' samples and tells them; every rank calls it.

    Args:
        run_dir: On whose disk the files lie that go when the run ends.
        closing: Takes what has to be given back at the end.
    """
    storage, peers = Storage(), WorldPeers()
    folders: dict[str, Path] = {}
    if config.cache.path is not None:
        identities = (identity_of(config, stack, feed, device, kind) for feed in feeds)
        folders = _lasting(Path(config.cache.path), identities, run_dir, closing, storage.notes, peers)
    room = Room([feed.source for feed in feeds], kind, _budgets(config.cache), is_lasting=bool(folders))
    folders = folders or {feed.source.name: run_dir for feed in feeds}
    problem = _shortage(config, room)
    if problem is None:
        problem, storage.read_s_per_byte = _bandwidths(room, feeds[0].source, folders, peers)
    if problem is not None:
        storage.notes.append(f"the cache is off: {problem}")
        return storage
    storage.cache = AutoCache(room, folders, peers)
    closing.callback(storage.cache.close)
    for feed in feeds:
        feed.cache = storage.cache
    return storage


def _bandwidths(
    room: Room, source: Source, folders: Mapping[str, Path], peers: WorldPeers
) -> tuple[str | None, dict[str, float]]:
    """What stands against the cache, and the seconds per byte of each tier, on the slowest node."""
    problem, own = None, {}
    if peers.worker == 0:
        try:
            num_tokens = int(np.median(source.lengths))
            own = seconds_per_byte(room.kind, num_tokens, room.bytes_by_tier, folders[source.name])
        except OSError as error:
            problem = in_words(error)
    nodes = peers.gathered((problem, own))
    problem = next((each for each, _ in nodes if each is not None), None)
    return problem, {tier: max(each.get(tier, 0.0) for _, each in nodes) for tier in room.bytes_by_tier}


def _budgets(cache: Cache) -> Budgets:
    return Budgets(int(cache.memory_gib * GIB), int(cache.disk_gib * GIB))


def _shortage(config: Config, room: Room) -> str | None:
    """Why the room is too small to be of use, if it is."""
    given = f"cache.memory_gib={config.cache.memory_gib:g} and cache.disk_gib={config.cache.disk_gib:g}"
    whole = f"all features take {room.whole_bytes / GIB:.3g} GiB"
    if not room.bytes_by_tier:
        return f"{given} leave no room; {whole}"
    if room.is_short and config.parallel.arrangement == "sharded":
        return (
            f"{given} have no room for all features, and no device of parallel=sharded has the frozen layers whole to "
            f"compute the others; {whole}"
        )
    return None


def _lasting(
    root: Path, identities: Iterable[Identity], run_dir: Path, closing: ExitStack, notes: list[str],
    peers: WorldPeers,
) -> dict[str, Path]:  # fmt: skip
    """Folders of stores that outlive the run, by split; worker 0 of each node holds their locks.

    None, and a note, where one cannot be had.
    """
    folders: dict[str, Path] = {}
    problem, held, node = None, ExitStack(), Node.here().index
    if peers.worker == 0:
        try:
            for identity in identities:
                place = held.enter_context(open_place(root, identity, str(run_dir), node))
                folders[identity.split_name] = place.path
                if place.is_new:
                    notes += _not_used(root, others(root, identity, node))
        except (StaleStore, InUse, Unwritable) as error:
            problem = str(error)
    problem = peers.first_of(problem)
    if problem is not None:
        held.close()
        notes.append(f"the cache is kept for this run only: {problem}")
        return {}
    closing.enter_context(held)
    return peers.from_first(folders)


def _not_used(root: Path, found: Sequence[str]) -> list[str]:
    """Tells a user who expects to find features why there are none."""
    if not found:
        return []
    more = f", and {len(found) - 1} more" if len(found) > 1 else ""
    return [f"cache.path={root} has other features of the same samples, which are not used: {found[0]}{more}"]
