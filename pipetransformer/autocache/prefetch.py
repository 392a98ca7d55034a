"""Reads what comes next in a thread, while the present batch is trained on."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class Prefetcher(Generic[Request, Result]):
    """Answers requests in a known order, a few ahead of the one that asks.

    Args:
        read: Answers one request; runs in the thread, one call at a time.
        requests: In the order in which they will be asked for.
        depth: Answers under way or ready at most, besides the one that was taken.
    """

    def __init__(self, read: Callable[[Request], Result], requests: Iterator[Request], depth: int) -> None:
        self._read, self._requests = read, requests
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-prefetch")
        self._coming: deque[tuple[Request, Future[Result]]] = deque()
        for _ in range(depth):
            self._ask_ahead()

    def _ask_ahead(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._coming.append((request, self._thread.submit(self._read, request)))

    @property
    def next_request(self) -> Request | None:
        """What :meth:`take` will answer; ``None`` at the end."""
        return self._coming[0][0] if self._coming else None

    def take(self) -> Result:
        """The answer to the next request; an error of the thread comes up here."""
        _, future = self._coming.popleft()
        result = future.result()
        self._ask_ahead()
        return result

    def close(self) -> None:
        """Ends the thread, after the answer that it is at."""
        self._coming.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)
