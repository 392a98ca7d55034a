"""Sets up the cache of a run: whether there is one, how large, in which folders, and how fast it reads."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipetransformer.autocache.bandwidth import break_even_level, forward_seconds, read_seconds, read_times
from pipetransformer.autocache.buffer import GIB
from pipetransformer.autocache.cache import AutoCache, describe_os_error
from pipetransformer.autocache.capacity import CacheCapacity, FeatureFormat
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autocache.reader import FeatureReader
from pipetransformer.autocache.source import SampleSource
from pipetransformer.autopipe.profile import AffineTime, Profile
from pipetransformer.config.names import in_options
from pipetransformer.config.schema import Config
from pipetransformer.config.sections import Cache
from pipetransformer.data.base import Data
from pipetransformer.models.stack import LayerStack
from pipetransformer.planning.cache_rule import obstacle, refused
from pipetransformer.report.reporter import Reporter
from pipetransformer.training.cache_fingerprint import fingerprint
from pipetransformer.training.cache_world import WorldCommunicator
from pipetransformer.training.kept_stores import KeptStores, lock_stores


@dataclass
class CacheSetup:
    """The cache of a run.

    Attributes:
        cache: ``None`` where frozen layers' output is not stored.
        notes: Messages for the user.
        read: Seconds of reading a batch as a line in its bytes, measured by tier.
    """

    cache: AutoCache | None = None
    notes: list[str] = field(default_factory=list)
    read: Mapping[str, AffineTime] = field(default_factory=dict)

    @property
    def reader(self) -> FeatureReader | None:
        """Reads the cache, for the loaders."""
        return None if self.cache is None else self.cache.reader

    @property
    def is_partial(self) -> bool:
        """True where a node stores only a part of the features."""
        return self.cache is not None and self.cache.capacity.is_partial

    @property
    def mean_read(self) -> AffineTime:
        """Mean of :attr:`read` over everything that is stored."""
        num_bytes = {} if self.cache is None else self.cache.capacity.bytes_by_tier
        total = sum(num_bytes.values())
        parts = [(own / total, self.read[tier]) for tier, own in num_bytes.items()]
        fixed_s = sum(part * read.fixed_s for part, read in parts)
        return AffineTime(fixed_s, sum(part * read.per_sample_s for part, read in parts))

    def outlook(self, profile: Profile, train: SampleSource) -> dict[str, Any] | None:
        """Describes the cache's size, and the block from which on it pays, for the run's record."""
        if self.cache is None:
            return None
        level = break_even_level(profile)
        return {
            "bytes_by_tier": self.cache.capacity.bytes_by_tier,
            "read_seconds_per_byte": {tier: read.per_sample_s for tier, read in self.read.items()},
            "missing": self.cache.capacity.miss_rate(train.name),
            "break_even_level": level,
            "read_seconds": None if level is None else read_seconds(profile, level),
            "forward_seconds": None if level is None else forward_seconds(profile, level),
        }


def set_up_cache(
    config: Config, stack: LayerStack, data: Data, sources: Sequence[SampleSource], feature_format: FeatureFormat,
    device: torch.device, run_dir: Path, closing: ExitStack, report: Reporter | None = None, tokenizer: Any = None,
) -> CacheSetup:  # fmt: skip
    """Decides whether the run has a cache, and divides its budgets among the splits. Collective.

    Args:
        config: Of the run.
        stack: The model, whose layers below the head decide what a persistent store holds.
        data: The dataset.
        sources: Its splits as the cache sees them, training first.
        feature_format: Of the features.
        device: Device that computes them.
        run_dir: Folder on the disk of files that end with the run.
        closing: Receives what has to be closed when the run ends.
        report: Is told where the run waits for another one.
        tokenizer: Of the model, to name it where another one makes a store stale.

    Raises:
        UserError: ``cache.require`` asks for a cache of all samples, in the folder that is named, and there is none.
    """
    setup = _set_up(config, stack, data, sources, feature_format, device, run_dir, closing, report, tokenizer)
    if config.cache.require:
        if config.cache.path is not None and setup.cache is not None and not setup.cache.capacity.persistent:
            raise refused(setup.notes[-1])
        if setup.cache is None:
            raise refused(setup.notes[-1])
        if setup.is_partial:
            raise refused(_too_small(config, setup.cache.capacity))
    return setup


def _set_up(
    config: Config, stack: LayerStack, data: Data, sources: Sequence[SampleSource], feature_format: FeatureFormat,
    device: torch.device, run_dir: Path, closing: ExitStack, report: Reporter | None, tokenizer: Any,
) -> CacheSetup:  # fmt: skip
    if not (config.cache.enabled and config.parallel.autopipe) or config.freeze.never_freezes:
        return CacheSetup()
    has_pair = data.train.flip_pair is not None
    if note := obstacle(config.cache, data.random_transform, has_pair, data.train.mixing is not None):
        return CacheSetup(notes=[note])
    setup, communicator = CacheSetup(), WorldCommunicator()
    if config.cache.augmentation == "flip_pair" and not data.random_transform:
        setup.notes.append("cache.augmentation=flip_pair has no effect: no transform of the dataset is random")
    kept, persistent = KeptStores(), config.cache.path is not None
    capacity = CacheCapacity(sources, feature_format, _budgets(config.cache), persistent)
    if persistent:
        fingerprints = (
            fingerprint(config, stack, split, source, feature_format, capacity.budgets[source.name], device)
            for split, source in zip((data.train, *data.evaluation), sources, strict=True)
        )
        kept = lock_stores(config, fingerprints, run_dir, closing, communicator, report, tokenizer)
        setup.notes += kept.notes
        if not kept.folders:
            capacity = capacity.for_this_run()
    folders = kept.folders or {source.name: run_dir for source in sources}
    problem = _shortage(config, capacity)
    if problem is None:
        share = max(1, config.batch_size // dist.get_world_size())
        problem, setup.read = _measure_reads(capacity, sources[0], folders, communicator, share)
    if problem is not None:
        setup.notes.append(f"the cache is off: {problem}")
        return setup
    setup.cache = AutoCache(capacity, folders, communicator, kept.locks)
    closing.callback(setup.cache.close)
    return setup


def _measure_reads(
    capacity: CacheCapacity, source: SampleSource, folders: Mapping[str, Path], communicator: WorldCommunicator,
    share: int,
) -> tuple[str | None, dict[str, AffineTime]]:  # fmt: skip
    """Measures reading from each tier, on the slowest node; or returns why that failed."""
    problem, own = None, {}
    if communicator.local_rank == 0:
        try:
            num_tokens = int(np.median(source.lengths))
            about = capacity.feature_format, num_tokens, capacity.bytes_by_tier
            own = read_times(*about, folders[source.name], share)
        except OSError as error:
            problem = in_options(describe_os_error(error))
    ranks = communicator.all_gather((problem, own))
    problem = next((each for each, _ in ranks if each is not None), None)
    measured = {tier: [each[tier] for _, each in ranks if tier in each] for tier in capacity.bytes_by_tier}
    return problem, {
        tier: AffineTime(max(read.fixed_s for read in nodes), max(read.per_sample_s for read in nodes))
        for tier, nodes in measured.items()
        if nodes
    }


def _budgets(cache: Cache) -> Budgets:
    return Budgets(int(cache.memory_gib * GIB), int(cache.disk_gib * GIB))


def _too_small(config: Config, capacity: CacheCapacity) -> str:
    given = f"cache.memory_gib={config.cache.memory_gib:g} and cache.disk_gib={config.cache.disk_gib:g}"
    return f"{given} do not fit all features, which take {capacity.whole_bytes / GIB:.3g} GiB: raise one of them"


def _shortage(config: Config, capacity: CacheCapacity) -> str | None:
    """Returns why the capacity is too small to be of use, or ``None``."""
    given = f"cache.memory_gib={config.cache.memory_gib:g} and cache.disk_gib={config.cache.disk_gib:g}"
    whole = f"all features take {capacity.whole_bytes / GIB:.3g} GiB"
    if not capacity.bytes_by_tier:
        return f"{given} fit no sample; {whole}: raise one of them"
    if capacity.is_partial and config.parallel.arrangement == "sharded":
        return (
            f"{given} do not fit all features, and with parallel=sharded no device holds whole frozen layers to "
            f"recompute the others; {whole}: raise one of them"
        )
    return None
