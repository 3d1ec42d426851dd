"""The capacity plan as tables on the terminal."""

from rich.console import Console
from rich.table import Table

from workbench.rows import Row, RowStatus


def print_plan(rows: list[Row], findings: list[str]) -> None:
    """Ledger with sources, pool per target, projected floors, then the findings."""
    console = Console()
    console.print(ledger_table(rows))
    console.print(target_table(rows))
    console.print(roofline_table(rows))
    for text in findings:
        console.print(f"- {text}", soft_wrap=True, highlight=False)


def ledger_table(rows: list[Row]) -> Table:
    table = Table("", "term", "per rank", "source", title="One rank's memory (derived)")
    for row in (row for row in rows if row.case_id.startswith("term/")):
        size = f"{row.bytes:,} B" if row.axes["kind"] == "per token" else f"{row.metrics['gib']:.2f} GiB"
        table.add_row(str(row.axes["kind"]), row.variant, size, str(row.metrics["source"]))
    return table


def target_table(rows: list[Row]) -> Table:
    table = Table(
        "target", "pool tokens", "longest context", "requests at 46k", title="The same service (derived)"
    )
    for row in (row for row in rows if row.case_id.startswith("target/")):
        if row.status is RowStatus.PASSED:
            cells = [f"{row.metrics[k]:,}" for k in ("pool_tokens", "longest_context", "requests_at_46k")]
        else:
            cells = [row.reason, "", ""]
        table.add_row(row.variant, *cells)
    return table


def roofline_table(rows: list[Row]) -> Table:
    floors = [row for row in rows if row.case_id.startswith("roofline/")]
    contexts = list(dict.fromkeys(row.axes["context"] for row in floors))
    headers = [f"{context:,}" for context in contexts]
    table = Table("target", *headers, title="Projected floor of a verify step, ms, by context (not measured)")
    for name in dict.fromkeys(row.variant for row in floors):
        own = [f"{(row.floor_us or 0) / 1e3:.2f}" for row in floors if row.variant == name]
        table.add_row(name, *own)
    return table
