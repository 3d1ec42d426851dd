"""vLLM logs: graph metrics tables, throughput lines, speculation metrics, capture and downgrade messages."""

import re
from dataclasses import dataclass, field

from workbench.diagnose.reading import Reading, Replay, State, mean

KIND = "vllm_log"
ROW = re.compile(r"\|\s*(\d+)\s*\|\s*(\d+)\s*\|\s*(\d+)\s*\|\s*(NONE|PIECEWISE|FULL)\s*\|\s*(\d+)\s*\|")
STATS = re.compile(
    r"Avg prompt throughput: [\d.]+ tokens/s, Avg generation throughput: (?P<tok_s>[\d.]+) tokens/s,"
)
STATS_ENDED = re.compile(r"(?:hit rate: [\d.]+%|KV cache usage: [\d.]+%\.?)[,.]?\s*$")
MODE = re.compile(r"- Mode: (?:CUDAGraphMode\.)?([A-Z_]{3,30})")
SIZES = re.compile(r"Capture sizes: \[([\d, ]*)\]")
CONFIG = re.compile(r"['\"]?cudagraph_mode['\"]?[:=] ?(?:<CUDAGraphMode\.)?([A-Z_]{4,30})")
SPEC = re.compile(
    r"SpecDecoding metrics:(?: Mean acceptance length: (?P<len>[\d.]+),)?.*?"
    r"Accepted: (?P<a>\d+) tokens, Drafted: (?P<d>\d+) tokens"
    r"(?:, Per-position acceptance rate: (?P<pos>[\d., ]+?))?"
    r"(?:, Avg Draft acceptance rate: (?P<rate>[\d.]+)%)?\s*$"
)
SPEC_V0 = re.compile(
    r"Speculative metrics: .*?Number of speculative tokens: (?P<k>\d+), "
    r"Number of accepted tokens: (?P<a>\d+), "
    r"Number of draft (?:tokens )?tokens: (?P<d>\d+), Number of emitted (?:tokens )?tokens: (?P<e>\d+)"
)
DOWNGRADE = re.compile(
    r"(?P<asked>CUDAGraphMode\.\w+) is not supported with (?:spec-decode for attention backend )?"
    r"(?P<backend>\w+)(?: backend)? "
    r"\(support: AttentionCGSupport\.(?P<support>\w+)\);\s+setting cudagraph_mode=(?P<mode>\w+)"
)
CAPTURING = re.compile(r"Capturing CUDA graphs?(?: shapes)?[^:]*:\s+(\d+)%")
CAPTURED = re.compile(r"Graph capturing finished in")
SKIPPED = re.compile(r"Skipping CUDA graph capture")
EAGER_SET = re.compile(
    r"enforce_eager=True|CUDA ?graph is disabled|cudagraph_mode=(?:CUDAGraphMode\.)?NONE",
    re.I,
)
FAILED = re.compile(
    r"(?i)(?:cuda ?graph captur\w+ failed|failed to capture cuda ?graph|error during graph capture)"
)
STARTUP = re.compile(
    r"torch\.compile takes|GPU KV cache size:|Maximum concurrency for|init engine \(|# GPU blocks:"
)
OWN = re.compile(r"CUDAGraph (?:Config Settings|Stats)|\(APIServer pid=|\(EngineCore|vllm", re.I)
ITERATION = re.compile(r"Iteration\(\d+\): \d+ context requests")
TABLE_HEAD = re.compile(r"\|\s*Unpadded Tok")
LAST_ROW = re.compile(r"\|\s*$")


WORDS = (  # in lower case: at least one is in every line that a pattern here can match, tables apart
    "avg prompt throughput", "mode: ", "capture sizes", "cudagraph", "cuda graph captur",
    "cuda graph is", "capturing cuda", "specdecoding metrics",
    "speculative metrics", "graph captur", "failed to capture", "enforce_eager", "torch.compile takes",
    "kv cache size", "maximum concurrency for", "init engine (", "# gpu blocks:", "iteration(",
    "unpadded tok",
)  # fmt: skip


def may_matter(low: str) -> bool:
    """Whether a line, in lower case, can hold anything that is read here; cheap, and never wrongly False."""
    return any(word in low for word in WORDS) or low.count("|") > 5


@dataclass
class Row:
    """One line of the graph metrics table."""

    unpadded: int
    padded: int
    mode: str
    count: int


@dataclass
class VllmFacts:
    """Everything the rules ask about one log."""

    stats: int = 0
    tok_s: list[float] = field(default_factory=list)
    windows: list[float] = field(default_factory=list)  # acceptance lengths of independent windows
    cumulative: list[float] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    draft_tokens: int | None = None
    rows: list[Row] = field(default_factory=list)
    table_heads: int = 0
    configured: str | None = None
    resolved: str | None = None
    downgrade: tuple[str, str] | None = None  # backend, support level
    sizes: list[int] = field(default_factory=list)
    capture_lines: int = 0
    capture_skipped: bool = False
    capture_failed: bool = False
    eager_set: bool = False
    startup_lines: int = 0
    iterations: int = 0
    truncated: int = 0

    @property
    def largest_size(self) -> int | None:
        return max(self.sizes, default=None)

    def is_prefill(self, row: Row) -> bool:
        """A row of more tokens than any decode batch can have."""
        full = max((r.unpadded for r in self.rows if r.mode == "FULL"), default=0)
        limit = self.largest_size or full
        return (
            limit > 0
            and row.unpadded > (limit if row.mode == "NONE" else max(full, 1))
            and row.mode != "FULL"
        )


def read(lines: list[str]) -> Reading | None:
    """The log's reading, or None when nothing in it is vLLM's."""
    facts, own = VllmFacts(), False
    for line in lines:
        own = own or bool(OWN.search(line))
        if may_matter(line.lower()):
            _read_line(line, facts)
    _read_end(lines, facts)
    evidence = facts.stats or facts.windows or facts.cumulative or facts.rows or facts.table_heads
    startup = (
        facts.capture_lines or facts.startup_lines or facts.downgrade or facts.configured or facts.iterations
    )
    if not evidence and not startup and not (own and facts.eager_set):
        return None
    return _summarise(facts)


def _read_line(line: str, facts: VllmFacts) -> None:
    row = ROW.search(line)
    if row and max(map(len, row.groups())) < 16:
        facts.rows.append(Row(int(row[1]), int(row[2]), row[4], int(row[5])))
    facts.table_heads += bool(TABLE_HEAD.search(line))
    stats = STATS.search(line)
    if stats:
        facts.stats += 1
        facts.tok_s.append(_number(stats["tok_s"]))
        facts.truncated += not STATS_ENDED.search(line)
    _read_speculation(line, facts)
    _read_modes(line, facts)
    facts.capture_lines += bool(CAPTURING.search(line)) + bool(CAPTURED.search(line))
    facts.capture_skipped = facts.capture_skipped or bool(SKIPPED.search(line))
    facts.capture_failed = facts.capture_failed or bool(FAILED.search(line))
    facts.startup_lines += bool(STARTUP.search(line))
    facts.iterations += bool(ITERATION.search(line))


def _read_speculation(line: str, facts: VllmFacts) -> None:
    window = SPEC.search(line)
    if window:
        accepted, drafted = int(window["a"][:15]), int(window["d"][:15])
        facts.accepted, facts.drafted = facts.accepted + accepted, facts.drafted + drafted
        positions = len(re.findall(r"\d+\.\d+", window["pos"] or ""))
        facts.draft_tokens = positions or facts.draft_tokens
        stated = window.groupdict().get("len")
        if stated:
            facts.windows.append(_number(stated))
        elif positions and drafted:
            facts.windows.append(1 + accepted / (drafted / positions))
    total = SPEC_V0.search(line)
    if total:
        k, drafted, emitted = (int(total[name][:15]) for name in ("k", "d", "e"))
        facts.draft_tokens = k or facts.draft_tokens
        if k and drafted:
            facts.cumulative.append(emitted / (drafted / k))


def _read_modes(line: str, facts: VllmFacts) -> None:
    down = DOWNGRADE.search(line)
    if down:
        facts.configured = facts.configured or down["asked"].split(".")[1]
        facts.resolved = down["mode"]
        facts.downgrade = (down["backend"], down["support"])
        return
    mode = MODE.search(line) or CONFIG.search(line)
    if mode:
        facts.configured = facts.configured or mode[1]
    sizes = SIZES.search(line)
    if sizes:
        facts.sizes = [int(n) for n in re.findall(r"\d+", sizes[1]) if len(n) < 8]
    facts.eager_set = facts.eager_set or bool(EAGER_SET.search(line))


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if value < 1e12 else 0.0


def _read_end(lines: list[str], facts: VllmFacts) -> None:
    """A table or a metrics line that breaks off at the end of the file."""
    last = next((line for line in reversed(lines) if line.strip()), "")
    if (
        (TABLE_HEAD.search(last) and not LAST_ROW.search(last))
        or ("SpecDecoding metrics:" in last and not SPEC.search(last))
        or (re.search(r"Avg prompt throughput|Engine \d{3}:\s*\w*$", last) and not STATS.search(last))
    ):
        facts.truncated += 1


def _summarise(facts: VllmFacts) -> Reading:
    lengths = facts.windows
    accept = round(facts.cumulative[-1], 4) if facts.cumulative else mean(lengths)
    dispatch = {
        mode: sum(r.count for r in facts.rows if r.mode == mode) for mode in ("FULL", "PIECEWISE", "NONE")
    }
    busy = [value for value in facts.tok_s if value > 0]
    summary = {
        "stat_lines": facts.stats,
        "spec_lines": len(facts.windows) + len(facts.cumulative),
        "accept_len_mean": accept,
        "configured_mode": facts.configured,
        "resolved_mode": facts.resolved,
        "dispatch": dispatch if facts.rows else None,
        "none_rows_prefill_like": sum(r.mode == "NONE" and facts.is_prefill(r) for r in facts.rows),
        "captured_bs": sorted(facts.sizes),
        "truncated_lines": facts.truncated,
    }
    reading = Reading(KIND, summary, _replay(facts), facts, mean_accept_len=accept)
    reading.mean_tok_s, reading.excluded_lines = mean(busy), len(facts.tok_s) - len(busy)
    return reading


def _replay(facts: VllmFacts) -> Replay:
    decode = [row for row in facts.rows if not facts.is_prefill(row)]
    counts = {
        mode: sum(row.count for row in decode if row.mode == mode) for mode in ("FULL", "PIECEWISE", "NONE")
    }
    replayed, eager = counts["FULL"] + counts["PIECEWISE"], counts["NONE"]
    state: State = "unknown"
    if replayed or eager:
        pieces = counts["PIECEWISE"] > 0  # attention runs between the pieces
        state = "mixed" if pieces or (replayed and eager) else "all_replayed" if replayed else "all_eager"
    return Replay(state, "dispatched batches", replayed, eager)
