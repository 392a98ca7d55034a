import time

import pytest
import torch
from torch import nn

from pipetransformer.runtime.tracing import NOTHING, Recorder

LAYER = nn.Linear(1, 1)


def test_outside_a_recording_nothing_happens() -> None:
    recorder = Recorder(torch.device("cpu"))
    with recorder.recording():
        pass
    assert recorder.span("forward") is NOTHING
    assert recorder.backward(0, LAYER, all_reduces=True) is NOTHING
    assert recorder.extending(abs)(-1) == 1


def test_what_is_run_is_noted_with_its_place_in_order() -> None:
    recorder = Recorder(torch.device("cpu"))
    with recorder.recording() as spans:
        with recorder.span("forward", 1, 2):
            pass
        with recorder.backward(2, LAYER, all_reduces=True):
            pass
        with recorder.span("optimizer"):
            pass
    assert [(span.kind, span.stage, span.microbatch) for span in spans] == [
        ("forward", 1, 2),
        ("backward", 0, 2),
        ("optimizer", 0, 0),
    ]
    times = [moment for span in spans for moment in (span.start_s, span.end_s)]
    assert times == sorted(times)


def test_the_loss_counts_as_part_of_the_forward_pass() -> None:
    recorder = Recorder(torch.device("cpu"))
    loss = recorder.extending(time.perf_counter)
    with recorder.recording() as spans:
        with recorder.span("forward"):
            pass
        end_s = loss()
    assert [span.kind for span in spans] == ["forward"]
    assert spans[0].end_s >= end_s


def test_a_step_that_fails_ends_the_recording() -> None:
    recorder = Recorder(torch.device("cpu"))
    with pytest.raises(ArithmeticError), recorder.recording():
        raise ArithmeticError
    assert recorder.span("forward") is NOTHING
