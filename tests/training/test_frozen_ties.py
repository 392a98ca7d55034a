"""What is said when a weight of several layers freezes with the lowest."""

from pipetransformer.models.stack import ParamRef
from pipetransformer.training.transitions import frozen_tie


def test_a_weight_that_blocks_have_in_common_is_named_once_with_its_layers() -> None:
    common = "deberta.encoder.rel_embeddings.weight"

    assert frozen_tie(ParamRef(1, common), ParamRef(12, common)) == (
        f"{common}, which layers 1 to 12 have in common, stops training here"
    )
