"""Bytes that processes share are there from the beginning, and gone at the end; a control group limits the memory."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.stores import bytes_there, in_other_process

from pipetransformer.autocache.buffer import GIB, SharedBuffer, available_host_memory

MEMINFO = f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {48 * GIB // 1024} kB\nHugePages_Total: 0\n"


def test_another_process_sees_the_same_memory() -> None:
    buffer = SharedBuffer.memory(5000)
    buffer.bytes[:] = torch.arange(5000) % 251
    assert in_other_process(bytes_there, buffer.address) == buffer.bytes.numpy().tobytes()
    buffer.close()


def test_another_opener_of_a_file_sees_the_same_bytes(tmp_path: Path) -> None:
    here = SharedBuffer.file(tmp_path / "new" / "a", 100)
    there = SharedBuffer.attach(here.address)
    here.bytes[:] = 7
    assert torch.equal(there.bytes, torch.full((100,), 7, dtype=torch.uint8))
    for buffer in (here, there):
        buffer.close()


def test_memory_has_no_name_and_leaves_nothing() -> None:
    before = set(os.listdir("/proc/self/fd"))
    buffer = SharedBuffer.memory(100)
    address = Path(buffer.address)
    assert os.stat(address).st_nlink == 0
    buffer.close()
    assert not address.exists()
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_without_a_name_is_seen_by_others_and_leaves_nothing(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    buffer = SharedBuffer.anonymous_file(tmp_path / "not" / "there", 100)
    buffer.bytes[:] = 7
    assert in_other_process(bytes_there, buffer.address) == bytes([7] * 100)
    there = SharedBuffer.attach(buffer.address)
    assert buffer.is_file
    assert there.is_file
    assert os.stat(buffer.address).st_dev == tmp_path.stat().st_dev
    for each in (there, buffer):
        each.close()
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("unlink", [False, True])
def test_a_file_goes_only_when_asked(unlink: bool, tmp_path: Path) -> None:
    SharedBuffer.file(tmp_path / "a", 100).close(unlink=unlink)
    assert (tmp_path / "a").exists() is not unlink


def test_closing_leaves_what_is_still_read_alone(tmp_path: Path) -> None:
    buffer = SharedBuffer.file(tmp_path / "a", 100)
    buffer.bytes[:] = 3
    kept = buffer.bytes
    buffer.close(unlink=True)
    assert int(kept.sum()) == 300


def test_a_new_file_leaves_the_bytes_of_one_that_is_open_alone(tmp_path: Path) -> None:
    old = SharedBuffer.file(tmp_path / "a", 100)
    old.bytes[:] = 3
    new = SharedBuffer.file(tmp_path / "a", 50)
    assert int(new.bytes.sum()) == 0
    assert int(old.bytes.sum()) == 300
    for buffer in (old, new):
        buffer.close()


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_fails_is_named_with_a_remedy(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    buffer = SharedBuffer.file(tmp_path / "a", 100)
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match=r"a fails: Input/output error; set disk_gib=0 or path") as caught:
        (buffer.read if name == "preadv" else buffer.write)(0, np.zeros(10, dtype=np.uint8))
    assert caught.value.errno == errno.EIO
    buffer.close()


@pytest.mark.parametrize("is_file", [False, True])
def test_bytes_are_read_and_written_from_any_place_on(
    is_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("preadv", "pwritev"):  # the system may do less than it is asked for
        whole = getattr(os, name)
        monkeypatch.setattr(os, name, lambda file, views, offset, call=whole: call(file, [views[0][:7]], offset))
    buffer = SharedBuffer.file(tmp_path / "a", 100) if is_file else SharedBuffer.memory(100)
    data = np.arange(60, dtype=np.uint8).reshape(5, 12)
    buffer.write(30, data)
    out = np.zeros((2, 12), dtype=np.uint8)
    buffer.read(42, out)
    assert np.array_equal(out, data[1:3])
    assert buffer.bytes.tolist() == [0] * 30 + list(range(60)) + [0] * 10, "the mapping sees it"
    buffer.close()


def test_a_file_that_has_become_shorter_is_told(tmp_path: Path) -> None:
    buffer = SharedBuffer.file(tmp_path / "a", 100)
    os.truncate(tmp_path / "a", 50)
    with pytest.raises(OSError, match=r"/a ends at byte 50 of 100"):
        buffer.read(40, np.empty(20, dtype=np.uint8))
    buffer.close()


def test_unmapped_pages_keep_their_bytes(tmp_path: Path) -> None:
    buffer = SharedBuffer.file(tmp_path / "a", 10000)
    buffer.bytes[:] = 3
    buffer.unmap_pages()
    assert int(buffer.bytes.sum(dtype=torch.int64)) == 30000
    buffer.close()


def test_a_disk_that_is_too_small_is_refused_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=4 * GIB // 4096, f_frsize=4096))
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("it wrote"))
    message = rf"3\.500 GiB of {tmp_path}, which has 4\.000 GiB free, 1\.000 of them kept .*: set disk_gib lower"
    with pytest.raises(OSError, match=message) as raised:
        SharedBuffer.file(tmp_path / "a", 3 * GIB + GIB // 2)
    assert raised.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(descriptor: int, *_: int) -> None:
        os.write(descriptor, b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    def free_space(_: Path) -> SimpleNamespace:
        empty = sum(path.stat().st_size for path in tmp_path.iterdir()) == 0
        return SimpleNamespace(f_bavail=2 * GIB if empty else 0, f_frsize=1)

    monkeypatch.setattr(os, "posix_fallocate", fill_up)
    monkeypatch.setattr(os, "statvfs", free_space)
    open_before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=rf"0\.500 GiB of {tmp_path}, which has 2\.000 GiB free: set disk_gib") as raised:
        SharedBuffer.file(tmp_path / "a", GIB // 2)
    assert raised.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == open_before


def test_a_file_has_its_name_once_it_has_its_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt  # which nothing tidies up after, as after a kill

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", die)
        with pytest.raises(KeyboardInterrupt):
            SharedBuffer.file(tmp_path / "a", 100)
    assert not (tmp_path / "a").exists()
    SharedBuffer.file(tmp_path / "a", 100).close()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_empty_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    open_before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(ValueError, match=rf"{tmp_path}/a is empty; remove it"):
        SharedBuffer.attach(str(tmp_path / "a"))
    assert set(os.listdir("/proc/self/fd")) == open_before


def test_a_shared_lock_keeps_out_those_who_want_it_alone(tmp_path: Path) -> None:
    buffers = [SharedBuffer.file(tmp_path / "a", 100), *(SharedBuffer.attach(str(tmp_path / "a")) for _ in range(2))]
    buffers[0].lock()
    with pytest.raises(OSError, match="another run uses"):
        buffers[1].lock(shared=True)
    for buffer in buffers[:2]:
        buffer.lock(shared=True)
    with pytest.raises(OSError, match="another run uses"):
        buffers[2].lock()
    for buffer in buffers:
        buffer.close()


def test_space_is_taken_at_once(tmp_path: Path) -> None:
    for buffer in (SharedBuffer.file(tmp_path / "a", 2**20), SharedBuffer.memory(2**20)):
        assert os.stat(buffer.address).st_blocks * 512 >= 2**20
        buffer.close()


def test_more_memory_than_is_free_is_refused() -> None:
    with pytest.raises(OSError, match=r"needs 1048576\.000 GiB of memory, which has .* GiB free: set memory_gib"):
        SharedBuffer.memory(2**20 * GIB)


def test_a_system_without_shared_memory_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match=r"set memory_gib=0"):
        SharedBuffer.memory(100)


def test_a_locked_file_is_not_locked_again_until_it_is_closed(tmp_path: Path) -> None:
    first = SharedBuffer.file(tmp_path / "a", 100)
    first.lock()
    second = SharedBuffer.attach(first.address)
    with pytest.raises(OSError, match=r"another run uses .*/a: wait for its end or set path"):
        second.lock()
    first.close()
    second.lock()
    second.close()


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
    assert available_host_memory(system(tmp_path, "0::/\n", {})) == 48 * GIB
    (tmp_path / "proc/self/cgroup").unlink()
    assert available_host_memory(tmp_path) == 48 * GIB


def test_what_a_group_has_left_counts_with_the_pages_that_the_system_would_drop(tmp_path: Path) -> None:
    files = version_2("job/step", 8 * GIB, used=6 * GIB, inactive=GIB)
    assert available_host_memory(system(tmp_path, "0::/job/step\n", files)) == 3 * GIB


@pytest.mark.parametrize(("inner", "outer", "expected"), [("max", 4, 4), (2, 4, 2), (8, 4, 4), ("max", "max", 48)])
def test_the_narrowest_of_nested_groups_counts(inner: object, outer: object, expected: int, tmp_path: Path) -> None:
    limits = [size if size == "max" else int(str(size)) * GIB for size in (inner, outer)]
    files = version_2("job/step", limits[0]) | version_2("job", limits[1])
    assert available_host_memory(system(tmp_path, "0::/job/step\n", files)) == expected * GIB


def test_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    files = version_1("job", 8 * GIB, used=7 * GIB, inactive=GIB) | version_1("", 1 << 62, used=0, inactive=0)
    assert available_host_memory(system(tmp_path, "5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n", files)) == 2 * GIB


def test_in_a_container_that_does_not_see_its_own_path_the_top_counts(tmp_path: Path) -> None:
    files = version_1("", 4 * GIB, used=GIB, inactive=0)
    assert available_host_memory(system(tmp_path, "4:memory:/docker/abc\n", files)) == 3 * GIB


def test_a_group_past_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert available_host_memory(system(tmp_path, "0::/job\n", version_2("job", GIB, used=2 * GIB))) == 0


def test_this_process_has_memory() -> None:
    assert available_host_memory() > 0
