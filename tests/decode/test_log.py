"""Log lines follow SGLang's grammar exactly, and their numbers are means over the interval."""

import re

import pytest

from workbench.decode import SpeculativeDecoder
from workbench.decode.log import DecodeLog

DECODE = re.compile(
    r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] Decode batch, #running-req: (?P<running>\d+), "
    r"#token: (?P<token>\d+), token usage: (?P<usage>\d\.\d\d), "
    r"(accept len: (?P<accept>\d+\.\d\d), accept rate: (?P<rate>\d\.\d\d), )?"
    r"((?P<device>[a-z]+) graph: (?P<flag>True|False), )?gen throughput \(token/s\): (?P<tput>\d+\.\d\d), "
    r"#queue-req: (?P<queue>\d+)$"
)
PREFILL = re.compile(
    r"^\[[^]]+\] Prefill batch, #new-seq: \d+, #new-token: \d+, #cached-token: \d+, #token: \d+, "
    r"token usage: \d\.\d\d, #running-req: \d+, #queue-req: \d+, cpu graph: False$"
)
BEGIN = re.compile(
    r"^\[[^]]+\] Capture target verify CPU graph begin\. backend=tape, num_tokens_per_req=7, bs=\[1, 2\], "
    r"avail mem=\d+\.\d\d GB$"
)
END = re.compile(
    r"^\[[^]]+\] Capture target verify CPU graph end\. elapsed=\d+\.\d\d s, "
    r"mem usage=\d+\.\d\d GB, avail mem=.* GB\.$"
)


def test_the_line_is_a_mean_over_the_interval_with_the_flag_of_its_last_step():
    now = [0.0]
    log = DecodeLog(interval=2, device="cuda", pool_tokens=1000, width=16, clock=lambda: now[0])
    log.add_step([3, 1], held_tokens=240, queued=2, flag=True)
    assert log.lines == []
    now[0] = 0.5
    log.add_step([4], held_tokens=250, queued=1, flag=False)
    match = DECODE.match(log.lines[0])
    assert match and match.groupdict() == dict(
        running="1", token="250", usage="0.25", accept="2.67", rate="0.10", device="cuda", flag="False",
        tput="16.00", queue="1",
    )  # fmt: skip


def test_no_speculation_and_no_flag_leave_their_fields_out():
    log = DecodeLog(interval=1, device="cpu", pool_tokens=10, width=0)
    log.add_step([1], 1, 0, None)
    match = DECODE.match(log.lines[0])
    assert match and match["accept"] is None and match["flag"] is None


def test_a_decode_writes_capture_prefill_and_decode_lines(pair, make_prompts):
    seen = []
    d = SpeculativeDecoder(*pair, max_batch=2, max_context=96, budget=6, log_interval=2, log_sink=seen.append)
    result = d.generate(make_prompts((3, 4, 5)), 20)
    assert seen == result.log_lines
    assert BEGIN.match(seen[0]) and END.match(seen[1])
    assert any(PREFILL.match(line) for line in seen)
    decodes = [match for line in seen if (match := DECODE.match(line))]
    assert len(decodes) == sum("Decode batch" in line for line in seen) >= len(result.replay.claims) // 2 - 1
    assert all(match["flag"] == "True" and match["device"] == "cpu" for match in decodes)


def test_interval_must_be_positive(pair):
    with pytest.raises(ValueError, match="log_interval=0"):
        SpeculativeDecoder(*pair, log_interval=0, max_context=64).generate([[1]], 2)
