"""Files and functions stay readable: the limits of the code bases this project reads like."""

import ast
from pathlib import Path
from statistics import mean, quantiles

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "workbench").rglob("*.py"))
EMPTY_ALLOWED_FULL = {"workbench", "attention", "kv", "tree", "decode", "diagnose", "cli"}
LOOSE_NAMES = {"utils.py", "helpers.py", "common.py", "misc.py", "util.py", "helper.py"}


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def functions() -> list[tuple[str, int, ast.FunctionDef]]:
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                lines = node.end_lineno - node.lineno + 1
                found.append((f"{path.relative_to(ROOT)}:{node.name}", lines, node))
    return found


def is_device_code(node: ast.FunctionDef) -> bool:
    """Triton kernels, exempt from length, not from naming."""
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


def test_files_are_short() -> None:
    sizes = {path: line_count(path) for path in SOURCES}
    average = mean(sizes.values())
    print(f"{len(sizes)} files, {sum(sizes.values())} lines, mean {average:.0f}")
    assert average <= 130
    long = {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > 300}
    assert len(long) <= max(1, len(sizes) // 20), long
    assert max(sizes.values()) <= 450, long


def test_functions_are_short() -> None:
    host = [(name, lines) for name, lines, node in functions() if not is_device_code(node)]
    lengths = [lines for _, lines in host]
    ninth_decile = quantiles(lengths, n=10)[8]
    print(f"{len(lengths)} functions, median {quantiles(lengths, n=2)[0]:.0f}, p90 {ninth_decile:.0f}")
    assert ninth_decile <= 30
    assert not [(name, lines) for name, lines in host if lines > 60]


def test_arguments_are_typed() -> None:
    arguments = [
        argument
        for _, _, node in functions()
        if not is_device_code(node)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        if argument.arg not in ("self", "cls")
    ]
    typed = sum(argument.annotation is not None for argument in arguments)
    assert typed / len(arguments) > 0.9, f"{typed} of {len(arguments)}"


def test_modules_are_nouns_with_a_docstring() -> None:
    assert not [path for path in SOURCES if path.name in LOOSE_NAMES]
    bare = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.name != "__init__.py" and not ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not bare


def test_package_files_are_empty_unless_they_are_the_contract() -> None:
    filled = {path.parent.name for path in SOURCES if path.name == "__init__.py" and path.read_text().strip()}
    assert filled <= EMPTY_ALLOWED_FULL
