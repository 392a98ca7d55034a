"""``import pipetransformer as pt`` costs nothing, and ``pt.train`` is the command line from Python."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

import pytest
from support.command import command
from support.jobs import ROOT, loaded

import pipetransformer as pt

WITHOUT_GUARD = """
import pipetransformer as pt

model = pt.TimmModel(
    name="vit_tiny_patch16_224", pretrained=False,
    options={"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2},
)
config = pt.Config(
    model=model, dataset=pt.Digits(max_train_samples=64, max_eval_samples=40), freeze=pt.PaperRule(),
    optim=pt.AdamW(lr=1e-3), epochs=1, batch_size=16, parallel=pt.Parallel(world_size=2),
)
print("metric", pt.train(config, "run")["metric"]["value"])
"""


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, pipetransformer as pt; pt.UserError; pt.PaperRule; pt.TimmModel; pt.Digits; pt.AdamW; pt.Config"
    show = "print([name for name in ('torch', 'hydra', 'omegaconf', 'timm', 'rich', 'wandb') if name in sys.modules])"
    words = [sys.executable, "-c", f"{code}; {show}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", pt.__all__)
def test_every_public_name_is_where_the_table_says(name: str) -> None:
    public, own = getattr(pt, name), getattr(import_module(pt.MODULES[name]), name)
    assert public is own or (name == "simulate" and public is import_module("pipetransformer.simulate"))
    assert name in dir(pt)


def test_a_simulation_is_composed_before_anything_else_is_imported() -> None:
    """Hydra finds the classes of its YAML through the package, whose ``simulate`` is a function to users."""
    code = "from pipetransformer.config.compose import compose_simulation; compose_simulation([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("before", ["", "import pipetransformer.simulate.run; "], ids=["first", "after its package"])
def test_simulate_is_a_function_whatever_was_imported_before(before: str) -> None:
    code = f"import sys, pipetransformer as pt; {before}assert callable(pt.simulate); pt.simulate; pt.simulate()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "missing 1 required positional argument: 'config'" in done.stderr, done.stderr


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        pt.trian  # noqa: B018


# every run: pt.train, test_torchrun.py; no rank imports a script, tests/launch/test_elastic.py
@pytest.mark.thorough
def test_a_script_without_guard_trains_as_the_command_line_does(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WITHOUT_GUARD)
    ended = command(tmp_path, sys.executable, "script.py", PYTHONPATH=str(ROOT))
    assert ended.code == 0, ended.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert f"metric {summary['metric']['value']}" in ended.out
    assert ended.out.count("starting 2 processes") == 1
    assert {path.name for path in tmp_path.iterdir()} == {"script.py", "run"}
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_a_configuration_that_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = pt.Config(
        model=pt.TimmModel(name="vit"), dataset=pt.Squad(), freeze=pt.NoFreezing(), optim=loaded().optim
    )  # fmt: skip
    with pytest.raises(pt.UserError, match="reads images and the dataset holds texts"):
        pt.train(config, tmp_path / "run")
    assert not list(tmp_path.iterdir())


def typed_policy(module: str) -> pt.NoFreezing:
    """One of a class that stands where only this process finds it."""

    @dataclass(frozen=True, kw_only=True)
    class Typed(pt.NoFreezing):
        pass

    if module:
        Typed.__module__, Typed.__qualname__ = module, "Typed"
    return Typed()


@pytest.mark.parametrize(
    ("module", "file", "words"),
    [
        ("", __file__, r"freeze is of typed_policy\.<locals>\.Typed, a class that is defined inside a function"),
        ("__main__", None, "freeze is of Typed, a class that is defined in a notebook or on a prompt"),
        ("__main__", "<stdin>", r"cannot import it; put it into a module, or give it to pt\.ElasticTrainer\("),
    ],
)
def test_a_class_that_other_processes_cannot_import_is_refused(
    module: str, file: str | None, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", file, raising=False)
    with pytest.raises(pt.UserError, match=words):
        pt.train(replace(loaded(), freeze=typed_policy(module)))
