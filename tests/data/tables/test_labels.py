"""Classes that the labels of a table give, and what is said where they may not be those that are meant."""

from pathlib import Path
from typing import Any

import pytest

from pipetransformer.data.base import Data, ImageFormat, TextFormat
from pipetransformer.data.tables.label_cells import name
from pipetransformer.data.tables.labels import LabelOptions, Labels
from pipetransformer.data.tables.spec import TableSpec


class Spec(TableSpec):
    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        raise NotImplementedError


def labels(file: Path, cells: list[str], names: Any = ()) -> Labels:
    file.write_text("\n".join(["label", *cells]) + "\n")
    spec = Spec(path=str(file), eval_fraction=0.1)
    return Labels.of(spec.tables().train, LabelOptions(("label",), "auto", tuple(map(name, names)), None))


def test_classes_that_differ_by_case_alone_are_told(tmp_path: Path) -> None:
    found = labels(tmp_path / "a.csv", 20 * ["yes", "Yes", "no"])
    assert found.names == ("Yes", "no", "yes")
    (warning,) = found.warnings
    assert warning.startswith("dataset.label=label: the labels Yes and yes differ by case alone and are two classes;")


@pytest.mark.parametrize(("cells", "names"), [(["yes", "no"], ()), (["yes", "Yes"], ("yes", "Yes"))])
def test_classes_that_differ_or_that_the_user_names_are_not_told(
    tmp_path: Path, cells: list[str], names: tuple[str, ...]
) -> None:
    assert labels(tmp_path / "a.csv", 20 * cells, names).warnings == ()
