"""The `workbench` command: loads its command modules, turns foreseeable errors into one line."""

import errno
import importlib
import os
import pkgutil
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import typer

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line. Foreseeable errors end in one line and exit code 2, Ctrl-C in 130."""
    try:
        load_commands()()
    except KeyboardInterrupt:
        print("workbench: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except (ValueError, OSError) as error:
        if os.environ.get("WORKBENCH_TRACEBACK"):
            raise
        print(f"workbench: {one_line(error)}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)


def load_commands() -> "typer.Typer":
    """The typer app with the commands of every module in this folder; a module that cannot load is named."""
    from workbench.cli.app import app

    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")]
    for name in names:
        try:
            importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:
            print(f"workbench: no commands from workbench/cli/{name}.py: {error}", file=sys.stderr)
    return app


def one_line(error: BaseException) -> str:
    """The message of `error` on one line; a full disk is named as such, refused values with their names."""
    if isinstance(error, ValueError) and hasattr(error, "errors"):
        return describe_refused(error.errors())
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return (
            f"the disk is full while writing {error.filename or 'a file'}: free some space and run it again"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
    return " ".join(str(error).split()) or type(error).__name__


def describe_refused(errors: "list[dict[str, Any]]") -> str:
    """The values that a parameter model (pydantic) refused, each with what it must be."""
    texts = []
    for one in errors:
        name = ".".join(map(str, one["loc"])) or "the values"
        told = str(one["msg"]).removeprefix("Value error, ").removeprefix("Input ")
        texts.append(f"{name}={one['input']!r} is refused: {told}")
    return "; ".join(texts)
