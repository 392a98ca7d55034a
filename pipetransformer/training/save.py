"""Saves the trained model in its original library's format."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from pipetransformer.errors import NotSaved
from pipetransformer.models.base import ModelSpec
from pipetransformer.models.stack import LayerStack
from pipetransformer.report.run_folder import MODEL, share_files

SECOND_PLACE = Path("/var/tmp")
GIB = 2**30


def places(run_dir: Path) -> list[Path]:
    """Returns the folders in which the model may be saved, the run folder's first."""
    return [run_dir / MODEL, SECOND_PLACE / f"pipetransformer-{run_dir.name}-{os.getpid()}"]


def save_model(model: ModelSpec, stack: LayerStack, state: Mapping[str, Tensor], folders: Sequence[Path]) -> Path:
    """Saves a model to the first folder that takes it, replacing an older one there.

    Args:
        state: All weights, by their original names.

    Returns:
        The folder.

    Raises:
        NotSaved: No folder takes it.
    """
    reasons = []
    for folder in folders:
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            model.save(stack, dict(state), folder)
            share_files(folder)
        except (OSError, SafetensorError) as error:
            reasons.append(f"{folder} ({str(error).strip().partition(chr(10))[0]}; {_free_gib(folder):.3g} GiB free)")
            shutil.rmtree(folder, ignore_errors=True)
        else:
            return folder
    needed = sum(tensor.nbytes for tensor in state.values()) / GIB
    tried = " nor in ".join(reasons)
    raise NotSaved(f"the model takes {needed:.3g} GiB and could not be saved in {tried}; free space and run again")


def _free_gib(folder: Path) -> float:
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    return shutil.disk_usage(nearest).free / GIB
