"""Says in one sentence how much an installation will download: `python download_size.py run VENV`, or `test`.

The sizes are sums over the wheels that constraints.txt leads to. tests/packaging/public_index.py compares them with the
index. pip itself knows them only after it has downloaded the wheels.
"""

import platform
import subprocess
import sys
from pathlib import Path

TORCH = {"x86_64": 2.73, "aarch64": 2.86}
"""GB of torch as it is published for Linux, with its CUDA libraries and Triton."""
REST = {"run": 0.04, "test": 0.52}
"""GB of everything else; "test" is all of "run" too."""
CPU_TORCH = 0.2
"""GB of a build of torch for processors alone."""
TRITON = 0.2
"""GB of Triton, which tests want beside a torch that does not bring it."""


def cpu_build(settings: str) -> str:
    """Where pip will find a CPU build of torch: a folder of wheels or PyTorch's index of such builds; else "".

    Args:
        settings: what `pip config list` prints; settings from the environment are among them.
    """
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    for line in settings.splitlines():
        key, _, value = line.partition("=")
        for place in value.strip("'\"").replace("\\n", " ").split():
            if key.endswith("find-links") and any(Path(place).glob(f"torch-*+cpu-{python}-*.whl")):
                return place
            if key.endswith("index-url") and place.rstrip("/").endswith("/whl/cpu"):
                return place
    return ""


def sentence(group: str, settings: str, installed: str = "") -> str:
    """What will be downloaded for "run" or "test" dependencies.

    Args:
        installed: the version of torch that is there already and does not come again.
    """
    if installed:
        size = REST[group] - REST["run"] if group == "test" else REST["run"]
        size += TRITON if group == "test" and installed.endswith("+cpu") else 0.0
        return f"up to {size:.2f} GB will be downloaded; torch {installed} is there already"
    place = cpu_build(settings)
    if place or sys.platform != "linux":
        size = REST[group] + (0.0 if place.startswith("/") else CPU_TORCH) + (TRITON if group == "test" else 0.0)
        return f"up to {size:.2f} GB will be downloaded, with a build of torch without CUDA" + (
            place and f" from {place}"
        )
    machine = "aarch64" if platform.machine() in ("aarch64", "arm64") else "x86_64"
    size = REST[group] + TORCH[machine]
    return f"up to {size:.1f} GB will be downloaded, most of it torch and its CUDA libraries"


def main() -> None:
    """Ask the environment about pip's settings and about torch, and print the sentence."""
    group, folder = sys.argv[1:]
    python = str(Path(folder) / "bin" / "python")
    settings = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    probe = "import importlib.metadata as m; print(m.version('torch'))"
    torch = subprocess.run([python, "-c", probe], capture_output=True, text=True).stdout.strip()
    print(f"setting up {folder} (once): {sentence(group, settings, torch)}", flush=True)


if __name__ == "__main__":
    main()
