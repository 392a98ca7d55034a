"""Signals ask while steps run, and stop at once otherwise."""

import os
import signal
from collections.abc import Iterator
from unittest import mock

import pytest

from pipetransformer.training import interrupt


@pytest.fixture(autouse=True)
def listening() -> Iterator[None]:
    before = {each: signal.getsignal(each) for each in interrupt.SIGNALS}
    interrupt.listen()
    yield
    interrupt.listen()
    for each, handler in before.items():
        signal.signal(each, handler)


def send(number: signal.Signals, at_s: float = 0.0) -> None:
    with mock.patch("time.monotonic", return_value=at_s):
        os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_a_signal_stops_at_once_where_no_step_runs(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        send(number)
    assert interrupt.requested() == number
    send(number, 10.0)  # the clean-up is not disturbed


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_the_first_signal_asks_while_steps_run_and_the_second_stops_at_once(number: signal.Signals) -> None:
    with interrupt.deferred():
        assert interrupt.requested() is None
        send(number)
        assert interrupt.requested() == number
        send(number, 0.5 * interrupt.SAME_S)  # handed on by the launcher
        with pytest.raises(KeyboardInterrupt):
            send(number, 2 * interrupt.SAME_S)
