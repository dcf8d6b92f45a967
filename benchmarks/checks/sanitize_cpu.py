"""Runs tests with the C++ kernels built for the compiler's sanitizers.

    python benchmarks/checks/sanitize_cpu.py [address | thread] [PYTEST ARGUMENT ...]

``address``: reads and writes outside of memory, and arithmetic that C++ does not define. ``thread``: races between the
threads of a team. Without arguments for pytest: the kernels' own tests. Exit 1 where a test failed or a sanitizer found
something; what it said is printed. Needs g++ and the libraries of its sanitizers. Kernels compile for some minutes.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import _paths  # noqa: F401
from benchmarks import record

FLAGS = "-O1 -g -fno-omit-frame-pointer"
WAYS = {
    "address": ("-fsanitize=address,undefined -fno-sanitize=vptr", ("libasan.so", "libubsan.so")),
    "thread": ("-fsanitize=thread", ("libtsan.so",)),
}
"""The compiler's flags, and the libraries that must be in the process before Python is."""
BUILD = "from transect.ops.cpu import build; build.BUILD_TIMEOUT = 1800; print(build.library_path())"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", nargs="?", choices=WAYS, default="address")
    options, given = parser.parse_known_args()
    if shutil.which("g++") is None:
        parser.error("needs g++ with its sanitizers' libraries: install g++")
    flags, names = WAYS[options.way]
    found = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        for name in (*names, "libstdc++.so")
    ]
    missing = [name for name in found if not Path(name).is_file()]
    if missing:
        parser.error(f"g++ has no {missing[0]}: install the libraries of its sanitizers")
    with tempfile.TemporaryDirectory() as folder:
        # Python and torch are not built for a sanitizer: what they leak or share is theirs.
        said = f"log_path={folder}/report"
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TRANSECT_CXXFLAGS": f"{FLAGS} {flags}",
            "ASAN_OPTIONS": f"detect_leaks=0:{said}",
            "UBSAN_OPTIONS": f"print_stacktrace=1:{said}",
            "TSAN_OPTIONS": f"ignore_noninstrumented_modules=1:report_signal_unsafe=0:exitcode=0:{said}",
        }
        subprocess.run([sys.executable, "-c", BUILD], env=environment, check=True)
        # The thread sanitizer keeps its notes at fixed addresses, which random ones may cover.
        fixed = ["setarch", "-R"] if shutil.which("setarch") else []
        tests = given or ["tests/ops/cpu", "-k", "not x86"]
        done = subprocess.run(
            [*fixed, sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests],
            env={**environment, "LD_PRELOAD": " ".join(found)},
            cwd=record.ROOT,
        )
        reports = sorted(Path(folder).glob("report*"))
        for report in reports:
            print(report.read_text(errors="replace"))
    print(f"{options.way}: {len(reports)} processes with findings, tests' exit status {done.returncode}")
    return int(bool(reports) or done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
