"""Where the initial weights of a transformers model come from, layer by layer.

transformers does all of it: it maps the checkpoint's names and draws what is missing. It is only handed tags in place
of the tensors that are not wanted (see :mod:`pipetransformer.models.checkpoint`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from pipetransformer.models.checkpoint import Checkpoint, named_tensors, tag
from pipetransformer.models.stack import LayerStack, seeded

WANTED: dict[str, Any] = {"attn_implementation": "sdpa", "dtype": torch.float32}


def find_checkpoint(name: str) -> Checkpoint | None:
    """The safetensors files of a folder or of the hub, whole or in shards; ``None`` where there are none."""
    for file in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME):
        try:
            found = cached_file(name, file)
        except OSError:  # how transformers says that there is no such file
            continue
        shards: Any = get_checkpoint_shard_files(name, found)[0] if file == SAFE_WEIGHTS_INDEX_NAME else [found]
        return Checkpoint([Path(shard) for shard in shards])
    return None


def load_tags(model_class: type[PreTrainedModel], config: PretrainedConfig, tags: dict[str, Tensor]) -> Any:
    """The model that transformers makes of a checkpoint, and its report."""
    # a head for other labels is drawn anew; whatever else does not fit is refused by the adapter
    return model_class.from_pretrained(
        None, config=config, state_dict=tags, ignore_mismatched_sizes=True, output_loading_info=True, **WANTED
    )


class Published:
    """A checkpoint's tensors; what it lacks (a new head) is drawn, and buffers that are not saved are made.

    Args:
        keys: The checkpoint's key of every tensor that comes from it unchanged.
    """

    def __init__(self, stack: LayerStack, checkpoint: Checkpoint, keys: dict[str, str], seed: int) -> None:
        self._names = stack.names()
        self._model_class, self._config = stack.config
        self._checkpoint, self._keys, self._seed = checkpoint, keys, seed

    def __call__(self, index: int) -> Iterator[tuple[str, Tensor]]:
        names = self._names[index]
        yield from self._checkpoint.read({name: self._keys[name] for name in names if name in self._keys})
        made = [name for name in names if name not in self._keys]
        if made:
            with seeded(self._seed):
                tensors = named_tensors(load_tags(self._model_class, self._config, self._checkpoint.tags())[0])
            yield from ((name, tensors[name]) for name in made)


class Drawn:
    """A model from scratch: to transformers a checkpoint that lacks the wanted layer, each with draws of its own."""

    def __init__(self, model: PreTrainedModel, stack: LayerStack, seed: int) -> None:
        self._names = stack.names()
        self._model_class, self._config = stack.config
        given = {name for names in self._names for name in names}  # transformers takes shared ones from these
        self._tags = {name: tag(0, t.shape, t.dtype) for name, t in model.state_dict().items() if name in given}
        self._seed = seed

    def __call__(self, index: int) -> Iterator[tuple[str, Tensor]]:
        names = self._names[index]
        others = {name: tensor for name, tensor in self._tags.items() if name not in names}
        with seeded(self._seed * len(self._names) + index):
            tensors = named_tensors(load_tags(self._model_class, self._config, others)[0])
        return ((name, tensors[name]) for name in names)
