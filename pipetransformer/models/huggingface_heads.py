"""Heads of transformers' task models, run on the hidden state after the last block.

The head layer is the task model itself. Its base model is replaced by one that has already reached that hidden state
and only runs what comes after the blocks. Dropout, classifier or output matrix are called by the model's own code.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from pipetransformer.errors import UserError
from pipetransformer.models.layer import shallow_copy


class _Reached(nn.Module):
    """Replacement of the base model; takes the last block's output in place of images or as ``inputs_embeds``.

    Args:
        after: The base model's modules after the blocks, by their names: the final norm, or the pooler of an encoder.
    """

    def __init__(self, after: dict[str, nn.Module]) -> None:
        super().__init__()
        self._norm = next((name for name in after if not name.startswith("pooler")), None)
        for name, module in after.items():
            self.add_module(name, module)

    def forward(self, images: Any = None, *_: Any, **inputs: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        reached = inputs.get("inputs_embeds", images)
        hidden = reached if self._norm is None else self.get_submodule(self._norm)(reached)
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=hidden, pooler_output=self._pool(hidden))

    def _pool(self, hidden: Tensor) -> Tensor | None:
        """Returns (B, D) of a model with a pooler; that of ALBERT is a matrix for the first token."""
        if "pooler" not in self._modules:
            return None
        pooler = self.get_submodule("pooler")
        if "pooler_activation" in self._modules:
            return self.get_submodule("pooler_activation")(pooler(hidden[:, 0]))
        return pooler(hidden)


def find_base(model: PreTrainedModel) -> tuple[str, PreTrainedModel]:
    """Returns a task model's base model and its name.

    Raises:
        UserError: It has none.
    """
    for name in (model.base_model_prefix, "vision_model"):  # SigLIP's prefix is that of its two towers
        base = getattr(model, name, None)
        if isinstance(base, PreTrainedModel):
            return name, base
    raise UserError("it has no head; take one of transformers' AutoModelFor classes")


def make_head(model: PreTrainedModel, after: dict[str, nn.Module]) -> PreTrainedModel:
    """Returns a shallow copy of a task model without the layers below its head; see :class:`_Reached`."""
    head = shallow_copy(model)
    setattr(head, find_base(model)[0], _Reached(after))
    return head


def run_head(model: nn.Module, hidden: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Maps the last block's output (B, T, D) to what :func:`logits` returns; some heads take the mean of the tokens."""
    return logits(model(inputs_embeds=hidden, attention_mask=attention_mask))


def run_on_last_token(model: PreTrainedModel, hidden: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Maps the last block's output (B, T, D) at each text's last token to (B, num_labels).

    The original looks for that token in the ids, as the last that is not ``config.pad_token_id``. Here it is the last
    that the mask (B, T) has, so that a text may end with the token that also fills up the others.
    """
    rows = torch.arange(len(hidden), device=hidden.device)
    if attention_mask is None:
        last = torch.full_like(rows, hidden.shape[1] - 1)
    else:
        columns = torch.arange(hidden.shape[1], device=hidden.device)
        last = (columns * attention_mask).argmax(-1)  # the first where a row is padding alone, as in the original
    reached = model.base_model(inputs_embeds=hidden[rows, last]).last_hidden_state  # (B, D)
    return model.get_submodule("score")(reached)


def logits(outputs: Any) -> Tensor:
    """Returns (B, num_labels) or (B, T, num_labels), or for question answering (B, T, 2) of start and end."""
    if "start_logits" in outputs:
        return torch.stack((outputs.start_logits, outputs.end_logits), dim=-1)
    return outputs.logits
