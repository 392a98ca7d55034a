"""A step is reported with the time that it waited for its input, and the run with how many steps hardly do."""

from unittest import mock

import pytest
from support.plans import plan

from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.step_log import StepLog


def log() -> tuple[StepLog, mock.Mock]:
    report = mock.Mock(spec=Reporter)
    runtime = mock.Mock(spec=ElasticRuntime, plan=plan(0, 0, [7], 1, 1), precision=PRECISIONS["float32"])
    return StepLog(report, runtime, mock.Mock(steps_per_epoch=10)), report


def test_a_step_says_how_long_it_waited_and_the_run_how_many_found_their_input_ready() -> None:
    steps, report = log()
    result = mock.Mock(loss=1.0, total_norm=2.0)
    with mock.patch("torch.distributed.get_world_size", return_value=3):
        for number, wait_s in enumerate((0.5, 0.0, 0.04, 0.06), 1):
            steps.note(number, result, 0.1, 8, seconds=1.0, wait_s=0.0, input_wait_s=wait_s)
            steps.flush()
    assert report.write.call_args.kwargs["num_idle_devices"] == 2
    assert [call.kwargs["input_wait_seconds"] for call in report.write.call_args_list] == [0.5, 0.0, 0.04, 0.06]
    assert "cache_wait_seconds" not in report.write.call_args.kwargs
    assert steps.input_figures() == {"wait_seconds": pytest.approx(0.6), "ready_fraction": 0.5}


def test_the_waits_of_a_resumed_run_are_added_to_those_before() -> None:
    earlier, later = log()[0], log()[0]
    result = mock.Mock(loss=1.0, total_norm=2.0)
    with mock.patch("torch.distributed.get_world_size", return_value=1):
        earlier.note(1, result, 0.1, 8, seconds=1.0, wait_s=0.0, input_wait_s=0.5)
        later.load_state_dict(earlier.state_dict())
        later.note(2, result, 0.1, 8, seconds=1.0, wait_s=0.0, input_wait_s=0.0)
    assert later.input_figures() == {"wait_seconds": 0.5, "ready_fraction": 0.5}


def test_a_run_without_a_step_has_no_share_of_them() -> None:
    assert log()[0].input_figures() == {"wait_seconds": 0.0, "ready_fraction": None}
