"""The device as torch's Python sees it: the module ``torch.hostgpu`` and its process groups."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

import hostgpu_device as device  # isort: skip, since torch brings its libraries

NAME = "hostgpu"
MEMORY = 80 * 2**30
torch.utils.rename_privateuse1_backend(NAME)


class Event:
    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._seconds, self._place = 0.0, (0, 0)

    def record(self, stream: "Stream | None" = None) -> None:
        number = (stream or current_stream()).stream_id
        self._seconds, self._place = time.perf_counter(), (number, device.mark(number))

    def wait(self, stream: "Stream | None" = None) -> None:
        device.flush(*self._place)

    synchronize = wait

    def query(self) -> bool:
        self.wait()
        return True

    def elapsed_time(self, other: "Event") -> float:
        return 1e3 * (other._seconds - self._seconds)


class Stream:
    count = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id, self.device, self.device_index, self.device_type = Stream.count, torch.device(NAME, 0), 0, 20
        Stream.count += 1

    def wait_stream(self, other: "Stream") -> None:
        device.flush(other.stream_id, -1)

    def wait_event(self, event: Event) -> None:
        event.wait()

    def synchronize(self) -> None:
        device.flush(self.stream_id, -1)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True


_MAIN, _of_thread = Stream(), threading.local()


def current_stream(*_: Any) -> Stream:
    return getattr(_of_thread, "stream", _MAIN)


@contextmanager
def stream(own: Stream | None) -> Iterator[None]:
    before, own = current_stream(), own or current_stream()
    _of_thread.stream = own
    device.set_stream(own.stream_id)
    try:
        yield
    finally:
        _of_thread.stream = before
        device.set_stream(before.stream_id)


def synchronize(*_: Any) -> None:
    for number in range(Stream.count):
        device.flush(number, -1)


@contextmanager
def _ignored(*_: Any) -> Iterator[None]:
    yield


def _returns(value: Any) -> Any:
    return lambda *_, **__: value


class Done(dist._Work):
    """An exchange that has ended, or that a wait ends."""

    def __init__(self, tensors: Any = None, pending: Any = None, arrived: Any = None) -> None:
        super().__init__()
        self._pending, self._arrived, self._tensors = pending, arrived, tensors
        self._future: Any = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: Any = None) -> bool:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
            if self._arrived is not None:
                _give(self._tensors, self._arrived)
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        return self._pending is None

    def get_future(self) -> Any:
        return self._future

    def result(self) -> Any:
        return self._tensors


@torch.no_grad()
def _give(tensors: Any, arrived: Any) -> None:
    for tensor, own in zip(tensors, arrived, strict=True):
        tensor.copy_(own.view(tensor.shape))


def _empty_like(tensors: Any) -> list[Tensor]:
    return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]


class DeviceGroup(dist.ProcessGroup):
    """Exchanges of the device's tensors alone, by gloo on copies in host memory."""

    _device_types = property(_returns([torch.device(NAME)]))
    group_name, group_desc = "", "of the device"

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo, self._size = dist.ProcessGroupGloo(store, rank, size, timeout), size

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, desc: str) -> None:
        pass

    def _get_backend(self, of: Any) -> Any:
        assert torch.device(of).type == NAME, f"the process group of the device has no {of}"
        return SimpleNamespace(supports_coalescing=False)

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:
        return "hostnccl"

    def _taken(self, tensors: Any) -> list[Tensor]:
        for tensor in tensors:
            assert tensor.device.type == NAME, f"the process group of the device takes no tensor on {tensor.device}"
        return [tensor.detach().cpu().contiguous() for tensor in tensors]

    def _summed(self, tensors: Any, options: Any) -> list[Tensor]:
        own, sum_options = self._taken(tensors), dist.AllreduceOptions()
        operation = dist.ReduceOp.SUM if options is None else options.reduceOp
        is_mean = operation == dist.ReduceOp.AVG
        sum_options.reduceOp = dist.ReduceOp.SUM if is_mean else operation
        for each in own:
            self._gloo.allreduce([each], sum_options).wait()
        return [each / self._size for each in own] if is_mean else own

    def allreduce(self, tensors: Any, options: Any = None) -> Done:
        _give(tensors, self._summed(tensors, options))
        return Done(tensors)

    allreduce_coalesced = allreduce

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, options: Any = None, *_: Any) -> Done:
        (total,) = self._summed([tensor], options)
        _give([output], [total.reshape(self._size, -1)[self.rank()]])
        return Done([output])

    def all_gather_single(self, output: Tensor, tensor: Tensor, options: Any = None, *_: Any) -> Done:
        (own,) = self._taken([tensor])
        parts = [torch.empty_like(own) for _ in range(self._size)]
        self._gloo.allgather([parts], [own]).wait()
        _give([output], [torch.stack(parts)])
        return Done([output])

    _reduce_scatter_base, _allgather_base = reduce_scatter_single, all_gather_single

    def allgather(self, outputs: Any, tensors: Any, options: Any = None) -> Done:
        parts = [_empty_like(output) for output in outputs]
        self._gloo.allgather(parts, self._taken(tensors)).wait()
        for output, own in zip(outputs, parts, strict=True):
            _give(output, own)
        return Done(outputs)

    def broadcast(self, tensors: Any, options: Any) -> Done:
        own = self._taken(tensors)
        self._gloo.broadcast(own, options).wait()
        _give(tensors, own)
        return Done(tensors)

    def gather(self, outputs: Any, tensors: Any, options: Any) -> Done:
        parts = [_empty_like(output) for output in outputs]
        self._gloo.gather(parts, self._taken(tensors), options).wait()
        for output, own in zip(outputs, parts, strict=True):
            _give(output, own)
        return Done(outputs)

    def send(self, tensors: Any, to: int, tag: int = 0) -> Done:
        return Done(tensors, self._gloo.send(self._taken(tensors), to, 0))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Done:
        arrived = _empty_like(tensors)
        return Done(tensors, self._gloo.recv(arrived, source, 0), arrived)

    def barrier(self, opts: Any = None) -> Done:
        self._gloo.barrier().wait()
        return Done()

    def shutdown(self) -> None:
        pass

    abort = shutdown


def _module() -> ModuleType:
    module: Any = ModuleType(f"torch.{NAME}")
    module.Event, module.Stream, module.stream, module.device = Event, Stream, stream, _ignored
    module.current_stream, module.synchronize = current_stream, synchronize
    module.is_available = module.is_initialized = _returns(True)
    module._is_in_bad_fork = _returns(False)
    module.device_count, module.current_device = _returns(device.num_devices), _returns(0)
    module.get_device_name, module.get_amp_supported_dtype = _returns(NAME), _returns([torch.float16, torch.bfloat16])
    module.default_generators = [torch.default_generator] * device.num_devices
    module.get_rng_state = lambda *_: torch.default_generator.get_state()
    module.set_rng_state = lambda state, *_: torch.default_generator.set_state(state)
    for name in ("set_device", "manual_seed", "manual_seed_all", "empty_cache", "init", "_lazy_init"):
        setattr(module, name, _returns(None))
    module.set_sync_debug_mode = lambda mode: device.refuse_waiting(mode == "error")
    module.memory_allocated = lambda *_: device.allocated()
    module.max_memory_allocated = module.max_memory_reserved = lambda *_: device.peak()
    module.reset_peak_memory_stats = lambda *_: device.reset_peak()
    module.mem_get_info = _returns((MEMORY, MEMORY))
    module.get_device_properties = _returns(SimpleNamespace(total_memory=MEMORY))
    return module


def register() -> None:
    """Makes the device, and the backends ``hostnccl`` and, for a world of one beside gloo, ``hostalone``."""
    torch._register_device_module(NAME, _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.Tensor.record_stream = _returns(None)  # type: ignore[method-assign]
    dist.Backend.register_backend("hostnccl", DeviceGroup, devices=[NAME])
    dist.Backend.register_backend("hostalone", _alone, devices=[NAME])
    # torch's record of exchanges knows no group that is written in Python
    dist.distributed_c10d._maybe_attach_flight_recorder = _returns(None)


def _alone(store: Any, rank: int, size: int, timeout: Any) -> Any:
    assert size == 1, "several ranks exchange by hostnccl"
    return FakeProcessGroup._create_internal(rank, size)


register()
