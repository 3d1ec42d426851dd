import dataclasses
import random
import time

import pytest
import torch
from scipy.stats import binom

from workbench import targets
from workbench.measure import profilers, timing
from workbench.measure.statistics import is_stable, median_interval, quantile
from workbench.measure.timing import (
    ImpossibleBandwidth,
    check_bandwidth,
    measure,
    pools_needed,
    prepare,
    sample_together,
)

CPU, H200 = targets.load("cpu"), targets.load("h200")


def test_quantile_agrees_with_torch():
    samples = [random.random() for _ in range(31)]
    for q in (0.1, 0.5, 0.9):
        want = torch.tensor(samples, dtype=torch.float64).quantile(q).item()
        assert quantile(samples, q) == pytest.approx(want)


def test_median_interval_of_thousands_of_samples():
    n = 5000
    low, high = median_interval(list(range(n)))
    half = 1.96 * 0.5 * n**0.5  # the normal approximation of the binomial law
    assert low == pytest.approx(n / 2 - half, abs=2) and high == pytest.approx(n / 2 + half, abs=2)


@pytest.mark.parametrize("n", [2, 5, 6, 9, 20, 41])
def test_median_interval_has_its_coverage_and_no_narrower_one_has(n):
    interval = median_interval(list(range(n)))
    if interval is None:
        assert 2 * binom.cdf(0, n, 0.5) > 0.05
        return
    cut = int(interval[0])
    assert interval[1] == n - 1 - cut
    assert 2 * binom.cdf(cut, n, 0.5) <= 0.05 < 2 * binom.cdf(cut + 1, n, 0.5)


def test_stability_needs_samples_and_a_narrow_interval():
    assert is_stable([1.0] * 3) is None
    assert is_stable([1.0] * 20) is True
    assert is_stable([1.0, 2.0] * 10) is False


def test_host_timing_of_a_known_sleep():
    result = measure(lambda: time.sleep(0.002), target=CPU, n=7)
    assert (result.mode, result.l2, result.n) == ("host", "n/a", 7)
    assert 2000 <= result.median_us < 20_000
    assert result.p10_us <= result.median_us <= result.p90_us
    assert result.span_us is not None and result.span_us >= 2000


def test_every_pool_is_run_in_each_sample_and_the_time_is_per_call():
    seen = []
    calls = [lambda i=i: (seen.append(i), time.sleep(0.001)) for i in range(4)]
    one = prepare(calls, target=CPU, l2="cold", bytes_per_call=1)
    seen.clear()
    one.sample()
    assert seen == [0, 1, 2, 3]
    assert 1000 <= one.samples[0] < 4000


def test_variants_are_interleaved_in_random_order():
    seen = []
    prepared = {name: prepare(lambda name=name: seen.append(name), target=CPU) for name in "abcd"}
    seen.clear()
    sample_together(prepared, n=12, seed=3)
    rounds = [tuple(seen[i : i + 4]) for i in range(0, 48, 4)]
    assert all(sorted(r) == list("abcd") for r in rounds)
    assert len(set(rounds)) > 3


def test_the_time_budget_ends_sampling_after_three_rounds():
    one = prepare(lambda: time.sleep(0.01), target=CPU)
    sample_together({"slow": one}, n=1000, budget_s=0.0)
    assert len(one.samples) == 3


@pytest.mark.parametrize("kv_bytes", [8 << 20, 512 << 20, 4096 * 1152])
def test_cold_pools_exceed_four_times_l2(kv_bytes):
    pools = pools_needed(kv_bytes, H200)
    assert pools >= 2
    assert pools * kv_bytes >= 4 * H200.l2_bytes > (pools - 1) * kv_bytes or pools == 2


def test_bandwidth_above_the_peak_is_an_error_only_when_not_warm():
    moved = int(5019e9 * 10e-6)
    with pytest.raises(ImpossibleBandwidth, match="5019 GB/s is above h200's peak of 4800"):
        check_bandwidth(moved, 10.0, H200, "cold")
    check_bandwidth(moved, 10.0, H200, "warm")
    check_bandwidth(int(4700e9 * 10e-6), 10.0, H200, "cold")


def test_an_impossible_host_timing_is_refused():
    slow_memory = dataclasses.replace(CPU, dram_peak_gbps=0.001)
    one = prepare(lambda: time.sleep(0.001), target=slow_memory, bytes_per_call=1 << 20)
    one.sample()
    with pytest.raises(ImpossibleBandwidth):
        one.timing()


@pytest.mark.parametrize(
    "kwargs, message",
    [
        (dict(mode="graph"), "graph"),
        (dict(mode="tape"), "mode='tape'"),
        (dict(l2="hot"), "l2='hot'"),
    ],
)
def test_bad_requests_name_the_value(kwargs, message):
    with pytest.raises(ValueError, match=message):
        prepare(lambda: None, target=CPU, **kwargs)
    with pytest.raises(ValueError, match="n=0"):
        sample_together({}, n=0)


def test_too_few_pools_are_refused_on_a_gpu_target_before_anything_runs():
    calls = [lambda: pytest.fail("must not run")] * 3
    with pytest.raises(ValueError, match="pass at least 30"):
        prepare(calls, target=H200, l2="cold", bytes_per_call=8 << 20)


@pytest.mark.parametrize("variable", sorted(profilers.ENVIRONMENT_MARKS))
def test_timing_is_refused_under_each_profiler(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(ValueError, match="timing refused under"):
        measure(lambda: None, target=CPU)


def test_timing_is_refused_under_torch_profiler():
    tracing = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with tracing, pytest.raises(ValueError, match=r"torch\.profiler"):
        measure(lambda: None, target=CPU)
    measure(lambda: None, target=CPU, n=1)


def test_preloaded_tools_are_noticed_and_ordinary_libraries_are_not():
    assert profilers.active_profiler({"LD_PRELOAD": "/opt/nsight-systems/lib/x.so"}) is not None
    assert profilers.active_profiler({"LD_PRELOAD": "/usr/lib/libncurses.so:/usr/lib/libjemalloc.so"}) is None


def test_launch_once_runs_the_call_once_without_a_gpu():
    seen = []
    if not torch.cuda.is_available():
        profilers.launch_once("x", lambda: seen.append(1))
        assert seen == [1]


@pytest.mark.gpu
def test_cold_and_warm_copies_on_the_device():
    target = targets.detect()
    rows = 8 << 20
    pools = pools_needed(2 * rows, target)
    sources = [torch.randint(0, 99, (rows,), dtype=torch.uint8, device="cuda") for _ in range(pools)]
    sinks = [torch.empty_like(s) for s in sources]
    calls = [lambda a=a, b=b: b.copy_(a) for a, b in zip(sources, sinks)]
    found = {}
    for l2 in ("cold", "warm"):
        for mode in ("eager", "graph"):
            one = measure(calls, target=target, mode=mode, l2=l2, bytes_per_call=2 * rows)
            assert (one.mode, one.l2) == (mode, l2) and one.span_us >= 0.5 * one.median_us
            found[l2, mode] = one.median_us
    assert found["cold", "graph"] > found["warm", "graph"]
    assert found["cold", "eager"] == pytest.approx(found["cold", "graph"], rel=0.35)


@pytest.mark.gpu
def test_a_failed_capture_leaves_the_process_usable():
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError):
        prepare(lambda: x.sum().item(), target=targets.detect(), mode="graph")
    assert timing.measure(lambda: x.add_(1), target=targets.detect(), n=3).median_us > 0
