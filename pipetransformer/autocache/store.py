"""The features of one split on one node, each sample in the fastest tier that has it."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.buffer import RESERVE_BYTES, SharedBuffer
from pipetransformer.autocache.codec import codec
from pipetransformer.autocache.layout import Placement
from pipetransformer.autocache.store_spec import StoreSpec
from pipetransformer.autocache.tier import Tier

DECODED_BYTES = 2**21  # of rows, at once


class FeatureStore:
    """Features of samples, without padding, under the key that they were computed with.

    One process of the node calls :meth:`create` or :meth:`reopen` and hands ``description`` to the others, which
    :meth:`attach`; all see the same bytes. A higher level overwrites the features in place under another key, shard by
    shard. One process writes a shard at a time; what it writes may be read once it has returned. As long as one of
    them lives, no other run opens the file.

    Attributes:
        description: What other processes attach with.
        shards: Ids of the samples that are kept, in the groups in which they are written. A group's samples have about
            the same length.
        bytes_read: Bytes that this process has read, by tier.
    """

    def __init__(self, description: StoreSpec, placement: Placement, regions: dict[str, SharedBuffer]) -> None:
        self.description, self.shards = description, placement.shards
        self._codec = codec(description.storage, description.hidden_size, description.dtype)
        stamp = zlib.crc32(f"{description.storage} {description.hidden_size} {description.dtype}".encode())
        layouts = placement.tiers
        self._tiers = {name: Tier(layout, regions[name], stamp) for name, layout in layouts.items()}
        self.bytes_read = dict.fromkeys(self._tiers, 0)

    @classmethod
    def create(cls, description: StoreSpec, reserve_bytes: int = RESERVE_BYTES) -> "FeatureStore":
        """Makes an empty store; a file that is there is replaced.

        Args:
            reserve_bytes: What has to stay free on the disk.

        Raises:
            OSError: Memory or disk has no room for what the budgets allow; nothing is left behind.
        """
        return cls._open(description, new_file=True, reserve_bytes=reserve_bytes)

    @classmethod
    def reopen(cls, description: StoreSpec) -> "FeatureStore":
        """Opens the file of an earlier run, with new memory. :meth:`verify` all shards before reading any.

        Raises:
            OSError: There is no file, another run uses it, or memory has no room.
            ValueError: The file was made with another description.
        """
        return cls._open(description, new_file=False)

    @classmethod
    def attach(cls, description: StoreSpec) -> "FeatureStore":
        """Opens a store that another process of the node has made and keeps open.

        Raises:
            OSError: It is not there any more.
            ValueError: The file at its place is another one.
        """
        placement = description.place()
        regions: dict[str, SharedBuffer] = {}
        try:
            for name in placement.tiers:
                regions[name] = SharedBuffer.attach(description.addresses[name])
            if "disk" in regions:
                regions["disk"].lock(shared=True)
            return cls(description, placement, regions)
        except (OSError, ValueError):
            for region in regions.values():
                region.close()
            raise

    @classmethod
    def _open(cls, description: StoreSpec, new_file: bool, reserve_bytes: int = RESERVE_BYTES) -> "FeatureStore":
        placement, regions = description.place(), {}
        try:
            if placement.disk is not None:
                regions["disk"] = _file(description, placement.disk.num_bytes, new_file, reserve_bytes)
                regions["disk"].lock()  # nobody else has it
                regions["disk"].lock(shared=True)
            if placement.memory is not None:
                regions["memory"] = SharedBuffer.memory(placement.memory.num_bytes)
            addresses = {name: region.address for name, region in regions.items()}
            return cls(replace(description, addresses=addresses), placement, regions)
        except (OSError, ValueError):
            for region in regions.values():
                region.close(unlink=new_file and description.lasting)
            raise

    @property
    def bytes_by_tier(self) -> dict[str, int]:
        """Bytes that the store takes on the node."""
        return {name: tier.layout.num_bytes for name, tier in self._tiers.items()}

    def write(self, shard: int, ids: np.ndarray, features: Tensor, key: int) -> None:
        """Stores samples of a shard in every tier that has it, and forgets the shard's others.

        Args:
            shard: Index in ``shards``.
            ids: Some or all of its samples, (B,).
            features: Theirs, padded, (B, T, D), on any device.
            key: What they were computed with, below 2 ** 64.

        Raises:
            OverflowError: A feature is too large for the codec.
        """
        self.write_all([(shard, ids)], features, key)

    def write_all(self, parts: Sequence[tuple[int, np.ndarray]], features: Tensor, key: int) -> None:
        """Stores samples of several shards, which leave the device at once; see :meth:`write`.

        Args:
            parts: Shards, rising, and of each some or all samples in their order there.
            features: Of all of them, in this order.
        """
        ids = np.concatenate([own for _, own in parts])
        rows = self._codec.encode(self._real(ids, features.detach())).cpu().numpy()
        bounds = np.cumsum([0, *(self.description.lengths[own].sum() for _, own in parts)])
        for tier in self._tiers.values():
            here = [index for index, (shard, _) in enumerate(parts) if shard in tier.layout.shards]
            if here:  # a tier's shards follow each other
                first, end = here[0], here[-1] + 1
                tier.write_all(parts[first:end], rows[bounds[first] : bounds[end]], key)

    def read(self, ids: np.ndarray, num_tokens: int, key: int, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The first ``num_tokens`` features of samples, zero past a sample's end and where it is not found.

        Args:
            ids: (B,).
            key: What they must have been computed with.
            out: Where to put them, (B, num_tokens, D), contiguous and on the CPU.

        Returns:
            The features (B, num_tokens, D), and which samples were found, bool (B,).
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

    def missing(self, ids: np.ndarray, key: int) -> np.ndarray:
        """Those of the samples that no tier has under the key."""
        found = np.zeros(len(ids), dtype=bool)
        for tier in self._tiers.values():
            found |= tier.valid(ids, key)
        return ids[~found]

    @property
    def num_stored(self) -> int:
        """Samples that some tier has, under whatever key."""
        ids = np.arange(len(self.description.lengths))
        return int(np.logical_or.reduce([tier.stored(ids) for tier in self._tiers.values()]).sum())

    def verify(self, shards: Iterable[int] | None = None, key: int | None = None) -> int:
        """Forgets what is not as it was written, or, with a key, was computed with another one.

        Args:
            shards: Indices in ``shards``, all by default; processes can share them out.

        Returns:
            How many samples were dropped, over all tiers.
        """
        numbers = range(len(self.shards)) if shards is None else list(shards)
        tiers = self._tiers.values()
        return sum(tier.verify([n for n in numbers if n in tier.layout.shards], key) for tier in tiers)

    def promote(self, shards: Iterable[int] | None = None) -> int:
        """Copies into memory what the disk holds of the shards that lie in both, after :meth:`reopen`.

        Returns:
            How many samples were copied.
        """
        if len(self._tiers) < 2:
            return 0
        memory, disk = self._tiers["memory"], self._tiers["disk"]
        numbers = range(len(self.shards)) if shards is None else shards
        both = [n for n in numbers if n in memory.layout.shards and n in disk.layout.shards]
        return sum(memory.copy(disk, n) for n in both)

    def forget(self) -> None:
        """Has the next reads of the disk tier come from the disk, see :meth:`SharedBuffer.forget`."""
        for tier in self._tiers.values():
            tier.region.forget()

    def close(self) -> None:
        """Gives the store back."""
        for tier in self._tiers.values():
            tier.region.close()
        self._tiers = {}

    def _real(self, ids: np.ndarray, features: Tensor) -> Tensor:
        """The samples' own features (R, D), of padded ones."""
        lengths, num_tokens = self.description.lengths[ids], features.shape[1]
        assert int(lengths.max()) <= num_tokens, f"features of {num_tokens} tokens are cut off"
        if int(lengths.min()) == num_tokens:
            return features.flatten(0, 1)
        is_real = torch.arange(num_tokens) < torch.from_numpy(lengths)[:, None]
        return features[is_real.to(features.device)]

    def _decode(self, ids: np.ndarray, key: int, features: Tensor) -> np.ndarray:
        """Fills features (B, T, D) a few samples at a time, whose rows stay in the processor's cache."""
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
        """Fills rows uint8 (B, T, row_bytes) from the first tier that has each sample, and says which were found."""
        rows = rows.reshape(*rows.shape[:2], self._codec.row_bytes)
        found = np.zeros(len(ids), dtype=bool)
        for name, tier in self._tiers.items():
            valid = ~found & tier.valid(ids, key)
            self.bytes_read[name] += tier.gather(ids, rows.shape[1], valid, rows) * self._codec.row_bytes
            found |= valid
        rows[~found] = 0
        return found


def _file(description: StoreSpec, num_bytes: int, new_file: bool, reserve_bytes: int) -> SharedBuffer:
    path = description.path
    if not description.lasting:
        return SharedBuffer.anonymous_file(path.parent, num_bytes, reserve_bytes)
    return SharedBuffer.file(path, num_bytes, reserve_bytes) if new_file else SharedBuffer.attach(str(path))
