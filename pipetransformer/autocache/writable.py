"""Whether a folder can be written, found out at the start of a run. No torch here: configuration stays fast."""

import tempfile
from pathlib import Path

from pipetransformer.errors import Unwritable


def unwritable(path: Path, error: OSError) -> Unwritable:
    """Says why a folder at or below ``path`` cannot be written, and what to change."""
    return Unwritable(
        f"the cache's folder {path} cannot be written ({error}); name another one by `path`=, or give "
        "`path`=null for one that ends with the run"
    )


def check_writable(path: Path) -> None:
    """Makes something where ``path`` is or would be made, and removes it; leaves no folder behind.

    Raises:
        Unwritable: It is not a folder, or nothing can be made there.
    """
    path = path.absolute()
    nearest = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".writable-", dir=nearest):
            pass
    except OSError as error:
        if not nearest.exists():  # another run that ends has just taken it back
            return check_writable(path)
        raise unwritable(path, error) from error
