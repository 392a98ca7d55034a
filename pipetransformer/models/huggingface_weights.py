"""Initial weights of a transformers model, layer by layer.

transformers maps the checkpoint's names and initializes missing tensors. Tensors of other layers are replaced by
placeholders (:mod:`pipetransformer.models.lazy_checkpoint`).
"""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from pipetransformer.errors import UserError
from pipetransformer.models.files import check_index
from pipetransformer.models.lazy_checkpoint import Checkpoint, named_tensors, placeholder, with_storage
from pipetransformer.models.stack import LayerStack, seeded

WANTED: dict[str, Any] = {"dtype": torch.float32}


def find_checkpoint(name: str) -> Checkpoint | None:
    """Returns the safetensors files of a folder or of the hub, whole or in shards, or ``None`` without any.

    Raises:
        UserError: The index of the shards names other files.
    """
    for file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        try:
            found: Any = cached_file(name, file)
        except OSError:  # how transformers says that there is no such file
            continue
        if file == SAFE_WEIGHTS_INDEX_NAME:
            check_index(name, Path(found))
        shards: Any = get_checkpoint_shard_files(name, found)[0] if file == SAFE_WEIGHTS_INDEX_NAME else [found]
        return Checkpoint([Path(shard) for shard in shards])
    return None


def load_state(model_class: type[PreTrainedModel], config: PretrainedConfig, state: dict[str, Tensor]) -> Any:
    """Returns the model that transformers makes of a checkpoint, and its report of missing and unexpected keys."""
    # a head for other labels is drawn anew; whatever else does not fit is refused by the adapter
    return model_class.from_pretrained(
        None, config=config, state_dict=state, ignore_mismatched_sizes=True, output_loading_info=True, **WANTED
    )


class Pretrained:
    """Tensors of a checkpoint; missing ones (a new head) and non-persistent buffers are initialized.

    Args:
        keys: For each tensor that is read unchanged its key in the checkpoint.
    """

    def __init__(self, stack: LayerStack, checkpoint: Checkpoint, keys: dict[str, str], seed: int) -> None:
        self._names = stack.names()
        self._model: tuple[Any, Any] = stack.config  # class and configuration
        self._checkpoint, self._keys, self._seed = checkpoint, keys, seed

    def __call__(self, index: int) -> Iterator[tuple[str, Tensor]]:
        names = self._names[index]
        yield from self._checkpoint.read({name: self._keys[name] for name in names if name in self._keys})
        made = [name for name in names if name not in self._keys]
        if made:
            with seeded(self._seed):
                tensors = named_tensors(load_state(*self._model, self._checkpoint.placeholders())[0])
            yield from ((name, tensors[name]) for name in made)


class RandomInit:
    """Randomly initialized tensors, seeded per layer.

    transformers draws them as those of a checkpoint that lacks just the wanted layer. It makes the model once, of a
    checkpoint of placeholders. In its turn the wanted layer gets storage, which the library has to fill::

        model     embeddings   layer 0   layer 1   head      placeholders, marked as initialized
        draw 1    ──────────   ───────   (empty)   ────      initialize_weights() fills what has no mark
    """

    def __init__(self, model: PreTrainedModel, stack: LayerStack, seed: int) -> None:
        self._names = stack.names()
        self._model: tuple[Any, Any] = stack.config  # class and configuration
        given = {name for names in self._names for name in names}  # transformers takes shared ones from these
        self._placeholders = {
            name: placeholder(0, t.shape, t.dtype) for name, t in model.state_dict().items() if name in given
        }
        self._seed = seed

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self  # as a function: copies of a stack draw the same

    @cached_property
    def _whole(self) -> PreTrainedModel:
        """The model of placeholders."""
        return load_state(*self._model, self._placeholders)[0]

    def __call__(self, index: int) -> Iterable[tuple[str, Tensor]]:
        names, whole = self._names[index], self._whole
        modules: Iterator[Any] = whole.modules()
        with with_storage(whole, names), seeded(self._seed * len(self._names) + index):
            for module in modules:
                module._is_hf_initialized = False  # its tensors have marks of their own
            whole.initialize_weights()
            tensors = named_tensors(whole)
        if left := [name for name in names if tensors[name].isnan().any()]:
            raise UserError(f"{type(whole).__name__} has no rule to initialize {left[0]}; use pretrained weights")
        return [(name, tensors[name]) for name in names]
