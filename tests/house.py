"""Measure the size, the names and the prose of the project, for the limits in `test_house.py`.

`source_figures` and `prose_figures` read files only. `python tests/house.py` saves and resumes a
small model under `sys.settrace` and prints the lines that each call ran, as JSON.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
BOOKS = frozenset(("train", "bridges", "interop", "sinks", "cli", "testing"))
"""Folders outside of the core: the Trainer with the bridges, and the tools."""
FAULTS = {
    "go on": r"\b(?:go|goes|going|gone|went)\s+on\b",
    "what as a noun": r"\bwhat\b(?! (?:is|are|was|were|do|does|did|to|if|about|happens)\b)",
    "that of": r"\b(?:that|those|ones?) of\b",
    "whoever, beside": r"\b(?:who|what)ever\b|\b(?:some|no)body\b"
    r"|\b(?:meanwhile|beside|anew|afresh|hence)\b",
    "where for if": r"(?:^|[.,;:(] ?)[Ww]here "
    r"(?:an?|the|it|th[ei]re|this|that|they|you|no|nothing|one|two|several)\b",
    "as it is": r"\bas (?:it|they) (?:is|was|are|were)\b",
    "is told": r"\b(?:is|was|are|were|be) told\b",
    "but for": r"\bbut for\b",
}
"""Patterns of the project's eight habits that readers of English stumble over."""
_WORST = 5


@dataclass(frozen=True, slots=True)
class Figure:
    """Measured value, and the places that contribute most to it."""

    value: float
    worst: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """Piece of prose, and the place where its first line is."""

    path: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class _Annotation:
    text: bytes
    place: str
    is_parameter: bool


class _Source:
    """Text of a module by the positions of its nodes, which `ast.unparse` takes seconds for."""

    def __init__(self, text: str) -> None:
        self._lines = text.encode().splitlines(keepends=True)

    def annotation(
        self, node: ast.expr | None, place: str, *, is_parameter: bool = False
    ) -> Iterator[_Annotation]:
        """Give the annotation at `node`, if there is one."""
        if node is not None:
            lines = self._lines[node.lineno - 1 : node.end_lineno]
            lines[-1] = lines[-1][: node.end_col_offset]
            lines[0] = lines[0][node.col_offset :]
            yield _Annotation(b"".join(lines), place, is_parameter)


def source_figures(src: Path) -> dict[str, Figure]:
    """Measure the source in `src`, a folder named `holdfast`."""
    texts = {path: path.read_text("utf-8") for path in sorted(src.rglob("*.py"))}
    lengths = {_shown(path, src): text.count("\n") for path, text in texts.items()}
    core = {_shown(p, src): lengths[_shown(p, src)] for p in texts if _is_core(p, src)}
    functions: list[tuple[str, str]] = []
    classes: dict[str, list[str]] = defaultdict(list)
    annotations: list[_Annotation] = []
    widths: dict[str, int] = {}
    for path, text in texts.items():
        source, file = _Source(text), _shown(path, src)
        for node in ast.walk(ast.parse(text)):
            place = f"{file}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                functions.append((node.name, place))
                widths[f"{place} {node.name}"] = _width(node.args)
                annotations += source.annotation(node.returns, place)
            elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(place)
            elif isinstance(node, ast.arg):
                annotations += source.annotation(node.annotation, place, is_parameter=True)
            elif isinstance(node, ast.AnnAssign):
                annotations += source.annotation(node.annotation, place)
    named = [(name.lstrip("_"), place) for name, place in functions if not name.endswith("__")]
    definitions = Counter(name for name, _ in named)
    shared = Counter({name: n for name, n in definitions.items() if n >= 5})
    one_word = Counter(name for name, _ in named if "_" not in name)
    twice = {name: places for name, places in classes.items() if len(places) > 1}
    callables = [
        a.place for a in annotations if a.is_parameter and re.search(rb"\bCallable\b", a.text)
    ]
    anys = [a.place for a in annotations if re.search(rb"\bAny\b", a.text)]
    comments = Counter({_shown(p, src): _comments(text) for p, text in texts.items()})
    n_lines = sum(lengths.values())
    return {
        "lines of src": Figure(n_lines, _largest(lengths)),
        "lines of the core": Figure(sum(core.values()), _largest(core)),
        "modules": Figure(len(texts), _largest(_by_folder(texts, src))),
        "public class names used twice": Figure(
            len(twice), tuple(f"{name}: {', '.join(places)}" for name, places in twice.items())
        ),
        "functions that share their name with 4 others, %": Figure(
            100 * shared.total() / len(named), _with_place(shared, named)
        ),
        "functions with a name of one word, %": Figure(
            100 * one_word.total() / len(named), _with_place(one_word, named)
        ),
        "callables as parameters": Figure(len(callables), _by_module(callables)),
        "widest call": Figure(max(widths.values()), _largest(widths)),
        "comment lines, %": Figure(
            100 * comments.total() / n_lines,
            tuple(path for path, _ in _sorted(lengths) if not comments[path]),
        ),
        "annotations with Any, %": Figure(100 * len(anys) / len(annotations), _by_module(anys)),
    }


def prose_figures(texts: Iterable[Text], of: str) -> dict[str, Figure]:
    """Count the words of `texts`, and each of the eight faults per 10,000 words."""
    texts = list(texts)
    n_words = max(sum(len(text.text.split()) for text in texts), 1)
    figures = {}
    for fault, pattern in FAULTS.items():
        found = [
            f"{text.path}:{text.line + text.text.count(chr(10), 0, match.start())} "
            f"{' '.join(text.text[max(match.start() - 30, 0) : match.end() + 30].split())!r}"
            for text in texts
            for match in re.finditer(pattern, text.text, re.MULTILINE)
        ]
        figures[f"{of}: “{fault}” per 10,000 words"] = Figure(
            1e4 * len(found) / n_words, tuple(found)
        )
    pages = Counter[str]()
    for text in texts:
        pages[text.path] += len(text.text.split())
    return {f"{of}: words": Figure(n_words, _largest(pages)), **figures}


def pages(project: Path) -> list[Text]:
    """Return the README and the pages of docs, without decisions; code blocks become blank."""
    paths = [project / "README.md", *sorted((project / "docs").rglob("*.md"))]
    return [
        Text(str(path.relative_to(project)), 1, _without_code(path.read_text("utf-8")))
        for path in paths
        if "decisions" not in path.parts
    ]


def long_lines(texts: Iterable[Text], limit: int = 100) -> Figure:
    """Count the lines of pages over `limit` columns; rows of tables, which cannot be wrapped, are
    left out."""
    long = Counter(
        {
            f"{text.path}:{text.line + n}": len(line)
            for text in texts
            for n, line in enumerate(text.text.splitlines())
            if len(line) > limit and not line.lstrip().startswith("|")
        }
    )
    return Figure(len(long), _by_module(long))


def messages(src: Path) -> Iterator[Text]:
    """Find the texts that users of the commands read.

    These are the docstrings of commands and all other strings of two or more words in `cli`, and
    the strings inside `raise` statements of all modules. A value in an f-string counts as a word.
    """
    for path in sorted(src.rglob("*.py")):
        tree = ast.parse(path.read_text("utf-8"))
        if path.relative_to(src).parts[0] == "cli":
            found = [*_strings(tree, _internal_docstrings(tree))]
        else:
            found = [s for n in ast.walk(tree) if isinstance(n, ast.Raise) for s in _strings(n)]
        for line, text in found:
            if len(text.split()) > 1:
                yield Text(_shown(path, src), line, text)


def _strings(node: ast.AST, skipped: frozenset[ast.AST] = frozenset()) -> Iterator[tuple[int, str]]:
    if node in skipped:
        return
    if isinstance(node, ast.JoinedStr):
        parts = [p.value if isinstance(p, ast.Constant) else " … " for p in node.values]
        yield node.lineno, "".join(map(str, parts))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.lineno, node.value
    for child in ast.iter_child_nodes(node) if not isinstance(node, ast.JoinedStr) else ():
        yield from _strings(child, skipped)


def _internal_docstrings(tree: ast.AST) -> frozenset[ast.AST]:
    """Return the strings that stand alone, except the docstrings of commands."""
    found, helps = set[ast.AST](), set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found.add(node.value)
        elif isinstance(node, ast.FunctionDef) and isinstance(node.body[0], ast.Expr):
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if re.search(r"\.(command|group)\b", decorators):
                helps.add(node.body[0].value)
    return frozenset(found - helps)


def run_figures(src: Path) -> dict[str, Figure]:
    """Count our modules and lines that the constructor, saves and a resume run, in a new process.

    Lines of functions count, in every thread; lines that run at import do not.
    """
    command = [sys.executable, "-W", "ignore", __file__, str(src.parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    figures = {}
    for name, lines in json.loads(done.stdout).items():
        modules = Counter(_shown(Path(path), src) for path, _ in lines)
        figures[f"{name}: modules run"] = Figure(len(modules), tuple(sorted(modules)))
        figures[f"{name}: lines run"] = Figure(len(lines), _largest(modules))
    return figures


def _run_traced(src: str) -> dict[str, list[tuple[str, int]]]:
    import torch

    import holdfast

    manager_class = holdfast.CheckpointManager
    assert holdfast.__file__.startswith(src), f"{holdfast.__file__} is not in {src}"
    prefix = str(Path(holdfast.__file__).parent)
    lines: set[tuple[str, int]] = set()

    def trace_line(frame: FrameType, event: str, _: object) -> Any:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return trace_line

    def trace_call(frame: FrameType, _event: str, _: object) -> Any:
        code = frame.f_code
        is_ours = code.co_filename.startswith(prefix) and code.co_flags & inspect.CO_OPTIMIZED
        return trace_line if is_ours else None

    def run(function: Callable[[], object]) -> list[tuple[str, int]]:
        lines.clear()
        sys.settrace(trace_call)
        try:
            function()
        finally:
            sys.settrace(None)
        return sorted(lines)

    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def train() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()

    def save(step: int) -> None:
        manager.save(step)
        manager.wait()

    def resume() -> None:
        manager.resume()
        manager.wait()  # for garbage collection in a thread

    train()
    threading.settrace(trace_call)
    with tempfile.TemporaryDirectory() as root:
        state = {"model": model, "optimizer": optimizer}
        ran = {"CheckpointManager(…)": run(lambda: manager_class(root, state).close)}
        manager = manager_class(root, state)
        ran["first save"] = run(lambda: save(1))
        train()
        save(2)
        train()
        ran["later save"] = run(lambda: save(3))
        manager.close()
        manager = manager_class(root, state)
        ran["resume"] = run(resume)
        manager.close()
    return ran


def _shown(path: Path, src: Path) -> str:
    return path.relative_to(src.parent.parent).as_posix()


def _is_core(path: Path, src: Path) -> bool:
    parts = path.relative_to(src).parts
    return parts[0] not in BOOKS


def _without_code(text: str) -> str:
    return re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)


def _width(args: ast.arguments) -> int:
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def _comments(text: str) -> int:
    return sum(line.lstrip().startswith("#") for line in text.splitlines())


def _by_folder(paths: Iterable[Path], src: Path) -> Counter[str]:
    return Counter(_shown(path.parent, src) + "/" for path in paths)


def _by_module(places: Iterable[str]) -> tuple[str, ...]:
    """Return the first place in each file, the files with most places first."""
    found: dict[str, list[str]] = defaultdict(list)
    for place in places:
        found[place.split(":")[0]].append(place)
    most = sorted(found.values(), key=len, reverse=True)
    return tuple(f"{of_file[0]} ({len(of_file)} in the file)" for of_file in most)


def _with_place(counts: Counter[str], named: list[tuple[str, str]]) -> tuple[str, ...]:
    places = dict(reversed(named))
    return tuple(f"{name} ({n}; first {places[name]})" for name, n in counts.most_common(_WORST))


def _largest(sizes: dict[str, int]) -> tuple[str, ...]:
    return tuple(f"{name} ({size:,})" for name, size in _sorted(sizes)[:_WORST])


def _sorted(sizes: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(sizes.items(), key=lambda item: -item[1])


if __name__ == "__main__":
    print(json.dumps(_run_traced(sys.argv[1])))
