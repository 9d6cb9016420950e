"""Checkpoints of the Hugging Face hub. HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE work as everywhere."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors as hub_errors

from outpace.errors import DownloadError, ModelError, OutpaceError

# Only files of the top folder: sub-folders hold other formats of the same weights (onnx, original).
_WANTED = ["*.json", "*.jinja", "*.safetensors"]
_UNWANTED = ["*/*", "consolidated*.safetensors"]
_REFERENCE = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class HubReference:
    """`org/name`, `org/name@revision` or `org/name/file.gguf[@revision]`."""

    repo: str
    file: str | None = None
    revision: str | None = None

    @classmethod
    def parse(cls, text: str) -> HubReference | None:
        """None when the text has another shape."""
        match = _REFERENCE.fullmatch(text)
        if match is None or any(part.strip(".") == "" for part in match["repo"].split("/")):
            return None
        return cls(match["repo"], match["file"], match["revision"])

    def __str__(self) -> str:
        return self.repo + (f"/{self.file}" if self.file else "") + (f"@{self.revision}" if self.revision else "")


def fetch_from_hub(reference: HubReference) -> Path:
    """The local snapshot folder, or the .gguf file, downloaded if it is not in the hub's own cache.

    ModelError: no such repository, revision or file, or no access to it. DownloadError: no connection, offline and
    not cached, a failing server, a full disk.
    """
    with _hub_errors(reference):
        if reference.file:
            return Path(huggingface_hub.hf_hub_download(reference.repo, reference.file, revision=reference.revision))
        return Path(
            huggingface_hub.snapshot_download(
                reference.repo, revision=reference.revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
            )
        )


@contextlib.contextmanager
def _hub_errors(reference: HubReference) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # its HTTP library, whose errors may pass through, has changed with its version
        raise _explain(reference, error) from error


def _explain(reference: HubReference, error: Exception) -> OutpaceError:
    """The order matters: a gated repository is also a missing one, in the hub's tree of exceptions."""
    if isinstance(error, hub_errors.GatedRepoError):
        return ModelError(
            f"{reference.repo} is gated: its authors ask you to accept their terms first. Accept them on the page of"
            " the model at huggingface.co, then log in with `hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, hub_errors.RepositoryNotFoundError | hub_errors.HFValidationError):
        return ModelError(
            f"{str(reference)!r} is neither a folder on this machine nor a model of the hub that you may read. Check"
            " the spelling; for a private model log in with `hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, hub_errors.RevisionNotFoundError):
        return ModelError(f"{reference.repo} has no revision {reference.revision!r}. Check its branches and tags.")
    if isinstance(error, hub_errors.LocalEntryNotFoundError | hub_errors.OfflineModeIsEnabled):
        return DownloadError(
            f"{str(reference)!r} is no file or folder on this machine, is not in the local cache of the hub, and cannot"
            " be fetched: there is no connection, or HF_HUB_OFFLINE is set. Check the spelling; connect once, or copy"
            " the checkpoint here and give its folder."
        )
    if isinstance(error, hub_errors.EntryNotFoundError):
        return ModelError(f"{reference.repo} has no file {reference.file!r}. Check the list of its files on the hub.")
    reason = " ".join(str(error).split()) or type(error).__name__
    return DownloadError(f"Fetching {reference} from the hub failed: {reason}. Run the command again later.")
