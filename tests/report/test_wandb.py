"""Weights & Biases receives all events, once each; an offline run is read back."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import wandb
import yaml
from omegaconf import OmegaConf
from support.wandb_files import OfflineRun, read_offline_runs
from wandb.errors import CommError

from pipetransformer.config.compose import CONF
from pipetransformer.report.charts import charts as charts_of
from pipetransformer.report.charts import step_of
from pipetransformer.report.decisions import DECISION_COLUMNS, TRANSITION_COLUMNS, decision_rows, transition_rows
from pipetransformer.report.environment import write_overrides
from pipetransformer.report.event_log import EVENT_LOG
from pipetransformer.report.sinks import EventName, NullSink, Sinks, Thinned
from pipetransformer.report.tensorboard import TensorBoardLogger, WandbAndTensorBoard
from pipetransformer.report.wandb import NoLogger, WandbLogger, WandbSink

from .conftest import run_events

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
    sink = WandbLogger(max_share=None).open(tmp_path, {})
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
    sink = WandbSink(fake, Path(EVENT_LOG))  # pyright: ignore[reportArgumentType]
    steps = [values for event, values in events if event == "step"]
    for values in (*steps[:4], *steps[2:]):
        sink.write("step", values)
    assert fake.rows == [1, 2, 3, 4, 3, 4, *range(5, 25)], "wandb drops a row below the last one"


def test_steps_that_a_run_trains_otherwise_have_rows_of_their_own(events: Events, fake: FakeRun) -> None:
    steps = [values for event, values in events if event == "step"]
    decision = next(values for event, values in events if event == "decision")
    sink = WandbSink(fake, Path(EVENT_LOG))  # pyright: ignore[reportArgumentType]
    for values in steps[:4]:
        sink.write("step", values)
    sink.write("decision", decision | {"step": 2, "bound": "guard", "num_steps_rolled_back": 2})
    for values in steps[2:]:
        sink.write("step", values)
    assert fake.rows == [1, 2, 3, 4, 4, *range(5, 27)]
    assert [values["step"] for values in fake.logged][3:6] == [4, 2, 3]
    resumed = WandbSink(fake, Path(EVENT_LOG))  # pyright: ignore[reportArgumentType]
    resumed.write("resume", {"step": 24, "num_steps_rolled_back": 2})
    resumed.write("step", steps[-1] | {"step": 25})
    assert fake.rows[-1] == 27


def test_tables_come_once_in_a_minute_and_at_the_end(events: Events, fake: FakeRun) -> None:
    seconds = iter(range(0, 10**6, 10))  # between two looks at the clock
    sink = WandbSink(fake, Path(EVENT_LOG), 60.0, lambda: float(next(seconds)))  # pyright: ignore[reportArgumentType]
    for event, values in events:
        if event != "summary":
            sink.write(event, values)
    steps = [row["step"] for row in fake.logged if "tables/transitions" in row]
    assert steps == [8, 16], "each when it has happened, since it is ten seconds from one event to the next"
    hasty = FakeRun()
    sink = WandbSink(hasty, Path(EVENT_LOG), 60.0, lambda: 0.0)  # pyright: ignore[reportArgumentType]
    for event, values in events:
        if event != "summary":
            sink.write(event, values)
    assert not any("tables/transitions" in row for row in hasty.logged)
    sink.close()
    assert [len(row["tables/transitions"].data) for row in hasty.logged if "tables/transitions" in row] == [2]
    assert hasty.exit_code == 1


def test_a_run_is_closed_where_its_last_tables_cannot_be_written(
    events: Events, fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = WandbSink(fake, Path(EVENT_LOG), 60.0, lambda: 0.0)  # pyright: ignore[reportArgumentType]
    for event, values in events:
        if event != "summary":
            sink.write(event, values)
    monkeypatch.setattr(fake, "log", mock.Mock(side_effect=OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        sink.close()
    assert fake.exit_code == 1


def test_the_table_says_what_the_guard_took_back(events: Events, fake: FakeRun) -> None:
    decision, transition = (
        next(values for event, values in events if event == name) for name in ("decision", "transition")
    )
    sink = WandbSink(fake, Path(EVENT_LOG))  # pyright: ignore[reportArgumentType]
    back = decision | {"step": 12, "num_frozen_before": 2, "num_frozen": 0, "bound": "guard"}
    for event, values in (("decision", decision), ("transition", transition), ("decision", back)):
        sink.write(event, values)
    states = [
        [row[-1] for row in row_of["tables/decisions"].data] for row_of in fake.logged if "tables/decisions" in row_of
    ]
    assert states == [[False], [True, False]]


def test_decisions_that_change_nothing_log_no_table(events: Events, fake: FakeRun) -> None:
    decision = next(values for event, values in events if event == "decision")
    sink = WandbSink(fake, Path(EVENT_LOG))  # pyright: ignore[reportArgumentType]
    for step in range(100):
        sink.write("decision", decision | {"step": step, "num_frozen": 0})
    assert not any("tables/decisions" in row for row in fake.logged)
    sink.write("summary", {"status": "completed", "last_step": 100})
    assert len(fake.logged[-1]["tables/decisions"].data) == 100


def test_transitions_of_a_run_without_decisions_are_a_table_too(events: Events, fake: FakeRun) -> None:
    transition = next(values for event, values in events if event == "transition")
    sink = WandbSink(fake, Path(EVENT_LOG))  # pyright: ignore[reportArgumentType]
    sink.write("transition", transition)
    (row,) = [row for row in fake.logged if "tables/transitions" in row]
    assert "tables/decisions" not in row


@pytest.mark.parametrize(
    ("event", "values"), [("warning", {"message": "slow"}), ("checkpoint", {"step": 4})], ids=["warning", "checkpoint"]
)
def test_tables_that_are_due_at_an_event_of_no_step_come_at_the_last_one(
    event: EventName, values: dict[str, Any], events: Events, fake: FakeRun
) -> None:
    seconds = iter([0.0, 0.0, 61.0, 61.0, 61.0])
    sink = WandbSink(fake, Path(EVENT_LOG), 60.0, lambda: next(seconds))  # pyright: ignore[reportArgumentType]
    sink.write("transition", next(values for event, values in events if event == "transition"))
    sink.write(event, values)
    assert "tables/transitions" in fake.logged[-1]
    assert fake.rows == [8, 8], "wandb drops a row below the last one"


@pytest.mark.parametrize(("status", "exit_code"), [("completed", 0), ("diverged", 1), ("interrupted", 1), (None, 1)])
def test_only_a_completed_run_is_marked_as_a_success(fake: FakeRun, status: str | None, exit_code: int) -> None:
    sink = WandbSink(fake, Path(EVENT_LOG))  # pyright: ignore[reportArgumentType]
    if status:
        sink.write("summary", {"status": status})
    sink.close()
    assert fake.exit_code == exit_code


def test_a_run_that_went_on_and_completed_shows_no_error_of_its_first_part(fake: FakeRun) -> None:
    """The service keeps the summary of a run; a value that is not sent again would stay."""
    failed = {"status": "failed", "error": "no room", "stopped_early": {"step": 1, "reason": "x"}, "last_step": 1}
    WandbSink(fake, Path(EVENT_LOG)).write("summary", failed)  # pyright: ignore[reportArgumentType]
    sink = WandbSink(fake, Path(EVENT_LOG))  # pyright: ignore[reportArgumentType]
    sink.write("resume", {"step": 1})
    sink.write("summary", {"status": "completed", "last_step": 2})
    assert fake.summary["status"] == "completed"
    assert {name for name, value in fake.summary.items() if value is not None} == {"status", "last_step"}


def test_the_group_of_the_user_comes_before_the_sweep(fake: FakeRun, tmp_path: Path) -> None:
    WandbLogger().open(tmp_path, {"seed": 1}, group_default="sweep")
    assert fake.config["group"] == "sweep"
    assert fake.config["config"] == {"seed": 1}
    WandbLogger(group="mine").open(tmp_path, {}, group_default="sweep")
    assert fake.config["group"] == "mine"


def test_jobs_of_a_sweep_have_names_of_their_own_however_long_their_options_are(fake: FakeRun, tmp_path: Path) -> None:
    """The options that all jobs have come behind those that differ; what is cut off counts, too."""
    same = [f"model.options.{letter}={'x' * 30}" for letter in "abcd"] + ["++model.options={e:1,f:2}"]
    given = [*same[:-1], "model.options={e: 1, f: 2}"]
    swept = yaml.safe_dump({"hydra": {"overrides": {"task": [*given, "freeze=none,alpha", "epochs=2", "seed=1,2"]}}})
    (tmp_path / "multirun.yaml").write_text(swept)
    names = []
    for number, (freeze, seed) in enumerate([("none", 1), ("none", 2), ("alpha", 1)]):
        job = tmp_path / str(number)
        job.mkdir()
        write_overrides(job, [*same, f"freeze={freeze}", "epochs=2", f"seed={seed}"])
        WandbLogger().open(job, {}, group_default="sweep")
        names.append((fake.config["name"], fake.config["job_type"]))
        assert fake.config["name"].startswith(f"freeze={freeze} seed={seed} model.options.a=x")
        assert max(map(len, names[-1])) == 128
    assert len({name for name, _ in names}) == 3
    arms = [arm for _, arm in names]
    assert arms[0] == arms[1] != arms[2]
    (tmp_path / "multirun.yaml").write_text("mine")  # a file of the user's own
    write_overrides(tmp_path / "0", [*same, "freeze=none", "seed=1"])
    WandbLogger().open(tmp_path / "0", {}, group_default="sweep")
    one = fake.config["job_type"]
    write_overrides(tmp_path / "0", [*same, "freeze=alpha", "seed=1"])
    WandbLogger().open(tmp_path / "0", {}, group_default="sweep")
    assert fake.config["job_type"] != one, "where both are cut off before they differ"


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"logger.mode=disabled is not one of offline, online; logger=none"):
        WandbLogger(mode="disabled")


@pytest.mark.parametrize("share", [0, -0.1, 1.5])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=rf"logger.max_share={share} has to be above 0 and at most 1 \(1 %.*null"):
        WandbLogger(max_share=share)
    with pytest.raises(ValueError, match=r"logger\.max_share"):
        TensorBoardLogger(max_share=share)


@pytest.mark.parametrize("logger", [WandbLogger(), WandbAndTensorBoard(), TensorBoardLogger()])
def test_a_service_is_kept_to_its_share(logger: WandbLogger, fake: FakeRun, tmp_path: Path) -> None:
    del fake
    sink = logger.open(tmp_path, {})
    parts = sink.parts if isinstance(sink, Sinks) else (sink,)
    assert all(isinstance(part, Thinned) for part in parts)
    sink.close()


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
import json, sys
from pathlib import Path
from pipetransformer.report.event_log import EVENT_LOG, JsonLines
from pipetransformer.report.tensorboard import TensorBoardLogger, WandbAndTensorBoard
from pipetransformer.report.wandb import WandbLogger

folder = Path(sys.argv[1])

def play(events, resumed=None):
    log = JsonLines(folder / EVENT_LOG, goes_on=resumed is not None)
    sink = WandbLogger(tags=["test"], max_share=None).open(folder, {"seed": 1}, "sweep", resumed)
    for name, values in events:
        log.write(name, values)
        sink.write(name, values)
    log.close()
    sink.close()
    return sink.identity()

first, second = json.loads((folder / "starts.json").read_text())
identity = play(first)
lines = (folder / EVENT_LOG).read_text().splitlines(keepends=True)
is_kept = lambda line: json.loads(line).get("step", 0) <= second[0][1]["step"]
(folder / EVENT_LOG).write_text("".join(filter(is_kept, lines)))  # as a run does that goes on from a checkpoint
play(second, identity)
"""
CHECKPOINT, STOPPED = 12, 20  # steps


@dataclass(frozen=True)
class Real:
    """An offline run that was stopped and went on."""

    events: Events
    ended: subprocess.CompletedProcess[str]
    starts: list[OfflineRun]

    def expected(self, step: int) -> dict[str, Any]:
        """All charts of a step."""
        rows = [charts_of(event, values) for event, values in self.events if step_of(values) == step]
        return {name: value for row in rows for name, value in row.items()}

    def rows(self, event: EventName) -> list[dict[str, Any]]:
        return [values for name, values in self.events if name == event]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    """Stops after a decision whose steps are trained again: step 16 happens twice."""
    folder, events = tmp_path_factory.mktemp("wandb"), run_events()
    write_overrides(folder, ["freeze=none", "freeze=alpha", "seed=2", "logger.project=mine", "hydra.sweep.dir=here"])
    events.insert(-1, ("evaluate", {"step": 24, "split": "test", "metrics": {"diverged": float("nan")}}))
    numbered = [(event, values) for event, values in events if "step" in values or event == "summary"]
    start = next(values for event, values in events if event == "start")
    first = [each for each in numbered if each[0] != "summary" and each[1]["step"] <= STOPPED]
    second = [each for each in numbered if each[0] == "summary" or each[1]["step"] > CHECKPOINT]
    starts = [[("start", start), *first], [("resume", start | {"step": CHECKPOINT}), *second]]
    (folder / "starts.json").write_text(json.dumps(starts))
    (folder / "home").mkdir()
    own_of_wandb = "ignore:Implicitly cleaning up:ResourceWarning"  # the folder in which it makes tables
    command = [sys.executable, "-W", "error", "-W", own_of_wandb, "-c", REAL_RUN, str(folder)]
    env = {**os.environ, "HOME": str(folder / "home")}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, env=env)
    return Real(events, ended, read_offline_runs(folder))


def test_an_offline_run_leaves_its_files_in_the_run_folder_and_is_quiet(real: Real) -> None:
    assert (real.ended.returncode, real.ended.stdout, real.ended.stderr) == (0, "", "")
    assert len(real.starts) == 2


def test_a_job_of_a_sweep_is_named_by_its_options_and_grouped(real: Real) -> None:
    one, other = real.starts
    assert (
        one.about
        == other.about
        == {
            "group": "sweep",
            "name": "freeze=alpha seed=2",
            "job_type": "freeze=alpha",
            "id": one.about["id"],
        }
    )


def test_a_run_that_was_the_best_static_plan_has_no_gain_over_it(fake: FakeRun) -> None:
    summary = dict(run_events()[-1][1])
    gains = {"speedup_vs_static", "share_of_limit"}
    static = summary | {"is_static": True}
    left_out = charts_of("summary", summary).keys() - charts_of("summary", static).keys()
    assert left_out == {f"result/{name}" for name in gains}
    WandbSink(fake, Path(EVENT_LOG)).write("summary", static)  # pyright: ignore[reportArgumentType]
    assert summary.keys() - fake.summary.keys() >= gains
    assert fake.summary["is_static"]


def test_what_is_read_back_says_at_each_step_what_the_events_say(real: Real) -> None:
    first, second = ({row["step"]: row for row in start.history} for start in real.starts)
    assert [*first] == [row["step"] for row in real.starts[0].history] == [*range(1, STOPPED + 1)], "no row twice"
    assert [*second] == [row["step"] for row in real.starts[1].history] == [*range(CHECKPOINT + 1, 25)]
    for step in range(1, 25):
        row, expected = (first | second)[step], real.expected(step)
        found = {name: value for name, value in row.items() if not name.startswith(("_", "tables/")) and name != "step"}
        assert found == pytest.approx(expected, nan_ok=True)
    names = {name for row in (first | second).values() for name in row}
    assert {
        "topology/num_idle_devices",
        "topology/num_stages",
        "topology/cache_level",
        "result/share_of_limit",
    } <= names
    assert {"result/speedup_vs_static", "result/accuracy", "test/accuracy"} <= names


def test_decisions_and_transitions_are_one_table_each_without_doubled_rows(real: Real) -> None:
    decisions = [dict(zip(DECISION_COLUMNS, row, strict=True)) for row in decision_rows(real.rows("decision"))]
    transitions = [dict(zip(TRANSITION_COLUMNS, row, strict=True)) for row in transition_rows(real.rows("transition"))]
    assert len(decisions) == len(transitions) == 2
    for start, num_states in zip(real.starts, (2, 2), strict=True):  # steps 8 and 16; step 16 again, and the end
        for name, rows in (("tables/decisions", decisions), ("tables/transitions", transitions)):
            states = start.tables(name)
            assert len(states) == num_states
            assert states[-1] == rows
    assert real.starts[1].summary["tables/decisions/nrows"] == 2, "the run shows the last state"


@pytest.mark.parametrize(("name", "spec"), [("wandb", WandbLogger), ("none", NoLogger)])
def test_the_configuration_lists_every_option_with_its_default(name: str, spec: type) -> None:
    options = OmegaConf.to_container(OmegaConf.load(LOGGERS / f"{name}.yaml"))
    assert options == {"_target_": f"{spec.__module__}.{spec.__name__}", **asdict(spec())}
    assert OmegaConf.to_container(OmegaConf.structured(spec)) == asdict(spec())


def test_the_specs_import_no_heavy_library() -> None:
    code = "import sys, pipetransformer.report.wandb; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"wandb", "torch", "matplotlib", "rich"}.isdisjoint(done.stdout.split())
