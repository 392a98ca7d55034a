"""Features of one split on one node, each sample in the fastest tier that holds it."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.buffer import RESERVE_BYTES, SharedBuffer
from pipetransformer.autocache.codec import codec
from pipetransformer.autocache.layout import Budgets, StoreLayout, assign_tiers
from pipetransformer.autocache.tier import Tier

DECODED_BYTES = 2**21  # rows that are decoded at once


@dataclass(frozen=True, eq=False)
class StoreSpec:
    """All that a process needs to open a :class:`FeatureStore`, as plain values that processes can send each other.

    Attributes:
        lengths: Tokens of each sample, (N,).
        hidden_size: Width of a feature, D.
        dtype: Type of the features.
        storage: Name of the codec.
        budgets: Of this split on this node.
        path: File of the disk tier of a persistent store; any other lies without a name in the same folder.
        shard_size: Most samples that are computed and written together.
        seed: Of the order in which samples fill the tiers.
        persistent: The file outlives the run.
        is_local: Samples that are stored before the others, bool (N,); none by default.
        reads_only: Other runs read the file at the same time, so that no process may change it.
        addresses: Of the buffer of each tier, set when the store is made.
    """

    lengths: np.ndarray
    hidden_size: int
    dtype: torch.dtype
    storage: str
    budgets: Budgets
    path: Path
    shard_size: int
    seed: int
    persistent: bool = False
    is_local: np.ndarray | None = None
    reads_only: bool = False
    addresses: Mapping[str, str] = field(default_factory=dict)

    def layout(self) -> StoreLayout:
        """Assigns the samples to tiers, in every process alike."""
        row_bytes = codec(self.storage, self.hidden_size, self.dtype).row_bytes
        return assign_tiers(
            self.lengths, row_bytes, self.budgets, self.shard_size, self.seed, self.persistent, self.is_local
        )


class FeatureStore:
    """Features of samples, without padding, under the key that they were computed with.

    One process of the node calls :meth:`create` or :meth:`reopen` and sends ``spec`` to the others, which
    :meth:`attach`; all see the same bytes. A higher level overwrites the features in place under another key, shard by
    shard. One process writes a shard at a time; its samples may be read once the write has returned. As long as one of
    these processes lives, no other run opens the file.

    Attributes:
        spec: The spec with which other processes attach.
        shards: Ids of the stored samples, in the groups in which they are written. Samples of a shard have about the
            same length.
        bytes_read: Bytes that this process has read, by tier.
    """

    def __init__(self, spec: StoreSpec, layout: StoreLayout, buffers: Mapping[str, SharedBuffer]) -> None:
        self.spec, self.shards = spec, layout.shards
        self._codec = codec(spec.storage, spec.hidden_size, spec.dtype)
        stamp = zlib.crc32(f"{spec.storage} {spec.hidden_size} {spec.dtype}".encode())
        self._tiers = {name: Tier(own, buffers[name], stamp) for name, own in layout.tiers.items()}
        self.bytes_read = dict.fromkeys(self._tiers, 0)

    @classmethod
    def create(cls, spec: StoreSpec, reserve_bytes: int = RESERVE_BYTES) -> "FeatureStore":
        """Makes an empty store. An existing file is replaced.

        Args:
            spec: Without addresses.
            reserve_bytes: Bytes that have to stay free on the disk.

        Raises:
            OSError: Memory or disk has less space than the budgets allow; nothing is left behind.
        """
        return cls._open(spec, new_file=True, reserve_bytes=reserve_bytes)

    @classmethod
    def reopen(cls, spec: StoreSpec) -> "FeatureStore":
        """Opens the file of an earlier run, with new memory. :meth:`verify` all shards before reading any.

        Raises:
            OSError: There is no file, another run uses it, or memory has too little space.
            UserError: The file was made with another spec.
        """
        return cls._open(spec, new_file=False)

    @classmethod
    def attach(cls, spec: StoreSpec) -> "FeatureStore":
        """Opens a store that another process of the node has made and keeps open.

        Raises:
            OSError: The store does not exist any more.
            UserError: Its path now holds another file.
        """
        layout = spec.layout()
        buffers: dict[str, SharedBuffer] = {}
        try:
            for name in layout.tiers:
                buffers[name] = SharedBuffer.attach(spec.addresses[name], spec.reads_only and name == "disk")
            if "disk" in buffers:
                buffers["disk"].lock(shared=True)
            return cls(spec, layout, buffers)
        except (OSError, ValueError):
            for buffer in buffers.values():
                buffer.close()
            raise

    @classmethod
    def _open(cls, spec: StoreSpec, new_file: bool, reserve_bytes: int = RESERVE_BYTES) -> "FeatureStore":
        layout, buffers = spec.layout(), {}
        try:
            if layout.disk is not None:
                buffers["disk"] = _disk_buffer(spec, layout.disk.num_bytes, new_file, reserve_bytes)
                if not spec.reads_only:
                    buffers["disk"].lock()  # fails if any other run holds it
                buffers["disk"].lock(shared=True)
            if layout.memory is not None:
                buffers["memory"] = SharedBuffer.memory(layout.memory.num_bytes)
            addresses = {name: buffer.address for name, buffer in buffers.items()}
            return cls(replace(spec, addresses=addresses), layout, buffers)
        except (OSError, ValueError):
            for buffer in buffers.values():
                buffer.close(unlink=new_file and spec.persistent)
            raise

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes of the store on the node."""
        return {name: tier.layout.num_bytes for name, tier in self._tiers.items()}

    def write(self, shard: int, ids: np.ndarray, features: Tensor, key: int) -> None:
        """Stores samples of a shard in every tier that holds it, and invalidates the shard's others.

        Args:
            shard: Index in ``shards``.
            ids: Some or all of its samples, (B,).
            features: Their features, padded, (B, T, D), on any device.
            key: Key under which they are stored, below 2 ** 64.

        Raises:
            FeatureOverflow: A feature is too large for the codec.
            StoreFailed: The file cannot be written.
        """
        self.write_all([(shard, ids)], features, key)

    def write_all(self, parts: Sequence[tuple[int, np.ndarray]], features: Tensor, key: int) -> None:
        """Stores samples of several shards with one copy from the device; see :meth:`write`.

        Args:
            parts: Ascending shards, each with some or all of its samples in their order there.
            features: Of all these samples in this order, (B, T, D).
            key: Key under which they are stored.
        """
        ids = np.concatenate([own for _, own in parts])
        rows = self._codec.encode(self._without_padding(ids, features.detach())).cpu().numpy()  # (R, row_bytes)
        bounds = np.cumsum([0, *(self.spec.lengths[own].sum() for _, own in parts)])
        for tier in self._tiers.values():
            here = [index for index, (shard, _) in enumerate(parts) if shard in tier.layout.shards]
            if here:  # contiguous, as the shards of a tier are
                first, end = here[0], here[-1] + 1
                tier.write_all(parts[first:end], rows[bounds[first] : bounds[end]], key)

    def read(self, ids: np.ndarray, num_tokens: int, key: int, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Reads the first ``num_tokens`` features of samples, zero past a sample's end and for missing samples.

        Args:
            ids: (B,).
            num_tokens: T.
            key: Features under any other key count as misses.
            out: Destination, (B, T, D), contiguous and on the CPU; allocated by default.

        Returns:
            The features (B, T, D), and which samples were found, bool (B,).
        """
        shape = (len(ids), num_tokens, self._codec.hidden_size)
        features = torch.empty(shape, dtype=self._codec.dtype) if out is None else out
        assert (features.shape, features.dtype) == (shape, self._codec.dtype)
        assert features.is_contiguous()
        if self._codec.is_plain:
            found = self._read_rows(ids, key, features.view(torch.uint8).numpy())
        else:
            found = self._decode(ids, key, features)
        return features, torch.from_numpy(found)

    def missing_ids(self, ids: np.ndarray, key: int) -> np.ndarray:
        """Returns the samples that no tier holds under the key."""
        found = np.zeros(len(ids), dtype=bool)
        for tier in self._tiers.values():
            found |= tier.valid(ids, key)
        return ids[~found]

    def is_on_disk(self, shard: int) -> bool:
        """Returns whether a shard is written to the file."""
        return "disk" in self._tiers and shard in self._tiers["disk"].layout.shards

    @property
    def num_stored(self) -> int:
        """Samples that some tier holds, under any key."""
        ids = np.arange(len(self.spec.lengths))
        return int(np.logical_or.reduce([tier.stored(ids) for tier in self._tiers.values()]).sum())

    def verify(self, shards: Iterable[int] | None = None, key: int | None = None) -> int:
        """Invalidates damaged samples and, with a key, those that are stored under another one.

        Args:
            shards: Indices in ``shards``, all by default; processes can divide them.
            key: The only key to keep.

        Returns:
            The number of samples that were dropped, over all tiers.
        """
        numbers = range(len(self.shards)) if shards is None else list(shards)
        tiers = self._tiers.values()
        return sum(tier.verify([n for n in numbers if n in tier.layout.shards], key) for tier in tiers)

    def promote(self, shards: Iterable[int] | None = None) -> int:
        """Copies shards that both tiers hold from disk into memory, after :meth:`reopen`.

        Returns:
            The number of samples that were copied.
        """
        if len(self._tiers) < 2:
            return 0
        memory, disk = self._tiers["memory"], self._tiers["disk"]
        numbers = range(len(self.shards)) if shards is None else shards
        both = [n for n in numbers if n in memory.layout.shards and n in disk.layout.shards]
        return sum(memory.copy(disk, n) for n in both)

    def drop_page_cache(self) -> None:
        """Evicts the disk tier from the page cache, so that the next reads come from the disk."""
        for tier in self._tiers.values():
            tier.buffer.drop_page_cache()

    def close(self) -> None:
        """Closes the store in this process."""
        for tier in self._tiers.values():
            tier.buffer.close()
        self._tiers = {}

    def _without_padding(self, ids: np.ndarray, features: Tensor) -> Tensor:
        """Returns the features (R, D) of the samples' own tokens."""
        lengths, num_tokens = self.spec.lengths[ids], features.shape[1]
        assert int(lengths.max()) <= num_tokens, f"features of {num_tokens} tokens are cut off"
        if int(lengths.min()) == num_tokens:
            return features.flatten(0, 1)
        is_real = torch.arange(num_tokens) < torch.from_numpy(lengths)[:, None]  # (B, T)
        return features[is_real.to(features.device)]

    def _decode(self, ids: np.ndarray, key: int, features: Tensor) -> np.ndarray:
        """Fills features (B, T, D) a few samples at a time, so that their rows stay in the processor's cache."""
        found = np.zeros(len(ids), dtype=bool)
        num_tokens, row_bytes = features.shape[1], self._codec.row_bytes
        num_samples = max(1, DECODED_BYTES // (num_tokens * row_bytes))
        buffer = torch.empty(min(num_samples, len(ids)), num_tokens, row_bytes, dtype=torch.uint8)
        for first in range(0, len(ids), num_samples):
            part = slice(first, first + num_samples)
            rows = buffer[: len(ids[part])]
            found[part] = self._read_rows(ids[part], key, rows.numpy())
            self._codec.decode_into(rows.flatten(0, 1), features[part].flatten(0, 1))
        return found

    def _read_rows(self, ids: np.ndarray, key: int, rows: np.ndarray) -> np.ndarray:
        """Fills rows uint8 (B, T, row_bytes), each sample from the first tier that holds it.

        Returns:
            Which samples were found, bool (B,).
        """
        rows = rows.reshape(*rows.shape[:2], self._codec.row_bytes)
        found = np.zeros(len(ids), dtype=bool)
        for name, tier in self._tiers.items():
            valid = ~found & tier.valid(ids, key)
            self.bytes_read[name] += tier.gather(ids, rows.shape[1], valid, rows) * self._codec.row_bytes
            found |= valid
        rows[~found] = 0
        return found


def _disk_buffer(spec: StoreSpec, num_bytes: int, new_file: bool, reserve_bytes: int) -> SharedBuffer:
    if not spec.persistent:
        return SharedBuffer.anonymous_file(spec.path.parent, num_bytes, reserve_bytes)
    if new_file:
        return SharedBuffer.file(spec.path, num_bytes, reserve_bytes)
    return SharedBuffer.attach(str(spec.path), spec.reads_only)
