"""A GPU that is none: the code of GPUs runs on a device in host memory, and is held to what a GPU would not forgive.

``python -m tests.hostgpu`` (``make hostgpu``) builds the device, and runs a copy of the checkout in which it has the
place of CUDA: ``device.cpp`` is the device, ``face.py`` what ``torch.cuda`` is for CUDA, ``check_runs.py`` compares
whole runs with those on the CPU. What a program gets wrong shows as an error or as other losses:

- a tensor of the host in an operation of the device, or in an exchange of the process group, is refused;
- fresh memory is garbage;
- copies between pinned memory and the device are late: one that nobody waits for leaves garbage;
- within a step, from the second of a plan on, a copy or a read that the host waits for is refused.

It says nothing about speed, the kernels of a GPU, nccl itself, or how kernels of one stream overlap with copies that
they do not wait for. Graphs of ``torch.compile`` need a compiler for the device, and torch exchanges no memory of a
parameter between it and the host (chunks, and FSDP on several ranks).
"""
