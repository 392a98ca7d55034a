import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import wandb
from omegaconf import OmegaConf
from wandb.errors import CommError

from pipetransformer.config.compose import CONF
from pipetransformer.report.reporter import EventName, NullSink
from pipetransformer.report.wandb import NoLogger, WandbLogger, WandbSink

LOGGERS = CONF / "logger"

Events = list[tuple[EventName, dict[str, Any]]]


class FakeRun:
    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.summary: dict[str, Any] = {}
        self.logged: list[dict[str, Any]] = []
        self.rows: list[int] = []
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, values: dict[str, Any], step: int) -> None:
        self.rows.append(step)
        self.logged.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    """Stands in for the service; keeps what the run was started with in ``config``."""
    run = FakeRun()
    monkeypatch.setattr(wandb, "setup", lambda settings: None)
    monkeypatch.setattr(wandb, "init", lambda **options: run.config.update(options) or run)
    return run


def charts(run: FakeRun, name: str) -> dict[int, Any]:
    return {values["step"]: values[name] for values in run.logged if name in values}


def test_every_kind_of_value_arrives_under_its_chart(events: Events, fake: FakeRun, tmp_path: Path) -> None:
    sink = WandbLogger().open(tmp_path, {})
    for event, values in events:
        sink.write(event, values)
    assert charts(fake, "train/loss")[2] == 1.15
    assert charts(fake, "throughput/samples_per_second")[24] == 800
    assert charts(fake, "topology/num_replicas") == {step: 4 ** ((step - 1) // 8 / 2) for step in range(1, 25)}
    assert charts(fake, "freeze/num_frozen") == {8: 2, 16: 4}
    assert charts(fake, "freeze/bound") == {8: "cap", 16: "cap"}
    assert charts(fake, "freeze/cap") == {8: 2.25, 16: 4.25}
    assert charts(fake, "gradient_norm/block_02") == {8: 0.2}, "a frozen block has no norm"
    assert charts(fake, "gradient_norm/block_06") == {8: 3.2, 16: 3.2}
    assert charts(fake, "transition/bytes_moved") == {8: 3 * 2**20, 16: 3 * 2**20}
    assert charts(fake, "cache_fill/to_level") == {16: 4}
    assert charts(fake, "test/accuracy") == {8: 0.58, 16: 0.66, 24: 0.74}
    assert fake.config["start"]["num_blocks"] == 6
    assert fake.summary["speedup_vs_static"] == 2.04
    assert fake.summary["metric/value"] == 0.74
    assert (fake.summary["best/value"], fake.summary["best/step"]) == (0.76, 16)


def test_steps_that_a_resumed_run_repeats_have_the_rows_that_they_had(events: Events, fake: FakeRun) -> None:
    sink = WandbSink(fake)  # pyright: ignore[reportArgumentType]
    steps = [values for event, values in events if event == "step"]
    for values in (*steps[:4], *steps[2:]):
        sink.write("step", values)
    assert fake.rows == [1, 2, 3, 4, 3, 4, *range(5, 25)], "wandb drops a row below the last one"


def test_steps_that_a_run_trains_otherwise_have_rows_of_their_own(events: Events, fake: FakeRun) -> None:
    steps = [values for event, values in events if event == "step"]
    decision = next(values for event, values in events if event == "decision")
    sink = WandbSink(fake)  # pyright: ignore[reportArgumentType]
    for values in steps[:4]:
        sink.write("step", values)
    sink.write("decision", decision | {"step": 2, "bound": "guard", "num_steps_rolled_back": 2})
    for values in steps[2:]:
        sink.write("step", values)
    assert fake.rows == [1, 2, 3, 4, 4, *range(5, 27)]
    assert [values["step"] for values in fake.logged][3:6] == [4, 2, 3]
    resumed = WandbSink(fake)  # pyright: ignore[reportArgumentType]
    resumed.write("resume", {"step": 24, "num_steps_rolled_back": 2})
    resumed.write("step", steps[-1] | {"step": 25})
    assert fake.rows[-1] == 27


@pytest.mark.parametrize(("status", "exit_code"), [("completed", 0), ("diverged", 1), ("interrupted", 1), (None, 1)])
def test_only_a_completed_run_is_marked_as_a_success(fake: FakeRun, status: str | None, exit_code: int) -> None:
    sink = WandbSink(fake)  # pyright: ignore[reportArgumentType]
    if status:
        sink.write("summary", {"status": status})
    sink.close()
    assert fake.exit_code == exit_code


def test_the_group_of_the_user_comes_before_the_sweep(fake: FakeRun, tmp_path: Path) -> None:
    WandbLogger().open(tmp_path, {"seed": 1}, group_default="sweep")
    assert fake.config["group"] == "sweep"
    assert fake.config["config"] == {"seed": 1}
    WandbLogger(group="mine").open(tmp_path, {}, group_default="sweep")
    assert fake.config["group"] == "mine"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logger.mode=disabled is not one of offline, online; logger=none"):
        WandbLogger(mode="disabled")


def test_online_without_an_api_key_is_refused_without_asking(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(wandb, "login", lambda prompt: prompt)
    with pytest.raises(ValueError, match=r"no API key was found.*logger.mode=offline.*logger=none"):
        WandbLogger(mode="online").open(tmp_path, {})


def test_a_service_that_does_not_answer_is_a_user_error(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(**options: Any) -> None:
        assert options["settings"].init_timeout <= 30
        raise CommError("connection refused")

    monkeypatch.setattr(wandb, "login", lambda prompt: True)
    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match=r"logger.mode=online: connection refused .*logger=none"):
        WandbLogger(mode="online").open(tmp_path, {})


def test_no_logger_opens_a_sink_that_does_nothing(tmp_path: Path) -> None:
    assert isinstance(NoLogger().open(tmp_path, {}), NullSink)
    assert list(tmp_path.iterdir()) == []


REAL_RUN = """
import sys
from dataclasses import asdict
from pathlib import Path
from pipetransformer.report.wandb import WandbLogger

sink = WandbLogger(tags=["test"]).open(Path(sys.argv[1]), {"seed": 1})
sink.write("evaluate", {"step": 1, "split": "test", "metrics": {"accuracy": float("nan")}})
sink.write("summary", {"status": "completed", "metric": {"value": 0.5}, "plans": [{"stages": [[0, 1]]}]})
sink.close()
"""


def test_an_offline_run_leaves_its_files_in_the_run_folder_and_is_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    command = [sys.executable, "-W", "error", "-c", REAL_RUN, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 1


@pytest.mark.parametrize(("name", "spec"), [("wandb", WandbLogger), ("none", NoLogger)])
def test_the_configuration_lists_every_option_with_its_default(name: str, spec: type) -> None:
    options = OmegaConf.to_container(OmegaConf.load(LOGGERS / f"{name}.yaml"))
    assert options == {"_target_": f"{spec.__module__}.{spec.__name__}", **asdict(spec())}
    assert OmegaConf.to_container(OmegaConf.structured(spec)) == asdict(spec())


def test_the_specs_import_no_heavy_library() -> None:
    code = "import sys, pipetransformer.report.wandb; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"wandb", "torch", "matplotlib", "rich"}.isdisjoint(done.stdout.split())
