"""Converts a model's pickled weights: ``python -m pipetransformer.models.to_safetensors <folder>``.

Reads tensors alone (``weights_only=True``) and writes ``model.safetensors`` beside them.
"""

import argparse
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from pipetransformer.errors import UserError
from pipetransformer.models.files import PICKLES

WEIGHTS = "model.safetensors"
SHARDS = "pytorch_model*.bin"
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model")  # under which training checkpoints keep weights


def convert(folder: Path) -> Path:
    """Writes the tensors of a folder's pickles, shards of one model or else a single file, as safetensors.

    Raises:
        UserError: There is no such file, several that are no shards, or one that holds more than tensors.
    """
    files = sorted(folder.glob(SHARDS)) or sorted(
        file for file in folder.glob("*") if file.suffix in PICKLES and file.is_file()
    )
    if not files or (len(files) > 1 and not files[0].match(SHARDS)):
        raise UserError(f"{folder} has {len(files)} files of pickled weights; give a folder with those of one model")
    tensors = {name: tensor.contiguous().clone() for file in files for name, tensor in _tensors(file).items()}
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return folder / WEIGHTS


def _tensors(file: Path) -> dict[str, Tensor]:
    try:
        found: Any = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UserError(f"{file} is no file of tensors alone and is not converted: {reason}") from error
    found = next((found[name] for name in WRAPPERS if isinstance(found, dict) and name in found), found)
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise UserError(f"{file} holds something else than tensors by name and is not converted")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m pipetransformer.models.to_safetensors", description=__doc__)
    parser.add_argument("folder", type=Path, help="the model's folder")
    try:
        print(convert(parser.parse_args(arguments).folder))
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
