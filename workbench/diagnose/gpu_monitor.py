"""nvidia-smi and dmon: columns come from the header, a table flattened into one line is refused."""

import re
from dataclasses import dataclass, field

from workbench.diagnose.reading import Reading, mean

KIND = "gpu_monitor"
DMON_HEAD = re.compile(r"^\s*#\s*gpu\b(?P<names>(?:\s+[a-z]\w*){2,})\s*$", re.I)
DMON_ROW = re.compile(r"^\s*#?\s*\d+(?:\s+(?:-|\d+(?:\.\d+)?))+\s*$")
SMI_MARK = re.compile(r"NVIDIA-SMI|GPU-Util")
SMI_GPU = re.compile(r"^\|\s*(\d+)\s+\S")
SMI_USE = re.compile(r"(?P<used>\d+)MiB\s*/\s*(?P<total>\d+)MiB\s*\|\s*(?P<util>\d+)%")


@dataclass
class MonitorFacts:
    """Samples of utilisation in percent and the GPUs they belong to."""

    gpus: set[int] = field(default_factory=set)
    sm: list[float] = field(default_factory=list)
    mem: list[float] = field(default_factory=list)
    used_mib: list[int] = field(default_factory=list)
    samples: int = 0
    truncated: int = 0


def read(lines: list[str]) -> Reading | None:
    """The monitor's reading, or None when the text is neither of the two tables."""
    return _read_dmon(lines) or _read_smi(lines) or _read_query(lines)


def _read_dmon(lines: list[str]) -> Reading | None:
    facts, names = MonitorFacts(), []
    for line in lines:
        head = DMON_HEAD.match(line)
        if head:
            names = ["gpu", *head["names"].lower().split()]
            continue
        if not names or not DMON_ROW.match(line):
            continue
        cells = line.strip().lstrip("#").split()
        if len(cells) != len(names):
            facts.truncated += len(cells) < len(names)
            continue
        _note_sample(dict(zip(names, cells)), facts)
    if not names or "sm" not in names:
        return None
    return _summarise(facts)


def _note_sample(values: dict[str, str], facts: MonitorFacts) -> None:
    if not values["gpu"].isdigit() or len(values["gpu"]) > 4:
        return
    facts.samples += 1
    facts.gpus.add(int(values["gpu"]))
    for name, series in (("sm", facts.sm), ("mem", facts.mem)):
        text = values.get(name, "-")
        if re.fullmatch(r"\d{1,5}(?:\.\d{1,3})?", text):
            series.append(float(text))


def _read_smi(lines: list[str]) -> Reading | None:
    """The boxed table: a GPU line, then a line with memory and utilisation."""
    if not any(SMI_MARK.search(line) for line in lines) or not any(
        line.lstrip().startswith("+--") for line in lines
    ):
        return None
    facts, current, in_processes = MonitorFacts(), None, False
    for line in lines:
        in_processes = in_processes or "Processes:" in line
        gpu = SMI_GPU.match(line)
        if gpu and not in_processes and len(gpu[1]) < 5:
            current = int(gpu[1])
            facts.gpus.add(current)
        use = SMI_USE.search(line)
        if use and current is not None:
            facts.samples += 1
            facts.sm.append(float(use["util"][:6]))
            facts.used_mib.append(int(use["used"][:9]))
    last = next((line for line in reversed(lines) if line.strip()), "")
    facts.truncated = int(last.startswith(("+", "|")) and not last.rstrip().endswith(("+", "|")))
    return _summarise(facts) if facts.gpus else None


def _read_query(lines: list[str]) -> Reading | None:
    """`nvidia-smi --query-gpu=... --format=csv` with a heading; rows without names are refused."""
    facts, names = MonitorFacts(), []
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if "utilization.gpu [%]" in cells:
            names = cells
        elif names and len(cells) == len(names):
            values = dict(zip(names, cells))
            gpu, busy = values.get("index", "0"), values["utilization.gpu [%]"].removesuffix("%").strip()
            memory = values.get("utilization.memory [%]", "-").removesuffix("%").strip() or "-"
            _note_sample({"gpu": gpu, "sm": busy if busy.isdigit() else "-", "mem": memory}, facts)
    return _summarise(facts) if facts.samples else None


def _summarise(facts: MonitorFacts) -> Reading:
    summary = {
        "samples": facts.samples,
        "gpus": len(facts.gpus),
        "sm_util_mean": mean(facts.sm),
        "mem_util_mean": mean(facts.mem),
        "memory_used_mib_max": max(facts.used_mib, default=None),
        "truncated_lines": facts.truncated,
    }
    return Reading(KIND, summary, facts=facts)
