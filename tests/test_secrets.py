"""A run that is given keys and tokens leaves none of them on disk or in its output."""

from pathlib import Path

import pytest
from support.command import train
from support.jobs import TINY

KEY = "0123456789abcdef0123456789abcdef01234567"
HUB = "hf_PlantedPlantedPlanted"
PASSWORD = "planted-password"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, bytes]:
    """All files of a run folder, W&B's included, and the output."""
    folder = tmp_path_factory.mktemp("run")
    ended = train(
        folder,
        *TINY,
        "logger=wandb",
        f"logger.tags=['https://me:{PASSWORD}@host']",
        f"logger.name={HUB}",
        f"+hydra.job.env_set.SOME_TOKEN={PASSWORD}",
        "dataset.max_eval_samples=40",
        "++model.options.drop_rate=0.0",
        "epochs=1",
        "hydra.run.dir=run",
        WANDB_API_KEY=KEY,
        HF_TOKEN=HUB,
    )
    assert ended.code == 0, ended.err
    files = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return {**files, Path("output"): (ended.out + ended.err).encode()}


@pytest.mark.parametrize("secret", [KEY, HUB, PASSWORD])
def test_no_file_of_the_run_holds_a_secret(written: dict[Path, bytes], secret: str) -> None:
    assert any(file.suffix == ".wandb" for file in written)
    assert [str(file) for file, content in written.items() if secret.encode() in content] == []


def test_a_sweep_with_a_secret_among_its_arguments_is_refused(tmp_path: Path) -> None:
    ended = train(tmp_path, "-m", *TINY, "seed=1,2", f"+hydra.job.env_set.SOME_TOKEN={PASSWORD}")
    assert ended.code == 1
    assert "SOME_TOKEN=*** holds a key or token, and Hydra writes all arguments" in ended.err
    assert PASSWORD not in ended.out + ended.err
    assert list(tmp_path.rglob("*")) == []
