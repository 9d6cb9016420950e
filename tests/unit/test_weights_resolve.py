"""References as people type them, and the hub's failures as one paragraph each."""

from __future__ import annotations

import types
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import filter_repo_objects

from outpace.errors import ConfigError, DownloadError, ModelError, OutpaceError
from outpace.weights import catalog
from outpace.weights import hub as hub_module
from outpace.weights import resolve as module
from outpace.weights.hub import HubReference, fetch_from_hub
from outpace.weights.resolve import resolve


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversion and pulling have their own tests; here they say what they were asked for. No network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(catalog, "pull", lambda name, progress: Path(f"/pulled/{name}.gguf"))
    monkeypatch.setattr(module, "convert", lambda path, dtype, progress: Path(f"/converted/{dtype}/{path.name}"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.mark.parametrize(("dtype", "stored"), [("auto", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")])
def test_catalogue_and_gguf(dtype: str, stored: str, tmp_path: Path) -> None:
    (tmp_path / "smollm2-135m-instruct").mkdir()  # a catalogue name wins over a folder of the same name
    assert resolve("smollm2-135m-instruct", dtype) == Path(f"/converted/{stored}/smollm2-135m-instruct.gguf")
    assert resolve("./smollm2-135m-instruct", dtype) == Path("smollm2-135m-instruct")
    (tmp_path / "mine.gguf").touch()
    for ref in ("mine.gguf", "~/mine.gguf", str(tmp_path / "mine.gguf")):
        assert resolve(ref, dtype) == Path(f"/converted/{stored}/mine.gguf")


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve("org/name", "auto") == Path("org/name")
    assert resolve("~/org", "auto") == tmp_path / "org"


def test_dtype() -> None:
    with pytest.raises(ConfigError, match="dtype must be one of auto, bfloat16, float32, native, got 'int8'"):
        resolve("smollm2-135m-instruct", "int8")


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("smollm2-135m-instrct", r"Did you mean smollm2-135m-instruct\?"),
        ("Qwen2.5-Coder-1.5B", r"Did you mean qwen2\.5-coder-1\.5b-instruct"),
        ("zzz", r"No model 'zzz': .*The catalogue has smollm2-135m-instruct, gemma-3-270m"),
        ("none.gguf", r"no such file or folder"),
        ("some/none.gguf", r"no such file or folder"),
        ("../some/where", r"no such file or folder"),
        ("/nowhere/at/all", r"no such file or folder \(/nowhere/at/all\)"),
        ("a b/c", r"nor does it look like a hub model"),
        ("", r"No model ''"),
    ],
)
def test_nothing_of_the_kind(ref: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve(ref, "auto")
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ModelError, match=r"is a file, but not a \.gguf"):
        resolve("model.safetensors", "auto")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("org/name", HubReference("org/name")),
        ("org/na.me-2_x@v1.0", HubReference("org/na.me-2_x", None, "v1.0")),
        ("org/name@refs/pr/3", HubReference("org/name", None, "refs/pr/3")),
        ("org/name/sub/f-q4.gguf", HubReference("org/name", "sub/f-q4.gguf")),
        ("org/name/f.gguf@main", HubReference("org/name", "f.gguf", "main")),
        ("name", None),
        ("org/name/f.bin", None),
        ("../name", None),
        ("./name", None),
        ("org/name@", None),
        ("https://host/org/name", None),
    ],
)
def test_hub_references(text: str, parsed: HubReference | None) -> None:
    assert HubReference.parse(text) == parsed
    assert parsed is None or str(parsed) == text


def cached(tmp_path: Path, *names: str) -> Path:
    """A snapshot as huggingface_hub lays it out."""
    root = tmp_path / "hub" / "models--org--name"
    folder = root / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_text("{}")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("a" * 40)
    return folder


def test_a_cached_hub_model_needs_no_connection(tmp_path: Path) -> None:
    folder = cached(tmp_path, "config.json", "f.gguf")
    assert resolve("org/name", "auto") == folder
    assert resolve("org/name@main", "auto") == folder
    assert resolve("org/name/f.gguf", "float32") == Path("/converted/float32/f.gguf")


@pytest.mark.parametrize("ref", ["org/other", "org/name@v2", "org/name/g.gguf"])
def test_offline_and_not_cached(ref: str, tmp_path: Path) -> None:
    cached(tmp_path, "config.json")
    with pytest.raises(
        DownloadError, match="cannot be fetched: there is no connection, or HF_HUB_OFFLINE is set"
    ) as caught:
        resolve(ref, "auto")
    assert "\n" not in str(caught.value) and repr(ref) in str(caught.value)


def failure(name: str) -> Exception:
    kind: type[Exception] = getattr(hub_errors, name)
    if issubclass(kind, hub_errors.HfHubHTTPError):
        return kind("https://host\nRequest ID: 1", response=types.SimpleNamespace(headers={}, request=None))  # type: ignore[arg-type]
    return kind("long\ntext")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("GatedRepoError", ModelError, r"gated.*hf auth login.*HF_TOKEN"),
        ("RepositoryNotFoundError", ModelError, r"neither a folder .* nor a model of the hub.*HF_TOKEN"),
        ("HFValidationError", ModelError, r"neither a folder"),
        ("RevisionNotFoundError", ModelError, r"has no revision 'v9'"),
        ("RemoteEntryNotFoundError", ModelError, r"has no file 'f\.gguf'"),
        ("LocalEntryNotFoundError", DownloadError, r"HF_HUB_OFFLINE"),
        ("OfflineModeIsEnabled", DownloadError, r"HF_HUB_OFFLINE"),
        ("HfHubHTTPError", DownloadError, r"Fetching org/name/f\.gguf@v9 from the hub failed"),
    ],
)
def test_hub_failures(name: str, error: type[OutpaceError], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, revision: str | None) -> str:
        raise failure(name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(OutpaceError, match=message) as caught:
        fetch_from_hub(HubReference("org/name", "f.gguf", "v9"))
    assert type(caught.value) is error and "\n" not in str(caught.value)


def test_a_connection_that_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever HTTP library the hub uses, its own errors do not reach the user."""

    def fail(*arguments: object, **options: object) -> str:
        raise RuntimeError("peer closed\nconnection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(DownloadError, match="from the hub failed: peer closed connection"):
        resolve("org/name", "auto")


def test_only_the_wanted_files(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    def snapshot(repo: str, revision: None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.update(allow=allow_patterns, ignore=ignore_patterns)
        return "/x"

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert hub_module.fetch_from_hub(HubReference("org/name")) == Path("/x")
    names = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja"]
    others = ["pytorch_model.bin", "original/model.safetensors", "onnx/config.json", "consolidated.safetensors", "a.py"]
    filtered = filter_repo_objects(names + others, allow_patterns=asked["allow"], ignore_patterns=asked["ignore"])
    assert list(filtered) == names
