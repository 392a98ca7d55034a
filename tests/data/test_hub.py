import datasets
import pytest

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
