"""Arms take turns within a seed, are not repeated, and are compared within a seed."""

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import yaml
from support.jobs import loaded

from experiments import arms, measured
from experiments.adapters import __main__ as adapters
from experiments.alpha import __main__ as alpha
from experiments.arms import FROZEN_FROM, Arm, Row, as_long_as, run_arms, table
from experiments.components import __main__ as components
from experiments.interval import __main__ as interval
from experiments.measured import ROOT, Took, run_measured
from experiments.microbatches import __main__ as microbatches
from experiments.padding import __main__ as padding
from experiments.policies import __main__ as policies
from experiments.policies.equal import __main__ as equal
from experiments.recipes import __main__ as recipes
from experiments.record import BEGIN, END
from experiments.start import __main__ as start
from experiments.static_plans import __main__ as static_plans
from experiments.storage import __main__ as storage
from pipetransformer.config.compose import CONF
from pipetransformer.report.event_log import write_json
from pipetransformer.report.summary_text import TIME_PARTS

EXPERIMENTS = {
    "adapters": (adapters.ARMS, adapters.COLUMNS),
    "alpha": (alpha.ARMS, alpha.COLUMNS),
    "components": (components.ARMS, arms.USUAL),
    "equal": (equal.ARMS, equal.COLUMNS),
    "interval": (interval.ARMS, interval.COLUMNS),
    "microbatches": (microbatches.ARMS, microbatches.COLUMNS),
    "padding": (padding.ARMS, padding.COLUMNS),
    "policies": (policies.ARMS, policies.COLUMNS),
    "recipes": (recipes.ARMS, recipes.COLUMNS),
    "start": (start.ARMS, start.COLUMNS),
    "static_plans": (static_plans.ARMS, static_plans.COLUMNS),
    "storage": (storage.ARMS, storage.COLUMNS),
}
PLAN = {"num_frozen": 0, "step": 0, "num_microbatches": 2, "stages": [[0, 3], [3, 6]], "num_replicas": 1}
BEGAN = datetime(2026, 11, 27, tzinfo=UTC).timestamp()
EVENTS = [
    {"event": "phase", "time": "2026-11-27T00:00:04.000+00:00", "message": "reading data"},
    {"event": "phase", "time": "2026-11-27T00:00:04.500+00:00", "message": "measuring layers and links"},
    {"event": "start", "time": "2026-11-27T00:00:06.000+00:00", "plan": PLAN},
    {"event": "step", "time": "2026-11-27T00:00:07.250+00:00", "step": 1},
]


class Machine:
    """Stands for the machine: writes what a run leaves behind; each command takes 10 s, and 2 s more per epoch."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []

    def run(self, command: Sequence[str], file: Path, env: Any = None) -> Took:
        given = dict(one.split("=", 1) for one in command if "=" in one)
        self.commands.append(list(command))
        epochs, frozen = int(given.get("epochs", 6)), given.get("freeze") != "none"
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "config.yaml").write_text(yaml.dump({"epochs": epochs, "seed": int(given["seed"])}))
        (file.parent / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in EVENTS))
        summary = {
            "status": "completed", "metric": {"name": "accuracy", "value": 0.5 + int(given["seed"]) / 100},
            "train_seconds": 9.0, "report_seconds": 0.09, "step_seconds": 8.0, "predicted_step_seconds": 4.0,
            "mean_frozen_fraction": frozen / 3,
            "plans": [PLAN, PLAN | {"num_frozen": 2, "step": 188}] if frozen else [PLAN], "signals": {"cka": 0.08},
        }  # fmt: skip
        write_json(file.parent / "summary.json", summary)
        took = Took(10.0 + 2 * epochs, (6.0 if frozen else 12.0) * int(given["seed"]), began=BEGAN)
        write_json(file, vars(took))
        return took


@pytest.fixture
def machine() -> Any:
    made = Machine()
    with mock.patch.object(arms, "run_measured", made.run):
        yield made


def values(commands: Sequence[Sequence[str]], option: str) -> list[str | None]:
    return [next((one.split("=")[1] for one in own if one.startswith(f"{option}=")), None) for own in commands]


def test_arms_take_turns_within_a_seed(machine: Machine, tmp_path: Path) -> None:
    made = (Arm("none", ("freeze=none",)), Arm("alpha", ("freeze=alpha",)))
    run_arms(made, (1, 2), tmp_path, ["epochs=4"])
    assert values(machine.commands, "freeze") == ["none", "alpha"] * 2
    assert values(machine.commands, "seed") == ["1", "1", "2", "2"]
    assert values(machine.commands, "epochs") == ["4"] * 4


@pytest.mark.parametrize("status", ["failed", "interrupted", "completed"])
def test_only_a_run_that_is_complete_is_not_repeated(machine: Machine, status: str, tmp_path: Path) -> None:
    made = (Arm("alpha = 1/3", ("freeze=alpha",)),)
    run_arms(made, (1,), tmp_path, [])
    (summary,) = tmp_path.glob("*/summary.json")
    write_json(summary, json.loads(summary.read_text()) | {"status": status})
    run_arms(made, (1,), tmp_path, [])
    assert len(machine.commands) == (1 if status == "completed" else 2)
    assert summary.parent.name == "alpha_1_3-1"


def test_a_ratio_is_taken_within_its_seed(machine: Machine, tmp_path: Path) -> None:
    """The machine takes twice as long during the second seed, and three times during the third."""
    outcomes = run_arms((Arm("none", ("freeze=none",)), Arm("alpha", ("freeze=alpha",))), (1, 2, 3), tmp_path, [])
    rows = table(outcomes, (arms.ARM, arms.FROZEN_FROM, arms.ACCURACY, arms.CPU, arms.FASTER_CPU)).splitlines()
    assert rows[2:] == [
        "| none | none | 0.52 ± 0.025 | 24 s | 1.00 |",
        "| alpha | 2 from 188 | 0.52 ± 0.025 | 12 s | 2.00 |",
    ]


def test_the_control_has_the_epochs_that_another_arm_s_cpu_time_pays_for(machine: Machine, tmp_path: Path) -> None:
    made = (Arm("none", ("freeze=none",)), Arm("all", ("freeze=alpha",)), Arm("shorter", as_long_as("all", "none")))
    shorter = run_arms(made, (1,), tmp_path, [])[-1]
    assert shorter.options == ("freeze=none", "epochs=3")


def test_the_control_never_has_more_time_than_is_paid_for() -> None:
    whole = SimpleNamespace(cpu_seconds=100.0, run=SimpleNamespace(config={"epochs": 4}))
    so_far: Any = {"none": whole, "all": SimpleNamespace(cpu_seconds=69.5)}  # 2.78 epochs
    assert as_long_as("all", "none")(so_far) == ("freeze=none", "epochs=2")


def test_a_cell_tells_each_seed_apart_where_they_differ() -> None:
    seeds: Any = {seed: SimpleNamespace(prefixes=prefixes) for seed, prefixes in enumerate([[(8, 1)], [(8, 1)], []])}
    assert dict([FROZEN_FROM])["frozen blocks from step"](Row(seeds, seeds)) == "1 from 8 / none"


def test_where_the_time_went_is_that_of_all_seeds() -> None:
    zero = dict.fromkeys(TIME_PARTS, 0.0)
    parts = [zero | {"active": 6.0, "unpredicted": 1.0}, zero | {"active": 3.0, "unpredicted": -1.0}]
    summaries = [{"time_parts": each, "train_seconds": 10.0} for each in parts]
    seeds: Any = {seed: SimpleNamespace(summary=summary) for seed, summary in enumerate(summaries)}
    _, cell = arms.SPENT
    assert cell(Row(seeds, seeds)) == f"45% {TIME_PARTS['active']}"
    seeds[2] = SimpleNamespace(summary={"train_seconds": 10.0})
    assert cell(Row(seeds, seeds)) == "", "a run of an earlier release has none"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_command_of_an_experiment_trains_every_arm_and_keeps_a_table(
    name: str, machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    made, columns = EXPERIMENTS[name]
    arguments = [str(tmp_path / "runs"), "model=bert", "--seeds", "1,2", "--into", str(tmp_path), "epochs=6"]
    arms.main(made, Path("elsewhere"), columns, arguments=arguments)
    assert len(machine.commands) == 2 * len(made)
    rows = capsys.readouterr().out.splitlines()[-len(made) :]
    assert [row.split(" | ")[0][2:] for row in rows] == [arm.name for arm in made]
    assert rows[-1] in (tmp_path / "README.md").read_text()
    assert len(json.loads((tmp_path / "results.json").read_text())["results"]) == 2 * len(made)


@pytest.mark.thinned("adapters", "components", "interval", "policies", "static_plans", "storage")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_options_of_every_arm_compose(name: str) -> None:
    for arm in EXPERIMENTS[name][0]:
        if isinstance(arm.options, tuple):
            loaded("model=bert", "dataset=sst2", *arm.options)


def test_the_way_to_the_first_step_is_told_in_seconds_from_the_command(machine: Machine, tmp_path: Path) -> None:
    rows = table(run_arms(start.ARMS, (1, 2), tmp_path, []), start.COLUMNS).splitlines()
    assert rows[2] == "| no service | 7.2 s | 4.0 s | 1.5 s | 9.0 s | 1.0% | 22 s |"
    first, second = (values(machine.commands, "profile.path")[end - 2 : end] for end in (5, 10))
    assert first == [str(tmp_path / "profiles-1")] * 2
    assert second == [str(tmp_path / "profiles-2")] * 2


def test_every_policy_has_an_arm_at_its_defaults_and_at_the_equal_fraction() -> None:
    known = {file.stem for file in CONF.glob("freeze/*.yaml")}
    assert set(policies.KNOBS) == known
    assert known < {arm.name for arm in equal.ARMS}
    scaled = {arm.name for arm in equal.ARMS if isinstance(arm.options, tuple) and equal.TARGET in arm.options}
    assert scaled == known - set(equal.CONTROLS)


def test_what_a_command_takes_counts_processes_that_outlive_it(tmp_path: Path) -> None:
    busy = (
        "import time\nheld = bytearray(2**26)\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass"
    )
    leaves = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {busy!r}])"
    took = run_measured(["python3", "-c", leaves], tmp_path / "took.json")
    assert took.cpu_seconds > 0.3
    assert took.peak_bytes > 2**26
    assert Took.read(tmp_path / "took.json") == took


@pytest.mark.skipif(sys.platform != "linux", reason="the signal at a parent's death is Linux's")
def test_a_command_ends_with_a_caller_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; print('began', flush=True); signal.pause()"]
    took = str(tmp_path / "took.json")
    adopter = f"from pathlib import Path; from experiments.measured import main; main(Path({took!r}), {command})"
    caller = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {adopter!r}])"
    with subprocess.Popen([sys.executable, "-c", caller], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "began\n"
        process.kill()
        assert process.stdout.read() == "", "the pipe is closed when the last of them has ended"
    assert not (tmp_path / "took.json").exists(), "what was cut short is not kept"


def test_a_command_that_fails_leaves_no_time(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="exit code 3"):
        run_measured(["python3", "-c", "raise SystemExit(3)"], tmp_path / "took.json")
    assert not (tmp_path / "took.json").exists()


def test_commands_run_where_train_py_is() -> None:
    assert (ROOT / "train.py").is_file()
    assert Path(measured.__file__).parent == ROOT / "experiments"
