"""Rotary positions of timm's Eva, which its blocks are given besides the hidden state.

They follow from the grid of patches, and so from the size of the images alone. So no layer has them as a tensor, and
they are neither sent nor stored nor saved. Each block has what computes them, and those on a device share the result::

    model:  patch embedding ──> block 1 ──> block 2 ──> ...        stack:  embedding   block 1   block 2   ...
                  rope ───────────┴───────────┴───────                               RotaryPositions (of the grid)
"""

import copy
from typing import Any

import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingMixed
from timm.models.eva import Eva
from torch import Tensor, nn

from pipetransformer.errors import UserError

_WITHOUT_EFFECT = {"shift_coords": 0.0, "jitter_coords": 1.0, "rescale_coords": 1.0}
"""Values with which what timm draws for the positions of a step changes nothing."""


class RotaryPositions:
    """Computes the rotary positions of a model's patches.

    Args:
        model: With rotary positions; may have no storage.

    Raises:
        UserError: They do not follow from the grid of patches alone.
    """

    def __init__(self, model: Eva) -> None:
        assert model.rope is not None
        _check_fixed(model.rope)
        self._grid = model.patch_embed.grid_size
        self._rope = _with_values(model.rope)
        self._computed: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __deepcopy__(self, _: object) -> "RotaryPositions":
        return self  # it has no state: a copy of a layer may share it

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the sines and cosines of all patches, (patches, 2 * width of a head).

        Args:
            hidden: Has the device and the dtype, as the model's own would have them.
        """
        key = hidden.device, hidden.dtype
        if key not in self._computed:
            with torch.inference_mode(False), torch.no_grad():  # a later training step may use them
                self._computed[key] = self._compute(*key)
        return self._computed[key]

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings that the positions follow from."""
        plain = {name: value for name, value in vars(self._rope).items() if not name.startswith("_")}
        settings = {name: value for name, value in plain.items() if isinstance(value, bool | int | float | str | tuple)}
        return {**settings, "kind": type(self._rope).__name__, "grid": self._grid}

    def _compute(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        rope: Any = copy.deepcopy(self._rope).to(device, dtype)  # how timm rounds them depends on it
        has_grid = getattr(rope, "feat_shape", None) is not None
        return rope.get_embed() if has_grid else rope.get_embed(shape=self._grid)


def _check_fixed(rope: nn.Module) -> None:
    if isinstance(rope, RotaryEmbeddingMixed):
        raise UserError(
            "its rotary positions are learned, those of all blocks in one parameter (rope_type=mixed) that would be in "
            "every layer; choose a model with fixed ones, such as vit_small_patch16_rope_224"
        )
    for name, value in _WITHOUT_EFFECT.items():
        if getattr(rope, name, None) not in (None, value):
            raise UserError(
                f"its rotary positions are drawn anew in each step, the same ones for a whole batch "
                f"(rope_{name}={getattr(rope, name)}); give model.options.rope_{name}={value:g}"
            )


def _with_values(rope: nn.Module) -> nn.Module:
    """Returns a copy with the values that timm gives a new model: without storage it has none."""
    with torch.device("cpu"):
        twin: Any = copy.deepcopy(rope).to_empty(device="cpu").float().eval()
        twin.init_non_persistent_buffers()
    return twin
