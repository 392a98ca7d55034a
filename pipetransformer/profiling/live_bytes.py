"""Counts the bytes of the tensors that live, on any device."""

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Tensors that operations give while it is on, each storage once, until it is freed.

    Attributes:
        now, peak: Bytes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.is_meta or key in self._known:
            return
        num_bytes = storage.nbytes()

        def freed(_: object) -> None:
            del self._known[key]
            self.now -= num_bytes

        self._known[key] = weakref.ref(storage, freed)
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        return result
