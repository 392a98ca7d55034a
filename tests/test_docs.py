"""Everything that README.md and docs/ say can be held against the code: links, options, commands, messages, names."""

import ast
import importlib
import importlib.util
import os
import posixpath
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser

import pipetransformer as pt
from pipetransformer.config.arguments import choices, groups, read_arguments
from pipetransformer.config.compose import CONF, load, register
from pipetransformer.config.names import in_options
from pipetransformer.config.schema import SimulationConfig
from pipetransformer.freeze import base
from pipetransformer.simulate.hardware import Hardware

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
SITE = [*PAGES, *sorted(ROOT.glob("experiments/**/README.md"))]
TRAIN = re.compile(
    r"^(?:python train\.py|pipetransformer-train|torchrun .*train\.py|sbatch examples/slurm\.sbatch) (.*)"
)
SIMULATE = re.compile(r"^(?:python -m pipetransformer\.simulate|pipetransformer-simulate) (.*)")
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
OPTION = re.compile(r"\b([a-z_]+(?:\.[a-z_0-9]+)+)=")


def ids(page: Path) -> str:
    return str(page.relative_to(ROOT))


def slug(heading: str) -> str:
    """The anchor of a heading, as MkDocs and the hosts of repositories make it."""
    words = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", heading)).strip().lower()
    return words.replace(" ", "-")


def anchors(page: Path) -> set[str]:
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}


# Links


@pytest.mark.parametrize("page", SITE, ids=ids)
def test_every_link_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md" and "api" not in target.parts:
            assert anchor in anchors(target), f"{link}: {ids(target)} has no such heading"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"([\w/]+\.md)$", text, re.MULTILINE))
    own = {str(page.relative_to(DOCS)) for page in PAGES[1:]}
    assert own <= listed, own - listed
    assert all((DOCS / path).is_file() or (ROOT / path).is_file() for path in listed)


def test_every_experiment_is_on_the_site() -> None:
    """In the navigation, or linked from a page that is."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    linked = {
        (page.parent / link).resolve()
        for page in SITE
        for link in re.findall(r"\]\(([^)\s#]+\.md)", page.read_text(encoding="utf-8"))
    }
    experiments = {page for page in SITE if ROOT / "experiments" in page.parents}
    assert {page for page in experiments if str(page.relative_to(ROOT)) not in navigation} <= linked


# Options


@cache
def keys(simulation: bool = False) -> frozenset[str]:
    """Every key that some choice of the groups gives the configuration, with its parents."""
    found: set[str] = set()
    for file in sorted(CONF.rglob("*.yaml")):
        node = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        group = file.relative_to(CONF).parts[0]
        is_global = file.parent == CONF or "@package _global_" in file.read_text(encoding="utf-8")
        found.update(_names(node, "" if is_global else f"{group}."))
    return frozenset(found | _schema_names())


def _names(node: object, prefix: str) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from _names(value, f"{prefix}{key}.")


def _schema_names() -> set[str]:
    from dataclasses import fields

    from pipetransformer.config.schema import SECTIONS

    sections = {f"{name}.{each.name}" for name, section in SECTIONS.items() for each in fields(section)}
    return sections | {each.name for each in fields(SimulationConfig)}


@pytest.mark.parametrize("page", SITE, ids=ids)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    for option in OPTION.findall(page.read_text(encoding="utf-8")):
        is_open = ".options." in option or option.startswith("hydra.")
        is_of_python = option.split(".")[0] not in {*groups(), *(key.partition(".")[0] for key in keys())}
        assert is_open or is_of_python or option in keys(), f"{option}= does not exist"


def test_an_option_that_does_not_exist_is_found() -> None:
    assert "freeze.alpha" in keys()
    assert "parallel.world_size" in keys()
    assert "freeze.aplha" not in keys()
    assert OPTION.findall("`freeze.aplha=` and dataset.text=review") == ["freeze.aplha", "dataset.text"]


# Commands


def commands(page: Path, pattern: re.Pattern[str]) -> Iterator[list[str]]:
    """The arguments of each command in a code block that has no language."""
    for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        for line in re.sub(r"\\\n\s*", "", block).splitlines() if language in ("", "bash") else []:
            if found := pattern.search(line):
                yield shlex.split(found[1], comments=True)


def jobs(arguments: list[str]) -> Iterator[list[str]]:
    """The overrides of a command's jobs; of a sweep so many that each value of each option occurs."""
    given = [each for each in arguments if not each.startswith(("-", "hydra.", "hydra/", "resume=outputs"))]
    if "-m" not in arguments:
        yield given
        return
    parsed = OverridesParser.create().parse_overrides(given)
    values = [[*each.sweep_string_iterator()] if each.is_sweep_override() else [] for each in parsed]
    for index in range(max(map(len, values))):
        yield [
            f"{each.key_or_group}={own[index % len(own)]}" if own else raw
            for each, own, raw in zip(parsed, values, given, strict=True)
        ]


TRAININGS = sorted(
    {
        tuple(each for each in job if not each.startswith("seed="))
        for page in PAGES
        for given in commands(page, TRAIN)
        for job in jobs(given)
    }
)
SIMULATIONS = sorted({tuple(given) for page in PAGES for given in commands(page, SIMULATE)})


@pytest.mark.parametrize("overrides", TRAININGS, ids=" ".join)
def test_every_training_command_composes(overrides: tuple[str, ...]) -> None:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = load(compose("config", read_arguments(overrides)), with_data=False)
    assert config.batch_size > 0


@pytest.mark.parametrize("overrides", SIMULATIONS, ids=" ".join)
def test_every_simulation_command_composes(overrides: tuple[str, ...]) -> None:
    register(SimulationConfig)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = load(compose("simulate", read_arguments(overrides, simulation=True)), SimulationConfig)
    assert isinstance(config.cluster, Hardware)


def test_the_commands_are_found() -> None:
    assert len(TRAININGS) > 20
    assert len(SIMULATIONS) > 1
    swept = list(jobs(["-m", "seed=1,2,3", "freeze=none,alpha", "epochs=1"]))
    assert swept == [[f"seed={1 + i}", f"freeze={('none', 'alpha')[i % 2]}", "epochs=1"] for i in range(3)]


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_every_choice_of_a_group_exists(page: Path) -> None:
    for group, value in re.findall(r"`(model|dataset|freeze|optim|parallel|peft)=([a-z_0-9/]+)`", page.read_text()):
        assert value in choices(group), f"{group}={value} does not exist"


# Messages


@cache
def templates() -> tuple[str, ...]:
    """Every string of the package with ``\\0`` for what is put in, options in place of fields."""
    files = sorted((ROOT / "pipetransformer").rglob("*.py"))
    nodes = (node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
    return tuple(in_options(text) for text in filter(None, map(_template, nodes)))


def _template(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) or "\0" for part in node.values)
    return ""


def is_said(message: str) -> bool:
    """Returns whether the fixed words of a message stand in one string of the package, in their order."""
    parts = message.split("…")
    fixed = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(fixed.search(text) for text in templates() if all(part in text for part in parts))


def messages() -> list[str]:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return re.findall(r"^#### `(.+)`$", text, re.MULTILINE)


@pytest.mark.parametrize("message", messages())
def test_every_message_of_the_troubleshooting_page_is_said(message: str) -> None:
    assert is_said(message)


def test_a_message_that_nobody_says_is_found() -> None:
    assert len(messages()) > 50
    assert not is_said("batch_size=… is greater than the … training samples; lower batch_size")
    assert not is_said("… training samples; lower batch_size=… is larger than the …")


# Names, sections, snippets


def options_in(file: Path) -> set[str]:
    """The names of the options in a YAML file of the configuration, of its sections too."""

    def names(values: Any) -> set[str]:
        own = {name: value for name, value in values.items() if name not in ("defaults", "hydra", "_target_")}
        inner = (names(value) for name, value in own.items() if isinstance(value, dict) and name != "options")
        return {*own}.union(*inner)

    return names(yaml.safe_load(file.read_text(encoding="utf-8")) or {})


def test_the_page_of_options_has_every_one_of_them() -> None:
    page = (DOCS / "reference" / "options.md").read_text(encoding="utf-8")
    shown = set().union(*(options_in(ROOT / file) for file in re.findall(r'--8<-- "(.+?)"', page)))
    files = [file for file in CONF.rglob("*.yaml") if "experiment" not in file.parts]
    for file in files:
        assert options_in(file) <= shown, file


def test_the_api_has_every_public_name() -> None:
    shown = {
        path.removeprefix("pipetransformer.")
        for page in (DOCS / "api").glob("*.md")
        for path in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    named = {f"{module.removeprefix('pipetransformer.')}.{name}" for name, module in pt.MODULES.items()}
    assert {name for name in named if not name.startswith("errors.")} <= shown


@cache
def hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_site", DOCS / "hooks" / "site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_take_sections_that_the_readme_has() -> None:
    wanted = [name for page in PAGES[1:] for name in re.findall(r"<!-- README\.md: (.+?) -->", page.read_text())]
    assert wanted
    assert all(hook().readme_section(name).strip() for name in wanted)
    with pytest.raises(ValueError, match=r"README.md has no section Nothing"):
        hook().readme_section("Nothing")


def test_a_link_out_of_the_pages_becomes_one_to_a_page() -> None:
    text = "[a](../../experiments/cache/README.md#x) [b](../../pipetransformer/freeze/none.py) [c](../limits.md) [d](https://e)"
    assert hook().with_pages(text, "docs/methods/none.md", "methods/none.md") == (
        "[a](../experiments/cache/README.md#x) [b](../pipetransformer/freeze/none.py.md) [c](../limits.md) [d](https://e)"
    )
    assert posixpath.normpath(hook().with_pages("[a](docs/limits.md)", "README.md", "reference/options.md")[4:-1]) == (
        "../limits.md"
    )


def test_a_page_that_fetches_something_is_found() -> None:
    fetched = hook().FETCHED
    assert fetched.search('<script async src="https://cdn.example/x.js">')[1] == "https://cdn.example/x.js"
    assert fetched.search('<link rel="stylesheet" href="http://fonts.example/a.css">')
    assert not fetched.search(
        '<link rel="canonical" href="http://127.0.0.1:8000/"><a href="https://arxiv.org"><img src="a.png">'
    )


def test_the_policy_of_the_page_about_policies_decides() -> None:
    page = (DOCS / "howto" / "policy.md").read_text(encoding="utf-8")
    (code,) = (block for language, block in FENCE.findall(page) if language == "python")
    names: dict[str, Any] = {}
    exec(code, names)
    policy = names["TenthRule"]()
    first, state = policy.decide(base.Signals(0, 3, 0, {"gradient_norm": (1.0, 2.0, 3.0)}), policy.initial_state())
    later, _ = policy.decide(base.Signals(1, 3, 0, {"gradient_norm": (0.05, 0.1, 3.0)}), state)
    assert (first.num_frozen, later.num_frozen) == (0, 2)


def write_own_classes(page: str, folder: Path) -> tuple[str, list[str]]:
    """Writes the module and the YAML of a how-to page; returns the module's name and the arguments of the command."""
    text = (DOCS / "howto" / page).read_text(encoding="utf-8")
    (code,) = (block for language, block in FENCE.findall(text) if language == "python")
    (values,) = (block for language, block in FENCE.findall(text) if language == "yaml")
    (command,) = re.findall(r"^PYTHONPATH=\. python train\.py (--config-dir=conf .+)$", text, re.MULTILINE)
    (file,) = re.findall(r"`(conf/\w+/\w+\.yaml)`:$", text, re.MULTILINE)
    module = yaml.safe_load(values)["_target_"].partition(".")[0]
    (folder / f"{module}.py").write_text(code)
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_text(values)
    return module, shlex.split(command)


# every run: the classes of two of the pages, the tests below and above; --config-dir and targets.allow of such classes,
# tests/config/test_targets.py; a run with an optimizer of one's own, tests/optim/test_named.py
@pytest.mark.thorough
def test_the_commands_with_classes_of_ones_own_run_in_another_folder(tmp_path: Path) -> None:
    """Those of four pages as one, since each would be a run; all of their modules are allowed."""
    kinds = ("model", "policy", "optimizer", "logger")
    given = [argument for kind in kinds for argument in write_own_classes(f"{kind}.md", tmp_path)[1]]
    allowed = [each.removeprefix("targets.allow=[").removesuffix("]") for each in given if each.startswith("targets")]
    arguments = [*dict.fromkeys(each for each in given if not each.startswith("targets"))]
    arguments.append(f"targets.allow=[{','.join(allowed)}]")
    assert len(arguments) == 6, "--config-dir, the four choices and what is allowed"
    few = ("dataset.max_train_samples=64", "dataset.max_eval_samples=40", "epochs=1")
    environment = {**os.environ, "PYTHONPATH": f".:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / "train.py"), *arguments, *few, "hydra.run.dir=out"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    assert "status: completed" in ended.stdout
    assert "nanobind" not in ended.stdout + ended.stderr, "the launcher imports a model of one's own, and torch with it"
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()
    config = yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())
    assert [config[name]["_target_"].partition(".")[0] for name in ("model", "freeze", "optim", "logger")] == allowed
    steps = [line.partition(",")[0] for line in (tmp_path / "out" / "loss.csv").read_text().splitlines()]
    assert steps == ["1", "2"]


def test_the_family_of_the_page_about_models_keeps_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from pipetransformer.models.base import Head
    from pipetransformer.models.checks import check_same_outputs, draw_all

    module, _ = write_own_classes("model.md", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module(module)
    options = yaml.safe_load((tmp_path / "conf" / "model" / "torchvision.yaml").read_text())["options"]
    spec = own.TorchvisionViT(name="vit", pretrained=False, options=options)
    head, shape, images = Head("image", 5), (3, 8, 8), torch.randn(4, 3, 8, 8)
    stack = spec.build(head, shape, seed=1)

    stack.check(images)
    meta = spec.build_meta(head, shape, seed=1)
    meta.load(2)
    assert all(torch.equal(tensor, dict(stack[2].tensors())[name]) for name, tensor in meta[2].tensors())
    assert not meta[1].has_storage

    draw_all(stack)
    state = {name: tensor for layer in stack.layers for name, tensor in layer.original_state().items()}
    spec.save(stack, state, tmp_path)
    original = own.VisionTransformer(**options, num_classes=5)
    original.load_state_dict(own.load_file(tmp_path / "model.safetensors"))
    check_same_outputs(stack, original, original, images)

    saved = own.TorchvisionViT(name=str(tmp_path))
    again = saved.build(head, shape, seed=2)
    assert all(torch.equal(state[name], tensor) for layer in again.layers for name, tensor in layer.tensors())
    assert saved.build(Head("image", 3), shape, seed=2)(images).shape == (4, 3)
    with pytest.raises(ValueError, match=r"has no model\.safetensors"):
        own.TorchvisionViT(name="nowhere").check_exists()


def test_the_plans_of_the_page_about_the_library_are_those_that_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "howto" / "library.md").read_text(encoding="utf-8").partition("## 3.")[2]
    (_, code), (_, shown) = FENCE.findall(page)
    exec(code, {})
    assert capsys.readouterr().out == shown
