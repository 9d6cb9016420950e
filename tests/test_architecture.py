"""The rules of docs/architecture.md, read off the source with `ast`. Every rule has a planted offender it must flag."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "outpace"
FILES = sorted(PACKAGE.rglob("*.py"))

# Lowest first; inside a layer left to right: a unit may import itself and everything before it.
LAYERS = (
    ("errors", "types", "config", "client"),
    ("sampling", "verify", "text"),
    ("kernels", "cache", "models", "weights"),
    ("drafters",),
    ("engine",),
    ("backends", "lab"),
    ("server", "cli"),
)
ORDER = {unit: position for position, unit in enumerate(unit for layer in LAYERS for unit in layer)}
SERVER_MAY = {"errors", "types", "config", "client", "text", "server"}

MAX_FILE, MAX_FUNCTION, MAX_PARAMETERS = 400, 60, 7
# How the class names end whose kind nobody may ask for: drafters, rules, stores, models.
ROLES = ("Drafter", "Rule", "Store", "Model", "Decoder", "Lookup")
MAKES_NO_TENSOR = ("torch.device", "torch.inference_mode", "torch.no_grad", "torch.finfo", "torch.iinfo")

Check = Callable[[ast.Module, str], Iterator[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def unit_of(path: Path) -> str:
    """The unit a file belongs to: a top-level module, or the sub-package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_units(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, unit) of every import of this package, wherever it stands in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # A relative import would hide the unit, so it counts as an unknown one.
            modules = [f"outpace.{'.' * node.level}"] if node.level else [node.module or ""]
            if modules == ["outpace"]:
                modules = [f"outpace.{alias.name}" for alias in node.names]
        else:
            continue
        for module in modules:
            if module.split(".")[0] == "outpace" and "." in module:
                yield node.lineno, module.split(".")[1]


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def layering(tree: ast.Module, unit: str) -> Iterator[str]:
    for line, other in imported_units(tree):
        if other not in ORDER:
            yield f"{line}: imports {other!r}, which has no place in the layers"
        elif unit == "server" and other not in SERVER_MAY:
            yield f"{line}: server imports {other}, but may know only L0 and text"
        elif unit in ORDER and ORDER[other] > ORDER[unit]:
            yield f"{line}: {unit} imports {other}, which is above it"


def function_length(tree: ast.Module, unit: str) -> Iterator[str]:
    for node in functions(tree):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION:
            yield f"{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION}"


def parameter_count(tree: ast.Module, unit: str) -> Iterator[str]:
    for node in functions(tree):
        names = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_PARAMETERS:
            yield f"{node.lineno}: {node.name} has {count} parameters, at most {MAX_PARAMETERS}"


def global_state(tree: ast.Module, unit: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            yield f"{node.lineno}: global {', '.join(node.names)}"


def module_tensors(tree: ast.Module, unit: str) -> Iterator[str]:
    """Calls to torch at import time, in module or class bodies. Types and dtypes (torch.float32) are no calls."""
    for statement in import_time(tree.body):
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and dotted(node.func).startswith("torch."):
                if dotted(node.func) in MAKES_NO_TENSOR:
                    continue
                yield f"{node.lineno}: {dotted(node.func)}() runs when the module is imported"


def import_time(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Everything that runs on import, function bodies excluded (decorators and defaults do run)."""
    for statement in body:
        if isinstance(statement, Function):
            yield from (*statement.decorator_list, *statement.args.defaults)
            yield from (default for default in statement.args.kw_defaults if default is not None)
        elif isinstance(statement, ast.ClassDef):
            yield from import_time(statement.body)
        else:
            yield statement


def type_questions(tree: ast.Module, unit: str) -> Iterator[str]:
    """hasattr on anything but plain values, isinstance with a role's class."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        if dotted(node.func) == "hasattr":
            yield f"{node.lineno}: hasattr asks for what a protocol should say"
        elif dotted(node.func) == "isinstance" and len(node.args) == 2:
            asked = [dotted(part).split(".")[-1] for part in alternatives(node.args[1])]
            for name in asked:
                if name.endswith(ROLES):
                    yield f"{node.lineno}: isinstance(..., {name}) asks for the kind of a role"


def alternatives(node: ast.expr) -> list[ast.expr]:
    """The classes of an isinstance: one, a tuple, or a union."""
    if isinstance(node, ast.Tuple):
        return list(node.elts)
    if isinstance(node, ast.BinOp):
        return alternatives(node.left) + alternatives(node.right)
    return [node]


def passed_through(tree: ast.Module, unit: str) -> Iterator[str]:
    """A function that takes **options and hands them on hides its own signature."""
    for node in functions(tree):
        if node.args.kwarg is None:
            continue
        name = node.args.kwarg.arg
        for inner in ast.walk(node):
            handed = isinstance(inner, ast.Call) and any(
                keyword.arg is None and dotted(keyword.value) == name for keyword in inner.keywords
            )
            if handed and isinstance(inner, ast.Call) and dotted(inner.func) != "dataclasses.replace":
                yield f"{inner.lineno}: {node.name} passes **{name} through to {dotted(inner.func)}"


def protocol_flags(tree: ast.Module, unit: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef) or "Protocol" not in {dotted(base).split(".")[-1] for base in node.bases}:
            continue
        for method in node.body:
            if isinstance(method, Function):
                # The codec's keyword-only options describe the text that is wanted, not a mode of the engine.
                options = [] if unit == "text" else method.args.kwonlyargs
                for arg in (*method.args.posonlyargs, *method.args.args, *options):
                    if arg.annotation is not None and "bool" in names_in(arg.annotation):
                        yield f"{method.lineno}: {node.name}.{method.name} takes the boolean {arg.arg}"


def names_in(node: ast.expr) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def dotted(node: ast.expr) -> str:
    """`a.b.c` for names and attributes; calls and subscripts count as what they are made on."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Subscript):
        return dotted(node.value)
    return ""


CHECKS: tuple[Check, ...] = (
    layering,
    function_length,
    parameter_count,
    global_state,
    module_tensors,
    type_questions,
    passed_through,
    protocol_flags,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_source_keeps_the_rule(check: Check) -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{problem}"
        for path in FILES
        for problem in check(ast.parse(path.read_text(encoding="utf-8")), unit_of(path))
    ]
    assert not found, "\n" + "\n".join(found)


def test_files_are_short() -> None:
    long = {str(path.relative_to(PACKAGE)): n for path in FILES if (n := lines_of(path.read_text())) > MAX_FILE}
    assert not long, f"at most {MAX_FILE} lines: {long}"
    assert lines_of("x\n" * (MAX_FILE + 1)) > MAX_FILE


def lines_of(text: str) -> int:
    return len(text.splitlines())


def test_every_unit_has_its_place() -> None:
    units = {unit_of(path) for path in FILES} - {"__init__", "__main__"}
    assert units <= set(ORDER), f"not in the layers: {units - set(ORDER)}"
    assert len(FILES) > 20


OFFENDERS = [
    (layering, "verify", "from outpace.engine.step import step"),
    (layering, "models", "def f():\n    from outpace.weights import load"),
    (layering, "types", "import outpace.config"),
    (layering, "drafters", "from outpace import engine"),
    (layering, "cache", "from ..models import base"),
    (layering, "cli", "import outpace.utilities"),
    (layering, "server", "from outpace.engine.local import LocalEngine"),
    (function_length, "cli", "def f():\n" + "    x = 1\n" * MAX_FUNCTION),
    (parameter_count, "cli", "def f(a, b, c, d, e, *, f, g, h): ..."),
    (parameter_count, "cli", "class A:\n    def f(self, a, b, c, d, e, f, g, h): ..."),
    (global_state, "cli", "n = 0\ndef f():\n    global n\n    n = 1"),
    (module_tensors, "models", "import torch\nmask = torch.ones(4).tril()"),
    (module_tensors, "models", "import torch\nclass A:\n    mask = torch.zeros(4)"),
    (module_tensors, "models", "import torch\ndef f(x=torch.zeros(1)): ..."),
    (type_questions, "engine", "def f(d):\n    return hasattr(d, 'reset')"),
    (type_questions, "engine", "def f(d):\n    return isinstance(d, base.MedusaDrafter)"),
    (type_questions, "engine", "def f(d):\n    return isinstance(d, (int, SlotStore))"),
    (type_questions, "engine", "def f(d):\n    return isinstance(d, int | TokenRule)"),
    (passed_through, "engine", "def f(a, **options):\n    return g(a, **options)"),
    (protocol_flags, "models", "class M(Protocol):\n    def forward(self, x: int, prefill: bool = False) -> int: ..."),
    (protocol_flags, "cache", "class M(Protocol):\n    def commit(self, *, tree: bool) -> None: ..."),
    (protocol_flags, "models", "class M(t.Protocol[T]):\n    def forward(self, prefill: bool | None) -> int: ..."),
]


@pytest.mark.parametrize(("check", "unit", "source"), OFFENDERS)
def test_planted_offenders_are_flagged(check: Check, unit: str, source: str) -> None:
    assert list(check(ast.parse(textwrap.dedent(source)), unit))


def test_ordinary_code_is_not_flagged() -> None:
    source = """
    import torch
    from torch import Tensor
    from outpace.types import Draft
    DTYPE = torch.float32
    @torch.inference_mode()
    def f(self, a, b, c, d, e, f, *, add_bos: bool = True) -> Tensor:
        return torch.zeros(1) if isinstance(a, int | float) else Draft(**{"a": 1})
    class P(Protocol):
        def ready(self) -> bool: ...
    """
    tree = ast.parse(textwrap.dedent(source))
    assert [problem for check in CHECKS for problem in check(tree, "engine")] == []
