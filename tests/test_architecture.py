"""Data flows one way: each package imports only what its row of the table allows."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import trimtab

ROOT = Path(trimtab.__file__).parent
REPOSITORY = Path(__file__).parents[1]
LEAVES = {"types", "errors", "files", "plugins", "text"}
"""Modules that everybody may import, besides those named in a row."""

# Package -> what it may import, besides itself and `LEAVES`. `trainer` has a row for its own files and one for each of
# its packages. Only `cli`, `api` and `__main__` may import everything.
ALLOWED: dict[str, set[str]] = {
    "adapters": {"corrections", "objectives", "monitor"},
    "check_loss": {"corrections", "objectives", "pages", "trainer.sandbox"},
    "corrections": set(),
    "diagnosis": {"adapters", "objectives", "corrections", "pages", "runs", "intervals"},
    "monitor": {"objectives", "corrections", "intervals"},
    "objectives": {"corrections"},
    "pages": set(),
    "preflight": {
        *("diagnosis", "pages", "runs", "trainer", "trainer.config", "trainer.engines", "trainer.models"),
        *("trainer.rollout", "trainer.tasks", "trainer.chat_template"),
    },
    "report": {"diagnosis", "monitor", "pages", "runs", "objectives", "trainer.config", "intervals"},
    "runs": set(),
    "trainer": {
        *(f"trainer.{part}" for part in ("checkpoint", "config", "engines", "environments", "evaluation", "features")),
        *(f"trainer.{part}" for part in ("models", "rewards", "rollout", "seeds", "tasks")),
        *("corrections", "monitor", "objectives", "runs", "intervals"),
    },
    "trainer.checkpoint": {"trainer", "trainer.config", "trainer.models", "trainer.rollout", "runs"},
    "trainer.cluster": {"trainer", "trainer.config", "trainer.engines", "trainer.models", "runs"},
    "trainer.config": {"runs"},
    "trainer.engines": {"trainer.config", "trainer.models", "trainer.seeds", "trainer.processes"},
    "trainer.environments": {f"trainer.{part}" for part in ("chat_template", "config", "registry", "sandbox", "seeds")},
    "trainer.evaluation": {
        *(f"trainer.{part}" for part in ("config", "engines", "environments", "models", "rewards", "tasks")),
        "intervals",
    },
    "trainer.features": {
        *(f"trainer.{part}" for part in ("checkpoint", "config", "models", "rollout", "seeds")),
        *("trainer", "objectives", "corrections"),
    },
    "trainer.lab": {"trainer", "trainer.config", "trainer.processes", "objectives", "runs"},
    "trainer.models": set(),
    "trainer.rewards": {"trainer.registry", "trainer.sandbox", "trainer.tasks"},
    "trainer.rollout": {
        *(f"trainer.{part}" for part in ("config", "engines", "environments", "rewards", "tasks", "seeds")),
        "runs",
    },
    "trainer.sandbox": {"trainer.processes"},
    "trainer.tasks": {"trainer.chat_template", "trainer.registry"},
}
INNER = {package.removeprefix("trainer.") for package in ALLOWED if package.startswith("trainer.")}
MODULES = {"seeds", "processes", "chat_template", "registry"}
"""Modules of `trainer` that import nothing else of it."""
LIMITS = {"src": 53_940, "tests": 53_910, "benchmarks": 11_380}
"""Lines of all Python files of a folder. A change that adds lines removes as many elsewhere."""
WORDS = 57_960
"""Words of README, CONTRIBUTING and the pages of docs."""
CORE = [ROOT / f"{name}.py" for name in ("__init__", "__main__", "errors", "files", "plugins", "text", "types")] + [
    path
    for package in ("adapters", "corrections", "monitor", "objectives")
    for path in sorted((ROOT / package).rglob("*.py"))
]
SINCE_311 = {
    *("StrEnum", "UTC", "Self", "Never", "LiteralString", "NotRequired", "Required", "Unpack", "batched"),
    *("TypeVarTuple", "assert_never", "assert_type", "override", "chdir", "ExceptionGroup", "BaseExceptionGroup"),
}
HEAVY = {"torch", "transformers", "datasets", "matplotlib", "pyarrow", "numpy"}


@functools.cache
def parsed(path: Path) -> list[ast.AST]:
    """The module and all nodes below it."""
    return list(ast.walk(ast.parse(path.read_text())))


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Dotted names a file imports, `if TYPE_CHECKING` blocks included: a type is a dependency as well."""
    nodes = parsed(path)
    if top_level_only:
        nodes = list(ast.iter_child_nodes(nodes[0]))
    result: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            result |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write absolute imports"
            module = node.module or ""
            result |= (
                {f"{module}.{alias.name}" for alias in node.names}
                if module in ("trimtab", "trimtab.trainer")
                else {module}
            )
    return result


def package_files(package: str) -> list[Path]:
    """The files of a package, for `trainer` those directly in it."""
    files = sorted((ROOT / package.replace(".", "/")).rglob("*.py"))
    return [path for path in files if package_of(path.relative_to(ROOT).with_suffix("").parts) == package]


def package_of(parts: tuple[str, ...]) -> str:
    """The row of a module, given by its path in the package."""
    inner = parts[0] == "trainer" and len(parts) > 1 and parts[1] in INNER | MODULES
    return ".".join(parts[: 1 + inner])


def imported_packages(path: Path) -> set[str]:
    names = (name.split(".")[1:] for name in imports(path) if name.startswith("trimtab."))
    return {package_of(tuple(name)) for name in names}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_what_its_row_allows(package: str) -> None:
    files = package_files(package)
    assert files
    for path in files:
        forbidden = imported_packages(path) - ALLOWED[package] - LEAVES - {package}
        assert not forbidden, f"{path.relative_to(ROOT)} imports {sorted(forbidden)}"
    unused = ALLOWED[package].difference(*map(imported_packages, files))
    assert not unused, f"{package} may import {sorted(unused)}, and does not"


def test_every_package_is_listed() -> None:
    outer, inner = ({path.parent.name for path in place.glob("*/__init__.py")} for place in (ROOT, ROOT / "trainer"))
    assert outer == {package for package in ALLOWED if "." not in package} | {"cli"}
    assert inner == INNER


def test_no_file_name_is_used_twice() -> None:
    names = Counter(path.name for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_corrections_import_torch_and_jaxtyping_only() -> None:
    import sys

    for path in package_files("corrections"):
        outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"trimtab"}
        assert outside <= {"torch", "jaxtyping"}, path


def test_corrections_change_no_tensor_in_place() -> None:
    """They are read as formulas."""
    for path in package_files("corrections"):
        calls = [node for node in parsed(path) if isinstance(node, ast.Call)]
        names = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)}
        assert not [name for name in names if name.endswith("_")], path
        assert not any(keyword.arg == "out" for call in calls for keyword in call.keywords), path


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_core_is_written_for_python_3_10(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    # torch brings typing_extensions, which has the newer names on every Python.
    origins = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)]
    extended = {
        name.name for node in origins if getattr(node, "module", None) == "typing_extensions" for name in node.names
    }
    names = {name.name for node in origins for name in node.names}
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not (names - extended) & SINCE_311
    # Inside a function that says which Python it needs, tomllib may be imported.
    assert "tomllib" not in imports(path, top_level_only=True)


def test_command_line_and_recipes_start_without_heavy_imports() -> None:
    light = [path for package in ("cli", "trainer.config") for path in package_files(package)]
    for path in [*light, ROOT / "errors.py", ROOT / "__init__.py"]:
        heavy = {name.split(".")[0] for name in imports(path, top_level_only=True)} & HEAVY
        assert not heavy, f"{path.relative_to(ROOT)} imports {sorted(heavy)} at the top"


@pytest.mark.parametrize("folder", sorted(LIMITS))
def test_lines_stay_within_their_limit(folder: str) -> None:
    lines = sum(len(path.read_text().splitlines()) for path in (REPOSITORY / folder).rglob("*.py"))
    assert lines <= LIMITS[folder], f"{lines} lines of {LIMITS[folder]}: remove as many as you add"


def test_words_of_documents_stay_within_their_limit() -> None:
    docs = REPOSITORY / "docs"
    pages = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *docs.glob("*.md"), *docs.glob("results/*.md")]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    assert words <= WORDS, f"{words} words of {WORDS}: remove as many as you add"


def test_no_file_and_no_function_outgrows_its_limit() -> None:
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 600, f"{path.relative_to(ROOT)} has more than 600 lines"
        for node in parsed(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                assert length <= 65, f"{path.relative_to(ROOT)}: {node.name} has {length} lines"


def test_text_is_printed_in_one_place() -> None:
    """Where control characters are escaped; rich would also interpret markup in what others wrote."""
    printing = {"print", "typer.echo", "click.echo", "Console", "sys.stdout.write", "sys.stderr.write"}
    # Before typer is known to be installed, and inside verl: without text of others.
    exempt = {"__main__.py", "adapters/verl.py", "adapters/verl_driver.py", "cli/output.py"}
    for path in sorted(ROOT.rglob("*.py")):
        if str(path.relative_to(ROOT)) not in exempt:
            calls = {ast.unparse(node.func) for node in parsed(path) if isinstance(node, ast.Call)}
            assert not calls & printing, f"{path.relative_to(ROOT)}: print with trimtab.cli.output.echo"


def test_text_files_name_their_encoding() -> None:
    """Otherwise it is that of the machine's locale, which may not have what another machine wrote."""
    for path in sorted(ROOT.rglob("*.py")):
        for call in (node for node in parsed(path) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
            if name in ("read_text", "write_text") and ast.unparse(call.func) != "atomic.write_text":
                named = [keyword.arg for keyword in call.keywords]
                assert "encoding" in named or (name == "read_text" and call.args), f"{path}, line {call.lineno}"


def names_in(node: ast.AST) -> set[str]:
    """Every name in the code below a node: variables, attributes, parameters, functions, keywords."""
    named = (getattr(part, key, None) for part in ast.walk(node) for key in ("id", "attr", "arg", "name"))
    return {name for name in named if isinstance(name, str)}


def described_names(docstring: str, *, of_class: bool) -> set[str]:
    """What a docstring explains: `rms` in "rms: in logits.", and of a class also in "`rms` is in logits."."""
    text, name = " ".join(docstring.split()), r"[a-z_][a-z_0-9]*"
    lists = re.findall(rf"(?:^|[.:] )({name}(?:, {name})*(?: and {name})?): ", text)
    subjects = re.findall(rf"(?:^|[.;:,] |and )`({name})`(?: is| are| says|:)", text) if of_class else []
    return {word for words in lists for word in re.split(", | and ", words)} | set(subjects)


def undefined_descriptions(files: list[Path]) -> Iterator[str]:
    """Names explained in the docstring of a class or function that neither it nor a base has, by their place."""
    classes = {node.name: node for path in files for node in parsed(path) if isinstance(node, ast.ClassDef)}

    def available(node: ast.AST) -> set[str]:
        bases = {name for base in node.bases for name in names_in(base)} if isinstance(node, ast.ClassDef) else set()
        own = [classes[name] for name in bases & set(classes) if classes[name] is not node]
        return names_in(node).union(*(available(base) for base in own))

    for path in files:
        constants = (node.value for node in parsed(path) if isinstance(node, ast.Constant))
        values = {value for value in constants if isinstance(value, str)}
        for node in parsed(path):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                described = described_names(ast.get_docstring(node) or "", of_class=isinstance(node, ast.ClassDef))
                for name in described - available(node) - values:
                    yield f"{path.name}: {node.name} describes {name!r}"


def test_docstrings_explain_names_that_exist(tmp_path: Path) -> None:
    assert list(undefined_descriptions(sorted(ROOT.rglob("*.py")))) == []
    planted = tmp_path / "planted.py"
    planted.write_text(
        'class Base:\n    size: int\nclass Noise(Base):\n    """The noise.\n\n    rms: in logits. size: of it. '
        'bound:\n    whether it is one. `asked` is the number.\n    """\n    rms: float\n'
    )
    assert sorted(undefined_descriptions([planted])) == [
        "planted.py: Noise describes 'asked'",
        "planted.py: Noise describes 'bound'",
    ]
