"""Encoders and decoders of texts of Hugging Face transformers as a flat stack."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pipetransformer.errors import UserError
from pipetransformer.models.base import Head
from pipetransformer.models.files import check_code, check_inside
from pipetransformer.models.hub import CONFIG
from pipetransformer.models.huggingface_base import BROKEN, REMEDY, TransformersSpec, first_line

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from pipetransformer.models.stack import LayerStack

TOKENIZER = "tokenizer_config.json"


@dataclass(frozen=True, kw_only=True)
class HuggingFaceModel(TransformersSpec):
    """An encoder or decoder of texts.

    From scratch it takes the configuration and tokenizer of ``name``.

    Attributes:
        untie: Give an output matrix that is the word embeddings (GPT-2, Gemma, small Llama and Qwen) a copy of its own,
            which starts equal and goes on training when the embeddings freeze; ``False`` keeps them one weight.
    """

    untie: bool = False

    modality: ClassVar[str] = "text"
    preprocessing: ClassVar[str] = TOKENIZER
    heads: ClassVar[dict[str, str]] = {
        "sequence": "AutoModelForSequenceClassification",
        "token": "AutoModelForTokenClassification",
        "causal": "AutoModelForCausalLM",
        "span": "AutoModelForQuestionAnswering",
    }

    def input_format(self) -> dict[str, Any]:
        """Returns keyword arguments of ``TextFormat``."""
        return {
            "tokenizer": self._tokenizer(),
            "max_length": self._num_positions(),
            "vocab_size": self._config().vocab_size,
        }

    def build_meta(self, head: Head, input_shape: tuple[int, ...], seed: int) -> LayerStack:
        stack = super().build_meta(head, input_shape, seed)
        return self._untied(stack) if self.untie else stack

    def _check_config(self, config: PretrainedConfig) -> None:
        from pipetransformer.models.huggingface_layers import check_config

        check_config(config)

    def _config_for(self, input_shape: tuple[int, ...]) -> PretrainedConfig:
        if input_shape:
            raise UserError(f"model.name={self.name} reads text, the dataset has images {input_shape}; choose a ViT")
        return self._config()

    def _save_preprocessing(self, model: PreTrainedModel, folder: Path) -> None:
        from pipetransformer.models.huggingface_layers import is_decoder

        tokenizer = self._tokenizer()
        if is_decoder(model):
            model.config.pad_token_id = tokenizer.pad_token_id  # its classifier looks for the last token by it
        tokenizer.save_pretrained(folder)

    def _meta_model(self, head: Head, config: PretrainedConfig) -> PreTrainedModel:
        from pipetransformer.models.huggingface_layers import is_decoder

        model = super()._meta_model(head, config)
        if head.kind == "sequence" and is_decoder(model):
            self._warn_of_ends(type(model).__name__)
        return model

    def _warn_of_ends(self, kind: str) -> None:
        """Warns of a token that ends texts and fills them up: a saved decoder takes the one before for the last."""
        try:
            tokenizer: Any = self._tokenizer()
        except UserError:
            return  # a run whose texts need one has said so before
        ends = [tokenizer(text)["input_ids"][-1:] for text in ("", "a")]
        if ends == 2 * [[tokenizer.pad_token_id]]:
            warnings.warn(
                f"the tokenizer of model.name={self.name} ends texts with {tokenizer.pad_token}, which also fills them "
                f"up: this run classifies a text by that token, a saved {kind} by the one before it, with other "
                "results; give the tokenizer another pad_token",
                stacklevel=2,
            )

    def _untied(self, stack: LayerStack) -> LayerStack:
        """Returns the stack with an output matrix of its own."""
        for lowest, *copies in stack.ties:
            if lowest.name in {place.name for place in copies}:
                raise UserError(
                    f"model.untie=true: the blocks of model.name={self.name} have {lowest.name} in common, of which a "
                    "saved model holds one; leave model.untie=false"
                )
        if not stack.ties:
            warnings.warn("model.untie=true changes nothing: the model shares no weights", stacklevel=2)
            return stack
        model_class, config = stack.config
        config = copy.deepcopy(config)
        config.tie_word_embeddings = False
        stack.separate()
        stack.config = (model_class, config)
        return stack

    def _tokenizer(self) -> PreTrainedTokenizerBase:
        from transformers import AutoTokenizer, PretrainedConfig
        from transformers.models.auto.tokenization_auto import get_tokenizer_config

        try:
            check_code(self.name, CONFIG, PretrainedConfig.get_config_dict(self.name)[0], self.trust_remote_code)
            settings = get_tokenizer_config(self.name)
            check_code(self.name, TOKENIZER, settings, self.trust_remote_code)
            for file in settings.get("fast_tokenizer_files") or ():
                check_inside(self.name, TOKENIZER, str(file))
            tokenizer = cast(
                "PreTrainedTokenizerBase",
                AutoTokenizer.from_pretrained(self.name, trust_remote_code=self.trust_remote_code),
            )
        except UserError:
            raise
        except (*BROKEN, OSError) as error:
            raise UserError(
                f"transformers found no tokenizer under model.name={self.name}: {first_line(error)}. {REMEDY}"
            ) from error
        if tokenizer.pad_token is None:  # as of most decoders; padding is masked, so that any token will do
            tokenizer.pad_token = tokenizer.eos_token
        # without tokenizer files transformers makes one that takes every word for an unknown one
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise UserError(f"transformers found no tokenizer under model.name={self.name}: no words in it. {REMEDY}")
        return tokenizer

    def _num_positions(self) -> int:
        import torch
        from transformers import AutoModel

        from pipetransformer.models.huggingface_layers import num_positions

        config = self._config()
        with self._with_options(), torch.device("meta"):
            base = AutoModel.from_config(config, trust_remote_code=self.trust_remote_code)
        with self._refusing(type(base).__name__):
            return num_positions(base)
