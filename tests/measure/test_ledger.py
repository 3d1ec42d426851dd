"""Stages are timed apart from the step's own clock: parts add up, the rest is shown, the cost is small."""

import time

import pytest

from workbench.measure.ledger import STAGES, HostWatch, Ledger, format_summary, profile_interval
from workbench.measure.stage_clock import HostClock, NoClock

SEGMENTS = ("other", "draft", "verify", "draft")


def wait(us: float) -> None:
    end = time.perf_counter() + us / 1e6
    while time.perf_counter() < end:
        pass


def run_step(clock, unmarked_us=0.0):
    clock.start()
    for segment, us in enumerate((50, 300, 900, 200)):
        clock.mark(segment, False)
        wait(us)
        clock.mark(segment, True)
    wait(unmarked_us)
    return clock.stop()


def add(ledger, reading, **changes):
    facts = dict(step=0, bs=1, replayed=True, tokens=2, watch=HostWatch())
    return ledger.add(reading.read(()), **(facts | changes))


def test_segments_of_one_stage_are_summed_and_the_rest_is_shown(monkeypatch):
    now_ns = 0

    def advance(us: float) -> None:
        nonlocal now_ns
        now_ns += int(us * 1000)

    monkeypatch.setattr(time, "perf_counter_ns", lambda: now_ns)
    monkeypatch.setitem(globals(), "wait", advance)
    ledger, clock = Ledger(SEGMENTS, every=0), HostClock(4)
    record = add(ledger, run_step(clock, unmarked_us=500))
    assert set(record.stages_us) == set(STAGES)
    assert record.stages_us["draft"] == 300 + 200 and record.stages_us["verify"] == 900
    assert record.stages_us["tree"] == 0.0 and record.unattributed_us == 500
    assert record.step_us == 50 + 300 + 900 + 200 + 500


def test_a_segment_that_did_not_run_does_not_keep_an_old_time():
    clock = HostClock(4)
    run_step(clock)
    clock.start()
    clock.mark(0, False)
    clock.mark(0, True)
    step_us, segments = clock.stop().read(())
    assert segments[1:] == [0.0, 0.0, 0.0] and step_us < 1000


def test_summary_and_its_line():
    ledger, clock = Ledger(SEGMENTS, every=0), HostClock(4)
    for step in range(4):
        add(ledger, run_step(clock), step=step, replayed=step > 0, tokens=step)
    summary = ledger.summary(skip=1)
    assert summary["steps"] == 3 and summary["replayed_share"] == 1.0 and summary["tokens_per_step"] == 2.0
    assert abs(summary["unattributed_share"]) < 0.05
    assert ledger.summary(last=4)["replayed_share"] == 0.75
    text = format_summary(summary, 3)
    assert "draft" in text and "unattributed" in text and "tree" not in text
    assert Ledger(SEGMENTS, every=0).summary() == {}


def test_host_time_is_neither_waiting_nor_done_once():
    ledger, clock = Ledger(SEGMENTS, every=0), HostClock(4)
    for step in range(5):
        reading, watch = run_step(clock), HostWatch()
        for part, us in (("schedule", 100), ("launch", 200), ("wait", 900)):
            wait(us)
            watch.lap(part)
        wait(500)  # other steps' work
        watch.resume()
        if step == 3:
            wait(5000)
            watch.lap("one_off")
        record = add(ledger, reading, step=step, watch=watch)
        laps = record.laps_us
        assert record.host_us == pytest.approx(laps["schedule"] + laps["launch"] + laps["read"])
        assert laps["schedule"] >= 100 and laps["launch"] >= 200 and laps["wait"] >= 900
        assert record.host_us < laps["wait"] + laps["schedule"] + laps["launch"]
    ledger.add_one_off("finish", 5000.0)
    ledger.add_one_off("finish", 1000.0)
    summary = ledger.summary()
    hosts = sorted(record.host_us for record in ledger.records)
    assert summary["host_us"] == hosts[2] <= summary["host_p90_us"] <= summary["host_max_us"] == hosts[-1]
    assert 100 <= summary["host_schedule_us"] < summary["host_launch_us"] and summary["host_tree_us"] == 0.0
    assert summary["wait_us"] >= 900 and summary["one_off_us"] == 6000.0


def test_profile_variable_prints_every_so_many_steps(monkeypatch):
    monkeypatch.setenv("WORKBENCH_PROFILE", "2")
    printed = []
    ledger = Ledger(SEGMENTS, sink=printed.append)
    for step in range(5):
        add(ledger, run_step(HostClock(4)), step=step)
    assert len(printed) == 2 and printed[0].startswith("ledger over 2 steps")


def test_profile_variable_must_be_a_number(monkeypatch):
    monkeypatch.delenv("WORKBENCH_PROFILE", raising=False)
    assert profile_interval() == 0
    monkeypatch.setenv("WORKBENCH_PROFILE", "often")
    with pytest.raises(ValueError, match="WORKBENCH_PROFILE='often'"):
        profile_interval()


def test_marks_cost_less_than_two_percent_of_a_millisecond_step():
    clock, n = HostClock(10), 2000
    best_us = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(n):
            clock.mark(3, False)
        best_us = min(best_us, (time.perf_counter() - start) / n * 1e6)
    assert 2 * 10 * best_us < 0.02 * 1000


def test_no_clock_reads_nothing():
    clock = NoClock()
    clock.start()
    clock.mark(0, True)
    assert clock.stop().read(()) == (0.0, [])
