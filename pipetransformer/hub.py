"""One question to the hub, before processes start: without torch, and with a deadline that holds.

Its client asks again and again before it gives up, and its time-outs are those of one read: they count neither looking
up the name of the host nor what else the client fetches first.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TypeVar

VARIABLE = "HF_HUB_ETAG_TIMEOUT"
TIMEOUT_S = float(os.environ.get(VARIABLE, "3"))
"""Seconds for an answer. The variable is the hub's own, whose client would wait for 10 s."""
Answer = TypeVar("Answer")


class NoAnswer(Exception):
    """The hub has not answered in time."""


def ask(question: Callable[[], Answer], timeout_s: float = TIMEOUT_S) -> Answer:
    """Returns the answer to a question, which is left to itself at the deadline.

    Raises:
        NoAnswer: There was none in time.
        Exception: Whatever the question raises.
    """
    outcome: SimpleQueue[tuple[Answer | None, Exception | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcome.put((question(), None))
        except Exception as error:
            outcome.put((None, error))

    Thread(target=run, name="hub", daemon=True).start()  # a daemon: nobody waits for it at exit
    try:
        answer, error = outcome.get(timeout=timeout_s)
    except Empty:
        raise NoAnswer(f"no answer within {timeout_s:g} s; {VARIABLE}=<seconds> waits longer") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


def reason(error: Exception) -> str:
    """Returns the first sentence of an error of the hub's client, which may write several lines."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
