"""A llama-server of our own: started on a free port of this machine, asked, and ended."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

HOST = "127.0.0.1"
START_SECONDS, ANSWER_SECONDS = 300, 600


class Server:
    """A running llama-server. `ask` raises SystemExit if it has died."""

    def __init__(self, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
        self._url, self._process, self._log = f"http://{HOST}:{port}", process, log

    def wait(self) -> None:
        """Until the model is loaded."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"{self._url}/health", timeout=5).close()
                return
            time.sleep(0.2)
        raise SystemExit(f"llama-server did not start; its last words:\n{self._log.read_text()[-2000:]}")

    def ask(self, prompt_ids: Sequence[int], tokens: int) -> dict[str, Any]:
        """The greedy continuation: the server's answer to POST /completion."""
        body = {"prompt": list(prompt_ids), "n_predict": tokens, "temperature": 0}
        body |= {"cache_prompt": False, "return_tokens": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/completion", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return cast(dict[str, Any], json.load(answer))
        except urllib.error.URLError as error:
            raise SystemExit(f"llama-server: {error}\n{self._log.read_text()[-2000:]}") from error


@contextlib.contextmanager
def serving(command: Sequence[str | Path], log: Path) -> Iterator[Server]:
    """Run `command` with host and port added; the process ends with the block."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        address = ["--host", HOST, "--port", str(port)]
        process = subprocess.Popen([*command, *address], stdout=out, stderr=subprocess.STDOUT)
        try:
            server = Server(port, process, log)
            server.wait()
            yield server
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
