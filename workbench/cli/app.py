"""The command line's root: every command module registers on these two apps."""

import typer

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", pretty_exceptions_enable=False)
bench = typer.Typer(no_args_is_help=True, help="Time one part of the path, correctness first.")
app.add_typer(bench, name="bench")
