"""The memory of a control group counts where it is less than the system's."""

from pathlib import Path

import pytest

from pipetransformer.autocache.free_memory import available_memory

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\nHugePages_Total: 0\n"


def system(root: Path, groups: str, files: dict[str, object]) -> Path:
    contents = {"proc/meminfo": MEMINFO, "proc/self/cgroup": groups, **files}
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def version_2(folder: str, limit: object, used: int = 0, inactive: int = 0) -> dict[str, object]:
    names = {"memory.max": limit, "memory.current": used, "memory.stat": f"anon 5\ninactive_file {inactive}"}
    return {f"sys/fs/cgroup/{folder}/{name}": content for name, content in names.items()}


def version_1(folder: str, limit: int, used: int, inactive: int) -> dict[str, object]:
    names = {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": used,
        "memory.stat": f"inactive_file 1\ntotal_inactive_file {inactive}",
    }
    return {f"sys/fs/cgroup/memory/{folder}/{name}": content for name, content in names.items()}


def test_without_groups_it_is_the_system_s(tmp_path: Path) -> None:
    assert available_memory(system(tmp_path, "0::/\n", {})) == 48 * GIB
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_memory(tmp_path) == 48 * GIB


def test_what_a_group_has_left_counts_with_the_pages_that_the_system_would_drop(tmp_path: Path) -> None:
    files = version_2("job/step", 8 * GIB, used=6 * GIB, inactive=GIB)
    assert available_memory(system(tmp_path, "0::/job/step\n", files)) == 3 * GIB


@pytest.mark.parametrize(("inner", "outer", "expected"), [("max", 4, 4), (2, 4, 2), (8, 4, 4), ("max", "max", 48)])
def test_the_narrowest_of_nested_groups_counts(inner: object, outer: object, expected: int, tmp_path: Path) -> None:
    limits = [size if size == "max" else int(str(size)) * GIB for size in (inner, outer)]
    files = version_2("job/step", limits[0]) | version_2("job", limits[1])
    assert available_memory(system(tmp_path, "0::/job/step\n", files)) == expected * GIB


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    files = version_1("job", 8 * GIB, used=7 * GIB, inactive=GIB) | version_1("", 1 << 62, used=0, inactive=0)
    assert available_memory(system(tmp_path, "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n", files)) == 2 * GIB


def test_in_a_container_that_does_not_see_its_own_path_the_top_counts(tmp_path: Path) -> None:
    files = version_1("", 4 * GIB, used=GIB, inactive=0)
    assert available_memory(system(tmp_path, "4:memory:/docker/abc\n", files)) == 3 * GIB


def test_a_group_past_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert available_memory(system(tmp_path, "0::/job\n", version_2("job", GIB, used=2 * GIB))) == 0


def test_this_process_has_memory() -> None:
    assert available_memory() > 0
