"""Build llama.cpp for the comparisons, from the source inside a Python source package.

    python -m benchmarks.peers.llama_cpp.build DIR [--jobs N]

Everything stays in DIR; what is there already is not made again. Needs a C++ compiler; CMake is put into a virtual
environment in DIR where the system has none.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
SOURCE = "vendor/llama.cpp"
TARGETS = ("llama-server", "llama-bench", "llama-batched-bench", "llama-quantize")
# GGML_NATIVE: all that this processor can do, as the Makefile of Outpace's kernels does. No download while building.
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "GGML_NATIVE": "ON",
    "BUILD_SHARED_LIBS": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
}


def program(folder: Path, name: str) -> Path:
    """Where a built program lies. SystemExit if it is not built."""
    path = folder / "build" / "bin" / name
    if not path.is_file():
        raise SystemExit(f"{path} is missing. Build it: python -m benchmarks.peers.llama_cpp.build {folder}")
    return path


def description() -> dict[str, str]:
    """What was built, for reports."""
    kept = ("CMAKE_BUILD_TYPE", "GGML_NATIVE")
    return {"llama.cpp": f"of {PACKAGE}", "built with": " ".join(f"-D{name}={OPTIONS[name]}" for name in kept)}


def build(folder: Path, jobs: int) -> None:
    """Make all programs in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    source, output = unpacked(folder), folder / "build"
    cmake = cmake_program(folder)
    flags = [f"-D{name}={value}" for name, value in OPTIONS.items()]
    subprocess.run([cmake, "-S", source, "-B", output, *flags], check=True)
    subprocess.run([cmake, "--build", output, "-j", str(jobs), "--target", *TARGETS], check=True)


def unpacked(folder: Path) -> Path:
    """The source of llama.cpp, fetched and unpacked if it is not there."""
    target = folder / "source"
    if target.is_dir():
        return target
    scratch = folder / "source.partial"
    shutil.rmtree(scratch, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
    subprocess.run([*command, "-d", scratch, PACKAGE], check=True)
    [archive] = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        wanted = [member for member in tar if member.name.partition("/")[2].startswith(SOURCE + "/")]
        tar.extractall(scratch, wanted, filter="data")
    [root] = (path for path in scratch.iterdir() if path.is_dir())
    (root / SOURCE).rename(target)
    shutil.rmtree(scratch)
    return target


def cmake_program(folder: Path) -> str:
    """The system's CMake, or one in a virtual environment of its own."""
    found = shutil.which("cmake")
    if found:
        return found
    tools = folder / "cmake"
    if not (tools / "bin" / "cmake").is_file():
        venv.create(tools, with_pip=True)
        subprocess.run([tools / "bin" / "python", "-m", "pip", "install", "--quiet", "cmake"], check=True)
    return str(tools / "bin" / "cmake")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    build(args.folder.absolute(), args.jobs)


if __name__ == "__main__":
    main()
