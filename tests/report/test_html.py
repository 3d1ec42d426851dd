"""A report is one offline file whose figures a browser really draws."""

import json
import math
import re
import subprocess
from pathlib import Path
from unittest.mock import patch

import nbformat
import pytest
from bs4 import BeautifulSoup

from workbench.report import html, notebook
from workbench.report.bundle import plotly_script
from workbench.report.figures import theme
from workbench.rows import Row, RunStatus
from workbench.runs.manifest import RunManifest

LOADING = ("src", "srcset", "data", "poster", "href", "xlink:href")
REMOTE = re.compile(r"^\s*(?:https?:)?//", re.I)


def remote_references(text: str) -> list[str]:
    """Every attribute or style of the page that names another host."""
    soup = BeautifulSoup(text, "html.parser")
    found = [str(tag[name]) for tag in soup.find_all(True) for name in LOADING if tag.has_attr(name)]
    styles = " ".join(style.text for style in soup.find_all("style"))
    imports = re.findall(r"@import[^;]*|url\(\s*[\"']?https?:", styles)
    return [one for one in found if REMOTE.match(one)] + imports


def figure_output(number: int, points: int = 50) -> dict:
    """What notebook.show publishes for one figure, through IPython's real display."""
    figure = theme.new_figure(f"Variant {number} is the fastest of all", "budget (nodes)", "latency (µs)")
    values = [math.sin(number + i / 5) + 2 for i in range(points)]
    values[3] = math.nan
    figure.add_scatter(x=list(range(points)), y=values, name="</script><b>odd name</b>")
    figure.add_bar(x=list(range(points)), y=tuple(values), name="bars")
    with patch("IPython.display.display") as display:
        notebook.show(figure)
    return display.call_args.args[0]


def write_run(
    folder: Path, figures: int, status: RunStatus = RunStatus.PASSED, reason: str = "", stderr: str = ""
) -> RunManifest:
    """A run folder as the runner leaves it, with `figures` figures."""
    content = nbformat.v4.new_notebook()
    content.cells = [
        nbformat.v4.new_markdown_cell("# Does it draw?"),
        nbformat.v4.new_code_cell("secret_code = 1"),
    ]
    log = nbformat.v4.new_output("stream", name="stdout", text="step: one\n")
    outputs = [log, *([nbformat.v4.new_output("stream", name="stderr", text=stderr)] if stderr else [])]
    content.cells.append(nbformat.v4.new_code_cell("run()", outputs=outputs))
    for number in range(figures):
        output = nbformat.v4.new_output("display_data", data=figure_output(number))
        content.cells.append(nbformat.v4.new_code_cell(f"show({number})", outputs=[output]))
    folder.mkdir(parents=True, exist_ok=True)
    nbformat.write(content, folder / "10_draws.ipynb")
    return RunManifest(
        run_id="cpu/b/10_draws",
        batch_id="cpu/b",
        notebook="10_draws.ipynb",
        experiment="draws",
        target="cpu",
        status=status,
        reason=reason,
        started_utc="2026-01-01T00:00:00Z",
        parameters={"label": "<img src=//evil.example/x>", "budget": 16},
        given=["budget"],
        code={"sha": "0123456789abcdef", "dirty": True},
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    return html.render_report(folder, write_run(folder, figures=12))


def test_offline_small_and_with_one_library(report: Path) -> None:
    text = report.read_text()
    assert text.count("plotly.js (cartesian - minified) v") == 1 and text.count(plotly_script()) == 1
    assert remote_references(text) == []
    assert len(text.encode()) < 3_000_000
    assert text.count("plotly-graph-div") == 12


def test_top_states_status_commit_and_parameters(report: Path) -> None:
    head = report.read_text().split("</header>")[0]
    assert "<strong>PASSED</strong>" in head and "0123456789ab with uncommitted changes" in head
    assert "<td>budget</td><td>16</td><td>given</td>" in head
    assert "<td>label</td>" in head and "<img src=//evil" not in head


def test_code_and_log_are_hidden_behind_a_toggle(report: Path) -> None:
    text = report.read_text()
    button = BeautifulSoup(text, "html.parser").find(id="toggle-code")
    assert '<body class="hide-code">' in text and button is not None and button["aria-pressed"] == "false"
    assert "secret_code" in text and re.search(r'<div class="log">.*?step: one', text, re.S)


def test_messages_stand_at_the_end_and_are_announced_at_the_top(tmp_path: Path) -> None:
    noise = "\x1b[33mUserWarning: <slow>\x1b[0m\nprofiler_start\n"
    text = html.render_report(tmp_path, write_run(tmp_path, figures=1, stderr=noise)).read_text()
    assert '<a href="#messages">2 lines of messages</a>' in text.split("</header>")[0]
    assert text.count("UserWarning: &lt;slow&gt;\nprofiler_start") == 1
    assert text.index("UserWarning") > text.index("plotly-graph-div"), "nothing above the findings"
    block = BeautifulSoup(text, "html.parser").find("details", id="messages")
    assert block is not None and not block.has_attr("open") and "\x1b" not in block.text
    failed = write_run(tmp_path, figures=0, status=RunStatus.FAILED, reason="x", stderr=noise)
    block = BeautifulSoup(html.render_report(tmp_path, failed).read_text(), "html.parser").find(id="messages")
    assert block is not None and block.has_attr("open"), "a failure is explained at once"
    quiet = html.render_report(tmp_path, write_run(tmp_path, figures=0)).read_text()
    assert 'id="messages"' not in quiet and "lines of messages" not in quiet


def test_every_figure_has_a_label_and_strict_json(report: Path) -> None:
    figures = BeautifulSoup(report.read_text(), "html.parser").find_all("figure", role="img")
    assert len([one for one in figures if str(one["aria-label"]).startswith("Variant")]) == 12
    data = figure_output(0)["application/vnd.plotly.v1+json"]
    json.dumps(data, allow_nan=False)
    assert data["data"][0]["y"][3] is None, "a NaN is a gap"


def test_report_without_figures_carries_no_library(tmp_path: Path) -> None:
    path = html.render_report(tmp_path, write_run(tmp_path, figures=0))
    assert path.stat().st_size < 60_000


@pytest.mark.parametrize("status", [s for s in RunStatus if s not in (RunStatus.PASSED, RunStatus.RUNNING)])
def test_unfinished_and_failed_runs_say_so_first(tmp_path: Path, status: RunStatus) -> None:
    manifest = write_run(tmp_path, figures=0, status=status, reason="cell 3 raised ZeroDivisionError")
    text = html.render_report(tmp_path, manifest).read_text()
    banner = text[text.index("<main>") : text.index("Does it draw?")]
    assert f"<strong>{status.value}</strong> — cell 3 raised ZeroDivisionError" in banner
    assert "not-passed" in banner


def test_outside_files_and_large_reports_are_refused() -> None:
    with pytest.raises(ValueError, match="loads an outside file"):
        html.require_offline('<script type="x" src="https://cdn.example/x.js">', "10_x")
    with pytest.raises(ValueError, match="3,000,001 bytes, more than 3,000,000: show fewer points"):
        html.require_offline("x" * 3_000_001, "10_x")
    html.require_offline('<a href="https://example.org/paper">', "10_x")  # a link loads nothing


def test_damaged_notebook_is_named(tmp_path: Path) -> None:
    manifest = write_run(tmp_path, figures=0)
    (tmp_path / manifest.notebook).write_text("{")
    with pytest.raises(ValueError, match=r"10_draws\.ipynb is not a notebook"):
        html.render_report(tmp_path, manifest)
    (tmp_path / manifest.notebook).unlink()
    with pytest.raises(FileNotFoundError, match=r"no notebook .*10_draws\.ipynb"):
        html.render_report(tmp_path, manifest)


def test_table_marks_what_was_not_measured() -> None:
    fields = {"case_id": "<c>", "experiment": "e", "variant": "v", "target": "cpu", "status": "PASSED"}
    rows = [Row.model_validate({**fields, "origin": origin}) for origin in ("measured", "projected")]
    with patch("IPython.display.display") as display:
        notebook.show_table(rows, ["case_id", "floor_us"])
    text = display.call_args.args[0]["text/html"]
    assert '<tr class="projected PASSED"><td>projected</td><td>&lt;c&gt;</td><td></td></tr>' in text


@pytest.mark.browser
def test_browser_draws_every_figure_offline(report: Path, chromium: str, tmp_path: Path) -> None:
    drawn, complaints = browse(chromium, report, tmp_path)
    assert not complaints
    assert len(re.findall(r'<svg class="main-svg"[^>]*style="background', drawn)) == 12


@pytest.mark.browser
def test_browser_check_notices_a_missing_library(report: Path, chromium: str, tmp_path: Path) -> None:
    page = tmp_path / "broken.html"
    page.write_text(report.read_text().replace(plotly_script(), "") + '<img src="https://example.org/x.png">')
    drawn, complaints = browse(chromium, page, tmp_path)
    assert complaints and "main-svg" not in drawn


def browse(chromium: str, page: Path, folder: Path) -> tuple[str, list[str]]:
    """The page after its scripts ran without any network, and what the browser complained about."""
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
    ]
    flags += [
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder}",
        "--virtual-time-budget=20000",
    ]
    command = [chromium, *flags, "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line or "ERR_" in line]
