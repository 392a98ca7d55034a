"""The command ``pipetransformer-cache``, which shows and removes the stores of ``cache.path=``. It imports no torch."""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from pipetransformer.autocache.about import About, read_about
from pipetransformer.autocache.persistent import IDENTITY
from pipetransformer.autocache.store_lock import LOCK, Holder, StoreLock, holders, is_locked
from pipetransformer.errors import StoreInUse, UserError
from pipetransformer.report.format import byte_size

HELP = """\
Shows and removes the stores that cache.path= keeps for later runs.

  pipetransformer-cache list <folder>      one line for each store: model, split, samples, level, size, age, owner, use
  pipetransformer-cache inspect <folder>   all that is known of each store: what it depends on, by name, and its level
  pipetransformer-cache remove <folder>    removes every store there, and says what that freed; refuses one in use

  <folder>   the folder of cache.path=, or a folder in it: of a model, a node or a split"""
HEADER = ("model", "split", "samples", "level", "size", "age", "owner", "in use")
UNKNOWN = "?"
AGES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs ``pipetransformer-cache``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or {"-h", "--help"} & {*given}:
        print(HELP)
        return
    try:
        _run(given)
    except (UserError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


def _run(given: Sequence[str]) -> None:
    commands = {"list": list_stores, "inspect": inspect_stores, "remove": remove_stores}
    if given[0] not in commands:
        raise UserError(f"{given[0]} is no command; give list, inspect or remove, and a folder (--help)")
    if len(given) != 2:
        raise UserError(f"{given[0]} takes one folder, that of cache.path=, and got {len(given) - 1} (--help)")
    commands[given[0]](Path(given[1]))


def find_stores(folder: Path) -> list[Path]:
    """Returns the folders of all stores in a folder, which may be one itself.

    Raises:
        UserError: There are none.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give the one of cache.path=")
    found = sorted(path.parent for path in folder.rglob(IDENTITY) if (path.parent / LOCK).exists())
    inside = [path for path in found if path.resolve().is_relative_to(folder.resolve())]
    if not inside:
        raise UserError(f"{folder} has no stores; give the folder of cache.path=")
    return inside


def list_stores(folder: Path) -> None:
    """Prints a line for each store."""
    rows = [HEADER, *(_row(path) for path in find_stores(folder))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(path: Path) -> tuple[str, ...]:
    identity, about = _identity(path), read_about(path)
    model = str(identity.get("model", UNKNOWN)).partition(" ")[0] or UNKNOWN
    split, samples = str(identity.get("split_name", path.name)), str(identity.get("num_samples", UNKNOWN))
    known = ("not filled", UNKNOWN, UNKNOWN) if about is None else (str(about.level), _age(about), about.owner)
    level, age, owner = known
    stored = samples if about is None else f"{about.num_stored} of {samples}"
    return model, split, stored, level, byte_size(size_on_disk(path)), age, owner, _use(path)


def _identity(path: Path) -> dict[str, object]:
    """Reads what the features depend on; empty where the file is damaged."""
    try:
        found = json.loads((path / IDENTITY).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _age(about: About) -> str:
    seconds = max(0.0, time.time() - about.made)
    size, unit = next(((size, unit) for size, unit in AGES if seconds >= size), AGES[-1])
    return f"{seconds / size:.0f} {unit}"


def _use(path: Path) -> str:
    try:
        if not is_locked(path):
            return "no"
    except OSError:
        return UNKNOWN  # it belongs to another user
    return ", ".join(f"{one.use} for {one}" for one in holders(path)) or "yes"


def size_on_disk(path: Path) -> int:
    """Returns the bytes that the files of a store take."""
    return sum(file.stat().st_blocks * 512 for file in path.iterdir() if file.is_file())


def inspect_stores(folder: Path) -> None:
    """Prints all that is known of each store."""
    for path in find_stores(folder):
        about = read_about(path)
        print(path)
        for name, value in _facts(path, about):
            print(f"  {name}: {value}")


def _facts(path: Path, about: About | None) -> list[tuple[str, object]]:
    identity = _identity(path)
    facts: list[tuple[str, object]] = [(name.replace("_", " "), value) for name, value in identity.items()]
    if not identity:
        facts.append((IDENTITY, "damaged: no run reads this store"))
    facts += [("size on disk", byte_size(size_on_disk(path))), ("in use", _use(path))]
    if about is None:
        return [*facts, ("level", "unknown: no run has filled it, or its description is damaged")]
    made = f"{datetime.fromtimestamp(about.made):%Y-%m-%d %H:%M:%S}, {_age(about)} ago"
    samples = f"{about.num_stored} of {about.num_samples}; a run compares them with their checksums when it opens them"
    facts += [("level", about.level), ("key of the level", about.key), ("samples stored", samples)]
    facts += [("filled", made), ("owner", about.owner)]
    return facts + [(f"made of {name}", value) for name, value in about.parts.items()]


def _lock(path: Path, locked: ExitStack) -> None:
    lock = StoreLock(path, Holder.here("pipetransformer-cache remove"))
    locked.callback(lock.close)
    try:
        lock.take()
    except StoreInUse:
        names = ", ".join(map(str, holders(path))) or "a run"
        raise StoreInUse(f"{path} is in use by {names}; wait until that ends. Nothing was removed") from None
    locked.callback(lock.release)


def remove_stores(folder: Path) -> None:
    """Removes all stores of a folder, and the folders that are empty then.

    Raises:
        StoreInUse: A run uses one of them; nothing is removed.
    """
    found, freed = find_stores(folder), 0
    with ExitStack() as locked:  # no run comes in between
        for path in found:
            _lock(path, locked)
        for path in found:
            freed += size_on_disk(path)
            shutil.rmtree(path)
    for path in found:
        for parent in path.parents[:2]:
            if parent != folder and parent.is_dir() and not any(parent.iterdir()):
                parent.rmdir()
    print(f"removed {len(found)} {'store' if len(found) == 1 else 'stores'}, {byte_size(freed)} freed")


if __name__ == "__main__":
    main()
