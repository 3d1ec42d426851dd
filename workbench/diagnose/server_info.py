"""SGLang's /get_server_info: settings by an allow-list; they configure, they do not dispatch."""

from dataclasses import dataclass, field
from typing import Any

from workbench.diagnose.reading import Reading, Replay

KIND = "sglang_server_info"


@dataclass
class ServerFacts:
    """The settings that bear on graphs."""

    graphs_disabled: bool = False
    role: str = "null"  # null, prefill or decode
    captured_bs: list[int] = field(default_factory=list)
    max_running: int = 0
    draft_tokens: int | None = None


def read(document: dict[str, Any]) -> Reading:
    """The reading of the parsed answer; keys outside of the allow-list are not looked at."""
    sizes = document.get("cuda_graph_bs")
    role = document.get("disaggregation_mode")
    facts = ServerFacts(
        graphs_disabled=document["disable_cuda_graph"] is True,
        role=role if role in ("prefill", "decode") else "null",
        captured_bs=sorted(n for n in sizes if _is_count(n)) if isinstance(sizes, list) else [],
        max_running=_count(document.get("max_running_requests")) or 0,
        draft_tokens=_count(document.get("speculative_num_draft_tokens")),
    )
    summary = {
        "disable_cuda_graph": facts.graphs_disabled,
        "disaggregation_mode": facts.role,
        "captured_bs": facts.captured_bs,
        "max_running_requests": facts.max_running,
        "speculative_num_draft_tokens": facts.draft_tokens,
    }
    return Reading(KIND, summary, Replay("not_applicable" if facts.role == "prefill" else "unknown"), facts)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40


def _count(value: Any) -> int | None:
    return value if _is_count(value) else None
