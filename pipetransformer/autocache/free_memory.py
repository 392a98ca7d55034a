"""How much memory this process may still take: what the system has, or less where its control group has a limit.

Containers and schedulers put processes into such groups (cgroups, version 1 or 2), and whatever exceeds the limit is
killed, however much memory the machine has left.
"""

from collections.abc import Iterator
from math import inf
from pathlib import Path

FILES = {  # limit: what is used, and what of that the system would drop
    "memory.max": ("memory.current", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
}


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken before the system swaps or kills.

    Args:
        root: Where ``proc`` and ``sys`` lie.
    """
    of_the_system = _numbers(root / "proc/meminfo")["MemAvailable:"] * 1024
    return max(0, int(min([of_the_system, *map(_left, _groups(root))])))


def _groups(root: Path) -> Iterator[Path]:
    """The folders of the groups that count this process's memory, from its own outwards."""
    groups = root / "proc/self/cgroup"
    for line in filter(None, groups.read_text().splitlines() if groups.exists() else ()):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):  # version 2, version 1
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            own = top / path.lstrip("/")
            yield from [own, *own.parents][: len(own.parts) - len(top.parts) + 1]


def _left(folder: Path) -> float:
    for limit, (used, droppable) in FILES.items():
        text = (folder / limit).read_text().strip() if (folder / limit).exists() else "max"
        if text != "max":
            taken = int((folder / used).read_text()) - _numbers(folder / "memory.stat").get(droppable, 0)
            return int(text) - taken
    return inf


def _numbers(file: Path) -> dict[str, int]:
    """Of a file whose lines begin with a name and a number."""
    words = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in filter(None, words)}
