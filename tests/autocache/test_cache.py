"""Levels: filled once, each computed from the one below, in its place; what has no room is computed when it is read."""

import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.caches import FEW, LENGTHS, WIDTH, make_cache, make_source
from torch import Tensor

from pipetransformer.autocache.cache import AutoCache, Filled, Opened
from pipetransformer.autocache.capacity import SHARD_SIZE
from pipetransformer.autocache.communicator import SingleProcess
from pipetransformer.autocache.reader import Request
from pipetransformer.autocache.source import SampleSource
from pipetransformer.autocache.store import FeatureStore
from pipetransformer.errors import StoreFailed
from pipetransformer.host_copies import Upload

ALL = np.arange(len(LENGTHS))


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[AutoCache]:
    made = make_cache(tmp_path, make_source([]))
    assert made.open() == Opened()
    yield made
    made.close()


def values(cache: AutoCache, source: SampleSource, ids: list[int]) -> list[float]:
    """The one number that all features of each sample are."""
    features = cache.reader.read(Request(source, np.array(ids), int(LENGTHS.max())))
    return [float(row[:length].unique().item()) for row, length in zip(features, LENGTHS[ids], strict=True)]


def test_a_level_is_computed_from_the_level_below_it(cache: AutoCache) -> None:
    source = make_source([])
    cache.advance(1, [(source, ALL)], lambda x, _: x + 10)
    cache.advance(3, [(source, ALL)], lambda x, _: x * 2)
    cache.start_reading(None)
    assert cache.level == 3
    assert values(cache, source, [4, 0]) == [(4 + 10) * 2, (0 + 10) * 2]


def test_samples_are_read_from_the_data_for_the_first_level_only(cache: AutoCache) -> None:
    reads: list[int] = []
    source = make_source(reads)
    cache.advance(1, [(source, ALL)], lambda x, _: x)
    assert sorted(reads) == ALL.tolist()
    cache.advance(2, [(source, ALL)], lambda x, _: x)
    assert len(reads) == len(ALL), "reading a picture may cost more than a block"


def test_short_samples_of_several_shards_are_computed_at_once(tmp_path: Path) -> None:
    source, sizes = make_source([], np.tile(LENGTHS, 40)), []
    cache = make_cache(tmp_path, source)
    assert cache.open() == Opened()

    def compute(x: Tensor, _: dict[str, Tensor]) -> Tensor:
        sizes.append(len(x))
        return x + 10

    cache.advance(1, [(source, np.arange(200))], compute)
    assert max(sizes) > SHARD_SIZE
    cache.start_reading(None)
    features = cache.reader.read(Request(source, np.arange(200), 5))[:, 0, 0]
    assert features.tolist() == (10 + np.arange(200)).tolist()
    cache.close()


def test_only_wanted_samples_are_computed(cache: AutoCache) -> None:
    reads: list[int] = []
    filled = cache.advance(2, [(make_source(reads), np.array([0, 3]))], lambda x, _: x)
    assert (filled.num_computed, filled.num_found) == (2, 0)
    assert sorted(reads) == [0, 3]


def test_the_workers_of_a_node_share_the_samples_and_see_what_the_others_stored(tmp_path: Path) -> None:
    reads: list[list[int]] = [[], []]
    lengths = np.tile(LENGTHS, 40)
    first = make_cache(tmp_path, make_source(reads[0], lengths), Worker(0, 2))
    second = make_cache(tmp_path, make_source(reads[1], lengths), Worker(1, 2))
    assert first.open() == Opened()
    assert second.open() == Opened()
    for cache, read in zip((first, second), reads, strict=True):
        cache.advance(1, [(make_source(read, lengths), np.arange(len(lengths)))], lambda x, _: x)
    assert sorted(reads[0] + reads[1]) == list(range(len(lengths)))
    shares = [lengths[read].sum() for read in reads]
    assert abs(shares[0] - shares[1]) <= SHARD_SIZE * LENGTHS.max(), "they compute about as many tokens"
    second.start_reading(None)
    assert second.reader.read(Request(make_source([], lengths), np.arange(len(lengths)), 5)).shape == (
        len(lengths),
        5,
        WIDTH,
    )
    second.close()
    first.close()


class Worker(SingleProcess):
    """One of several processes of a node, in one process; the first leaves what it gives to the others."""

    given: object = None

    def __init__(self, local_rank: int, local_world_size: int) -> None:
        self.local_rank, self.local_world_size = local_rank, local_world_size

    def broadcast_from_local_leader(self, value):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
        if self.local_rank == 0:
            Worker.given = value
        return Worker.given


class Counting(SingleProcess):
    """Counts collectives."""

    num_barriers = 0

    def all_reduce_sum(self, *numbers: int) -> tuple[int, ...]:
        self.num_barriers += 1
        return numbers


def test_nobody_writes_before_all_have_done_reading(tmp_path: Path) -> None:
    source, communicator, barriers = make_source([]), Counting(), []
    cache = make_cache(tmp_path, source, communicator)

    def compute(x: Tensor, _: dict[str, Tensor]) -> Tensor:
        barriers.append(communicator.num_barriers)
        return x

    assert cache.open() == Opened()
    for level in (1, 2):
        communicator.num_barriers = 0
        cache.advance(level, [(source, ALL)], compute)
        cache.start_reading(None)
    assert set(barriers) == {0, 1}, "nobody can have read anything before the first level"
    cache.clear()
    barriers.clear()
    communicator.num_barriers = 0
    cache.advance(1, [(source, ALL)], compute)
    assert set(barriers) == {1}, "what is cleared here may still be read there"
    cache.close()


def test_it_does_not_go_back(cache: AutoCache) -> None:
    cache.advance(2, [(make_source([]), ALL)], lambda x, _: x)
    with pytest.raises(AssertionError, match="cannot advance to 1"):
        cache.advance(1, [(make_source([]), ALL)], lambda x, _: x)


def test_after_unfreezing_nothing_old_is_read(cache: AutoCache) -> None:
    source = make_source([])
    cache.advance(2, [(source, ALL)], lambda x, _: x + 10)
    cache.clear()
    cache.advance(2, [(source, np.array([1]))], lambda x, _: x + 20)
    cache.start_reading(None)
    assert values(cache, source, [1]) == [21]
    with pytest.raises(RuntimeError, match=r"holds no features of 1 samples of the train split: \[3\]"):
        values(cache, source, [3])


def test_after_unfreezing_a_store_that_outlives_the_run_is_asked_by_the_weights_of_each_level(tmp_path: Path) -> None:
    """Two blocks are stored; the upper one trains again and freezes again, changed or as it was."""
    source, weights = make_source([]), {index: {"weight": torch.tensor([float(index)])} for index in range(3)}
    cache = make_cache(tmp_path, source, disk_bytes=1 << 20, persistent=True)

    def fill(level: int, changed: float = 0.0) -> Filled:
        cache.clear()
        layers = [weights[index] for index in range(level)] + [{"weight": weights[level]["weight"] + changed}]
        filled = cache.advance(level, [(source, ALL)], lambda x, _: x + 10 * level + changed, iter(layers))
        cache.start_reading(None)
        assert values(cache, source, [1]) == [1 + 10 * level + changed]
        return filled

    num = len(ALL)
    assert cache.open() == Opened()
    assert fill(2) == Filled(num, 0)
    assert fill(2) == Filled(0, num), "nothing has changed: the guard has taken back what it did"
    assert fill(1) == Filled(num, 0), "a store holds one level"
    assert fill(2, changed=3.0) == Filled(num, 0), "what is stored is of other weights"
    assert fill(2) == Filled(num, 0)
    cache.close()


def test_what_has_no_room_is_computed_when_it_is_read(tmp_path: Path) -> None:
    reads: list[int] = []
    source = make_source(reads)
    cache = make_cache(tmp_path, source, memory_bytes=FEW)
    missing = cache.capacity.miss_rate("train")
    assert 0 < missing < 1
    assert cache.open() == Opened()
    filled = cache.advance(1, [(source, ALL)], lambda x, _: x + 10)
    assert filled.num_computed == round((1 - missing) * len(ALL))
    reads.clear()
    cache.start_reading(lambda x, _: x + 10)
    assert values(cache, source, ALL.tolist()) == [sample + 10 for sample in ALL]
    assert len(reads) == round(missing * len(ALL)), "what is stored is not read from the source again"
    assert (cache.reader.stats.hits, cache.reader.stats.misses) == (filled.num_computed, len(reads))
    cache.close()


def test_what_is_announced_is_read_ahead_and_anything_else_still_right(cache: AutoCache) -> None:
    source = make_source([])
    cache.advance(1, [(source, ALL)], lambda x, _: x)
    cache.start_reading(None)
    requests = [Request(source, np.array(ids), 5) for ids in ([0, 1], [2, 3], [4, 0], [1, 2])]
    cache.reader.prefetch(iter(requests))
    read = [cache.reader.read(request)[:, 0, 0].tolist() for request in requests[:2]]
    other = cache.reader.read(Request(source, np.array([4]), 5))[:, 0, 0].tolist()
    assert (read, other) == ([[0, 1], [2, 3]], [4])
    assert cache.reader.read(requests[2])[:, 0, 0].tolist() == [4, 0]


def test_a_batch_stays_as_it_is_while_the_next_ones_are_read_ahead(cache: AutoCache) -> None:
    source = make_source([])
    cache.advance(1, [(source, ALL)], lambda x, _: x)
    cache.start_reading(None)
    requests = [Request(source, np.array([sample]), 5) for sample in ALL]
    cache.reader.prefetch(iter(requests))
    present = cache.reader.read(requests[0])
    kept = present.clone()
    cache.reader.read(requests[1])
    cache.reader.stop_prefetching()
    assert torch.equal(present, kept)


def test_a_device_has_the_batch_of_the_step_and_those_read_ahead_alone(
    cache: AutoCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy stands for the memory of a device, which the plan has room for."""
    copies: list[weakref.ref[Tensor]] = []

    class Copied(Upload):
        def __init__(self, tensor: Tensor, device: torch.device) -> None:
            copy = tensor.clone()
            copies.append(weakref.ref(copy))
            super().__init__(copy, device)

    monkeypatch.setattr("pipetransformer.autocache.reader.Upload", Copied)
    source = make_source([])
    cache.advance(1, [(source, ALL)], lambda x, _: x)
    cache.start_reading(None)
    requests = [Request(source, np.array([sample]), 5) for sample in ALL]
    cache.reader.prefetch(iter(requests))
    for request in requests[:2]:
        present = cache.reader.read(request)
    assert copies[0]() is None, "of the step before"
    cache.reader.stop_prefetching()
    (left,) = (copy for copy in copies if copy() is not None)
    assert left() is present, "nobody takes the others"


def test_time_spent_waiting_is_counted(cache: AutoCache, monkeypatch: pytest.MonkeyPatch) -> None:
    source, waits, read = make_source([]), threading.Event(), FeatureStore.read
    cache.advance(1, [(source, ALL)], lambda x, _: x)
    cache.start_reading(None)
    seconds, this_thread = [5.0], threading.get_ident()

    def late(*args: Any) -> tuple[Tensor, Tensor]:
        assert waits.wait(60)
        seconds.append(7.0)
        return read(*args)

    def clock() -> float:
        now = seconds[-1]
        if threading.get_ident() == this_thread:
            waits.set()
        return now

    monkeypatch.setattr(FeatureStore, "read", late)
    monkeypatch.setattr("pipetransformer.autocache.reader.time", SimpleNamespace(perf_counter=clock))
    request = Request(source, ALL, int(LENGTHS.max()))
    cache.reader.prefetch(iter([request]))
    cache.reader.read(request)
    assert cache.reader.stats.waited_s == 2.0


def test_no_room_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    cache = make_cache(tmp_path, make_source([]), memory_bytes=0, disk_bytes=1 << 20)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(StoreFailed, match="set disk_gib lower"):
        cache.open()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_after_the_end(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, make_source([]), memory_bytes=0, disk_bytes=1 << 20)
    assert cache.open() == Opened()
    cache.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lasting_store_is_found_by_the_next_run_with_the_same_weights(tmp_path: Path) -> None:
    weights = [{"weight": torch.ones(2)}]
    source = make_source([])
    for num_intact, filled in ((0, Filled(len(ALL), 0)), (len(ALL), Filled(0, len(ALL)))):
        cache = make_cache(tmp_path, source, disk_bytes=1 << 20, persistent=True)
        assert cache.open() == Opened(num_intact)
        assert cache.open() == Opened(), "they are told once"
        assert cache.advance(1, [(source, ALL)], lambda x, _: x + 10, iter(weights)) == filled
        cache.start_reading(None)
        assert values(cache, source, [2]) == [12]
        cache.close()


def test_a_lasting_store_of_other_weights_is_computed_again(tmp_path: Path) -> None:
    source = make_source([])
    for weight, num_intact in ((1.0, 0), (2.0, len(ALL))):
        cache = make_cache(tmp_path, source, disk_bytes=1 << 20, persistent=True)
        assert cache.open() == Opened(num_intact)
        layer = {"weight": torch.full((2,), weight)}
        filled = cache.advance(1, [(source, ALL)], lambda x, _, by=weight: x * by, iter([layer]))
        assert filled == Filled(len(ALL), num_found=0, num_replaced=num_intact)
        cache.start_reading(None)
        assert values(cache, source, [3]) == [3 * weight]
        cache.close()


def test_damaged_samples_of_a_lasting_store_are_counted_and_computed_again(tmp_path: Path) -> None:
    source, layer = make_source([]), {"weight": torch.ones(2)}
    first = make_cache(tmp_path, source, disk_bytes=1 << 20, persistent=True)
    assert first.open() == Opened()
    first.advance(1, [(source, ALL)], lambda x, _: x + 10, iter([layer]))
    first.close()
    path = tmp_path / "train.features"
    damaged = bytearray(path.read_bytes())
    damaged[5] ^= 1
    path.write_bytes(bytes(damaged))
    second = make_cache(tmp_path, source, disk_bytes=1 << 20, persistent=True)
    assert second.open() == Opened(num_damaged=len(ALL)), "the shard that the bit is in"
    assert second.advance(1, [(source, ALL)], lambda x, _: x + 10, iter([layer])).num_computed == len(ALL)
    second.start_reading(None)
    assert values(second, source, [0, 4]) == [10, 14]
    second.close()
