"""The wheel holds all that a run needs, and its commands work outside the checkout."""

import os
import subprocess
import sys
import zipfile
from configparser import ConfigParser
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.jobs import ROOT, TINY

pytestmark = pytest.mark.skipif(find_spec("setuptools") is None, reason="building a wheel needs setuptools")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "pipetransformer"):  # a build leaves files where it runs
        os.symlink(ROOT / name, source / name)
    words = ["pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", str(folder), str(source)]
    subprocess.run([sys.executable, "-m", *words], capture_output=True, check=True, timeout=200)
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_configuration_and_says_that_it_is_typed(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    conf = {str(file.relative_to(ROOT)) for file in (ROOT / "pipetransformer" / "conf").rglob("*.yaml")}
    modules = {str(file.relative_to(ROOT)) for file in (ROOT / "pipetransformer").rglob("*.py")}
    assert len(conf) > 50
    assert {"pipetransformer/py.typed", *conf, *modules} <= names
    assert {name.partition("/")[0] for name in names if ".dist-info" not in name} == {"pipetransformer"}


def test_its_commands_are_there(wheel: Path) -> None:
    parser = ConfigParser()
    file = next(name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt"))
    parser.read_string(zipfile.ZipFile(wheel).read(file).decode())
    commands = dict(parser["console_scripts"])
    assert set(commands) == {
        f"pipetransformer-{name}" for name in ("train", "simulate", "export", "evaluate", "predict", "cache", "report")
    }
    for target in commands.values():
        module, _, name = target.partition(":")
        assert callable(getattr(import_module(module), name))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.mark.parametrize(
    ("module", "arguments", "words"),
    [
        pytest.param(
            "pipetransformer.command",
            [*TINY, "epochs=1", "parallel.world_size=1", "hydra.run.dir=run"],
            "accuracy",
            marks=pytest.mark.thorough,  # test_the_wheel_holds_... has all files of a run
        ),
        ("pipetransformer.simulate.__main__", ["epochs=2", "hydra.run.dir=run"], "speed-up over best static plan"),
    ],
)
def test_its_commands_work_outside_the_checkout(
    installed: Path, tmp_path: Path, module: str, arguments: list[str], words: str
) -> None:
    code = f"import sys; from {module} import main; import pipetransformer; print(pipetransformer.__file__); main()"
    env = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert words in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
