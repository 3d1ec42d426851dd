"""All rows of all runs: found on disk, queried together by DuckDB in memory."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workbench.rows_file import read_rows, write_rows

if TYPE_CHECKING:
    import duckdb

__all__ = ["ROWS_FILE", "connect", "find_rows", "query_rows", "read_rows", "write_rows"]
ROWS_FILE = "rows.parquet"


def find_rows(root: Path | str) -> list[Path]:
    """Every finished rows file below `root`; folders that are still being written are left out."""
    found = sorted(Path(root).rglob(ROWS_FILE))
    return [path for path in found if not any(part.startswith(".") for part in path.relative_to(root).parts)]


def query_rows(paths: Iterable[Path | str], sql: str) -> list[dict[str, Any]]:
    """Answer `sql` over the view `rows` (all `paths` together, plus `filename`)."""
    relation = connect(paths).sql(sql)
    return [dict(zip(relation.columns, values)) for values in relation.fetchall()]


def connect(paths: Iterable[Path | str]) -> "duckdb.DuckDBPyConnection":
    """An in-memory DuckDB whose view `rows` unites the files; columns absent from a file are NULL."""
    import duckdb

    files = [str(path) for path in paths]
    if not files:
        raise FileNotFoundError("no rows file to query: run `workbench reproduce` first")
    connection = duckdb.connect(":memory:")
    try:
        connection.read_parquet(files, union_by_name=True, filename=True).create_view("rows")
    except duckdb.Error as error:
        for path in files:
            read_rows(path)  # names the damaged file, if it is one
        raise ValueError(f"cannot query {len(files)} rows files: {error}") from error
    return connection
