"""Nsight Systems SQLite exports: an allow-list of columns, the schema read first, metadata never touched."""

import sqlite3
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from workbench.diagnose.nsys_text import BEGIN_CAPTURE, LAUNCH
from workbench.diagnose.reading import Reading, Replay, State

KIND = "nsys_sqlite"
MAGIC = b"SQLite format 3\x00"
KERNELS, RUNTIME = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME"
GRAPH_TABLES = ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "CUDA_GRAPH_EVENTS", "CUDA_GRAPH_NODE_EVENTS")
PRIVATE_TABLES = (
    "META_DATA_CAPTURE",
    "META_DATA_EXPORT",
    "TARGET_INFO_SYSTEM_ENV",
    "PROCESSES",
    "ProcessStreams",
)
REPLAYED_TIME_SHARE = 0.95
REPLAYED_KERNEL_SHARE = 0.9  # graph pieces with attention launched between them stay below
PRIVACY = (
    "the export carries environment variables and command lines of the profiled machine, "
    "which may hold access tokens: remove its metadata tables before sharing it"
)


@dataclass
class SqliteFacts:
    """Everything the rules ask about one export."""

    kernels: int = 0
    in_graphs: int = 0
    eager: int = 0
    unmatched: int = 0
    graph_ns: int = 0
    kernel_ns: int = 0
    graph_launches: int = 0
    eager_launches: int = 0
    begin_captures: int = 0
    graph_traces: int = 0
    has_node_column: bool = False
    private_tables: list[str] = field(default_factory=list)
    span_ns: int = 0


def read(path: Path) -> Reading:
    """Counts of launches and kernels. A damaged file gives an empty reading with a warning."""
    facts, warnings = SqliteFacts(), []
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        try:
            _read_tables(connection, facts)
        finally:
            connection.close()
    except sqlite3.Error as error:
        warnings.append(f"the SQLite export could not be read to its end ({type(error).__name__})")
    if facts.private_tables:
        warnings.append(PRIVACY)
    reading = Reading(KIND, _summary(facts), _replay(facts), facts)
    reading.warnings = warnings
    return reading


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"PRAGMA table_info({table})")}


def _read_tables(connection: sqlite3.Connection, facts: SqliteFacts) -> None:
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    facts.private_tables = sorted(tables & set(PRIVATE_TABLES))
    launches: dict[tuple[int, int], str] = {}
    if {RUNTIME, "StringIds"} <= tables:
        launches = _read_launches(connection, facts)
    if KERNELS in tables:
        _read_kernels(connection, launches, facts)
    for table in GRAPH_TABLES:
        if table in tables:
            facts.graph_traces += connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def _read_launches(connection: sqlite3.Connection, facts: SqliteFacts) -> dict[tuple[int, int], str]:
    """{(process, correlation): "graph" | "eager"}; other calls are only looked at for captures."""
    columns = _columns(connection, RUNTIME)
    process = "globalTid >> 24" if "globalTid" in columns else "0"
    query = (
        f"SELECT s.value, r.correlationId, {process} FROM {RUNTIME} r JOIN StringIds s ON s.id = r.nameId"
        " WHERE s.value LIKE '%Launch%' OR s.value LIKE '%BeginCapture%'"
    )
    launches: dict[tuple[int, int], str] = {}
    counts: Counter[str] = Counter()
    for name, correlation, owner in connection.execute(query):
        launch = LAUNCH.match(str(name))
        facts.begin_captures += bool(BEGIN_CAPTURE.match(str(name)))
        if launch:
            kind = "graph" if launch["kind"] == "GraphLaunch" else "eager"
            counts[kind] += 1
            launches[owner or 0, correlation or 0] = kind
    facts.graph_launches, facts.eager_launches = counts["graph"], counts["eager"]
    return launches


def _read_kernels(
    connection: sqlite3.Connection, launches: dict[tuple[int, int], str], facts: SqliteFacts
) -> None:
    """Kernels by their graph node where the export has one, else by the launch they correlate with."""
    columns = _columns(connection, KERNELS)
    facts.has_node_column = bool({"graphNodeId", "graphId"} & columns)
    node = "coalesce(graphNodeId, 0)" if "graphNodeId" in columns else "0"
    graph = "coalesce(graphId, 0)" if "graphId" in columns else "0"
    process = "globalPid >> 24" if "globalPid" in columns else "0"
    begin = end = None
    for start, stop, correlation, node_id, graph_id, owner in connection.execute(
        f"SELECT start, end, correlationId, {node}, {graph}, {process} FROM {KERNELS}"
    ):
        kind = "graph" if node_id or graph_id else launches.get((owner or 0, correlation or 0))
        kind = kind or (launches.get((0, correlation or 0)) if owner else None)
        facts.kernels += 1
        facts.in_graphs += kind == "graph"
        facts.eager += kind == "eager"
        facts.unmatched += kind is None
        facts.kernel_ns += stop - start
        facts.graph_ns += (stop - start) if kind == "graph" else 0
        begin, end = min(begin or start, start), max(end or stop, stop)
    facts.span_ns = (end or 0) - (begin or 0)


def _summary(facts: SqliteFacts) -> dict[str, int | float | None]:
    return {
        "kernels": facts.kernels,
        "kernels_in_graphs": facts.in_graphs,
        "kernels_eager": facts.eager,
        "kernels_unmatched": facts.unmatched,
        "graph_launches": facts.graph_launches,
        "eager_launches": facts.eager_launches,
        "capture_begins": facts.begin_captures,
        "graph_time_share": round(facts.graph_ns / facts.kernel_ns, 4) if facts.kernel_ns else None,
    }


def _replay(facts: SqliteFacts) -> Replay:
    return kernel_replay(facts.in_graphs, facts.eager, facts.unmatched, facts.graph_ns, facts.kernel_ns)


def kernel_replay(
    in_graphs: int, eager: int, unmatched: int, graph_time: float, kernel_time: float
) -> Replay:
    """The state that follows from kernels: replayed when graphs own nearly all, by time and by number."""
    time_share = graph_time / kernel_time if kernel_time else 0.0
    kernel_share = in_graphs / max(in_graphs + eager, 1)
    state: State = "unknown"
    if in_graphs and (
        not eager or (time_share >= REPLAYED_TIME_SHARE and kernel_share >= REPLAYED_KERNEL_SHARE)
    ):
        state = "all_replayed"
    elif in_graphs:
        state = "mixed"
    elif eager:
        state = "all_eager"
    return Replay(state, "kernels", in_graphs, eager, unmatched)
