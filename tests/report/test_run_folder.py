import json
import math
import re
import shutil
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.errors import UserError
from pipetransformer.report.environment import OVERRIDES, environment, read_overrides, write_overrides
from pipetransformer.report.event_log import EVENT_LOG, SUMMARY, JsonLines, read_events, read_json, write_json
from pipetransformer.report.run_folder import CONFIG, find_run, next_steps, read_run, saved_model, share_files
from pipetransformer.report.sinks import EVENTS, EventName

Events = list[tuple[EventName, dict[str, Any]]]

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


def write_events(path: Path, events: Events) -> None:
    log = JsonLines(path)
    for event, values in events:
        log.write(event, values)
    log.close()


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not abs(value) < 2**63 else value


def test_a_number_that_is_too_large_to_be_read_back_is_written_as_none(tmp_path: Path) -> None:
    write_json(tmp_path / "value.json", {"perplexity": 1e20, "loss": 46.0})
    assert read_json(tmp_path / "value.json") == {"perplexity": None, "loss": 46.0}


@given(value=plain_values)
def test_what_is_written_is_read_back_with_nulls_for_what_is_not_finite(
    tmp_path_factory: pytest.TempPathFactory, value: Any
) -> None:
    path = tmp_path_factory.mktemp("json") / "value.json"
    write_json(path, value)
    assert json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail) == finite(value)


def test_a_value_that_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"status": "completed"})
    with pytest.raises(TypeError):
        write_json(path, {"status": object()})
    assert json.loads(path.read_text()) == {"status": "completed"}
    assert list(tmp_path.iterdir()) == [path]


def test_steps_in_quick_succession_are_on_disk_together_and_before_any_other_event(tmp_path: Path) -> None:
    now, file = [0.0], tmp_path / EVENT_LOG
    log = JsonLines(file, clock=lambda: now[0])

    def write(event: EventName, step: int, at: float) -> list[int]:
        now[0] = at
        log.write(event, {"step": step})
        return written()

    def written() -> list[int]:
        return [json.loads(line)["step"] for line in file.read_text().splitlines()]

    assert write("step", 1, at=0.0) == [1]
    assert write("step", 2, at=0.04) == [1]
    assert write("step", 3, at=0.08) == [1]
    assert write("step", 4, at=0.12) == [1, 2, 3, 4]
    assert write("step", 5, at=1.12) == [1, 2, 3, 4, 5], "slow steps at once"
    assert write("step", 6, at=1.16) == [1, 2, 3, 4, 5]
    assert write("decision", 6, at=1.17) == [1, 2, 3, 4, 5, 6, 6]
    assert write("step", 7, at=1.18) == [1, 2, 3, 4, 5, 6, 6]
    log.flush()
    assert written()[-1] == 7
    write("step", 8, at=1.19)
    log.close()
    assert written()[-1] == 8


def test_each_event_is_on_disk_as_soon_as_it_is_written(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / EVENT_LOG)
    log.write("step", {"step": 1, "loss": math.nan})
    (line,) = (tmp_path / EVENT_LOG).read_text().splitlines()
    log.close()
    values = json.loads(line)
    offset = datetime.fromisoformat(values.pop("time")).utcoffset()
    assert offset is not None
    assert offset.total_seconds() == 0
    assert values == {"event": "step", "step": 1, "loss": None}


def test_a_number_that_no_reader_takes_becomes_null_in_its_line(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / EVENT_LOG)
    log.write("step", {"step": 1, "lr": 1e30, "loss": 0.5, "norms": [1.0, 2.0**63]})
    log.close()
    (values,) = read_events(tmp_path / EVENT_LOG, "step")
    assert (values["lr"], values["loss"], values["norms"]) == (None, 0.5, [1.0, None])


def test_a_folder_is_read_back_as_it_was_written(run_folder: Path, events: Events) -> None:
    run = read_run(run_folder)
    assert run.config == {"seed": 1, "freeze": {"alpha": 0.33}}
    assert run.summary == events[-1][1]
    for name in EVENTS:
        read = [{key: value for key, value in values.items() if key != "time"} for values in run.events[name]]
        assert read == [values for event, values in events if event == name]
    assert [step for step, _ in run.plans] == [0, 8, 16]


def test_a_run_that_goes_on_has_no_summary_yet(run_folder: Path) -> None:
    (run_folder / SUMMARY).unlink()
    assert read_run(run_folder).summary == {}


@pytest.mark.parametrize("missing", [CONFIG, EVENT_LOG])
def test_a_folder_without_a_run_is_refused_by_name(run_folder: Path, missing: str) -> None:
    (run_folder / missing).unlink()
    with pytest.raises(ValueError, match=rf"not a run folder: it has no {missing}"):
        read_run(run_folder)


def test_an_incomplete_line_is_refused_with_its_number(run_folder: Path) -> None:
    path = run_folder / EVENT_LOG
    num_lines = len(path.read_text().splitlines())
    before = read_run(run_folder)
    path.write_text(path.read_text() + '{"event": "st')
    assert read_run(run_folder) == before, "the last one, which a run may still be writing"
    path.write_text(path.read_text() + "\n")
    with pytest.raises(ValueError, match=rf"line {num_lines + 1} is incomplete.*remove this line"):
        read_run(run_folder)


@pytest.mark.parametrize("line", ["[1]", '{"event": "lunch"}', "{}"])
def test_a_line_that_is_no_event_is_refused(run_folder: Path, line: str) -> None:
    (run_folder / EVENT_LOG).write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1 is not an event of a run"):
        read_run(run_folder)


def test_a_log_whose_beginning_was_removed_before_the_run_went_on_is_not_said_to_have_ended(run_folder: Path) -> None:
    (run_folder / EVENT_LOG).write_text('{"event": "resume", "step": 4}\n')
    with pytest.raises(
        ValueError, match=r"metrics\.jsonl has no start event: its lines before the run went on at step 4"
    ):
        read_run(run_folder)


def test_a_run_that_never_started_is_refused(run_folder: Path) -> None:
    (run_folder / EVENT_LOG).write_text('{"event": "warning", "message": "slow"}\n')
    with pytest.raises(ValueError, match="no start event"):
        read_run(run_folder)


def test_a_damaged_summary_is_refused(run_folder: Path) -> None:
    (run_folder / SUMMARY).write_text('{"status": ')
    with pytest.raises(ValueError, match=rf"{SUMMARY} is damaged"):
        read_run(run_folder)


def test_a_new_run_in_the_same_folder_begins_a_new_log(tmp_path: Path) -> None:
    path = tmp_path / EVENT_LOG
    write_events(path, [("step", {"step": 1})])
    path.write_bytes(path.read_bytes() + b'{"event": "st')
    write_events(path, [("step", {"step": 2})])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [2]


def test_a_run_is_found_from_the_folders_below_and_from_the_shells(
    run_folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, elsewhere = tmp_path_factory.mktemp("root"), tmp_path_factory.mktemp("elsewhere")
    (root / "notebooks").mkdir()
    run_folder = run_folder.rename(root / "run")
    for here, shell in [(root, root), (root / "notebooks", elsewhere), (elsewhere, root)]:
        monkeypatch.chdir(here)
        monkeypatch.setenv("PWD", str(shell))
        assert find_run(run_folder.name).samefile(run_folder)
        assert find_run(run_folder) == run_folder
    assert find_run("nothing/here") == Path("nothing/here")


def test_saved_files_have_the_permissions_of_their_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "model.safetensors").touch(0o600)
    share_files(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


def model_folder(run_dir: Path, config: str) -> None:
    (run_dir / "model").mkdir()
    (run_dir / "model" / "config.json").write_text(config)


def test_the_model_is_named_with_the_call_that_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model_folder(tmp_path, '{"architectures": ["BertForQuestionAnswering"]}')
    monkeypatch.chdir(tmp_path.parent)
    path = f"{tmp_path.name}/model"
    assert next_steps(tmp_path, {"model": {"folder": str(tmp_path / "model"), "step": 8}}) == [
        ("model", f"{path}  (transformers.BertForQuestionAnswering.from_pretrained('{path}'))"),
        ("figures", f"python -m pipetransformer.report {tmp_path.name}"),
    ]


def test_adapters_are_named_with_the_call_that_loads_them(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/adapter_config.json").write_text("{}")
    (label, command), _ = next_steps(tmp_path, {"model": {"folder": str(tmp_path / "model"), "step": 8}})
    assert (label, command.partition("  ")[2]) == (
        "model",
        f"(peft.PeftModel.from_pretrained(<model>, '{tmp_path / 'model'}'))",
    )


def test_a_model_of_an_earlier_run_is_not_offered_by_one_that_failed(tmp_path: Path) -> None:
    model_folder(tmp_path, "{}")
    assert next_steps(tmp_path, {"status": "failed"}) == []


def test_a_copy_of_a_run_has_its_own_model_whatever_becomes_of_the_first(tmp_path: Path) -> None:
    run, copy, second = tmp_path / "run", tmp_path / "copy", tmp_path / "pipetransformer-run-7"
    run.mkdir()
    model_folder(run, "{}")
    write_json(run / SUMMARY, {"model": {"folder": str(run / "model"), "step": 3}})
    shutil.copytree(run, copy)
    assert saved_model(copy) == (copy / "model", 3)
    second.mkdir()  # the run folder was full
    write_json(copy / SUMMARY, {"model": {"folder": str(second), "step": 4}})
    assert saved_model(copy) == (second, 4)


def test_the_environment_names_versions_and_the_command() -> None:
    found = environment()
    required = {
        re.split(r"[^\w.-]", line)[0] for line in metadata.requires("pipetransformer") or () if "extra" not in line
    }
    assert set(found["packages"]) == {"pipetransformer", *required} >= {"torch", "numpy", "safetensors"}
    assert found["num_cpus"] >= 1
    assert found["command"]
    assert found["git_commit"] is None or len(found["git_commit"]) == 40
    assert finite(found) == found


def test_a_resumed_run_has_the_plans_of_all_its_parts(tmp_path: Path, events: Events) -> None:
    resumed = events[1][1] | {"step": 24, "checkpoint": "checkpoints/step-00000024", "num_steps_lost": 0}
    write_events(tmp_path / EVENT_LOG, events[:-1])
    again = JsonLines(tmp_path / EVENT_LOG, goes_on=True)
    again.write("resume", resumed)
    again.close()
    (tmp_path / CONFIG).write_text("seed: 1\n")
    run = read_run(tmp_path)
    assert [step for step, _ in run.plans] == [0, 8, 16, 24]
    assert len(run.events["step"]) == 24


def test_a_transition_tells_its_devices_where_the_line_of_the_resume_is_gone(tmp_path: Path, events: Events) -> None:
    """A roll-back cuts the log to a checkpoint of the time before."""
    rolled = [(name, values | {"world_size": 7} if name == "transition" else values) for name, values in events]
    write_events(tmp_path / EVENT_LOG, rolled)
    (tmp_path / CONFIG).write_text("seed: 1\n")
    run = read_run(tmp_path)
    assert [plan["world_size"] for _, plan in run.plans][1:] == [7, 7]


def test_a_plan_that_follows_a_resume_at_the_same_step_comes_after_it(tmp_path: Path, events: Events) -> None:
    """A resumed run begins without its cache, and fills it in a transition; it may have other devices than before."""
    resumed = events[1][1] | {"step": 12, "checkpoint": "step-12", "num_steps_lost": 0, "world_size": 7}
    transition = next(values for event, values in events if event == "transition")
    write_events(tmp_path / EVENT_LOG, events[:-1])
    lines = [json.loads(line) for line in (tmp_path / EVENT_LOG).read_text().splitlines()]
    kept = [line for line in lines if line.get("step", 0) <= 12]
    (tmp_path / EVENT_LOG).write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    again, clock = JsonLines(tmp_path / EVENT_LOG, goes_on=True), iter("34")
    moments = mock.Mock(now=lambda _: datetime(2126, 1, 1, second=int(next(clock)), tzinfo=UTC))
    with mock.patch("pipetransformer.report.event_log.datetime", moments):
        again.write("resume", resumed | {"plan": transition["before"]})
        again.write("transition", transition | {"step": 12, "after": transition["after"] | {"cache_level": 2}})
    again.close()
    (tmp_path / CONFIG).write_text("seed: 1\n")
    run = read_run(tmp_path)
    assert [(step, plan["cache_level"]) for step, plan in run.plans][-2:] == [(12, 0), (12, 2)]
    assert [plan["world_size"] for _, plan in run.plans] == [4, 4, 7, 7]
    assert run.world_size(run.events["transition"][-1]["time"]) == 7


def test_the_arguments_of_a_run_are_kept(tmp_path: Path) -> None:
    assert read_overrides(tmp_path) is None
    write_overrides(tmp_path, ["model=bert", "optim.lr=1e-3"])
    assert read_overrides(tmp_path) == ["model=bert", "optim.lr=1e-3"]
    for damaged in ("[]", '{"overrides": 3}', '{"overrides": [1]}', "{"):
        (tmp_path / OVERRIDES).write_text(damaged)
        with pytest.raises(UserError, match=OVERRIDES):
            read_overrides(tmp_path)
