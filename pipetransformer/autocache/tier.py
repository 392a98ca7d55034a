"""Rows of samples in one region, each with a mark that says that it is there."""

import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pipetransformer.autocache.buffer import SharedBuffer
from pipetransformer.autocache.layout import TierLayout
from pipetransformer.errors import UserError

MARK = 0xA5  # no single flipped bit makes one
CHUNK_BYTES = 2**18  # that are checked or copied at once


class Tier:
    """A sample counts only with its mark and under the key of its shard.

    A shard is rewritten in this order::

        marks off  ->  rows  ->  key, checksum  ->  marks on

    so that a process that is killed anywhere leaves samples that are right or absent. A computer that fails writes
    pages in any order: after that, and for a file of an earlier run, :meth:`verify` before reading.

    One process writes a shard at a time, and nobody reads it meanwhile; others may read and write other shards.

    Args:
        layout: Where the samples lie.
        region: The bytes, ``layout.num_bytes`` of them.
        stamp: What the rows are, as a number; part of the checksums.

    Raises:
        UserError: The region has another size.
    """

    def __init__(self, layout: TierLayout, region: SharedBuffer, stamp: int = 0) -> None:
        if region.num_bytes != layout.num_bytes:
            raise UserError(
                f"{region.address} has {region.num_bytes} bytes and the store needs {layout.num_bytes}: it was made "
                "for other samples or budgets; remove it or set `path` to another folder"
            )
        self.layout, self.region, self._stamp = layout, region, stamp
        num_shards, buffer = len(layout.shards), region.bytes.numpy()
        keys, checksums = (layout.records_offset + size * num_shards for size in (8, 12))
        self._keys = buffer[layout.records_offset : keys].view(np.uint64)
        self._checksums = buffer[keys:checksums].view(np.uint32)
        self._marks = buffer[checksums:]
        self._rows = buffer[: layout.num_rows * layout.row_bytes].reshape(-1, layout.row_bytes)
        self._common_length = int(layout.lengths[0]) if np.ptp(layout.lengths) == 0 else None
        self._shard_of = np.repeat(np.arange(num_shards), np.diff(layout.bounds))

    def write(self, shard: int, ids: np.ndarray, rows: np.ndarray, key: int) -> None:
        """Stores samples of one shard; see :meth:`write_all`."""
        self.write_all([(shard, ids)], rows, key)

    def write_all(self, parts: Sequence[tuple[int, np.ndarray]], rows: np.ndarray, key: int) -> None:
        """Stores samples of shards and forgets the shards' others. What lies side by side is written at once.

        Args:
            parts: Numbers of shards, rising, of ``layout.shards``, and of each some or all of its samples in their
                order there, (B,).
            rows: The rows of all of them in this order, sample after sample without padding, uint8 (R, row_bytes).
            key: What the rows were computed with, below 2 ** 64.
        """
        slots = self.layout.slots[np.concatenate([ids for _, ids in parts])]
        row_ends = np.cumsum(self.layout.lengths[slots])
        assert np.all(slots[1:] > slots[:-1]), "samples are written in the order in which they lie"
        assert len(rows) == row_ends[-1], f"{len(rows)} rows for samples of {row_ends[-1]}"
        places = [self.layout.slots_of(shard) for shard, _ in parts]
        bounds = np.cumsum([0, *(len(ids) for _, ids in parts)])
        for (shard, _), place, first, end in zip(parts, places, bounds, bounds[1:], strict=False):
            assert place.start <= slots[first] <= slots[end - 1] < place.stop, f"not all samples are of shard {shard}"
        for place in places:
            self._marks[place] = 0
        self._write_rows(slots, rows, row_ends)
        row_bounds = np.concatenate([[0], row_ends])[bounds]
        for (shard, ids), place, first, end in zip(parts, places, row_bounds, row_bounds[1:], strict=False):
            is_whole = len(ids) == place.stop - place.start
            self._write_record(shard, key, [rows[first:end].reshape(-1)] if is_whole else self._chunks(shard))
        self._marks[slots] = MARK

    def stored(self, ids: np.ndarray) -> np.ndarray:
        """Which of the samples are there under any key, bool (B,)."""
        return self._is_marked(self.layout.slots[ids])

    def valid(self, ids: np.ndarray, key: int) -> np.ndarray:
        """Which of the samples can be read under the key, bool (B,)."""
        slots = self.layout.slots[ids]
        return self._is_marked(slots) & (self._keys[self._shard_of[slots]] == np.uint64(key))

    def _is_marked(self, slots: np.ndarray) -> np.ndarray:
        return (slots >= 0) & (self._marks[slots] == MARK)

    def gather(self, ids: np.ndarray, num_tokens: int, present: np.ndarray, out: np.ndarray) -> int:
        """Copies the first ``num_tokens`` rows of samples, with zeros past a sample's end.

        Args:
            ids: (B,).
            present: Which of them are read, bool (B,); what is not is left as it is.
            out: uint8 (B, num_tokens, row_bytes), contiguous.

        Returns:
            The number of rows that were read.
        """
        assert out.flags.c_contiguous
        read = np.flatnonzero(present)
        if len(read) == 0:
            return 0
        counts = np.minimum(self.layout.lengths[self.layout.slots[ids[read]]], num_tokens)
        if self.region.is_file:
            self._read_runs(ids[read], counts, read, out)
        elif len(read) == len(ids):
            self._take(ids, counts, out)
        else:
            part = np.empty((len(read), *out.shape[1:]), dtype=np.uint8)
            self._take(ids[read], counts, part)
            out[read] = part
        return int(counts.sum())

    def _take(self, ids: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
        """From memory all samples at once."""
        num_tokens = out.shape[1]
        if num_tokens == self._common_length:  # whole samples are faster to copy than their rows
            rows, index = self._rows.reshape(len(self.layout.ids), -1), self.layout.slots[ids]
        else:
            rows, index = self._rows, (self.layout.start[ids, None] + np.arange(num_tokens)).reshape(-1)
        # the default mode would copy twice; rows past a sample's end are another's, or past the end the last one's
        np.take(rows, index, axis=0, out=out.reshape(-1, rows.shape[1]), mode="clip")
        if counts.min(initial=num_tokens) < num_tokens:
            out[np.arange(num_tokens) >= counts[:, None]] = 0

    def _read_runs(self, ids: np.ndarray, counts: np.ndarray, places: np.ndarray, out: np.ndarray) -> None:
        """From a file with one call of the system for all that lies side by side there and in ``out``."""
        slots, num_tokens, rows = self.layout.slots[ids], out.shape[1], out.reshape(-1, out.shape[2])
        is_full = (counts == num_tokens) & (self.layout.lengths[slots] == num_tokens)
        firsts = _firsts(is_full[:-1] & (np.diff(slots) == 1) & (np.diff(places) == 1))
        offsets = self.layout.start[ids[firsts]] * self.layout.row_bytes
        sizes = np.add.reduceat(counts, firsts)
        for place, offset, size in zip(places[firsts].tolist(), offsets.tolist(), sizes.tolist(), strict=True):
            self.region.read(offset, rows[place * num_tokens : place * num_tokens + size])
        for short in np.flatnonzero(counts < num_tokens).tolist():
            out[places[short], counts[short] :] = 0

    def verify(self, shards: Iterable[int], key: int | None = None) -> int:
        """Forgets the samples of shards whose bytes or marks are not those that were written, or not under the key.

        Returns:
            How many samples were dropped.
        """
        dropped = 0
        for shard in shards:
            marks, index = self._marks[self.layout.slots_of(shard)], shard - self.layout.first_shard
            damaged = (marks != MARK) & (marks != 0)
            dropped += int(damaged.sum())
            marks[damaged] = 0
            if not (marks == MARK).any():
                continue
            checksum = self._checksum(shard, int(self._keys[index]), self._chunks(shard))
            intact = checksum == int(self._checksums[index])
            if not intact or (key is not None and int(self._keys[index]) != key):
                dropped += int((marks == MARK).sum())
                marks[:] = 0
        return dropped

    def copy(self, other: "Tier", shard: int) -> int:
        """Takes over what another tier holds of a shard that both have, and returns how many samples that is."""
        here, there = self.layout.slots_of(shard), other.layout.slots_of(shard)
        marks = other._marks[there]
        self._marks[here] = 0
        offset = self.layout.rows_of(shard).start * self.layout.row_bytes
        for chunk in other._chunks(shard):
            self.region.write(offset, chunk)
            offset += len(chunk)
        self._write_record(shard, int(other._keys[shard - other.layout.first_shard]), self._chunks(shard))
        self._marks[here] = marks
        return int((marks == MARK).sum())

    def clear(self, ids: np.ndarray | None = None) -> None:
        """Forgets samples, or all of them."""
        if ids is None:
            self._marks[:] = 0
        else:
            slots = self.layout.slots[ids]
            self._marks[slots[slots >= 0]] = 0

    def _write_rows(self, slots: np.ndarray, rows: np.ndarray, row_ends: np.ndarray) -> None:
        firsts = _firsts(np.diff(slots) == 1)
        offsets = self.layout.start[self.layout.ids[slots[firsts]]] * self.layout.row_bytes
        parts = np.split(rows, row_ends[firsts[1:] - 1])
        for offset, part in zip(offsets.tolist(), parts, strict=True):
            self.region.write(offset, part)

    def _write_record(self, shard: int, key: int, rows: Iterable[np.ndarray]) -> None:
        index = shard - self.layout.first_shard
        self._keys[index] = key
        self._checksums[index] = self._checksum(shard, key, rows)

    def _checksum(self, shard: int, key: int, rows: Iterable[np.ndarray]) -> int:
        """Of what the rows are, the key, the samples and the rows."""
        ids = self.layout.ids[self.layout.slots_of(shard)]
        head = np.array([self._stamp, key], dtype=np.uint64).tobytes() + ids.tobytes()
        checksum = zlib.crc32(head)
        for chunk in rows:
            checksum = zlib.crc32(chunk.data, checksum)
        return checksum

    def _chunks(self, shard: int) -> Iterator[np.ndarray]:
        """The bytes of a shard's rows, uint8 (at most CHUNK_BYTES,) each; one is valid until the next."""
        rows = self.layout.rows_of(shard)
        end, buffer = rows.stop * self.layout.row_bytes, np.empty(CHUNK_BYTES, dtype=np.uint8)
        for offset in range(rows.start * self.layout.row_bytes, end, CHUNK_BYTES):
            chunk = buffer[: end - offset]
            self.region.read(offset, chunk)
            yield chunk


def _firsts(joined: np.ndarray) -> np.ndarray:
    """Where runs begin among items of which each is joined to the next or not, (N - 1,)."""
    return np.concatenate([[0], np.flatnonzero(~joined) + 1])
