"""Builds the device, and runs a copy of the checkout in which it has the place of CUDA: ``python -m tests.hostgpu``."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT, OWN = Path(__file__).parents[2], Path(__file__).parent
WORDS = {r"torch\.cuda": "torch.hostgpu", r'"cuda"': '"hostgpu"', r"\bis_cuda\b": "is_hostgpu", r'"nccl"': '"hostnccl"'}
FIRST = f"import sys\n\nsys.path[:0] = [{str(OWN)!r}, {{built!r}}]\nimport face as _face\n"
ROWS = ("tests/runtime/test_devices.py", "tests/training/test_device_runs.py", "tests/hostgpu/check_runs.py")
WHAT_IT_CAN = "not compiled and not chunks"  # a parameter of the host cannot move to a device of this kind and back


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="hostgpu-") as name:
        copy = Path(name) / "copy"
        make_copy(copy, build())
        words = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-p",
            "late",
            "-W",
            "ignore",
            "-v",
            "--thorough",
        ]
        rows = sys.argv[1:] or [*ROWS, "-k", WHAT_IT_CAN]
        env = os.environ | {"PYTHONPATH": f"{copy}{os.pathsep}{OWN}", "OMP_NUM_THREADS": "1"}
        return subprocess.run([*words, *rows], cwd=copy, env=env, check=False).returncode


def build() -> Path:
    """Compiles the device, which takes a minute the first time, and returns its folder."""
    from torch.utils.cpp_extension import load

    device = load("hostgpu_device", [str(OWN / "device.cpp")], extra_cflags=["-O1", "-w"])
    return Path(device.__file__).parent


def make_copy(copy: Path, built: Path) -> None:
    """Copies the checkout, with the device in place of CUDA, imported before all else."""
    for name in ("pipetransformer", "tests", "experiments"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    for file in copy.rglob("*.py"):
        if OWN.name not in file.parts:
            text = own = file.read_text()
            for word, other in WORDS.items():
                own = re.sub(word, other, own)
            if own != text:
                file.write_text(own)
    replace(copy / "pipetransformer" / "__init__.py", "import sys\n", FIRST.format(built=str(built)))
    replace(copy / "pipetransformer" / "launch" / "forkserver.py", "GPU_FILES = (", f"GPU_FILES = ({str(built)!r}, ")
    of_one = 'backend = {"gloo": "cpu:gloo,hostgpu:hostalone"}.get(backend, backend) if world == 1 else backend'
    replace(
        copy / "tests" / "support" / "pool.py",
        "    dist.init_process_group(",
        f"    {of_one}\n    dist.init_process_group(",
    )


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text, f"{file} has no {old!r} any more"
    file.write_text(text.replace(old, new, 1))


if __name__ == "__main__":
    sys.exit(main())
