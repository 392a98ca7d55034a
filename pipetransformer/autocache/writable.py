"""Checks at the start of a run that a folder can be written. No torch, however far away: configuration stays fast."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from pipetransformer.errors import Unwritable, UserError


def unwritable(path: Path, error: OSError) -> Unwritable:
    """Returns the error for a folder at or below ``path`` that cannot be written, with the remedy."""
    return Unwritable(
        f"the cache's folder {path} cannot be written ({error}); name another one by `path`=, or give "
        "`path`=null for one that ends with the run"
    )


def check_writable(path: Path, refusal: Callable[[Path, OSError], UserError] = unwritable) -> None:
    """Makes and removes a temporary folder in ``path`` or its nearest existing parent, to see whether that works.

    Args:
        path: The folder, absolute or not.
        refusal: Makes the error from the absolute path and the reason.

    Raises:
        UserError: It is not a folder, or nothing can be made there.
    """
    path = path.absolute()
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".writable-", dir=nearest):
            pass
    except OSError as error:
        if not nearest.exists():  # a finishing run removed it in the meantime
            return check_writable(path, refusal)
        raise refusal(path, error) from error
