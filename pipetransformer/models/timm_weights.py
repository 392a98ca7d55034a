"""Initial weights of a timm model, layer by layer.

timm's checkpoint filter renames and resizes, its ``init_weights`` initializes. Tensors of other layers are replaced by
placeholders (:mod:`pipetransformer.models.lazy_checkpoint`), or have no storage.
"""

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any, Self

from huggingface_hub import hf_hub_download
from timm.models.eva import Eva
from torch import Tensor, nn

from pipetransformer.models.layer import shallow_copy
from pipetransformer.models.lazy_checkpoint import Checkpoint, named_tensors, with_storage
from pipetransformer.models.stack import LayerStack, WithoutFilling, seeded
from pipetransformer.models.timm_layers import FlatModel

Create = Callable[..., FlatModel]
"""Makes the model: ``create(pretrained=...)``, with further arguments of ``timm.create_model``."""
_FILE = "model.safetensors"


def find_checkpoint(published: Any) -> Checkpoint | None:
    """Returns the safetensors file that timm's ``pretrained_cfg`` names, local or on the hub, or ``None``."""
    if published.get("source") == "local-dir":
        file = Path(published["file"]) / _FILE
        return Checkpoint([file]) if file.is_file() else None
    name = published.get("hf_hub_filename") or _FILE
    if not published.get("hf_hub_id") or not name.endswith(".safetensors"):
        return None
    repository, _, revision = published["hf_hub_id"].partition("@")
    try:
        return Checkpoint([Path(hf_hub_download(repository, name, revision=revision or None))])
    except (OSError, ValueError):  # how the hub says that there is no such file
        return None


class RandomInit:
    """Randomly initialized tensors, seeded per layer.

    Attributes:
        model: The model without storage.
        names: For each layer the names of its tensors.
    """

    def __init__(self, model: FlatModel, stack: LayerStack, create: Create, seed: int) -> None:
        self.model, self._create, self._seed = copy.deepcopy(model), create, seed
        self.names = stack.names()

    def __deepcopy__(self, _: dict[int, Any]) -> Self:
        return self  # as a function: copies of a stack draw the same

    def __call__(self, index: int) -> Iterable[tuple[str, Tensor]]:
        return self.draw(index, self.names[index])

    def draw(self, index: int, names: list[str]) -> Iterable[tuple[str, Tensor]]:
        """Returns some of a layer's tensors."""
        with with_storage(self.model, names), seeded(self._seed * len(self.names) + index), WithoutFilling():
            model = _with_blocks_of(self.model, names)
            model.fix_init_weight = lambda: None  # it would scale the only block as the first one
            model.init_weights()  # without storage nothing is drawn
            if getattr(model, "fix_init", isinstance(model, Eva)):  # an Eva's init_weights always does
                self.model.fix_init_weight()  # divides by the root of each block's number
            drawn = named_tensors(model)
        left = [name for name in names if not drawn[name].is_floating_point() or drawn[name].isnan().any()]
        return ((name, drawn[name]) for name in names) if not left else self._draw_whole(names, left[0])

    def _draw_whole(self, names: list[str], left: str) -> Iterable[tuple[str, Tensor]]:
        warnings.warn(
            f"every process draws the whole model before it keeps its own layers: timm has no rule for {left} alone",
            stacklevel=2,
        )
        with seeded(self._seed):
            drawn = named_tensors(self._create(pretrained=False))
        return ((name, drawn[name]) for name in names)


class Pretrained:
    """Tensors of a checkpoint; timm computes resized ones and initializes missing ones (a new head).

    Attributes:
        converted: Names of the tensors that timm computes from the checkpoint's.
    """

    def __init__(self, checkpoint: Checkpoint, create: Create, drawn: RandomInit) -> None:
        self._checkpoint, self._create, self._drawn = checkpoint, create, drawn
        loaded = named_tensors(self._load(checkpoint.placeholders()))
        self._keys = checkpoint.origins(loaded.items())
        self._lacking = {name for name, tensor in loaded.items() if tensor.is_meta}
        self.converted = loaded.keys() - self._keys.keys() - self._lacking

    def __call__(self, index: int) -> Iterator[tuple[str, Tensor]]:
        names = self._drawn.names[index]
        yield from self._checkpoint.read({name: self._keys[name] for name in names if name in self._keys})
        lacking = [name for name in names if name in self._lacking]
        if lacking:
            yield from self._drawn.draw(index, lacking)
        converted = [name for name in names if name in self.converted]
        if converted:
            unplaced = {key: key for key in self._checkpoint if key not in self._keys.values()}
            loaded = named_tensors(self._load(self._checkpoint.placeholders() | dict(self._checkpoint.read(unplaced))))
            yield from ((name, loaded[name]) for name in converted)

    def _load(self, state: dict[str, Tensor]) -> FlatModel:
        """Returns the model that timm makes of a state; tensors that the state lacks have no storage."""
        instead = {"source": "", "file": None, "hf_hub_id": None, "url": None, "custom_load": False}
        with _as_they_are(type(self._drawn.model)):
            return self._create(pretrained=True, device="meta", pretrained_cfg_overlay={**instead, "state_dict": state})


@contextmanager
def _as_they_are(kind: type[FlatModel]) -> Iterator[None]:
    """Makes ``load_state_dict`` of a class assign the tensors themselves, for which timm has no argument."""
    kind.load_state_dict = partialmethod(nn.Module.load_state_dict, assign=True)  # type: ignore
    try:
        yield
    finally:
        del kind.load_state_dict


def _with_blocks_of(model: FlatModel, names: list[str]) -> FlatModel:
    """Returns the model without the blocks that have none of these tensors: timm is slow on the meta device."""
    twin = shallow_copy(model)
    twin._modules["blocks"] = nn.Sequential(
        OrderedDict(
            (index, block)
            for index, block in model.blocks.named_children()
            if any(name.startswith(f"blocks.{index}.") for name in names)
        )
    )
    return twin
