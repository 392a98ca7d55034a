"""A piece of mapped bytes that the processes of a node share."""

import errno
import fcntl
import mmap
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pipetransformer.autocache.free_memory import available_memory
from pipetransformer.errors import StoreFailed, UserError

GIB = 2**30
RESERVE_BYTES = GIB  # of a disk, left to others
UNFINISHED = ".unfinished"  # of a file that has not got all its space
DISK_REMEDY = "set `disk_gib` lower or `path` to another disk"


class SharedBuffer:
    """Bytes in memory or in a file.

    Make one with :meth:`memory`, :meth:`file` or :meth:`anonymous_file`; other processes :meth:`attach` it.

    Everything is allocated at the beginning, so that a lack of room is an error there and not a crash later.

    Attributes:
        address: What another process of the node attaches to, as long as the process that made it keeps it open.
        is_file: It lies in a file, not in memory.
        bytes: The bytes, mapped, uint8 (num_bytes,), zero at the beginning. Views of it keep the mapping alive after
            :meth:`close`. What is touched of a file counts as this process's memory, so rows are better read with
            :meth:`read`.
    """

    def __init__(self, descriptor: int, address: str, is_file: bool) -> None:
        self._descriptor, self.address, self.is_file = descriptor, address, is_file
        self.num_bytes = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, self.num_bytes)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._array = self.bytes.numpy()

    @classmethod
    def memory(cls, num_bytes: int) -> "SharedBuffer":
        """Shared memory without a name: nothing of it is left when its processes end, however they end.

        Raises:
            StoreFailed: The system has no such memory, or less than that is free.
        """
        if not hasattr(os, "memfd_create"):
            raise StoreFailed(errno.ENOSYS, f"{sys.platform} has no memfd_create to share memory: set `memory_gib`=0")
        _check_room("memory", num_bytes, available_memory(), "set `memory_gib` lower")
        descriptor = os.memfd_create("autocache")
        try:
            os.posix_fallocate(descriptor, 0, num_bytes)
            return cls(descriptor, _address(descriptor), is_file=False)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def file(cls, path: Path, num_bytes: int, reserve_bytes: int = RESERVE_BYTES) -> "SharedBuffer":
        """A new file; one that is there is replaced, and whoever has it open keeps its bytes.

        It has its name once it has its space: a process that is killed leaves all of it or none, and what it leaves
        under another name goes when the file is made again.

        Args:
            reserve_bytes: What has to stay free on the disk.

        Raises:
            StoreFailed: The disk has no room for it; nothing is left of the file.
        """
        _check_allocation()
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + UNFINISHED)
        for old in (path, unfinished):
            old.unlink(missing_ok=True)
        _check_room(str(path.parent), num_bytes, _free_disk(path.parent), DISK_REMEDY, reserve_bytes)
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
        """A file of which nothing is left when its processes end, however they end.

        Args:
            folder: Where it lies; if that is not there, in the nearest one above it.
            reserve_bytes: What has to stay free on the disk.

        Raises:
            StoreFailed: The disk has no room for it.
        """
        _check_allocation()
        folder = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.is_dir())
        _check_room(str(folder), num_bytes, _free_disk(folder), DISK_REMEDY, reserve_bytes)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            descriptor = os.dup(file.fileno())
        try:
            _allocate(descriptor, folder, num_bytes)
            return cls(descriptor, _address(descriptor), is_file=True)
        except OSError:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, address: str) -> "SharedBuffer":
        """The region of another process, or a file of an earlier one.

        Raises:
            OSError: Nothing is there, or it belongs to another user.
            UserError: It is empty.
        """
        descriptor = os.open(address, os.O_RDWR)
        try:
            is_memory = os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:")
            return cls(descriptor, address, is_file=not is_memory)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise
            raise UserError(f"{address} is empty; remove it or set `path` to another folder") from error

    def lock(self, shared: bool = False) -> None:
        """Keeps others from locking it until this process closes it or ends; once more, to change the kind of lock.

        Args:
            shared: Others may hold such a lock too, none of them a lock of its own.

        Raises:
            StoreFailed: Somebody has locked it.
        """
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            message = f"another run uses {self.address}: wait for its end or set `path` to another folder"
            raise StoreFailed(errno.EBUSY, message) from error

    def read(self, offset: int, out: np.ndarray) -> None:
        """Fills a contiguous array with the bytes from ``offset`` on.

        A file is read past its mapping: the system maps up to 2 MiB around a byte that is touched, and all of that
        counts as this process's memory from then on.

        Raises:
            StoreFailed: The file has become shorter, or cannot be read.
        """
        if self.is_file:
            self._transfer(os.preadv, offset, out)
        else:
            out.reshape(-1).view(np.uint8)[:] = self._array[offset : offset + out.nbytes]

    def write(self, offset: int, data: np.ndarray) -> None:
        """Puts a contiguous array in place of the bytes from ``offset`` on; the mapping sees it at once.

        Raises:
            StoreFailed: The file cannot be written.
        """
        if self.is_file:
            self._transfer(os.pwritev, offset, data)
        else:
            self._array[offset : offset + data.nbytes] = data.reshape(-1).view(np.uint8)

    def _transfer(self, call: Callable[[int, list[memoryview], int], int], offset: int, array: np.ndarray) -> None:
        left = array.reshape(-1).view(np.uint8).data
        while len(left):  # a call may do less than it is asked for
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
        """For messages: a path, which of a file without a name tells the folder."""
        return os.readlink(f"/proc/self/fd/{self._descriptor}")

    def unmap_pages(self) -> None:
        """Lets go of a file's pages that this process has touched: they no longer count as its memory.

        Nothing is lost, they stay with the system, which writes and drops them as it needs. Memory stays as it is.
        """
        if self.is_file:
            self._map.madvise(mmap.MADV_DONTNEED)

    def forget(self) -> None:
        """Has the system write a file and drop it from its memory, so that it is read from the disk again."""
        if self.is_file:
            self.unmap_pages()
            os.fsync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, unlink: bool = False) -> None:
        """Gives the region up, and with ``unlink`` the file; others keep what they have attached."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            del self._map, self.bytes, self._array
        if unlink and self.is_file:
            Path(self.address).unlink(missing_ok=True)


def _check_room(place: str, needed: int, free: int, remedy: str, reserve: int = 0) -> None:
    if needed > free - reserve:
        raise _no_room(errno.ENOSPC, place, needed, free, remedy, reserve)


def _address(descriptor: int) -> str:
    """Where another process opens what has no name."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _check_allocation() -> None:
    if not hasattr(os, "posix_fallocate"):
        raise StoreFailed(errno.ENOSYS, f"{sys.platform} has no posix_fallocate to take disk space: set `disk_gib`=0")


def _allocate(descriptor: int, folder: Path, num_bytes: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.ftruncate(descriptor, 0)  # so that what it did get counts as free
        raise _no_room(error.errno, str(folder), num_bytes, _free_disk(folder), DISK_REMEDY) from error


def _no_room(code: int | None, place: str, needed: int, free: int, remedy: str, reserve: int = 0) -> StoreFailed:
    kept = f", {reserve / GIB:.3f} of them kept for others" if reserve else ""
    return StoreFailed(
        code or errno.ENOSPC,
        f"the cache needs {needed / GIB:.3f} GiB of {place}, which has {free / GIB:.3f} GiB free{kept}: {remedy}",
    )


def _free_disk(folder: Path) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize
