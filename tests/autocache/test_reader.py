"""Answers come in order, ahead of time, and errors reach the consumer."""

import threading
from unittest import mock

import pytest
import torch

from pipetransformer.autocache.reader import FeatureReader, Prefetcher


def test_answers_come_in_the_order_of_the_requests() -> None:
    prefetcher = Prefetcher(lambda n: n * n, iter(range(1, 6)), depth=2)
    assert [prefetcher.take() for _ in range(5)] == [1, 4, 9, 16, 25]
    assert prefetcher.next_request is None
    prefetcher.close()


def test_it_reads_ahead_and_no_further_than_its_depth() -> None:
    read: list[int] = []
    second = threading.Event()

    def note(n: int) -> int:
        read.append(n)
        if n == 2:
            second.set()
        return n

    prefetcher = Prefetcher(note, iter(range(1, 9)), depth=2)
    assert second.wait(timeout=60), "the second is read though nobody has asked for the first"
    assert prefetcher.next_request == 1
    prefetcher.close()
    assert read == [1, 2]


def test_it_reads_in_another_thread() -> None:
    prefetcher = Prefetcher(lambda _: threading.get_ident(), iter([0]), depth=1)
    assert prefetcher.take() != threading.get_ident()
    prefetcher.close()


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda", 1)], ids=str)
def test_its_thread_is_on_the_device_of_the_reader(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on the first GPU, where copies for another one would leave a context behind."""
    chosen: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda each: chosen.append((each, threading.get_ident())))
    monkeypatch.setattr(FeatureReader, "_fetch", lambda *_: threading.get_ident())
    reader = FeatureReader()
    reader.device = device
    reader.prefetch(iter([mock.sentinel.request]))
    assert reader._prefetcher is not None
    thread = reader._prefetcher.take()
    reader.stop_prefetching()
    assert chosen == [(device, thread)] * (device.type == "cuda")


def test_an_error_reaches_the_one_who_takes() -> None:
    def fail(_: int) -> int:
        raise OSError("the disk is gone")

    prefetcher = Prefetcher(fail, iter([1]), depth=1)
    with pytest.raises(OSError, match="the disk is gone"):
        prefetcher.take()
    prefetcher.close()


def test_closing_ends_the_thread() -> None:
    before = threading.active_count()
    prefetcher = Prefetcher(lambda n: n, iter(range(100)), depth=3)
    prefetcher.take()
    prefetcher.close()
    assert threading.active_count() == before
