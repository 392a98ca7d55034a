"""TensorBoard has the charts that Weights & Biases has, each step once."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import TINY, loaded, run_job
from support.pool import Pool
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipetransformer.config.arguments import read_arguments
from pipetransformer.errors import UserError
from pipetransformer.report import tensorboard
from pipetransformer.report.charts import charts
from pipetransformer.report.reporter import Reporter
from pipetransformer.report.sinks import EventName, NullSink, Sinks
from pipetransformer.report.tensorboard import TensorBoardLogger, WandbAndTensorBoard
from pipetransformer.report.wandb import WandbLogger

Events = list[tuple[EventName, dict[str, Any]]]


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps and values of each chart, as TensorBoard shows them."""
    log = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {tag: [(each.step, each.value) for each in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def write(folder: Path, events: Iterable[tuple[EventName, dict[str, Any]]]) -> None:
    sink = TensorBoardLogger(max_share=None).open(folder, {"seed": 1})
    for event, values in events:
        sink.write(event, values)
    sink.close()


def test_every_number_arrives_under_the_name_that_weights_and_biases_has(events: Events, tmp_path: Path) -> None:
    write(tmp_path, events)
    found = read(tmp_path)
    expected = {name for event in events for name, value in charts(*event).items() if isinstance(value, int | float)}
    assert found.keys() == expected
    assert {"train/loss", "test/accuracy", "freeze/num_frozen", "transition/seconds"} <= expected
    assert found["topology/num_idle_devices"] == [(step, 0) for step in range(1, 25)]
    assert found["result/speedup_vs_static"] == [(24, pytest.approx(2.04))]
    assert found["result/share_of_limit"] == [(24, pytest.approx(0.843))]
    assert found["train/loss"][1] == (2, pytest.approx(1.15))
    assert [step for step, _ in found["train/loss"]] == list(range(1, 25))
    assert [step for step, _ in found["test/accuracy"]] == [8, 16, 24]


def test_a_resumed_run_goes_on_in_the_same_log_without_doubled_steps(events: Events, tmp_path: Path) -> None:
    start, steps = events[1], [event for event in events if event[0] == "step"]
    assert start[0] == "start"
    write(tmp_path, [start, *steps[:14]])
    again = [(name, values | {"loss": 100.0 + values["step"]}) for name, values in steps[12:]]
    write(tmp_path, [("resume", start[1] | {"step": 12}), *again])
    losses = read(tmp_path)["train/loss"]
    assert [step for step, _ in losses] == list(range(1, 25))
    assert [value > 100 for _, value in losses] == [False] * 12 + [True] * 12


def test_the_summary_of_a_run_that_was_the_best_static_plan_tells_no_gain(events: Events, tmp_path: Path) -> None:
    write(tmp_path, [*events[:-1], ("summary", events[-1][1] | {"is_static": True})])
    log = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    (told,) = log.Tensors("summary/text_summary")
    assert b"is_static" in told.tensor_proto.string_val[0]
    assert b"speedup_vs_static" not in told.tensor_proto.string_val[0]


def test_steps_that_the_guard_has_taken_back_are_hidden(events: Events, tmp_path: Path) -> None:
    start, steps = events[1], [event for event in events if event[0] == "step"]
    decision = next(values for event, values in events if event == "decision")
    back: tuple[EventName, dict[str, Any]] = "decision", decision | {"step": 2, "num_steps_rolled_back": 2}
    write(tmp_path, [start, *steps[:4], back, *steps[2:6]])
    assert [step for step, _ in read(tmp_path)["train/loss"]] == [1, 2, 3, 4, 5, 6]


def test_several_loggers_take_each_event_and_are_all_closed(tmp_path: Path) -> None:
    seen: list[str] = []

    class Sink(NullSink):
        def __init__(self, name: str) -> None:
            self.name = name

        def write(self, event: EventName, values: dict[str, Any]) -> None:
            seen.append(f"{self.name} {event}")

        def identity(self) -> dict[str, Any]:
            return {self.name: 1}

        def close(self) -> None:
            seen.append(f"{self.name} closed")
            raise OSError(self.name)

    both = Sinks([Sink("one"), Sink("two")])
    both.write("phase", {})
    assert both.identity() == {"one": 1, "two": 1}
    with pytest.raises(OSError, match=r"one|two"):
        both.close()
    assert seen == ["one phase", "two phase", "two closed", "one closed"]


@pytest.mark.parametrize(
    ("argument", "spec"),
    [
        ("logger=tensorboard", TensorBoardLogger()),
        ("logger=[wandb,tensorboard]", WandbAndTensorBoard()),
        ("logger=[tensorboard, wandb]", WandbAndTensorBoard()),
        ("logger=wandb_tensorboard", WandbAndTensorBoard()),
        ("logger=[wandb]", WandbLogger()),
    ],
)
def test_loggers_are_named_alone_or_in_a_list(argument: str, spec: object) -> None:
    assert loaded(argument).logger == spec


def test_a_list_with_an_unknown_logger_is_no_option() -> None:
    assert read_arguments(["logger=[wandb,comet]"]) == ["logger=wandb_comet"]


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "find_spec", lambda _: None)
    for argument in ("logger=tensorboard", "logger=[wandb,tensorboard]"):
        with pytest.raises(UserError, match=r"pip install 'pipetransformer\[tensorboard\]', or take logger=wandb"):
            loaded(argument)


def test_a_run_leaves_its_log_without_secrets(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "hf_PlantedPlantedPlanted"
    job = run_job(pool, 1, tmp_path / "run", *TINY[1:], "logger=tensorboard", "logger.max_share=null")
    assert job.error == ""
    assert [step for step, _ in read(tmp_path / "run")["train/loss"]] == list(range(1, 9))
    sink = TensorBoardLogger().open(tmp_path, {})
    report = Reporter([sink])
    report.write("start", run_dir=secret)
    report.write("summary", status="failed", error=f"token {secret}")
    report.close()
    files = [file.read_bytes() for file in (tmp_path / "tensorboard").iterdir()]
    assert files
    assert not any(secret.encode() in content for content in files)
