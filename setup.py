"""Builds the native kernels: plain C ABI, loaded with ctypes. Without a compiler the package installs all the same."""

import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FOLDER = Path("src/outpace/kernels/native")
X86 = platform.machine().lower() in ("x86_64", "amd64")
COMMON = ["-O3", "-g0", "-std=c++17", "-fPIC", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]
# Each instruction set is one file with flags of its own; the rest is compiled for any machine of the platform.
FLAGS = {
    "ops_v3.cpp": ["-march=x86-64-v3"],
    "ops_v4.cpp": ["-march=x86-64-v4"],
    "ops_v4bf16.cpp": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
    "ops_amx.cpp": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16"],
}
# Older compilers know neither: the library is then built without them.
OPTIONAL = ("ops_v4bf16.cpp", "ops_amx.cpp")


class BuildNative(build_ext):
    def build_extension(self, ext: Extension) -> None:
        output = self.get_ext_fullpath(ext.name)
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        without: list[tuple[str, str]] = []
        objects = []
        for source in sorted(ext.sources, key=lambda path: Path(path).name not in OPTIONAL):
            name = Path(source).name
            flags = COMMON + FLAGS.get(name, [])
            try:
                objects += self.compiler.compile(
                    [source], output_dir=self.build_temp, macros=without, extra_postargs=flags, depends=ext.depends
                )
            except CompileError:
                if name not in OPTIONAL:
                    raise
                without.append((f"NO_{Path(name).stem.upper()}", "1"))
        self.compiler.link_shared_object(objects, output, libraries=["pthread"], target_lang="c++")


sources = [str(path) for path in sorted(FOLDER.glob("*.cpp")) if X86 or path.name not in FLAGS]
headers = [str(path) for path in FOLDER.iterdir() if path.suffix in (".h", ".inc")]
setup(
    ext_modules=[Extension("outpace.kernels._native", sources, depends=headers, optional=True)],
    cmdclass={"build_ext": BuildNative},
)
