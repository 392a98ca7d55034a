"""Several documents in one row of a batch, so that little of it is padding.

A document stays a sample: its id, its stored features and its part of the loss are its own, whatever row it lies in.
Packs are made of a global batch when it is read, the same on every rank::

    documents       a a a a a   b b   c c c   d d
    padded rows     a a a a a | b b . . . | c c c . . | d d . . .
    packs           a a a a a | c c c b b | d d . . .               width 5
    positions       0 1 2 3 4 | 0 1 2 0 1 | 0 1 2 3 4

Attention finds the documents of a row by their positions: a document begins where they do not go on by one. Padding
goes on with the last document, so that it sees something; nothing sees padding.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autodp.sampler import pack, replica_batch
from pipetransformer.autodp.topology import Topology


@dataclass(frozen=True, eq=False)
class PackedRows:
    """A replica's rows of one global batch.

    Attributes:
        documents: Sample ids of all rows, row by row, shape (N,).
        row: The row of each document, shape (N,).
        start: Its first column, shape (N,).
        num_tokens: Its tokens, shape (N,).
        weights: 1 for a row of documents, 0 for one that only fills up the shape, shape (B,).
        width: Columns T of each row.
    """

    documents: np.ndarray
    row: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    weights: np.ndarray
    width: int

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def first_documents(self) -> np.ndarray:
        """The first document of each row, shape (B,), whose random stream is the row's."""
        return self.documents[np.searchsorted(self.row, np.arange(len(self)))]

    def scatter(self, values: Tensor, fill: float) -> Tensor:
        """Lays out values of documents, (N, T of a document, ...), in rows (B, T, ...); ``fill`` stands beside them."""
        rows = values.new_full((len(self), self.width, *values.shape[2:]), fill)
        document = np.repeat(np.arange(len(self.row)), self.num_tokens)  # of each token, (M,)
        position = np.arange(len(document)) - _starts(self.num_tokens)[document]
        rows[self.row[document], self.start[document] + position] = values[document, position]
        return rows

    def context(self) -> dict[str, Tensor]:
        """Returns ``attention_mask`` (B, T) of bool, and ``position_ids`` (B, T), from 0 on in each document."""
        columns = np.arange(self.width)
        starts = np.zeros((len(self), self.width), dtype=np.int64)
        ends = np.zeros(len(self), dtype=np.int64)
        for row, start, length in zip(self.row, self.start, self.num_tokens, strict=True):
            starts[row, start:] = start
            ends[row] = start + length
        return {
            "attention_mask": torch.from_numpy(columns < ends[:, None]),
            "position_ids": torch.from_numpy(columns - starts),
        }


def packed_rows(
    global_ids: np.ndarray, lengths: np.ndarray, capacity: int, topology: Topology, step_of_width: int
) -> PackedRows:
    """Packs a global batch, and returns the rows of a replica.

    Args:
        global_ids: The documents, (B,).
        lengths: Tokens of every document of the split.
        capacity: Tokens of a row at most.
        topology: This rank's view of the plan.
        step_of_width: The width is a multiple of it where the capacity allows, so that few shapes occur.
    """
    plan = topology.plan
    packs = [global_ids[members] for members in pack(lengths[global_ids], capacity)]
    longest = max(int(lengths[members].sum()) for members in packs)
    own = replica_batch(
        np.arange(len(packs)), topology.share, plan.num_shares, plan.num_microbatches, plan.mesh.rows_multiple
    )
    rows = [packs[index] for index in own.ids]
    documents = np.concatenate(rows)
    return PackedRows(
        documents,
        np.repeat(np.arange(len(rows)), [len(members) for members in rows]),
        np.concatenate([_starts(lengths[members]) for members in rows]),
        lengths[documents],
        own.weights,
        min(-(-longest // step_of_width) * step_of_width, capacity),
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths
