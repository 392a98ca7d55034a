"""Keys and tokens are hidden wherever a run writes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.report import environment, event_log
from pipetransformer.report.reporter import Reporter
from pipetransformer.report.secrets import HIDDEN, redact
from pipetransformer.report.sinks import EventName, NullSink, Values

SECRET = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("+logger.api_key=planted", "+logger.api_key=***"),
        ("hydra.job.env_set.WANDB_API_KEY=planted", "hydra.job.env_set.WANDB_API_KEY=***"),
        ("+model.options.token='planted one'", "+model.options.token=***"),
        ("model.options={token: planted, depth: 2}", "model.options={token: ***, depth: 2}"),
        ("hydra.job.env_set.MY_TOKEN=planted", "hydra.job.env_set.MY_TOKEN=***"),
        ("HF_TOKEN=planted python train.py", "HF_TOKEN=*** python train.py"),
        ("https://somebody:planted@host/x", "https://***@host/x"),
        ("https://planted@host:80/x?access_token=planted&b=1", "https://***@host:80/x?access_token=***&b=1"),
        ("it says hf_AbCdEfGhIjKlMnOpQrSt once", "it says *** once"),
        ('{"password": "planted"}', '{"password": ***}'),
    ],
)
def test_a_secret_is_hidden_and_the_rest_is_kept(text: str, hidden: str) -> None:
    assert redact(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "+model.options.class_token=false",
        "model.options.num_reg_tokens=4",
        "pad_token: [PAD]",
        "optim.lr=1e-3",
        "https://host/path@2x.png",
        "tokens per second: 12",
        "monkey=banana",
        "model.name=google/electra-small-discriminator",
        "/home/me/outputs/2026-01-31/12-00-00",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_values_of_the_environment_are_hidden_wherever_they_occur(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_ACCESS_TOKEN", SECRET)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false and more")
    value = {"a": [f"x{SECRET}y", 1.5, None, True], SECRET: ("false and more",)}
    assert redact(value) == {"a": [f"x{HIDDEN}y", 1.5, None, True], HIDDEN: ("false and more",)}


def test_values_under_the_name_of_a_secret_are_hidden() -> None:
    assert redact({"api_key": "x", "token": "y", "class_token": False, "password": None}) == {
        "api_key": HIDDEN, "token": HIDDEN, "class_token": False, "password": None,
    }  # fmt: skip


@given(st.recursive(st.none() | st.floats(allow_nan=False) | st.text("abc =:/", max_size=8), st.lists))
def test_values_without_secrets_come_back_equal(value: Any) -> None:
    assert redact(value) == value


def test_no_writer_of_a_run_folder_passes_one_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setattr(sys, "argv", ["train.py", f"+logger.api_key={SECRET}", "model.name=https://me:planted@host/x"])
    event_log.write_json(tmp_path / "env.json", environment.environment())
    event_log.write_json(tmp_path / "summary.json", {"error": f"401 for {SECRET}"})
    log = event_log.JsonLines(tmp_path / "metrics.jsonl")
    log.write("warning", {"message": f"tried https://me:planted@host with {SECRET}"})
    log.close()
    written = "".join(file.read_text() for file in tmp_path.iterdir())
    assert SECRET not in written
    assert "planted" not in written
    assert json.loads((tmp_path / "env.json").read_text())["command"][-1] == "model.name=https://***@host/x"


def test_no_sink_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[Values] = []

    class Taking(NullSink):
        def write(self, event: EventName, values: Values) -> None:
            taken.append(values)

    monkeypatch.setenv("HF_TOKEN", SECRET)
    Reporter([Taking()]).write("warning", message=f"with {SECRET}", number=3)
    assert taken == [{"message": f"with {HIDDEN}", "number": 3}]


def test_the_settings_of_a_run_hold_none(tmp_path: Path) -> None:
    from support.jobs import loaded

    from pipetransformer.config.schema import write_config

    write_config(loaded("+model.options.token=planted", "model.name=https://me:planted@host/x"), tmp_path)
    text = (tmp_path / "config.yaml").read_text()
    assert "planted" not in text
    assert yaml.safe_load(text)["model"]["options"]["token"] == HIDDEN
