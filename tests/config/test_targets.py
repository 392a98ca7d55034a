"""A configuration names classes of this package, and others only where the user allows them."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.jobs import ROOT, loaded

from pipetransformer.errors import UserError

SPEC = """
from dataclasses import dataclass
from pipetransformer.freeze.none import NoFreezing

@dataclass(frozen=True, kw_only=True)
class Mine(NoFreezing):
    ratio: float = 2.0
"""


@pytest.mark.parametrize(
    "target",
    ["os.system", "builtins.eval", "subprocess.Popen", "pipetransformers.evil.Spec", "pipetransformer_evil.Spec"],
)
def test_a_class_of_another_package_is_refused(target: str) -> None:
    with pytest.raises(UserError, match=rf"model\._target_={target} is not run: .*targets\.allow=\[{target}\]$"):
        loaded(f"model._target_={target}")


@pytest.mark.parametrize("value", ["null", "[os.system]", "1", "''"])
def test_what_is_no_name_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"model\._target_=.* is not run"):
        loaded(f"model._target_={value}")


def test_nothing_is_imported_before_all_names_are_checked(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code = """
from pipetransformer.config.compose import compose_training
try:
    compose_training(["logger._target_=planted.Logger"])
except ValueError as error:
    print(error)
"""
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "logger._target_=planted.Logger is not run" in done.stdout
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "override",
    [
        "++model.options={_target_: os.system, command: 'touch ran'}",
        "model.options={_target_: os.system, command: 'touch ran'}",
        "+model.options.deeper={_target_: pipetransformer.freeze.none.NoFreezing}",
        "+parallel._target_=os.system",
        "+model.options.list=[{_target_: os.system}]",
    ],
)
def test_a_target_within_a_spec_or_section_is_refused(override: str) -> None:
    with pytest.raises(UserError, match=r"_target_=.* is not run"):
        loaded(override)


def test_what_a_module_of_this_package_imports_is_none_of_its_classes() -> None:
    for target in ("pipetransformer.report.environment.subprocess.Popen", "pipetransformer.models.timm.Path"):
        with pytest.raises(UserError, match=r"model\._target_=.* is no dataclass of that place"):
            loaded(f"model._target_={target}")


@pytest.mark.parametrize("name", ["my_freezing.Mine", "my_freezing"])
def test_an_allowed_class_is_taken(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_freezing.py").write_text(SPEC)
    monkeypatch.syspath_prepend(tmp_path)
    config = loaded("freeze=none", "freeze._target_=my_freezing.Mine", f"targets.allow=[{name}]")
    assert type(config.freeze).__name__ == "Mine"
    assert config.targets.allow == [name]


def test_each_field_of_an_allowed_class_is_an_option_whether_its_file_has_it_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_freezing.py").write_text(SPEC)
    (tmp_path / "conf" / "freeze").mkdir(parents=True)
    (tmp_path / "conf" / "freeze" / "mine.yaml").write_text("_target_: my_freezing.Mine\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = ("freeze=none", "freeze._target_=my_freezing.Mine", "targets.allow=[my_freezing]")
    freeze = loaded(*own, "freeze.ratio=3", "freeze.target_fraction=0.5").freeze
    assert (vars(freeze)["ratio"], freeze.target_fraction) == (3.0, 0.5)
    with pytest.raises(UserError, match=r"^freeze\.ratoi does not exist; did you mean freeze\.ratio\?$"):
        loaded(*own, "freeze.ratoi=3")
    with pytest.raises(UserError, match=r"^freeze\.ratio=many must be a number$"):
        loaded(*own, "freeze.ratio=many")
    given = ["--config-dir=conf", "freeze=mine", "freeze.ratio=3", "freeze.guard=0.5", "targets.allow=[my_freezing]"]
    command = [sys.executable, str(ROOT / "train.py"), *given, "--cfg=job", "--package=freeze"]
    env = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert "ratio: 3" in done.stdout
    assert "guard: 0.5" in done.stdout


MISSING = [
    ("nowhere_at_all.Mine", r"No module named 'nowhere_at_all'; put its folder on PYTHONPATH"),
    ("my_freezing.Yours", r"my_freezing has no Yours; name a class of it"),
    ("my_freezing.Mine.Inner", r"AttributeError: type object 'Mine' has no attribute 'Inner'"),
    ("needing.Mine", r"No module named 'not_installed', which it imports; install it, or put its folder on PYTHONPATH"),
    ("broken.Mine", r"SyntaxError: .+broken\.py.+"),
    ("pipetransformer.freeze.nope.Rule", r"pipetransformer\.freeze has no nope; name a class of it"),
]


@pytest.mark.parametrize(("target", "reason"), MISSING, ids=[target for target, _ in MISSING])
def test_a_class_that_cannot_be_imported_says_why_once(
    target: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "my_freezing.py").write_text(SPEC)
    (tmp_path / "needing.py").write_text("import not_installed")
    (tmp_path / "broken.py").write_text("def (")
    monkeypatch.syspath_prepend(tmp_path)
    name = target.partition(".")[0]
    with pytest.raises(UserError, match=rf"^freeze\._target_={target} cannot be imported: {reason}$"):
        loaded("freeze=none", f"freeze._target_={target}", f"targets.allow=[{name}]")
    assert not caplog.records
