"""Errors of collectives, told from all others."""

from torch.distributed import DistError


def is_collective(error: BaseException) -> bool:
    """Returns whether an error came from a collective or a store of the ranks: another rank has gone or is late."""
    is_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)  # it has no class of its own
    return is_gloo or isinstance(error, DistError)
