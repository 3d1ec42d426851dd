"""`workbench decode` streams text and says how it ran; bad input is one line that names the value."""

import pytest
from typer.testing import CliRunner

from workbench.cli import decode as command
from workbench.cli.app import app


def run(*arguments):
    return CliRunner().invoke(app, ["decode", *arguments])


def test_text_streams_and_the_summary_follows(tmp_path):
    log = tmp_path / "decode.log"
    options = (
        "--prompt-name",
        "ring_buffer",
        "--max-new-tokens",
        "12",
        "--log",
        str(log),
        "--log-interval",
        "1",
    )
    result = run(*options)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith('"""A fixed-size ring buffer')
    assert "12 tokens, accept length" in result.stderr and "replayed" in result.stderr
    assert "unattributed" in result.stderr
    assert "cpu graph: True" in log.read_text()
    plain = run(*options, "--shape", "none", "--mode", "eager")
    assert plain.stdout == result.stdout and "graph_disabled" in plain.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --prompt TEXT"),
        (("--prompt", "x", "--prompt-name", "y"), "give one of --prompt TEXT"),
        (("--prompt-name", "nope"), "unknown prompt 'nope': choose one of"),
        (("--prompt", "x", "--model", "nope"), "no model 'nope'"),
        (("--prompt", "x", "--mode", "fast"), "mode='fast': choose one of eager"),
    ],
)
def test_bad_input_is_named(arguments, message):
    result = run(*arguments)
    assert isinstance(result.exception, ValueError | OSError)
    assert message in str(result.exception) and "\n" not in str(result.exception)


def test_standard_input_is_a_prompt(monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("import os\n"))
    assert command.read_prompt("-", "") == "import os\n"
