"""What holds for every dataset."""

import json
import re
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from PIL import Image
from support.command import TIMEOUT_S

from pipetransformer.data.base import (
    Data,
    DatasetSpec,
    Digest,
    ImageFormat,
    Plain,
    TextFormat,
    count_before_loading,
    load_data,
    subsample,
)
from pipetransformer.data.images.datasets import Digits, HubImages, IdxImages
from pipetransformer.data.images.table import TableImages
from pipetransformer.data.text.glue import Glue
from pipetransformer.data.text.squad import Squad
from pipetransformer.data.text.table import TextDataset
from pipetransformer.errors import UserError

VALUES = st.sampled_from([None, 0, 1, 11, 1.0, "", "1", "11", "None", (1,), (1, 1)])
SPECS = [Digits, IdxImages, HubImages, TableImages, Glue, Squad, TextDataset]
HEAVY = ["torch", "torchvision", "torchmetrics", "transformers", "datasets", "sklearn", "PIL"]


def make(spec: type[DatasetSpec], **options: object) -> DatasetSpec:
    return spec(**({"task": "sst2"} if spec is Glue else {}) | options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("spec", SPECS)
def test_a_path_that_does_not_exist_is_named(spec: type[DatasetSpec], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"dataset\.path={tmp_path / 'missing'} does not exist"):
        make(spec, path=str(tmp_path / "missing")).check()
    with pytest.raises(ValueError, match=rf"dataset\.path=missing does not exist in {Path.cwd()}"):
        make(spec, path="missing").check()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("option", ["max_train_samples", "max_eval_samples"])
def test_a_limit_that_leaves_no_samples_is_refused(spec: type[DatasetSpec], option: str) -> None:
    with pytest.raises(ValueError, match=rf"dataset\.{option}=0"):
        make(spec, **{option: 0}).check()


@pytest.mark.parametrize("spec", SPECS)
def test_a_spec_is_its_own_schema(spec: type[DatasetSpec]) -> None:
    schema = OmegaConf.structured(spec)
    assert {"path", "max_train_samples", "max_eval_samples"} <= {*schema}


def test_checking_a_dataset_loads_nothing_heavy() -> None:
    code = f"""
import sys
from pipetransformer.data.text.glue import Glue
from pipetransformer.data.images.datasets import Digits, IdxImages
from pipetransformer.data.text.squad import Squad
from pipetransformer.data.text.table import TextDataset
for spec in (Glue(task="sst2"), Digits(), IdxImages(), Squad(), TextDataset(path=".")):
    spec.check()
print([name for name in {HEAVY} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert result.stdout.strip() == "[]"


def test_the_launcher_looks_at_local_data_without_torch(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(tmp_path / split / name / "0.png")
    for name in ("train", "dev"):
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\nit is\t1\n")
    qas = [{"id": "a", "question": "it?", "answers": [{"text": "it", "answer_start": 0}]}]
    articles = [{"title": "", "paragraphs": [{"context": "it is", "qas": qas}]}] * 2
    (tmp_path / "reviews.csv").write_text("text,label\na,1\nb,2\nc,1\n")
    (tmp_path / "squad.json").write_text(json.dumps({"data": articles}))
    code = f"""
import sys
from pipetransformer.data.text.glue import Glue
from pipetransformer.data.images.datasets import Digits, HubImages
from pipetransformer.data.text.squad import Squad
from pipetransformer.data.text.table import TextDataset
folder = {str(tmp_path)!r}
for spec in (Digits(), HubImages(path=folder), Glue(task="sst2", path=folder), Squad(path=folder + "/squad.json")):
    print(spec.preflight())
print([name for name in {[name for name in HEAVY if name != "PIL"]} if name in sys.modules])
file = folder + "/reviews.csv"
print(TextDataset(path=file, eval_path=file).preflight())
print([name for name in {[name for name in HEAVY if name not in ("PIL", "datasets")]} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert result.stdout.split("\n")[:-1] == ["1437", "2", "1", "None", "[]", "3", "[]"]


@given(st.integers(1, 200), st.integers(1, 250), st.integers(1, 250))
def test_draws_are_fixed_ascending_and_nested(num_samples: int, one: int, other: int) -> None:
    small, large = subsample(num_samples, min(one, other)), subsample(num_samples, max(one, other))
    assert len(small) == min(num_samples, one, other)
    assert (np.diff(small) > 0).all()
    assert {*small.tolist()} <= {*large.tolist()} <= {*range(num_samples)}
    np.testing.assert_array_equal(large, subsample(num_samples, max(one, other)))


def test_without_a_limit_all_samples_are_used() -> None:
    assert subsample(7, None).tolist() == [*range(7)]


def test_a_draw_is_spread_over_the_data() -> None:
    assert subsample(1000, 10).max() > 500


def digest(*values: Plain | np.ndarray, kind: str = "test") -> str:
    made = Digest(kind)
    made.add(*values)
    return made.hex()


@example([1, 1], [11])
@given(st.lists(VALUES, max_size=4), st.lists(VALUES, max_size=4))
def test_two_lists_have_one_digest_only_if_they_are_equal(one: list[Plain], two: list[Plain]) -> None:
    assert (digest(*one) == digest(*two)) == (repr(one) == repr(two))


@pytest.mark.parametrize(
    "other",
    [
        np.array([[1, 2]], dtype=np.int32),
        np.array([1, 2], dtype=np.int64),
        np.array([1, 3], dtype=np.int32),
        np.array([1, 2, 0], dtype=np.int32),
        np.array([1, 2], dtype=np.uint32),
        np.array([1, 2], dtype=">i4"),
    ],
    ids=["shape", "width", "value", "length", "type", "byte order"],
)
def test_an_array_counts_by_type_shape_and_bytes(other: np.ndarray) -> None:
    array = np.array([1, 2], dtype=np.int32)
    assert digest(array) == digest(array.copy())
    assert digest(array) != digest(other)


def test_where_an_array_ends_counts() -> None:
    whole = np.arange(6, dtype=np.uint8)
    splits = {digest(whole[:cut], whole[cut:]) for cut in range(7)}
    assert len(splits) == 7


def test_the_kind_counts() -> None:
    assert digest(1, kind="tokens") != digest(1, kind="pictures")


def test_an_array_with_gaps_is_the_same_as_without() -> None:
    table = np.arange(24).reshape(4, 6)
    assert digest(table[:, ::2]) == digest(table[:, ::2].copy())


def test_an_array_is_not_copied() -> None:
    array = np.zeros(8 << 20, dtype=np.uint8)
    tracemalloc.start()
    try:
        digest(array.reshape(8, -1))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < array.nbytes / 8


def test_addresses_of_objects_are_refused() -> None:
    with pytest.raises(AssertionError, match="addresses"):
        digest(np.array([object()]))


@dataclass(frozen=True, kw_only=True)
class Own(DatasetSpec):
    """Returns what it is given."""

    returns: Any

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        return self.returns

    def preflight(self) -> int | None:
        return self.returns


def loaded_digits(**changes: Any) -> Data:
    data = Digits(max_train_samples=8, max_eval_samples=8).load(ImageFormat())
    return Data(**{"train": data.train, "evaluation": data.evaluation, "task": data.task} | changes)


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (None, "Own.load returned None; end it with: return Data(train, (evaluation,), task)"),
        (({}, {}), "Own.load returned a value of type tuple; end it with: return Data("),
        ({"train": {}}, "Own.load returned Data with train a value of type dict; give a Split"),
        ({"evaluation": None}, "Own.load returned Data with evaluation None; give a tuple of splits"),
        ({"evaluation": ("dev",)}, "Own.load returned Data with a value of type str among evaluation; give a tuple"),
        ({"task": "classes"}, "Own.load returned Data with task a value of type str; give a Task"),
    ],
)
def test_a_dataset_of_ones_own_that_returns_something_else_is_told_in_a_line(returns: Any, message: str) -> None:
    returns = loaded_digits(**returns) if isinstance(returns, dict) else returns
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        load_data(Own(returns=returns), ImageFormat())


def test_data_of_a_dataset_of_ones_own_is_taken() -> None:
    data = loaded_digits()
    assert load_data(Own(returns=data), ImageFormat()) is data


@pytest.mark.parametrize(
    ("returns", "kind"), [("64", "a value of type str"), (True, "a value of type bool"), (Own, "the class Own")]
)
def test_a_preflight_that_returns_no_number_is_told_in_a_line(returns: Any, kind: str) -> None:
    told = f"Own.preflight returned {kind}; return the number of training samples, or None where only load can tell"
    with pytest.raises(UserError, match=f"^{re.escape(told)}$"):
        count_before_loading(Own(returns=returns))


@pytest.mark.parametrize("returns", [None, 64, np.int64(64)])
def test_a_preflight_that_counts_or_cannot_is_taken(returns: Any) -> None:
    assert count_before_loading(Own(returns=returns)) == returns
