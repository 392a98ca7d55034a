"""A configuration of a script is refused in a line where a field holds a value of another kind."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Optional

import numpy as np
import pytest
from support.jobs import loaded

import pipetransformer as pt
from pipetransformer.config.compose import compose_simulation, read_config
from pipetransformer.config.kinds import CONFIG, check_config
from pipetransformer.config.schema import write_config
from pipetransformer.kinds import check_kinds, kinds_of


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optim": "adamw"}, r"optim is 'adamw' (str); give an optimizer of pipetransformer, such as pt.AdamW("),
        ({"freeze": pt.PaperRule}, "freeze is the class PaperRule; give a freeze policy, such as pt.PaperRule()"),
        ({"model": "bert"}, "model is 'bert' (str); give a specification, such as pt.TimmModel(name=...)"),
        ({"logger": pt.PaperRule()}, "logger is of type pipetransformer.freeze.pipetransformer.PaperRule; give"),
        ({"parallel": {"world_size": 2}}, "parallel is of type dict; give Parallel(...)"),
        ({"parallel": pt.Parallel(world_size="2")}, "parallel.world_size is '2' (str); give a whole number or None"),
        ({"parallel": pt.Parallel(recompute=1)}, "parallel.recompute is 1 (int); give True or False or None"),
        ({"cache": pt.Cache(path=3)}, "cache.path is 3 (int); give a string or None"),
        ({"resume": pt.Resume(allow="seed")}, "resume.allow is 'seed' (str); give a list"),
        ({"batch_size": 8.0}, "batch_size is 8.0 (float); give a whole number"),
        ({"epochs": True}, "epochs is True (bool); give a whole number"),
        ({"log_every_s": "10"}, "log_every_s is '10' (str); give a number"),
        ({"seed": None}, "seed is None; give a whole number"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_is_told_in_a_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(pt.UserError, match=f"^{re.escape(message)}"):
        check_config(replace(loaded(), **changes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pt.AdamW(lr="1e-3"), "optim.lr is '1e-3' (str); give a number or None"),
        (lambda: pt.SGD(lr=1e-3, momentum="0.9"), "optim.momentum is '0.9' (str); give a number"),
        (lambda: pt.PaperRule(alpha="x"), "freeze.alpha is 'x' (str); give a number"),
        (lambda: pt.FreezeOut(cubic="false"), "freeze.cubic is 'false' (str); give True or False"),
        (lambda: pt.Egeria(window=2.5), "freeze.window is 2.5 (float); give a whole number"),
        (lambda: pt.FixedSchedule(num_frozen=3), "freeze.num_frozen is 3 (int); give a list"),
        (
            lambda: check_config(replace(loaded(), model=pt.TimmModel(name="vit_tiny", image_size="8"))),
            "model.image_size is '8' (str); give a whole number or None",
        ),
        (
            lambda: check_config(replace(loaded(), dataset=pt.Digits(max_train_samples="8"))),
            "dataset.max_train_samples is '8' (str); give a whole number or None",
        ),
    ],
)  # fmt: skip
def test_an_option_of_a_specification_is_told_before_anything_uses_it(make: Callable[[], object], message: str) -> None:
    with pytest.raises(pt.UserError, match=f"^{re.escape(message)}"):
        make()


@dataclass(frozen=True)
class Loose:
    """Options whose types tell nothing to a check, or more than a class."""

    word: str = "a"
    any: object = None
    few: Literal["a", "b"] = "a"
    pair: tuple[float, float] = (0.0, 1.0)
    maybe: Optional[int] = None  # noqa: UP045
    away: "Missing" = None  # type: ignore[name-defined]  # noqa: F821


def test_a_type_that_cannot_be_told_leaves_its_class_unchecked() -> None:
    assert kinds_of(Loose) == {}
    known = kinds_of(make_dataclass("Known", [(each.name, each.type) for each in fields(Loose)[:-1]]))
    check_kinds({"pair": [0, 1], "maybe": np.int64(3), "few": 3, "word": 3}, known)
    with pytest.raises(pt.UserError, match="maybe is 'x'"):
        check_kinds({"maybe": "x"}, known)


def test_what_does_in_place_of_a_type_is_taken() -> None:
    check_config(replace(loaded(), log_every_s=10, cache=pt.Cache(path=Path("x")), resume=pt.Resume(allow=("seed",))))
    check_config(compose_simulation())


def test_every_field_but_words_of_a_few_has_a_kind() -> None:
    assert {"optim", "freeze", "parallel", "batch_size", "compile"} < CONFIG.keys()
    assert "precision" not in CONFIG
    assert {"path", "memory_gib", "enabled"} < kinds_of(pt.Cache).keys()


def test_functions_that_take_a_configuration_refuse_anything_else(tmp_path: Path) -> None:
    given: Any = {"model": "bert"}
    for message, function in (
        (r"pt\.Config\(", pt.train),
        (r"pt\.Config\(", pt.ElasticTrainer.from_config),
        ("SimulationConfig", pt.simulate),
    ):
        with pytest.raises(pt.UserError, match=f"^config is of type dict; give {message}"):
            function(given)
    with pytest.raises(pt.UserError, match=r"^run_dir is 3 \(int\); give the path of a folder, or None"):
        pt.train(loaded(), 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"norm_layer": int}, "model.options.norm_layer is the class int, which config.yaml of the run cannot hold"),
        ({"norm_layer": lambda width: width}, "model.options.norm_layer is of type function, which config.yaml of"),
        ({"sizes": [1, {2, 3}]}, "model.options.sizes[1] is of type set, which config.yaml of the run cannot hold"),
    ],
)  # fmt: skip
def test_an_option_that_no_file_holds_is_told_in_a_line(value: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = loaded()
    config = replace(config, model=replace(config.model, options=value))
    with pytest.raises(pt.UserError, match=f"^{re.escape(message)}"):
        pt.train(config, tmp_path / "run")


def test_what_does_in_place_of_a_type_is_written_as_a_plain_value(tmp_path: Path) -> None:
    given = replace(loaded(), epochs=np.int64(2), log_every_s=np.float64(0.5), cache=pt.Cache(path=tmp_path / "store"))
    given = replace(given, model=replace(given.model, options={"depth": np.int64(4), "drop_rate": np.float32(0.5)}))
    write_config(given, tmp_path)
    read = read_config(tmp_path / "config.yaml")
    assert (read.epochs, read.log_every_s, read.cache.path) == (2, 0.5, str(tmp_path / "store"))
    assert read.model.options == {"depth": 4, "drop_rate": 0.5}
