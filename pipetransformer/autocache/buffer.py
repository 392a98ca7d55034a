"""Bytes in memory or in a file that the processes of a node share; and how much memory there is.

A process may take what the system has available, or less where its control group has a limit: containers and
schedulers put processes into such groups (cgroups, version 1 or 2), and the kernel kills what exceeds the limit.
"""

import errno
import fcntl
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path

import numpy as np
import torch

from pipetransformer.errors import StoreFailed, UserError

GIB = 2**30
RESERVE_BYTES = GIB  # of a disk, left to others
UNFINISHED = ".unfinished"  # suffix of a file whose space is not allocated yet
DISK_REMEDY = "set `disk_gib` lower or `path` to another disk"
LIMIT_FILES = {  # of a control group: limit, bytes in use, and which of these the kernel would evict
    "memory.max": ("memory.current", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
}


class SharedBuffer:
    """Bytes in memory or in a file.

    Made by :meth:`memory`, :meth:`file` or :meth:`anonymous_file`; other processes :meth:`attach`. All bytes are
    allocated at the beginning, so that a lack of space is an error there and not a crash later.

    Attributes:
        address: Path at which other processes of the node attach, as long as the process that made it keeps it open.
        is_file: The bytes are in a file, not in memory.
        bytes: The mapped bytes, uint8 (num_bytes,), zero at the beginning. Views keep the mapping alive after
            :meth:`close`. Pages of a file that are touched count as memory of this process: use :meth:`read` for rows.
    """

    def __init__(self, descriptor: int, address: str, is_file: bool, reads_only: bool = False) -> None:
        self._descriptor, self.address, self.is_file = descriptor, address, is_file
        self.num_bytes = os.fstat(descriptor).st_size
        # flags that a reader turns off are off for this process alone: its pages of the file are copied on write
        self._map = mmap.mmap(descriptor, self.num_bytes, access=mmap.ACCESS_COPY if reads_only else mmap.ACCESS_WRITE)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._array = self.bytes.numpy()

    @classmethod
    def memory(cls, num_bytes: int) -> "SharedBuffer":
        """Allocates anonymous shared memory. Nothing of it is left when its processes end, however they end.

        Raises:
            StoreFailed: The system has no such memory, or less than that is free.
        """
        if not hasattr(os, "memfd_create"):
            raise StoreFailed(errno.ENOSYS, f"{sys.platform} has no memfd_create to share memory: set `memory_gib`=0")
        _check_space("memory", num_bytes, available_host_memory(), "set `memory_gib` lower")
        descriptor = os.memfd_create("autocache")
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(descriptor, _address(descriptor), is_file=False)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def file(cls, path: Path, num_bytes: int, reserve_bytes: int = RESERVE_BYTES) -> "SharedBuffer":
        """Makes a new file. An existing one is replaced; processes that have it open keep its bytes.

        The file gets its name after its space, so that a killed process leaves the whole file or none. A leftover
        under the temporary name is removed when the file is made again.

        Args:
            path: Name of the file.
            num_bytes: Its size.
            reserve_bytes: Bytes that have to stay free on the disk.

        Raises:
            StoreFailed: The disk has too little space; nothing is left of the file.
        """
        _check_allocation()
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + UNFINISHED)
        for old in (path, unfinished):
            old.unlink(missing_ok=True)
        _check_space(str(path.parent), num_bytes, _free_disk(path.parent), DISK_REMEDY, reserve_bytes)
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _allocate(descriptor, path.parent, num_bytes)
            unfinished.replace(path)
            return cls(descriptor, str(path.absolute()), is_file=True)
        except OSError:
            os.close(descriptor)
            for made in (path, unfinished):
                made.unlink(missing_ok=True)
            raise

    @classmethod
    def anonymous_file(cls, folder: Path, num_bytes: int, reserve_bytes: int = RESERVE_BYTES) -> "SharedBuffer":
        """Makes a file without a name. Nothing of it is left when its processes end, however they end.

        Args:
            folder: Its folder; if that does not exist, the nearest existing parent.
            num_bytes: Its size.
            reserve_bytes: Bytes that have to stay free on the disk.

        Raises:
            StoreFailed: The disk has too little space.
        """
        _check_allocation()
        folder = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
        _check_space(str(folder), num_bytes, _free_disk(folder), DISK_REMEDY, reserve_bytes)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            descriptor = os.dup(file.fileno())
        try:
            _allocate(descriptor, folder, num_bytes)
            return cls(descriptor, _address(descriptor), is_file=True)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, address: str, reads_only: bool = False) -> "SharedBuffer":
        """Opens the buffer of another process, or a file of an earlier one.

        Args:
            address: Of the buffer.
            reads_only: Nothing that this process does changes the bytes of the others.

        Raises:
            OSError: Nothing is there, or it belongs to another user.
            UserError: It is empty.
        """
        descriptor = os.open(address, os.O_RDONLY if reads_only else os.O_RDWR)
        try:
            is_memory = os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")
            return cls(descriptor, address, not is_memory, reads_only)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise
            raise UserError(f"{address} is empty; remove it or set `path` to another folder") from error

    def lock(self, shared: bool = False) -> None:
        """Locks the file until this process closes it or ends. A second call changes the kind of lock.

        Args:
            shared: Takes a shared lock in place of an exclusive one.

        Raises:
            StoreFailed: Another process holds a lock that excludes this one.
        """
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"another run uses {self.address}: wait for its end or set `path` to another folder"
            raise StoreFailed(errno.EBUSY, message) from error

    def read(self, offset: int, out: np.ndarray) -> None:
        """Fills a contiguous array with the bytes from ``offset`` on.

        A file is not read through its mapping: the kernel maps up to 2 MiB around a byte that is touched, and all of
        that counts as memory of this process from then on.

        Raises:
            StoreFailed: The file has become shorter, or cannot be read.
        """
        if self.is_file:
            self._transfer(os.preadv, offset, out)
        else:
            out.reshape(-1).view(np.uint8)[:] = self._array[offset : offset + out.nbytes]

    def write(self, offset: int, data: np.ndarray) -> None:
        """Overwrites the bytes from ``offset`` on with a contiguous array; the mapping shows them at once.

        Raises:
            StoreFailed: The file cannot be written.
        """
        if self.is_file:
            self._transfer(os.pwritev, offset, data)
        else:
            self._array[offset : offset + data.nbytes] = data.reshape(-1).view(np.uint8)

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], offset: int, array: np.ndarray) -> None:
        left = array.reshape(-1).view(np.uint8).data
        while len(left):  # a call may transfer less than asked
            try:
                num_bytes = call(self._descriptor, [left], offset)
            except OSError as error:
                remedy = "set `disk_gib`=0 or `path` to another disk"
                raise StoreFailed(error.errno, f"{self._name} fails: {error.strerror}; {remedy}") from error
            if num_bytes == 0:
                raise StoreFailed(errno.EIO, f"{self._name} ends at byte {offset} of {self.num_bytes}")
            left, offset = left[num_bytes:], offset + num_bytes

    @property
    def _name(self) -> str:
        """Path for messages; for a file without a name it tells the folder."""
        return os.readlink(f"/proc/self/fd/{self._descriptor}")

    def unmap_pages(self) -> None:
        """Unmaps the pages of a file that this process has touched, so that they no longer count as its memory.

        The bytes stay in the page cache, which the kernel writes back and evicts. Anonymous memory is left as it is.
        """
        if self.is_file:
            self._map.madvise(mmap.MADV_DONTNEED)

    def drop_page_cache(self) -> None:
        """Flushes the file and evicts it from the page cache."""
        if self.is_file:
            self.unmap_pages()
            os.fsync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, unlink: bool = False) -> None:
        """Closes the buffer, and with ``unlink`` removes the file; other processes keep what they have attached."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            del self._map, self.bytes, self._array
        if unlink and self.is_file:
            Path(self.address).unlink(missing_ok=True)


def _check_space(where: str, needed: int, free: int, remedy: str, reserve: int = 0) -> None:
    if needed > free - reserve:
        raise _out_of_space(errno.ENOSPC, where, needed, free, remedy, reserve)


def _address(descriptor: int) -> str:
    """Returns the path at which other processes open a buffer without a name."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _check_allocation() -> None:
    if not hasattr(os, "posix_fallocate"):
        raise StoreFailed(errno.ENOSYS, f"{sys.platform} has no posix_fallocate to take disk space: set `disk_gib`=0")


def _allocate(descriptor: int, folder: Path, num_bytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.ftruncate(descriptor, 0)  # the part that was allocated counts as free again
        raise _out_of_space(error.errno, str(folder), num_bytes, _free_disk(folder), DISK_REMEDY) from error


def _out_of_space(code: int | None, where: str, needed: int, free: int, remedy: str, reserve: int = 0) -> StoreFailed:
    kept = f", {reserve / GIB:.3f} of them kept for others" if reserve else ""
    return StoreFailed(
        code or errno.ENOSPC,
        f"the cache needs {needed / GIB:.3f} GiB of {where}, which has {free / GIB:.3f} GiB free{kept}: {remedy}",
    )


def _free_disk(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def available_host_memory(root: Path = Path("/")) -> int:
    """Returns the bytes that this process can take before the kernel swaps or kills.

    Args:
        root: Parent of ``proc`` and ``sys``.
    """
    of_the_system = _numbers(root / "proc/meminfo")["MemAvailable:"] * 1024
    return max(0, int(min([of_the_system, *map(_left_in_group, _control_groups(root))])))


def _control_groups(root: Path) -> Iterator[Path]:
    """Yields the folders of the groups that count this process's memory, from the innermost outwards."""
    groups = root / "proc/self/cgroup"
    for line in filter(None, groups.read_text().splitlines() if groups.exists() else ()):
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):  # version 2, version 1
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            own = top / path.lstrip("/")
            yield from [own, *own.parents][: len(own.parts) - len(top.parts) + 1]


def _left_in_group(folder: Path) -> float:
    for limit, (used, evictable) in LIMIT_FILES.items():
        text = (folder / limit).read_text().strip() if (folder / limit).exists() else "max"
        if text != "max":
            taken = int((folder / used).read_text()) - _numbers(folder / "memory.stat").get(evictable, 0)
            return int(text) - taken
    return inf


def _numbers(file: Path) -> dict[str, int]:
    """Reads a file whose lines begin with a name and a number."""
    words = (line.split() for line in file.read_text().splitlines())
    return {name: int(number) for name, number, *_ in filter(None, words)}
