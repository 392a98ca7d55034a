"""One look at disk and hub, before any process starts."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from socket import create_server

import pytest
from support.hub import Hub, serving

from pipetransformer.errors import UserError
from pipetransformer.models.base import ModelSpec
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.timm import TimmModel, architectures, repository

TIMM = "vit_tiny_patch16_224"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model of each family."""
    hub = Hub(tmp_path)
    for name in ("bert", "vit"):
        folder = tmp_path / "models" / "somebody" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    with serving(hub):
        point_to(hub.url, tmp_path, monkeypatch)
        yield hub


def point_to(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the hub's client ask there, with an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("spec", [HuggingFaceModel(name="somebody/bert"), TimmModel(name="somebody/vit")])
def test_a_model_of_the_hub_exists(spec: ModelSpec) -> None:
    spec.check_exists()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("family", [HuggingFaceModel, TimmModel])
def test_a_model_that_neither_disk_nor_hub_has_is_refused(family: Callable[..., ModelSpec]) -> None:
    with pytest.raises(UserError, match=r"neither disk nor hub has model\.name=nobody/model .*model\.name=<folder>"):
        family(name="nobody/model").check_exists()


@pytest.mark.parametrize("spec", [HuggingFaceModel(name="somebody/bert"), TimmModel(name=TIMM)])
def test_a_hub_that_says_nothing_is_waited_for_once(
    spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with create_server(("127.0.0.1", 0)) as silent:
        point_to(f"http://127.0.0.1:{silent.getsockname()[1]}", tmp_path, monkeypatch)
        before = time.monotonic()
        with pytest.raises(UserError, match=r"no answer within 0\.5 s; HF_HUB_ETAG_TIMEOUT=.*HF_HUB_OFFLINE=1"):
            spec.check_exists(timeout_s=0.5)

    assert time.monotonic() - before < 10, "a client that asks again takes longer"


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize("spec", [HuggingFaceModel(name="somebody/bert"), TimmModel(name=TIMM)])
def test_offline_only_the_cache_counts(spec: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match=r"was not downloaded before, and HF_HUB_OFFLINE=1"):
        spec.check_exists()
    name, file = (
        ("somebody/bert", "config.json") if spec.modality == "text" else (repository(TIMM), "model.safetensors")
    )
    assert name is not None
    folder = tmp_path / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("c0ffee")
    (folder / "snapshots" / "c0ffee").mkdir(parents=True)
    (folder / "snapshots" / "c0ffee" / file).write_text("{}")

    spec.check_exists()


@pytest.mark.parametrize("family", [HuggingFaceModel, TimmModel])
def test_a_folder_needs_its_config(family: Callable[..., ModelSpec], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a folder without config\.json"):
        family(name=str(tmp_path)).check_exists()
    (tmp_path / "config.json").write_text("{}")

    family(name=str(tmp_path)).check_exists()


@pytest.mark.parametrize("name", ["/no/such/folder", "a/b/c", "no model"])
def test_what_is_neither_a_folder_nor_a_name_is_refused(name: str) -> None:
    with pytest.raises(UserError, match="is neither a folder nor a name on the hub"):
        HuggingFaceModel(name=name).check_exists()


@pytest.mark.parametrize(
    ("name", "near"),
    [("vit_tiny_patch16_244", "vit_tiny_patch16_224"), ("eva02_tiny_patch14_244", "eva02_tiny_patch14_224")],
)
def test_a_name_that_timm_does_not_know_is_answered_with_near_ones(name: str, near: str) -> None:
    with pytest.raises(UserError, match=rf"no model\.name={name}; did you mean .*{near}"):
        TimmModel(name=name, pretrained=False).check_exists()


def test_names_and_places_are_those_of_timm() -> None:
    import timm

    assert {name for name in timm.list_models() if name.startswith(("vit_", "eva"))} <= set(architectures())
    for name in ("vit_base_patch16_224", "deit_small_patch16_224", "vit_base_patch16_siglip_224.webli"):
        assert repository(name) == timm.get_pretrained_cfg(name).hf_hub_id
    for name in ("vit_tiny_patch16_224_in21k", "resnet18"):  # an old name, and another architecture, refused later
        TimmModel(name=name, pretrained=False).check_exists()


def test_looking_imports_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = (
        "import sys; from pipetransformer.models.huggingface import HuggingFaceModel as H;"
        "from pipetransformer.models.timm import TimmModel as T;"
        f"H(name={str(tmp_path)!r}).check_exists(); T(name={TIMM!r}, pretrained=False).check_exists();"
        "assert not {'torch', 'timm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
