"""Rows of samples in one buffer, each sample with a flag that says whether it is valid."""

import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from pipetransformer.autocache.buffer import SharedBuffer
from pipetransformer.autocache.layout import TierLayout
from pipetransformer.errors import UserError

VALID = 0xA5  # flag of a valid sample, 0 otherwise: no single flipped bit turns one into the other
CHUNK_BYTES = 2**18  # checksummed or copied at once


class Tier:
    """Samples in memory or on disk. A sample counts only if its flag is valid, and only under the key of its shard.

    A shard is rewritten in this order::

        flags off  ->  rows  ->  header (key, checksum)  ->  flags on

    so that a process killed at any point leaves each sample either intact or absent. A machine that fails may have
    written pages in any order: after that, and for a file of an earlier run, :meth:`verify` before reading.

    One process writes a shard at a time, and none reads it meanwhile; other shards may be read and written.

    Args:
        layout: Offsets of the samples.
        buffer: The bytes, ``layout.num_bytes`` of them.
        stamp: A number for the meaning of the rows; part of the checksums.

    Raises:
        UserError: The buffer has another size.
    """

    def __init__(self, layout: TierLayout, buffer: SharedBuffer, stamp: int = 0) -> None:
        if buffer.num_bytes != layout.num_bytes:
            raise UserError(
                f"{buffer.address} has {buffer.num_bytes} bytes and the store needs {layout.num_bytes}: it was made "
                "for other samples or budgets; remove it or set `path` to another folder"
            )
        self.layout, self.buffer, self._stamp = layout, buffer, stamp
        num_shards, mapped = len(layout.shards), buffer.bytes.numpy()
        keys_end, checksums_end = (layout.headers_offset + size * num_shards for size in (8, 12))
        self._keys = mapped[layout.headers_offset : keys_end].view(np.uint64)  # (S,)
        self._checksums = mapped[keys_end:checksums_end].view(np.uint32)  # (S,)
        self._flags = mapped[checksums_end:]  # (K,)
        self._rows = mapped[: layout.num_rows * layout.row_bytes].reshape(-1, layout.row_bytes)
        self._common_length = int(layout.lengths[0]) if np.ptp(layout.lengths) == 0 else None
        self._shard_of = np.repeat(np.arange(num_shards), np.diff(layout.bounds))  # (K,)

    def write(self, shard: int, ids: np.ndarray, rows: np.ndarray, key: int) -> None:
        """Stores samples of one shard; see :meth:`write_all`."""
        self.write_all([(shard, ids)], rows, key)

    def write_all(self, parts: Sequence[tuple[int, np.ndarray]], rows: np.ndarray, key: int) -> None:
        """Stores samples of several shards and invalidates the shards' others. Contiguous rows take one write.

        Args:
            parts: Ascending shard numbers of ``layout.shards``, each with some or all of its samples in their order
                there, (B,).
            rows: Rows of all these samples in this order, without padding, uint8 (R, row_bytes).
            key: Key under which the rows are stored, below 2 ** 64.
        """
        slots = self.layout.slots[np.concatenate([ids for _, ids in parts])]  # (B over all shards,)
        row_ends = np.cumsum(self.layout.lengths[slots])
        assert np.all(slots[1:] > slots[:-1]), "samples are written in the order in which they lie"
        assert len(rows) == row_ends[-1], f"{len(rows)} rows for samples of {row_ends[-1]}"
        shard_slots = [self.layout.slots_of(shard) for shard, _ in parts]
        bounds = np.cumsum([0, *(len(ids) for _, ids in parts)])  # of each shard's samples in `slots`
        for (shard, _), own, first, end in zip(parts, shard_slots, bounds, bounds[1:], strict=False):
            assert own.start <= slots[first] <= slots[end - 1] < own.stop, f"not all samples are of shard {shard}"
        for own in shard_slots:
            self._flags[own] = 0  # before any row changes
        self._write_rows(slots, rows, row_ends)
        row_bounds = np.concatenate([[0], row_ends])[bounds]
        for (shard, ids), own, first, end in zip(parts, shard_slots, row_bounds, row_bounds[1:], strict=False):
            # the checksum is of all rows of the shard: where only some were written, the others are read back
            is_whole = len(ids) == own.stop - own.start
            self._write_header(shard, key, [rows[first:end].reshape(-1)] if is_whole else self._chunks(shard))
        self._flags[slots] = VALID  # last: the rows and their header are complete

    def stored(self, ids: np.ndarray) -> np.ndarray:
        """Tells which of the samples are stored under any key, bool (B,)."""
        return self._is_valid(self.layout.slots[ids])

    def valid(self, ids: np.ndarray, key: int) -> np.ndarray:
        """Tells which of the samples can be read under the key, bool (B,)."""
        slots = self.layout.slots[ids]
        return self._is_valid(slots) & (self._keys[self._shard_of[slots]] == np.uint64(key))

    def _is_valid(self, slots: np.ndarray) -> np.ndarray:
        return (slots >= 0) & (self._flags[slots] == VALID)

    def gather(self, ids: np.ndarray, num_tokens: int, present: np.ndarray, out: np.ndarray) -> int:
        """Copies the first ``num_tokens`` rows of samples, with zeros past a sample's end.

        Args:
            ids: (B,).
            num_tokens: T.
            present: Which of them to read, bool (B,); ``out`` is left as it is for the others.
            out: uint8 (B, T, row_bytes), contiguous.

        Returns:
            The number of rows read.
        """
        assert out.flags.c_contiguous
        read = np.flatnonzero(present)
        if len(read) == 0:
            return 0
        counts = np.minimum(self.layout.lengths[self.layout.slots[ids[read]]], num_tokens)
        if self.buffer.is_file:
            self._read_contiguous(ids[read], counts, read, out)
        elif len(read) == len(ids):
            self._take(ids, counts, out)
        else:
            part = np.empty((len(read), *out.shape[1:]), dtype=np.uint8)
            self._take(ids[read], counts, part)
            out[read] = part
        return int(counts.sum())

    def _take(self, ids: np.ndarray, counts: np.ndarray, out: np.ndarray) -> None:
        """Copies all samples from memory at once."""
        num_tokens = out.shape[1]
        if num_tokens == self._common_length:  # whole samples are faster to copy than their rows
            rows, index = self._rows.reshape(len(self.layout.ids), -1), self.layout.slots[ids]
        else:
            rows, index = self._rows, (self.layout.start[ids, None] + np.arange(num_tokens)).reshape(-1)
        # clipped: the default mode copies twice. Rows past a sample's end are another sample's and zeroed below
        np.take(rows, index, axis=0, out=out.reshape(-1, rows.shape[1]), mode="clip")
        if counts.min(initial=num_tokens) < num_tokens:
            out[np.arange(num_tokens) >= counts[:, None]] = 0

    def _read_contiguous(self, ids: np.ndarray, counts: np.ndarray, out_index: np.ndarray, out: np.ndarray) -> None:
        """Reads from a file with one system call per range that is contiguous both there and in ``out``."""
        slots, num_tokens, rows = self.layout.slots[ids], out.shape[1], out.reshape(-1, out.shape[2])
        is_full = (counts == num_tokens) & (self.layout.lengths[slots] == num_tokens)
        firsts = _range_starts(is_full[:-1] & (np.diff(slots) == 1) & (np.diff(out_index) == 1))
        offsets = self.layout.start[ids[firsts]] * self.layout.row_bytes
        sizes = np.add.reduceat(counts, firsts)
        for index, offset, size in zip(out_index[firsts].tolist(), offsets.tolist(), sizes.tolist(), strict=True):
            self.buffer.read(offset, rows[index * num_tokens : index * num_tokens + size])
        for short in np.flatnonzero(counts < num_tokens).tolist():
            out[out_index[short], counts[short] :] = 0

    def verify(self, shards: Iterable[int], key: int | None = None) -> int:
        """Invalidates the samples of shards whose bytes or flags are damaged, or which are not under the key.

        Returns:
            The number of samples that were dropped.
        """
        dropped = 0
        for shard in shards:
            flags, index = self._flags[self.layout.slots_of(shard)], shard - self.layout.first_shard
            damaged = (flags != VALID) & (flags != 0)
            dropped += int(damaged.sum())
            flags[damaged] = 0
            if not (flags == VALID).any():
                continue
            checksum = self._checksum(shard, int(self._keys[index]), self._chunks(shard))
            intact = checksum == int(self._checksums[index])
            if not intact or (key is not None and int(self._keys[index]) != key):
                dropped += int((flags == VALID).sum())
                flags[:] = 0
        return dropped

    def copy(self, other: "Tier", shard: int) -> int:
        """Copies a shard that both tiers hold from the other one, and returns the number of samples."""
        here, there = self.layout.slots_of(shard), other.layout.slots_of(shard)
        flags = other._flags[there]
        self._flags[here] = 0
        offset = self.layout.rows_of(shard).start * self.layout.row_bytes
        for chunk in other._chunks(shard):
            self.buffer.write(offset, chunk)
            offset += len(chunk)
        self._write_header(shard, int(other._keys[shard - other.layout.first_shard]), self._chunks(shard))
        self._flags[here] = flags
        return int((flags == VALID).sum())

    def invalidate(self, ids: np.ndarray | None = None) -> None:
        """Invalidates samples, by default all of them."""
        if ids is None:
            self._flags[:] = 0
        else:
            slots = self.layout.slots[ids]
            self._flags[slots[slots >= 0]] = 0

    def _write_rows(self, slots: np.ndarray, rows: np.ndarray, row_ends: np.ndarray) -> None:
        firsts = _range_starts(np.diff(slots) == 1)
        offsets = self.layout.start[self.layout.ids[slots[firsts]]] * self.layout.row_bytes
        parts = np.split(rows, row_ends[firsts[1:] - 1])
        for offset, part in zip(offsets.tolist(), parts, strict=True):
            self.buffer.write(offset, part)

    def _write_header(self, shard: int, key: int, rows: Iterable[np.ndarray]) -> None:
        index = shard - self.layout.first_shard
        self._keys[index] = key
        self._checksums[index] = self._checksum(shard, key, rows)

    def _checksum(self, shard: int, key: int, rows: Iterable[np.ndarray]) -> int:
        """Computes the CRC-32 of stamp, key, sample ids and rows."""
        ids = self.layout.ids[self.layout.slots_of(shard)]
        head = np.array([self._stamp, key], dtype=np.uint64).tobytes() + ids.tobytes()
        checksum = zlib.crc32(head)
        for chunk in rows:
            checksum = zlib.crc32(chunk.data, checksum)
        return checksum

    def _chunks(self, shard: int) -> Iterator[np.ndarray]:
        """Yields the bytes of a shard's rows, uint8 (at most CHUNK_BYTES,); each is valid until the next."""
        rows = self.layout.rows_of(shard)
        end, buffer = rows.stop * self.layout.row_bytes, np.empty(CHUNK_BYTES, dtype=np.uint8)
        for offset in range(rows.start * self.layout.row_bytes, end, CHUNK_BYTES):
            chunk = buffer[: end - offset]
            self.buffer.read(offset, chunk)
            yield chunk


def _range_starts(joined: np.ndarray) -> np.ndarray:
    """Returns where ranges begin among items of which each is joined to the next or not, (N - 1,)."""
    return np.concatenate([[0], np.flatnonzero(~joined) + 1])
