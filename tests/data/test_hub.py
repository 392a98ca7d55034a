import os
import subprocess
import sys
from pathlib import Path
from socket import create_server

import datasets
import pytest
from support.hub import Hub, serving

from pipetransformer.data.hub import load_hub


def test_without_the_hub_the_message_names_the_local_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'train' of nobody/nothing .* dataset\.path=: a folder with pictures"):
        load_hub("nobody/nothing", "train", "a folder with pictures")


def test_name_configuration_and_split_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*names: str, split: str) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"asked": ["/".join([*names, split])]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_hub("owner/data", "validation", "files", config="sst2")["asked"][:] == ["owner/data/sst2/validation"]


def find(name: str, config: str | None = None, **environment: str) -> str:
    """What finding a dataset raises in a fresh process, which reads its environment once."""
    code = f"from pipetransformer.data.hub import find_on_hub; find_on_hub({name!r}, 'a folder', {config!r})"
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=inherited | environment, capture_output=True, text=True, timeout=60
    )
    return ended.stderr.strip().splitlines()[-1] if ended.stderr else ""


def test_the_hub_is_asked_once_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "hub" / "datasets" / "owner" / "data").mkdir(parents=True)
    hub = Hub(tmp_path / "hub")
    with serving(hub):
        asked = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
        assert find("owner/data", **asked) == ""
        message = find("owner/other", **asked)
    assert "neither disk nor hub has the data owner/other" in message
    assert "dataset.path=: a folder" in message


def test_what_an_earlier_run_has_loaded_needs_no_hub(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    assert "owner/data was not loaded before, and HF_HUB_OFFLINE=1 keeps from asking" in find("owner/data", **offline)
    (tmp_path / "datasets" / "owner___data" / "default").mkdir(parents=True)
    assert find("owner/data", **offline) == ""
    assert "was not loaded before" in find("owner/data", "other", **offline), "another configuration"


def test_a_hub_that_says_nothing_is_waited_for_once(tmp_path: Path) -> None:
    with create_server(("127.0.0.1", 0)) as silent:
        asked = {"HF_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}", "HF_HOME": str(tmp_path)}
        message = find("owner/data", **asked, HF_HUB_ETAG_TIMEOUT="1")
    assert "owner/data cannot be loaded from the hub (no answer within 1 s" in message
    assert "dataset.path=: a folder" in message
