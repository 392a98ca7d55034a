"""A sample is right or it is not there, whatever happens to the process or to the bytes."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores import in_other_process, kill_inside_write, memory_growth

from pipetransformer.autocache.buffer import SharedBuffer
from pipetransformer.autocache.layout import Budgets, assign_tiers
from pipetransformer.autocache.tier import Tier

LENGTHS, ROW_BYTES = np.array([2, 3, 1, 4, 2]), 5
MIB = 2**20


def make_tier(stamp: int = 0, lengths: np.ndarray = LENGTHS, file: Path | None = None) -> Tier:
    layout = assign_tiers(lengths, ROW_BYTES, Budgets(10**4, 0), shard_size=3, seed=0, persistent=False).memory
    assert layout is not None
    buffer = SharedBuffer.file(file, layout.num_bytes) if file else SharedBuffer.memory(layout.num_bytes)
    return Tier(layout, buffer, stamp)


def rows_of(ids: np.ndarray, lengths: np.ndarray = LENGTHS) -> np.ndarray:
    """Rows (R, ROW_BYTES) that tell sample and token and are not zero."""
    return np.array([[10 * i + t + 1] * ROW_BYTES for i in ids for t in range(lengths[i])], dtype=np.uint8)


def ids_of(tier: Tier, shard: int) -> np.ndarray:
    return tier.layout.ids[tier.layout.slots_of(shard)]


def filled(stamp: int = 0, key: int = 1, lengths: np.ndarray = LENGTHS, file: Path | None = None) -> Tier:
    tier = make_tier(stamp, lengths, file)
    for shard in tier.layout.shards:
        tier.write(shard, ids_of(tier, shard), rows_of(ids_of(tier, shard), lengths), key)
    return tier


def read(tier: Tier, ids: np.ndarray, num_tokens: int) -> np.ndarray:
    out = np.full((len(ids), num_tokens, ROW_BYTES), 255, dtype=np.uint8)
    tier.gather(ids, num_tokens, np.ones(len(ids), dtype=bool), out)
    return out


@pytest.mark.parametrize("lengths", [LENGTHS, np.full(5, 3)], ids=["of all lengths", "of one length"])
@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
def test_samples_are_read_in_any_order_and_padded_with_zeros(
    lengths: np.ndarray, in_file: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tier = filled(lengths=lengths, file=tmp_path_factory.mktemp("tier") / "rows" if in_file else None)

    @given(ids=st.lists(st.integers(0, 4), min_size=1, max_size=8).map(np.array), num_tokens=st.integers(1, 6))
    def are_right(ids: np.ndarray, num_tokens: int) -> None:
        out = read(tier, ids, num_tokens)
        for row, sample in enumerate(ids):
            expected = rows_of(np.array([sample]), lengths)[:num_tokens]
            assert np.array_equal(out[row, : len(expected)], expected)
            assert not out[row, len(expected) :].any()

    are_right()


def test_what_lies_side_by_side_in_a_file_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier, sizes = filled(lengths=np.full(5, 3), file=tmp_path / "rows"), []
    read_region = SharedBuffer.read

    def counting(buffer: SharedBuffer, offset: int, out: np.ndarray) -> None:
        sizes.append(len(out) // 3)
        read_region(buffer, offset, out)

    monkeypatch.setattr(SharedBuffer, "read", counting)
    ids = tier.layout.ids
    read(tier, ids, 3)
    read(tier, ids[[0, 1, 3, 4, 2]], 3)
    read(tier, ids[:2], 2)
    assert sizes == [5, 2, 2, 1, 0, 0]


@pytest.mark.parametrize("in_file", [False, True], ids=["memory", "file"])
def test_only_what_is_present_is_read(in_file: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    lengths = np.full(5, 3)
    tier = filled(lengths=lengths, file=tmp_path_factory.mktemp("tier") / "rows" if in_file else None)

    @given(
        present=st.lists(st.booleans(), min_size=1, max_size=5).map(np.array),
        num_tokens=st.integers(1, 4),
        order=st.permutations(tier.layout.ids.tolist()).map(np.array),
    )
    def is_read(present: np.ndarray, num_tokens: int, order: np.ndarray) -> None:
        ids, out = order[: len(present)], np.full((len(present), num_tokens, ROW_BYTES), 255, dtype=np.uint8)
        assert tier.gather(ids, num_tokens, present, out) == min(num_tokens, 3) * present.sum()
        tokens = np.arange(num_tokens)
        expected = np.where(present[:, None], (10 * ids[:, None] + tokens + 1) * (tokens < 3), 255)
        assert np.array_equal(out, np.repeat(expected[:, :, None], ROW_BYTES, axis=2))

    is_read()


def test_what_is_not_present_is_left_alone_and_not_counted() -> None:
    out = np.full((2, 4, ROW_BYTES), 255, dtype=np.uint8)
    assert filled().gather(np.array([3, 1]), 4, np.array([False, True]), out) == LENGTHS[1]
    assert (out[0] == 255).all()
    assert out[1, 0, 0] == 11


def test_a_sample_counts_under_its_key_only() -> None:
    tier, everything = filled(key=2**64 - 1), np.arange(5)
    assert tier.valid(everything, 2**64 - 1).all()
    assert not tier.valid(everything, 2**64 - 2).any()
    assert not make_tier().valid(everything, 0).any(), "zero is a key like any other"


def test_a_part_of_a_shard_can_be_written_and_its_rest_is_invalid() -> None:
    tier = filled()
    ids = ids_of(tier, 0)
    tier.write(0, ids[[0, 2]], 100 + rows_of(ids[[0, 2]]), key=1)
    assert tier.valid(ids, 1).tolist() == [True, False, True]
    for sample in ids[[0, 2]]:
        assert np.array_equal(read(tier, np.array([sample]), LENGTHS[sample])[0], 100 + rows_of(np.array([sample])))
    assert tier.valid(ids_of(tier, 1), 1).all()
    assert tier.verify(tier.layout.shards) == 0


def test_shards_are_written_together_or_one_by_one() -> None:
    tier, single = make_tier(), filled(key=3)
    parts = [(shard, ids_of(tier, shard)) for shard in tier.layout.shards]
    tier.write_all(parts, rows_of(np.concatenate([ids for _, ids in parts])), key=3)
    assert np.array_equal(tier.buffer.bytes, single.buffer.bytes)


def test_parts_of_several_shards_can_be_written_and_their_rest_is_invalid() -> None:
    tier = filled()
    parts = [(0, ids_of(tier, 0)[[0, 2]]), (1, ids_of(tier, 1)[1:])]
    ids = np.concatenate([own for _, own in parts])
    tier.write_all(parts, 100 + rows_of(ids), key=2)
    assert np.array_equal(np.flatnonzero(tier.valid(np.arange(5), 2)), np.sort(ids))
    assert not tier.valid(np.arange(5), 1).any()
    for sample in ids:
        assert np.array_equal(read(tier, np.array([sample]), LENGTHS[sample])[0], 100 + rows_of(np.array([sample])))
    assert tier.verify(tier.layout.shards) == 0


def test_samples_of_another_shard_are_refused() -> None:
    tier = filled()
    with pytest.raises(AssertionError, match="not all samples are of shard 0"):
        tier.write(0, ids_of(tier, 1), 100 + rows_of(ids_of(tier, 1)), key=1)
    assert tier.valid(np.arange(5), 1).all()
    assert tier.verify(tier.layout.shards) == 0, "nothing was written"


def test_samples_in_another_order_are_refused() -> None:
    tier = make_tier()
    ids = ids_of(tier, 0)[::-1]
    with pytest.raises(AssertionError, match="in the order in which they lie"):
        tier.write(0, ids, rows_of(ids), key=1)


def test_samples_can_be_invalidated() -> None:
    tier = filled()
    tier.invalidate(np.array([4, 0]))
    assert tier.valid(np.arange(5), 1).tolist() == [False, True, True, True, False]
    tier.invalidate()
    assert not tier.valid(np.arange(5), 1).any()


@given(bit=st.integers(0, 10**9))
def test_any_flipped_bit_is_found(bit: int) -> None:
    """In rows, keys and checksums the shard goes, in a flag the sample, in the padding nothing; nothing is wrong."""
    tier = filled()
    bit %= 8 * tier.buffer.num_bytes
    tier.buffer.bytes[bit // 8] ^= 1 << bit % 8
    num_samples = int(tier.valid(np.arange(5), 1).sum())
    dropped, byte, layout = tier.verify(tier.layout.shards), bit // 8, tier.layout
    valid = np.flatnonzero(tier.valid(np.arange(5), 1))
    assert np.array_equal(read(tier, valid, 4)[:, 0, 0] if len(valid) else valid, 10 * valid + 1)
    if byte < layout.num_rows * ROW_BYTES:
        assert dropped == len(ids_of(tier, int(byte >= layout.row_bounds[1] * ROW_BYTES)))
    elif byte < layout.headers_offset:
        assert dropped == 0, "that is padding"
    elif byte < layout.num_bytes - len(layout.ids):
        assert dropped in (2, 3)
    else:
        assert (num_samples, dropped) == (4, 1)


@pytest.mark.parametrize("bit", range(8))
def test_no_flipped_bit_validates_a_sample_that_was_not_written(bit: int) -> None:
    tier = filled()
    tier.write(0, ids_of(tier, 0)[1:], rows_of(ids_of(tier, 0)[1:]), key=1)
    tier.buffer.bytes[tier.buffer.num_bytes - len(LENGTHS)] ^= 1 << bit
    assert not tier.valid(ids_of(tier, 0)[:1], 1).any()


def test_bytes_that_mean_something_else_are_dropped() -> None:
    tier = filled(stamp=1)
    assert Tier(tier.layout, tier.buffer, stamp=2).verify(tier.layout.shards) == 5


def test_verify_drops_what_is_of_another_key() -> None:
    tier = filled(key=1)
    tier.write(0, ids_of(tier, 0), rows_of(ids_of(tier, 0)), key=2)
    assert tier.verify(tier.layout.shards, key=2) == 2
    assert tier.valid(ids_of(tier, 0), 2).all()
    assert not tier.valid(ids_of(tier, 1), 1).any()


def test_a_region_of_another_size_is_refused() -> None:
    tier = make_tier()
    with pytest.raises(ValueError, match=rf"has 100 bytes and the store needs {tier.buffer.num_bytes}: .*path"):
        Tier(tier.layout, SharedBuffer.memory(100))


@pytest.mark.thinned("1-1")
@pytest.mark.parametrize(("some", "num_shards"), [(None, 1), (1, 1)])
def test_a_process_killed_anywhere_leaves_samples_right_or_missing(
    some: int | None, num_shards: int, tmp_path: Path
) -> None:
    states = in_other_process(kill_inside_write, tmp_path, some, num_shards)
    assert len(states) > 20, "one for each line of the way"
    assert not any("wrong" in state for state in states)
    assert any("missing" in state for state in states), "some died between the flags"
    for state in states:
        assert set(state) <= {"old", "new", "missing"}


def test_neither_writing_nor_reading_a_file_fills_the_memory(tmp_path: Path) -> None:
    assert in_other_process(memory_growth, tmp_path, 64, True) < 3 * MIB
    assert in_other_process(memory_growth, tmp_path, 64, False) > 60 * MIB, "it would, through the mapping"
