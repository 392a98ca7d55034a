"""A signal ends the run even when it comes while an exception would be lost."""

import os
import signal
from collections.abc import Iterator

import pytest

from pipetransformer.training import interrupt as stop


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop.listen()
    yield
    stop.listen()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_interrupts_and_later_ones_do_not(number: signal.Signals) -> None:
    stop.check()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)


def test_a_signal_during_a_finalizer_is_not_lost() -> None:
    class Finalized:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    Finalized()
    with pytest.raises(KeyboardInterrupt):
        stop.check()
