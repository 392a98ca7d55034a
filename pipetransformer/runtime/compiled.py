"""Blocks compiled by ``torch.compile``: one graph for all blocks of a shape, and none anew when blocks freeze.

The forward pass is compiled and not the module, so that names, hooks and moves stay what they are. A block is given to
the compiled function, and its weights are inputs of the graph::

    block 1 ─┐                         ┌─ trains, its input takes a gradient
    block 2 ─┼─► function of a kind ───┼─ trains, its input takes none: the lowest active block
    block 3 ─┘                         └─ takes no gradient: frozen, or evaluated

Each kind of block has a function of its own for each set of weights that train. Torch keeps graphs by function, so a
graph that was made for frozen weights is never that of weights that train, whatever torch compares (issue 139476).
"""

import warnings
from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor

from pipetransformer.errors import UserError
from pipetransformer.models.layer import Layer

BACKEND = "inductor"
MAX_GRAPHS = 64  # of a function; lengths and sizes of batches become symbols of one graph when they change
LayerCall = Callable[..., Tensor]
"""``call(x, **context)``: runs a layer."""


class BlockCompiler:
    """The compiled functions of one rank.

    Args:
        num_layers: Of the model; embedding and head, the first and the last, run as they are.
    """

    def __init__(self, num_layers: int) -> None:
        from torch import _dynamo  # takes its time

        _dynamo.config.optimize_ddp = False  # it would cut the graph of a block into buckets
        _dynamo.config.recompile_limit = MAX_GRAPHS
        # torch looks at the gradient of a block's input while it traces, and says so
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
        # products of float32 are those that the user asks for, by precision=
        warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores for float32 matrix multiplication avail")
        self._head = num_layers - 1
        self._functions: dict[object, LayerCall] = {}

    def call(self, index: int, layer: Layer) -> LayerCall:
        """Returns the call of a layer with the weights that train now, compiled where it is a block.

        Args:
            index: Of the layer in the model.
            layer: Its weights may move and change; which of them train may not.
        """
        if not 0 < index < self._head:
            return layer
        training, passive = self._function(layer, trains=True), self._function(layer, trains=False)

        def call(x: Tensor, **context: Tensor) -> Tensor:
            function = training if torch.is_grad_enabled() else passive
            try:
                return function(layer, x, context)
            except torch._dynamo.exc.TorchDynamoException as error:
                raise _refused(layer, error) from error

        return call

    def _function(self, layer: Layer, trains: bool) -> LayerCall:
        """Returns the function of a kind of block and of the weights that train."""
        parameters = list(layer.parameters())
        trained = tuple(trains and each.requires_grad for each in parameters)
        kind = type(layer.module), tuple(each.shape for each in parameters), trained
        if kind not in self._functions:
            own = FunctionType(_run.__code__.replace(co_name=f"block_{len(self._functions)}"), globals())
            self._functions[kind] = torch.compile(own, backend=BACKEND, fullgraph=True)
        return self._functions[kind]


def _run(layer: Layer, x: Tensor, context: dict[str, Tensor]) -> Tensor:
    return layer.forward(x, **context)


def _refused(layer: Layer, error: Exception) -> UserError:
    reason = str(error).strip().partition("\n")[0]
    return UserError(
        f"compile=true: {type(layer.module).__name__} does not compile to one graph ({reason}); take compile=false"
    )
