"""`outpace env`: what a bug report needs."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from outpace.cli.arguments import Parser
from outpace.cli.console import Console
from outpace.cli.settings import ENV_PREFIX

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "transformers", "gguf", "jinja2", "rich", "huggingface_hub")
_SHOWN_VARIABLES = ("HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_SECRET = re.compile(r"KEY|TOKEN$|SECRET|PASSWORD")


def configure(parser: Parser) -> None:
    """The options of this command."""
    parser.add_json()


def run(args: Namespace, console: Console) -> int:
    """Print the block. Returns the exit code."""
    facts = {"outpace": _installed("outpace"), **machine_facts()}
    facts["packages"] = {name: _installed(name) for name in PACKAGES}
    facts["compiler"] = shutil.which("g++") or shutil.which("clang++") or "none found"
    facts["variables"] = variables()
    if args.json:
        console.data(json.dumps(facts, indent=2))
        return 0
    for name, value in facts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key}={item}" for key, item in value.items()) or "none"
        console.data(f"{name + ':':<14}{value}")
    return 0


def machine_facts() -> dict[str, Any]:
    """Processor, cores this process may use, memory in GiB, versions."""
    return {
        "cpu": cpu_name(),
        "cores": _cores(),
        "memory_gib": _memory_gib(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": _installed("torch"),
    }


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def variables() -> dict[str, str]:
    """Environment variables that change what outpace does; secrets are named, not shown."""
    names = [name for name in os.environ if name.startswith(ENV_PREFIX) or name in _SHOWN_VARIABLES]
    if "HF_TOKEN" in os.environ:
        names.append("HF_TOKEN")
    return {name: "(set)" if _SECRET.search(name) else os.environ[name] for name in sorted(names)}


def _cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_gib() -> float:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return 0.0


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
