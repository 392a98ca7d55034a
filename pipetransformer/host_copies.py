"""Copies between host and device that let the host go on: through pinned memory, and beside what the device computes.

From pageable memory a GPU copies only while the host waits. From pinned memory it copies by itself, in the order of a
stream; an event tells when a copy has ended::

    host      read batch 8 ─► start its copy ─► go on            take batch 8
    stream of copies          [──── batch 8 ────]
    stream of kernels         [──── step 7 ────────────] wait for the event [─── step 8 ───

Where the device is the CPU, nothing is pinned, a copy is a plain copy or the tensor itself, and nothing is waited for.
"""

from functools import cache

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a tensor on a device. Later work of the device sees it whole; the host does not wait.

    Args:
        tensor: May be anywhere; from host memory it goes through pinned memory.
        device: The target.
        dtype: Its type there; ``None`` keeps it. A GPU converts by itself, so that no wider type is copied.
    """
    if device.type == "cuda" and not tensor.is_cuda:
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        tensor = pinned.to(device, non_blocking=True)  # torch keeps the pinned memory until the copy has ended
    return tensor.to(device, dtype or tensor.dtype)


def empty_for(device: torch.device, size: int, dtype: torch.dtype) -> Tensor:
    """Allocates host memory (size,), pinned where a GPU copies it."""
    return torch.empty(size, dtype=dtype, pin_memory=device.type == "cuda")


def trim_pinned() -> None:
    """Gives pinned memory that is free back to the system; torch keeps it for the next use."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)  # earlier releases of torch have none
    if torch.cuda.is_initialized() and empty is not None:
        empty()


class HostCopies:
    """Copies of a device's tensors to host memory, all under way at a time, with one wait at the end."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_pending = device, False

    def copy(self, tensor: Tensor) -> Tensor:
        """Returns a contiguous copy in host memory, whose numbers are there after :meth:`wait`."""
        tensor = tensor.detach()
        if not tensor.is_cuda:
            return tensor.to("cpu", copy=True).contiguous()
        self._is_pending = True
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def move(self, tensor: Tensor) -> Tensor:
        """Returns a tensor of the host itself, and of any other a copy."""
        return self.copy(tensor) if tensor.is_cuda else tensor

    def wait(self) -> None:
        """Waits until all copies have ended."""
        if self._is_pending:
            torch.cuda.current_stream(self._device).synchronize()
            self._is_pending = False


class Upload:
    """A tensor of host memory on its way to a device.

    Args:
        tensor: In host memory, pinned where the device is a GPU. It stays as it is until the copy has ended.
        device: The target.
    """

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self._tensor: Tensor | None = tensor
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            with torch.cuda.stream(copy_stream(device, "up")):  # also in a thread that has no device of its own
                self._tensor = tensor.to(device, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()

    def take(self) -> Tensor:
        """Hands it over on the device, once. What the device does from here on waits for it; the host does not."""
        tensor, self._tensor = self._tensor, None  # what lives on to wait for the host memory holds no device memory
        assert tensor is not None, "it has been taken"
        if self._event is not None:
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(self._event)
            tensor.record_stream(stream)  # its memory was given out for the other stream
        return tensor

    def drop(self) -> None:
        """Frees its memory of the device, which nobody takes."""
        self._tensor = None

    def wait(self) -> None:
        """Waits until the host memory may be written again."""
        if self._event is not None:
            self._event.synchronize()


class Fetch:
    """A copy from host memory into a tensor of the device, beside what the device computes from here on.

    Unlike :class:`Upload` it fills memory of the current stream, which is taken again as soon as it is let go: where
    memory is short, none of it waits for another stream.

    Args:
        source: In host memory, pinned where the device is a GPU. It stays as it is until the copy has ended.
        target: Filled.
    """

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._target, self._event = target, None
        if not target.is_cuda:
            target.copy_(source)
            return
        copies = copy_stream(target.device, "up")
        copies.wait_stream(torch.cuda.current_stream(target.device))  # whose kernels may still read that memory
        with torch.cuda.stream(copies):
            target.copy_(source, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def take(self) -> Tensor:
        """Returns the target. Work that the device is given from here on waits for the copy; the host does not."""
        if self._event is not None:
            torch.cuda.current_stream(self._target.device).wait_event(self._event)
        return self._target


class Download:
    """The numbers of a tensor on their way to the host.

    Reading them waits until they are there, and not for what the device was given after them.

    Args:
        tensor: Its numbers where the current stream has got to count.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._event = tensor.detach(), None
        if tensor.is_cuda:
            copies = HostCopies(tensor.device)
            self._source, self._tensor = tensor, copies.copy(tensor)
            self._event = torch.cuda.Event()
            self._event.record()

    def values(self) -> list[float]:
        """Waits for the numbers, and returns them."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.tolist()


@cache
def copy_stream(device: torch.device, direction: str) -> torch.cuda.Stream:
    """Returns the stream of a GPU on which copies ``up`` or ``down`` run beside its kernels."""
    return torch.cuda.Stream(device)
