"""The step bench: rows are timed only when checked, launches come from the trace, findings from rows."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workbench import targets
from workbench.cli import bench_step
from workbench.decode import DecodeHooks
from workbench.decode.capture_watch import CaptureError
from workbench.decode.graph_runner import GraphRunner
from workbench.experiments import eager_vs_graph, step_bench
from workbench.experiments.capture_bench import bench_capture
from workbench.experiments.launch_paths import bench_launch_paths
from workbench.experiments.step_bench import StepBench
from workbench.experiments.step_bytes import derive_reads
from workbench.experiments.step_case import StepCase, make_allocator
from workbench.experiments.step_parts import middle_half
from workbench.measure.ledger import STAGES
from workbench.model.presets import PRESETS
from workbench.report.figures import eager_vs_graph as figures
from workbench.report.figures import theme
from workbench.rows import Origin, RowStatus

CPU = targets.load("cpu")


@pytest.fixture(scope="module")
def rows(pair):
    case = StepCase("small", 40, bs=2, budget=6, random_kv=True, accept_length=3.0)
    bench = StepBench(case, CPU, [[1] * 40] * 2, steps=5, rounds=2)
    found = bench.run(pair, lambda name: None)
    found += bench_capture(case, pair, CPU, [1, 2], lambda name: None)
    return found + bench_launch_paths(CPU, 5, samples=3)


def by_mode(rows):
    return {row.variant: row for row in rows if row.variant in eager_vs_graph.MODES}


def test_modes_pass_their_check_and_launches_come_from_the_trace(rows):
    modes = by_mode(rows)
    assert list(modes) == list(eager_vs_graph.MODES)
    assert all(row.status is RowStatus.PASSED and row.timing.n >= 6 for row in modes.values())
    metrics = {mode: row.metrics for mode, row in modes.items()}
    assert [metrics[mode]["graph_launches_per_step"] for mode in modes] == [0, 2, 1]
    assert metrics["eager"]["launches_per_step"] > 100 > 20 > metrics["step_graph"]["launches_per_step"]
    assert metrics["step_graph"]["kernels_in_graphs_per_step"] > 100
    assert metrics["step_graph"]["capture_s"] > 0 == metrics["eager"]["capture_s"]
    assert metrics["eager"]["accept_length"] == metrics["step_graph"]["accept_length"] > 1
    assert all(m["unattributed_share"] < 0.2 and "verify_attention_us" not in m for m in metrics.values())


def test_attention_is_measured_once_and_no_modes_own(rows, pair):
    [row] = [row for row in rows if row.variant == "verify_attention"]
    layers = pair[0].config.num_layers
    assert row.metrics["verify_attention_us"] == pytest.approx(layers * row.timing.median_us)
    eager = by_mode(rows)["eager"].timing.median_us
    text = " ".join(eager_vs_graph.findings(rows))
    assert f"derived: as much as {layers * row.timing.median_us / eager:.0%} of a step eager" in text


def test_the_parts_of_a_bar_add_up_and_nothing_is_clamped(rows):
    for row in by_mode(rows).values():
        m = row.metrics
        claimed = sum(m[f"typical_{stage}_us"] for stage in STAGES) + m["typical_unattributed_us"]
        assert claimed == pytest.approx(m["typical_step_us"])
        height_ms = sum(bar.y[0] for bar in figures.main_figure([row]).data if bar.type == "bar")
        assert height_ms * 1e3 == pytest.approx(m["typical_step_us"] + m["typical_between_us"])
        assert height_ms * 1e3 == pytest.approx(row.timing.median_us, rel=0.5)
        [mark] = [trace for trace in figures.main_figure([row]).data if trace.type == "scatter"]
        assert mark.y[0] == pytest.approx(row.timing.median_us / 1e3)


def test_a_step_whose_stages_overlap_is_shown_below_zero(rows):
    row = by_mode(rows)["eager"]
    overlapping = row.model_copy(update={"metrics": row.metrics | {"typical_between_us": -70.0}})
    bars = {bar.name: bar.y[0] for bar in figures.main_figure([overlapping]).data}
    assert bars["between steps"] == pytest.approx(-0.07)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_the_middle_half_leaves_out_as_many_below_as_above(values):
    kept = sorted(values[i] for i in middle_half(values))
    cut = len(values) // 4
    assert kept == sorted(values)[cut : len(values) - cut] and len(kept) >= len(values) / 2


def test_rows_stored_before_the_typical_step_keep_their_means(rows):
    row = by_mode(rows)["step_graph"]
    old = {name: value for name, value in row.metrics.items() if not name.startswith("typical_")}
    row = row.model_copy(update={"metrics": old})
    assert figures.part_us(row, "verify") == old["verify_us"] > 0
    assert "Between two steps" not in " ".join(eager_vs_graph.findings([row]))


def test_a_wrong_mode_gets_no_time(pair, monkeypatch):
    class Shifted(DecodeHooks):
        def make_step(self, step):
            place = step.place_rows
            step.place_rows = lambda b: (place(b), b.positions.add_(3))
            return step

    decoder = step_bench.SpeculativeDecoder
    monkeypatch.setattr(
        step_bench, "SpeculativeDecoder", lambda *args, **options: decoder(*args, hooks=Shifted(), **options)
    )
    case = StepCase("small", 20, budget=6, random_kv=True)
    found = StepBench(case, CPU, [[1] * 20], steps=4, rounds=1, modes=("step_graph",)).run(
        pair, lambda name: None
    )
    assert found[0].status is RowStatus.INCORRECT and found[0].timing is None
    assert "positions" in found[0].reason


def test_a_failing_mode_is_a_row_with_its_reason(pair, monkeypatch):
    def fails(self, mode):
        raise RuntimeError(f"no {mode}")

    monkeypatch.setattr(StepBench, "_check", fails)
    found = StepBench(StepCase("small", 20), CPU, [[1] * 20], steps=4, rounds=1).run(pair, lambda name: None)
    assert [row.reason for row in found] == ["no eager", "no split_graph", "no step_graph"]
    assert all(row.status is RowStatus.RUNTIME_ERROR for row in found)


def test_an_error_in_a_timed_round_fails_that_mode_only(pair, monkeypatch):
    time = StepBench._time

    def fails(self, mode):
        time(self, mode)
        if mode == "split_graph":
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 3 GiB")

    monkeypatch.setattr(StepBench, "_time", fails)
    case = StepCase("small", 20, budget=6, random_kv=True)
    found = StepBench(case, CPU, [[1] * 20], steps=4, rounds=2).run(pair, lambda name: None)
    modes = by_mode(found)
    assert modes["split_graph"].status is RowStatus.OUT_OF_MEMORY
    assert modes["split_graph"].reason == "CUDA out of memory." and modes["split_graph"].timing is None
    assert all(modes[mode].timing is not None for mode in ("eager", "step_graph"))
    assert "split_graph is OUT_OF_MEMORY: CUDA out of memory" in " ".join(eager_vs_graph.findings(found))


@pytest.mark.parametrize("error", [RuntimeError("tracer\nbusy"), ValueError("tracer"), MemoryError()])
def test_a_mode_that_cannot_be_traced_keeps_its_times(pair, monkeypatch, error, capsys):
    record, calls = step_bench.record_trace, []

    def fails_first(path, work):
        calls.append(path)
        if len(calls) == 1:
            raise error
        record(path, work)

    monkeypatch.setattr(step_bench, "record_trace", fails_first)
    case = StepCase("small", 20, budget=6, random_kv=True)
    found = StepBench(case, CPU, [[1] * 20], steps=4, rounds=1).run(pair, lambda name: None)
    eager, graph = by_mode(found)["eager"], by_mode(found)["step_graph"]
    reason = "tracer" if str(error) else "MemoryError"
    assert eager.metrics["trace_reason"] == reason and eager.timing is not None
    assert eager.metrics["host_us"] > 0 and "launches_per_step" not in eager.metrics
    assert graph.metrics["graph_launches_per_step"] == 1 and "trace_reason" not in graph.metrics
    text = " ".join(eager_vs_graph.findings(found))
    assert f"{eager.case_id} not traced: {reason}." in text and "ms as one graph" in text
    assert "single launches" not in text and "GPU is idle" not in text
    bench_step.print_tables(found)
    assert capsys.readouterr().out.count("not traced") == 1
    theme.require_words(figures.main_figure(found))


def test_a_capture_that_fails_before_the_trace_is_not_traced_eagerly(pair, monkeypatch):
    """The decoder would go on eagerly: its launches are not the graph's."""
    made = []

    def make(self, mode):
        decoder = make_decoder(self, mode)
        made.append(mode)
        if made.count(mode) == 2:
            monkeypatch.setattr(step_bench, "record_trace", lambda path, work: setattr(
                decoder.runner, "capture_error", CaptureError("aten::item", "a.py:3", "moved")
            ))  # fmt: skip
        return decoder

    make_decoder = StepBench._make
    monkeypatch.setattr(StepBench, "_make", make)
    case = StepCase("small", 20, budget=6, random_kv=True)
    bench = StepBench(case, CPU, [[1] * 20], steps=4, rounds=1, modes=("step_graph",))
    [row, _] = bench.run(pair, lambda name: None)
    assert row.timing is not None and "broke at aten::item" in row.metrics["trace_reason"]


def test_a_decoder_whose_capture_failed_is_refused(pair, monkeypatch):
    def fails(self, *args, **options):
        raise CaptureError("aten::item", "a.py:3", "said so")

    monkeypatch.setattr(GraphRunner, "_capture_bucket", fails)
    case = StepCase("small", 20, budget=6, random_kv=True)
    bench = StepBench(case, CPU, [[1] * 20], steps=4, rounds=1, models=pair)
    with pytest.raises(CaptureError, match="broke at aten::item"):
        bench._make("step_graph")


def test_launch_paths_are_checked_and_name_what_needs_a_gpu(rows):
    paths = {row.variant: row for row in rows if row.axes.get("part") == "launch_path"}
    assert paths["replayed_graph"].status is RowStatus.PASSED
    assert paths["ctypes"].status is RowStatus.UNSUPPORTED and paths["ctypes"].timing is None


def test_findings_and_figures_say_what_the_rows_say(rows):
    text = " ".join(eager_vs_graph.findings(rows))
    eager, graph = by_mode(rows)["eager"], by_mode(rows)["step_graph"]
    assert f"{eager.timing.median_us / 1e3:.2f} ms eagerly" in text
    assert f"{eager.metrics['launches_per_step']:.0f} single launches" in text
    assert "capturing 2 buckets" in text and "5 launches of one small kernel" in text
    assert "us through torch_op" in text and "us through torch_custom_op" in text
    for figure in (figures.main_figure(rows), figures.launch_figure(rows)):
        theme.require_words(figure)
    assert (
        f"{eager.timing.median_us / graph.timing.median_us:.2f}"
        in figures.main_figure(rows).layout.title.text
    )


def test_no_rows_no_claims():
    assert eager_vs_graph.findings([]) == []
    assert "No step" in figures.main_figure([]).layout.title.text


def test_layouts(pair):
    assert make_allocator(50, "contiguous", 0).alloc(50).tolist() == list(range(1, 51))
    shuffled = make_allocator(50, "random", 3).alloc(50).tolist()
    assert sorted(shuffled) == list(range(1, 51)) != shuffled
    with pytest.raises(ValueError, match="layout='heap'"):
        make_allocator(5, "heap", 0)


def test_parameters_are_checked():
    with pytest.raises(ValueError, match="contexts='4k'"):
        eager_vs_graph.pick_contexts("4k", CPU)
    assert eager_vs_graph.pick_contexts("16, 64", CPU) == [16, 64]
    assert eager_vs_graph.pick_contexts("64,16, 64", CPU) == [64, 16], "each length once"
    assert eager_vs_graph.pick_models("tiny, narrow61,tiny", CPU) == ["tiny", "narrow61"]
    with pytest.raises(ValueError, match="extra"):
        eager_vs_graph.Params(nsplit=3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layout", "zigzag", "choose one of random, contiguous"),
        ("models", "tiny,huge", "unknown model 'huge'"),
        ("models", "auto,tiny", "unknown model 'auto': auto alone"),
        ("contexts", "256,-1", "give lengths with commas between"),
        ("contexts", "", "give lengths with commas between"),
    ],
)
def test_values_that_no_run_could_use_are_refused_before_it(name, value, message):
    with pytest.raises(ValueError, match=message):
        eager_vs_graph.Params(**{name: value})


def test_values_that_runs_use_are_taken(tmp_path):
    params = eager_vs_graph.Params(layout="contiguous", models=f"tiny, k2-rank,{tmp_path}", contexts="16, 64")
    assert params.contexts == "16, 64"


def test_host_time_leaves_out_waiting_and_what_is_done_once(rows):
    for row in by_mode(rows).values():
        m = row.metrics
        assert 0 < m["host_us"] <= m["host_p90_us"] <= m["host_max_us"] and m["one_off_us"] > 0
        assert m["host_schedule_us"] > 0 and m["host_launch_us"] > 0 and m["host_read_us"] > 0
        assert m["steps"] == 2 * 5 == row.timing.n + 2 * 2  # both rounds; n steps have n - 1 periods
        assert (
            row.timing.p10_us > 0.5 * row.timing.median_us
        )  # none is a step that launched nothing behind it
    split, graph = by_mode(rows)["split_graph"].metrics, by_mode(rows)["step_graph"].metrics
    assert split["host_tree_us"] > 0 == graph["host_tree_us"]
    text = " ".join(eager_vs_graph.findings(rows))
    assert f"host time {graph['host_us']:.0f} us per steady step" in text


def test_warm_up_and_capture_are_two_numbers(rows):
    captures = [row.metrics for row in rows if row.variant == "capture"]
    for name in ("warmup_s", "capture_s"):
        assert all(m[name] > 0 for m in captures)
        assert captures[0][f"total_{name}"] == pytest.approx(sum(m[name] for m in captures))


def test_a_row_without_a_time_has_no_times_among_its_metrics(pair, monkeypatch):
    case = StepCase("small", 20, budget=6, random_kv=True)
    bench = StepBench(case, CPU, [[1] * 20], steps=4, rounds=1, modes=("step_graph",))
    monkeypatch.setattr(bench, "_verdict", lambda mode: (RowStatus.INCORRECT, "said so"))
    metrics = bench.run(pair, lambda name: None)[0].metrics
    assert metrics["graph_launches_per_step"] == 1 and metrics["capture_s"] > 0
    assert not [name for name in metrics if name.endswith("_us")] and "idle_share" not in metrics


def test_bytes_stand_beside_the_real_models(pair):
    """Derived from the sizes alone: a step of 17 rows at 46,080 tokens on one rank of Kimi K2."""
    rank, h200 = PRESETS["k2-rank"], targets.load("h200")
    models = (SimpleNamespace(config=rank.target), SimpleNamespace(config=rank.drafter))
    [row] = derive_reads(StepCase("k2-rank", 46_080), models, h200)
    assert row.origin is Origin.DERIVED and row.timing is None
    m = row.metrics
    assert m["own_kv_bytes"] == m["real_kv_bytes"] == 46_080 * 70_272
    distinct = 128 * (1 - (1 - 8 / 128) ** 17)
    assert m["own_distinct_experts"] == pytest.approx(distinct) and m["real_distinct_experts"] > distinct
    assert m["own_expert_bytes"] == pytest.approx(60 * distinct * 3 * 7168 * 256 * 2)
    assert m["own_memory_us"] == pytest.approx(row.bytes / (h200.dram_gbps * 1e3), rel=1e-6)
    text = " ".join(eager_vs_graph.findings([row]))
    assert "46080 tokens, derived: k2-rank" in text and "kimi-k2 TP8 rank" in text and "all-reduce" in text
    assert derive_reads(StepCase("small", 20), pair, CPU) == []
