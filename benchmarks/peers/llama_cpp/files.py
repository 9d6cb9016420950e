"""Make the .gguf files that both engines read: a catalogue model in other types.

    python -m benchmarks.peers.llama_cpp.files DIR qwen2.5-coder-1.5b-instruct --types Q8_0 BF16

DIR is the folder of `build`; the files go to DIR/files. The catalogue's own file (Q4_K_M for the Qwen models) is linked
there under its type. The others are made from it, so they say no more than it does; speed depends on the type alone.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from benchmarks.peers.llama_cpp.build import program
from gguf import LlamaFileType

from outpace.weights import catalog
from outpace.weights.gguf import read_gguf


def file_type(path: Path) -> str:
    """The type a .gguf says it has, like Q4_K_M."""
    number = int(read_gguf(path).metadata["general.file_type"])
    return LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")


def dtype_for(path: Path) -> str:
    """How Outpace reads the same weights: `--dtype`. Unquantised files hold no blocks."""
    return {"BF16": "bfloat16", "F32": "float32"}.get(file_type(path), "native")


def make(folder: Path, model: str, kind: str, threads: int) -> Path:
    """The model in one type, made if it is not there."""
    original = catalog.pull(model)
    target = folder / "files" / f"{model}-{kind.lower()}.gguf"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_suffix(".partial")
    scratch.unlink(missing_ok=True)
    if kind == file_type(original):
        scratch.symlink_to(original)
    else:
        command: list[str | Path] = [program(folder, "llama-quantize"), "--allow-requantize"]
        command += [original, scratch, kind, str(threads)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    scratch.rename(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("model", nargs="+", help="a name in the catalogue (`outpace models`)")
    parser.add_argument("--types", nargs="+", metavar="TYPE", help="of llama-quantize (default: the file's own)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    for model in args.model:
        for kind in args.types or [file_type(catalog.pull(model))]:
            print(make(args.folder.absolute(), model, kind, args.threads))


if __name__ == "__main__":
    main()
