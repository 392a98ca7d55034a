"""The time of copies between host memory and a device."""

import torch
import torch.distributed as dist

from pipetransformer.profiling.timing import typical_seconds

NUM_BYTES = 1 << 24


def measure_host_copies(device: torch.device) -> float:
    """Returns the seconds per byte of a copy to the device, those of the slowest rank. Every rank calls it.

    Where the device is the CPU, a copy goes to another buffer in memory.
    """
    source = torch.zeros(NUM_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    seconds = torch.tensor(typical_seconds(lambda: target.copy_(source), device, num_repeats=5), dtype=torch.float64)
    if dist.get_world_size() > 1:
        seconds = seconds.to(device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item() / NUM_BYTES
