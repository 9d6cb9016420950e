"""A model reference, as people type it -> the folder of a checkpoint on this machine."""

from __future__ import annotations

from pathlib import Path

from outpace.config import stored_dtype
from outpace.errors import ConfigError, ModelError
from outpace.weights import catalog
from outpace.weights.convert import convert
from outpace.weights.hub import HubReference, fetch_from_hub
from outpace.weights.local import Progress


def resolve(ref: str, dtype: str, progress: Progress | None = None) -> Path:
    """The folder that `load_checkpoint` and the codec read. `ref` is tried as

    1. a catalogue name (`smollm2-135m-instruct`): pulled and converted once; `./name` is a folder of that name,
    2. a .gguf file: converted once,
    3. a folder: taken as it is,
    4. `org/name[@revision]` or `org/name/file.gguf[@revision]`: fetched from the hub.

    dtype decides only how a .gguf is converted ("auto" is bfloat16). ModelError: nothing of the kind, with the nearest
    catalogue names. DownloadError: it exists and could not be fetched. ConfigError: no such dtype.
    """
    stored = stored_dtype(dtype)
    if ref in [entry.name for entry in catalog.entries()]:
        return convert(catalog.pull(ref, progress), stored, progress)
    path = Path(ref).expanduser()
    if stored == "native" and not path.is_file() and not ref.partition("@")[0].endswith(".gguf"):
        raise ConfigError(
            f"dtype 'native' runs a .gguf file's own blocks, and {ref!r} is none. Leave it out, or give a .gguf file or"
            " a catalogue name."
        )
    if ref and path.is_dir():  # for pathlib the empty text is the current folder
        return path
    if path.is_file():
        return _from_file(path, stored, progress)
    reference = HubReference.parse(ref)
    if reference is None or (path.suffix == ".gguf" and reference.file is None):
        raise _not_found(ref)
    local = fetch_from_hub(reference)
    return convert(local, stored, progress) if reference.file else local


def _from_file(path: Path, stored: str, progress: Progress | None) -> Path:
    if path.suffix != ".gguf":
        raise ModelError(
            f"{path} is a file, but not a .gguf. Give a .gguf file, or the folder that holds config.json and the"
            " .safetensors files."
        )
    return convert(path, stored, progress)


def _not_found(ref: str) -> ModelError:
    return ModelError(
        f"No model {ref!r}: it is not a name in the catalogue, and there is no such file or folder"
        f" ({Path(ref).expanduser().absolute()}), nor does it look like a hub model (org/name)."
        f" {catalog.suggestion(ref)}"
    )
