"""Files of a folder of pictures: which of them are pictures by their names, and what is said of the others."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

SUFFIXES = (".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".bmp", ".ppm", ".pgm", ".pbm", ".webp", ".tif", ".tiff", ".gif")
OF_SYSTEMS = ("thumbs.db", "desktop.ini")  # files that a system puts into folders, in small letters


def is_picture(file: Path) -> bool:
    """Returns whether a file is a picture by its name."""
    return file.suffix.lower() in SUFFIXES


def visible_files(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and below it."""
    for parent, folders, names in os.walk(folder, followlinks=True):
        visible = (name for name in folders if not name.startswith("."))
        folders[:] = (name for name in visible if not leads_back(Path(parent, name), folder))  # the others are passed
        yield from (Path(parent, name) for name in names if not name.startswith("."))


def leads_back(entry: Path, folder: Path) -> bool:
    """Returns whether a folder is a link to one that it lies in, on the way from ``folder``: its files would recur."""
    if not entry.is_symlink():
        return False
    target = os.path.realpath(entry)
    way = [above for above in entry.parents if above.is_relative_to(folder)]
    return any(Path(os.path.realpath(above)).is_relative_to(target) for above in way)


def left_out(folder: Path, others: Sequence[Path]) -> tuple[str, ...]:
    """Returns the warning about files that are no pictures by their names, or none."""
    if not others:
        return ()
    counts = Counter(file.suffix.lower() or "no ending" for file in others)
    found = ", ".join(f"{count} of {ending}" for ending, count in counts.most_common(5))
    return (
        f"{folder} has {len(others)} files among its pictures that are left out ({found}), the first is {others[0]}; "
        f"if they are pictures, convert or rename them to one of {', '.join(SUFFIXES)}",
    )
