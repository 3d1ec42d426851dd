"""Rows as Parquet files: written atomically, read back exactly."""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from workbench.rows import Row, first_line

if TYPE_CHECKING:
    import pyarrow as pa


def write_rows(rows: Sequence[Row], path: Path | str) -> Path:
    """Write `rows` to a Parquet file: one flat column per field for queries, `row_json` for an exact read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = _columns([row.flat() for row in rows]) if rows else {"case_id": pa.array([], pa.string())}
    columns["row_json"] = pa.array([_exact_json(row) for row in rows], pa.string())
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        pq.write_table(pa.table(columns), partial, compression="zstd")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_rows(path: Path | str) -> list[Row]:
    """The rows of one file, each checked by the schema. Raises ValueError that names a damaged file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no rows file {path}: run the notebook that writes it, or give another folder"
        )
    try:
        stored = pq.read_table(path)
        samples = (
            stored["samples"].to_pylist() if "samples" in stored.column_names else [[]] * stored.num_rows
        )
        return [_row(text, values) for text, values in zip(stored["row_json"].to_pylist(), samples)]
    except (pa.ArrowException, OSError, KeyError, ValidationError, json.JSONDecodeError) as error:
        raise ValueError(
            f"rows file {path} is damaged ({first_line(error)}): run its notebook again"
        ) from error


def _columns(flat: list[dict[str, Any]]) -> dict[str, "pa.Array"]:
    """Column name -> values; a column whose values have mixed types becomes text."""
    import pyarrow as pa

    names = list(dict.fromkeys(name for row in flat for name in row))
    columns: dict[str, pa.Array] = {}
    for name in names:
        values = [row.get(name) for row in flat]
        kinds = {type(value) for value in values if value is not None}
        if name == "samples":
            columns[name] = pa.array(values, pa.list_(pa.float64()))
        elif kinds <= {int, float} or len(kinds) <= 1:
            columns[name] = pa.array(
                [float(v) if kinds == {int, float} and v is not None else v for v in values]
            )
        else:
            columns[name] = pa.array([None if value is None else str(value) for value in values], pa.string())
    return columns


def _exact_json(row: Row) -> str:
    """Strict JSON of the row without its samples, which have their own column."""
    fields = row.model_dump(mode="python")
    fields["errors"] = {
        name: value if math.isfinite(value) else str(value) for name, value in row.errors.items()
    }
    for group in ("axes", "metrics"):
        fields[group] = {name: _finite(value) for name, value in fields[group].items()}
    if fields["timing"] is not None:
        fields["timing"].pop("samples")
    return json.dumps(fields, allow_nan=False)


def _finite(value: Any) -> Any:
    """None for a number that strict JSON cannot hold."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(text: str, samples: list[float] | None) -> Row:
    fields = json.loads(text)
    if fields.get("timing") is not None:
        fields["timing"]["samples"] = samples or ()
    return Row.model_validate(fields)
