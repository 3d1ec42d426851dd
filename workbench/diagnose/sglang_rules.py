"""What an SGLang log supports: findings about the lines, causes for the lines that say False."""

from collections.abc import Iterable

from workbench.diagnose.catalogue import cause
from workbench.diagnose.reading import Cause, Finding, Reading
from workbench.diagnose.sglang import DecodeLine, SglangFacts

LOG_INTERVAL = 40  # SGLang's default decode_log_interval


def findings(reading: Reading) -> Iterable[Finding | Cause]:
    """What the lines show."""
    from workbench.diagnose import rules

    facts: SglangFacts = reading.facts
    if facts.prefill_flags:
        text = "prefill lines carry a graph flag too: it says nothing about decode"
        yield Finding("prefill_lines_carry_graph_flag", "info", text, f"{facts.prefill_flags} prefill lines")
    if facts.known:
        text = (
            f"a decode line is a sample, by default one each {LOG_INTERVAL} steps: these are lines, not steps"
        )
        yield Finding("log_line_is_a_sample", "info", text, f"{len(facts.decode)} decode lines")
    if reading.excluded_lines:
        text = "a throughput after a start or an idle time spans the waiting; it is left out of the mean"
        yield Finding("first_throughput_meaningless", "info", text, f"{reading.excluded_lines} lines")
    if facts.duplicates:
        text = "lines occur more than once: the text was pasted or collected twice"
        yield Finding("duplicate_lines", "warning", text, f"{facts.duplicates} repeated lines")
    if facts.backwards:
        yield Finding(
            "time_goes_backwards", "warning", "time stamps go backwards", f"{facts.backwards} times"
        )
    if facts.engines > 1:
        text = "lines of several servers in one file: their numbers must not be mixed"
        yield Finding("two_engines_in_one_file", "warning", text, f"{facts.engines} servers or grammars")
    if facts.decode and not facts.known and not facts.counters:
        yield rules.NO_DISPATCH
    if not facts.decode and not facts.prefill_lines and not facts.counters:
        yield rules.STARTUP_ONLY
    width = draft_width(facts)
    low = reading.mean_accept_len is not None and rules.is_low(reading.mean_accept_len, width)
    if low and not speculation_is_off(facts):
        assert reading.mean_accept_len is not None
        yield rules.low_acceptance(reading.mean_accept_len, width)


def draft_width(facts: SglangFacts) -> int | None:
    """Rows of a verify pass: stated at capture or start, else fitted from length and rate, else None."""
    stated = facts.settings.get("speculative_num_draft_tokens") or facts.captured_width
    if stated and stated > 1:
        return stated
    pairs = [(x.accept_len, x.accept_rate) for x in facts.decode if x.accept_len and x.accept_rate]
    if not pairs:
        return None
    fits = []
    for width in range(
        2, 129
    ):  # the rate was length / width in 2025 and (length - 1) / (width - 1) since 2026
        old = max(abs(length / width - rate) for length, rate in pairs)
        new = max(abs((length - 1) / (width - 1) - rate) for length, rate in pairs)
        fits.append((min(old, new), width))
    error, width = min(fits)
    return width if error <= 0.02 else None


def speculation_is_off(facts: SglangFacts) -> bool:
    """Exactly 1.00 on every eager line: nothing was even offered."""
    lengths = [line.accept_len for line in facts.decode if line.accept_len is not None]
    return (
        bool(lengths)
        and all(length == 1.0 for length in lengths)
        and any(x.flag is False for x in facts.known)
    )


def causes(reading: Reading) -> Iterable[Finding | Cause]:
    """Why lines say False; a log that has none of them names no cause, a start names what will happen."""
    facts: SglangFacts = reading.facts
    eager = [line for line in facts.known if line.flag is False]
    if not facts.decode:
        yield from _startup(facts)
    if facts.capture_failed:
        yield cause("capture_failed", "stated", "the log states that a capture failed")
    if facts.disabled and (eager or not facts.known):
        yield cause("graph_disabled", "stated", "the log states that graphs are disabled")
    if not eager:
        return
    yield from _batch_ceiling(facts, eager)
    yield from _ranks(facts)
    if speculation_is_off(facts):
        requests = max((line.running or 0 for line in eager), default=0)
        why = f"every line accepts exactly 1.00 at {requests} requests: speculation may be off there"
        yield cause("speculation_off_without_graph", "possible", why)
    yield from _speculative(facts, eager)
    if facts.late_captures:
        why = f"{facts.late_captures} captures while serving: graphs were recorded again on demand"
        yield cause("hidden_mode_mismatch", "likely", why)
    only_eager = len(eager) == len(facts.known)
    if only_eager and not facts.disabled and not facts.capture_lines:
        yield cause("graph_disabled", "possible", "every line says False and no capture is in the file")


def _startup(facts: SglangFacts) -> Iterable[Cause]:
    largest, limit = max(facts.captured_bs, default=0), facts.settings.get("max_running_requests", 0)
    if largest and limit > largest:
        why = f"captured up to {largest}, {limit} requests may run: above {largest} decode is eager"
        yield cause("batch_above_captured", "possible", why)


def _batch_ceiling(facts: SglangFacts, eager: list[DecodeLine]) -> Iterable[Cause]:
    """Compare the batch of False lines with the largest captured or replayed one."""
    low = min((line.running for line in eager if line.running is not None), default=None)
    high = max((x.running for x in facts.known if x.flag and x.running is not None), default=None)
    largest = max(facts.captured_bs, default=None)
    if low is None:
        return
    if largest is not None and low <= largest:
        why = f"False at {low} requests although {largest} is captured"
        yield cause("batch_above_captured", "excluded", why)
    elif largest is not None:
        yield cause(
            "batch_above_captured", "stated", f"{low} requests run, the largest captured batch is {largest}"
        )
    elif high is not None and low > high:
        why = f"False from {low} requests up, True up to {high}: the largest captured batch lies between"
        yield cause("batch_above_captured", "likely", why)
    elif high is None and low > 1:
        yield cause("batch_above_captured", "possible", f"every line says False, with {low} requests or more")
    if facts.dp_attention or (high is None and any("DP" in line.ranks for line in eager)):
        ranks = len({line.ranks.get("DP", 0) for line in eager})
        why = f"data-parallel attention ({ranks} ranks seen): the sum over ranks may be what is compared"
        yield cause("dp_attention_token_sum", "possible", why)


def _ranks(facts: SglangFacts) -> Iterable[Cause]:
    """Ranks that show different flags at one time."""
    moments: dict[object, set[bool | None]] = {}
    for line in facts.known:
        if line.time and "DP" in line.ranks:
            moments.setdefault(line.time, set()).add(line.flag)
    split = sum(len(flags) > 1 for flags in moments.values())
    if split:
        yield cause("ranks_disagree", "likely", f"DP ranks show different flags in {split} moments")


def _speculative(facts: SglangFacts, eager: list[DecodeLine]) -> Iterable[Cause]:
    """Causes that need speculation: the width, the allow-list, the hidden mode, a flag nobody handed on."""
    accepted = [line for line in eager if line.accept_len is not None]
    if not accepted and not facts.settings.get("speculative_num_draft_tokens"):
        return
    width, wanted = facts.captured_width, facts.settings.get("speculative_num_draft_tokens")
    if width and wanted:
        same = width == wanted
        why = f"captured for {width} tokens per request, {wanted} are drafted"
        yield cause("verify_width_mismatch", "excluded" if same else "likely", why)
    elif not speculation_is_off(facts):
        why = f"speculation is on and {len(eager)} of {len(facts.known)} lines say False: widths may differ"
        yield cause("verify_width_mismatch", "possible", why)
    if len(eager) > len(facts.known) // 2:
        yield cause(
            "flag_not_propagated",
            "possible",
            "with speculation it is False, too, where nobody hands it on",
        )
        yield cause(
            "mode_not_allowed", "possible", "a speculative algorithm may be missing from the runner's list"
        )
        if not facts.late_captures:
            yield cause(
                "hidden_mode_mismatch", "possible", "speculation needs hidden states that may not be captured"
            )
