"""What holds for every dataset."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from pipetransformer.data.base import DatasetSpec
from pipetransformer.data.glue import Glue
from pipetransformer.data.images import Digits, HubImages, IdxImages
from pipetransformer.data.squad import Squad

SPECS = [Digits, IdxImages, HubImages, Glue, Squad]
HEAVY = ["torch", "torchvision", "torchmetrics", "transformers", "datasets", "sklearn", "PIL"]


def make(spec: type[DatasetSpec], **options: object) -> DatasetSpec:
    return spec(**({"task": "sst2"} if spec is Glue else {}) | options)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("spec", SPECS)
def test_a_path_that_does_not_exist_is_named(spec: type[DatasetSpec], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"dataset\.path={tmp_path / 'missing'} does not exist"):
        make(spec, path=str(tmp_path / "missing")).check()


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
from pipetransformer.data.glue import Glue
from pipetransformer.data.images import Digits, IdxImages
from pipetransformer.data.squad import Squad
for spec in (Glue(task="sst2"), Digits(), IdxImages(), Squad()):
    spec.check()
print([name for name in {HEAVY} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
