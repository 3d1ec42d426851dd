import dataclasses
import random

import pytest
import torch

from workbench import targets
from workbench.attention.variants import find
from workbench.experiments import nsplit_sweep, verify_bench, verify_cases, verify_variants
from workbench.experiments.split_regret import regrets
from workbench.experiments.verify_bench import Bench, BenchOptions, make_candidates
from workbench.experiments.verify_cases import (
    VerifyCase,
    build_inputs,
    layout_slots,
    parse_case,
    random_tree_mask,
    request_slots,
)
from workbench.experiments.verify_gate import classify, plan_run
from workbench.experiments.verify_oracle import expected_output
from workbench.measure.timing import MAX_CALLS_PER_SAMPLE, pools_needed
from workbench.rows import Origin, Row, RowStatus

CPU, H200 = targets.load("cpu"), targets.load("h200")
SMALL = VerifyCase(2, 3, 4, 37, "random", "tree", "fp32", latent=32, rope=8)


def brute_force(inputs, mask):
    """Row by row, head by head, in Python floats of fp64."""
    case, q = inputs.case, inputs.q[0].double()
    out = torch.zeros(*q.shape[:2], case.latent, dtype=torch.float64)
    for t in range(q.shape[0]):
        request, node = divmod(t, case.q_len)
        slots = inputs.kv_indices[0][request * case.kv_len : (request + 1) * case.kv_len].tolist()
        seen = []
        for place, slot in enumerate(slots):
            draft = place - case.ctx
            flat = (request * case.q_len + node) * case.q_len + draft
            visible = draft < 0 or (draft <= node if mask == "causal" else bool(inputs.tree_mask[flat]))
            if visible:
                seen.append(inputs.kv[slot].double())
        rows = torch.stack(seen)
        for head in range(case.heads):
            weights = (rows @ q[t, head] * verify_cases.SM_SCALE).softmax(0)
            out[t, head] = weights @ rows[:, : case.latent]
    return out


@pytest.mark.parametrize("mask", ["tree", "causal"])
def test_the_oracle_agrees_with_brute_force_in_any_block_size(mask, monkeypatch):
    inputs = build_inputs(SMALL, pools=2, device="cpu", seed=random.randrange(1000))
    out, lse = expected_output(inputs, mask)
    torch.testing.assert_close(out, brute_force(inputs, mask), rtol=1e-12, atol=1e-12)
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("layout", ["contiguous", "random", "reversed", "runs:7"])
def test_pools_use_every_slot_once_and_never_the_dummy(layout):
    slots = layout_slots(layout, 100, device="cpu", seed=5)
    assert sorted(slots.tolist()) == list(range(1, 101))
    runs = (slots.diff() != 1).sum().item() + 1
    expected = {"contiguous": 1, "reversed": 100}.get(layout)
    assert runs == expected if expected else runs > 10


@pytest.mark.parametrize("kv_len, page", [(64, 64), (65, 64), (200, 16)])
def test_pages_are_aligned_whole_and_never_shared(kv_len, page):
    slots = request_slots(f"pages:{page}", 5, kv_len, device="cpu", seed=2).view(5, kv_len)
    owners = [set((row // page).tolist()) for row in slots]
    assert all(len(own) == -(-kv_len // page) for own in owners) and 0 not in set.union(*owners)
    assert sum(map(len, owners)) == len(set.union(*owners))
    for row in slots:
        assert torch.equal(row % page, torch.arange(kv_len) % page)


def test_peers_get_the_nearest_case_they_can_run_and_the_row_says_so():
    case = VerifyCase(1, 8, 16, 4096)
    fitted = {
        v: verify_bench.fitting_case(find(v), case) for v in ("triton_split", "flashinfer_fa2", "flashmla")
    }
    assert fitted["triton_split"] == case
    assert (fitted["flashinfer_fa2"].mask, fitted["flashinfer_fa2"].layout) == ("causal", "random")
    assert (fitted["flashmla"].mask, fitted["flashmla"].layout) == ("causal", "pages:64")
    [candidate] = make_candidates(case, [find("flashmla")])
    assert candidate.asked == case


def test_a_peer_plans_once_per_pool_and_every_pool_is_right():
    case = dataclasses.replace(SMALL, q_len=3)
    inputs = build_inputs(case, pools=3, device="cpu", seed=4)
    [candidate] = make_candidates(case, [find("torch_flex")])
    run = plan_run(candidate, inputs)
    assert len(run.plans) == 3
    [plain] = make_candidates(case, [find("torch_split")])
    other = plan_run(plain, inputs)
    for pool in range(3):
        run.call(pool)
        other.call(pool)
        torch.testing.assert_close(run.out, other.out, rtol=1e-4, atol=1e-5)


def test_an_unknown_layout_is_named():
    with pytest.raises(ValueError, match=r"layout 'runs:0'"):
        layout_slots("runs:0", 10, device="cpu", seed=0)


def test_a_random_tree_mask_is_transitive_with_a_full_diagonal():
    case = VerifyCase(3, 1, 20, 0)
    for mask in random_tree_mask(case, 11).view(3, 20, 20):
        assert mask.diagonal().all() and mask[:, 0].all() and not mask.triu(1).any()
        ancestors = mask.float()
        assert torch.equal((ancestors @ ancestors) > 0, mask)


def test_case_names_round_trip():
    cases = verify_cases.table_cases() + verify_cases.random_cases(30, 3) + [SMALL]
    for case in cases:
        if (case.latent, case.rope) == (512, 64):
            assert parse_case(case.name) == case
    assert len({case.name for case in cases}) == len(cases)
    with pytest.raises(ValueError, match="case 'bs1': write it like"):
        parse_case("bs1")


def test_every_listed_shape_can_be_kept_cold_within_the_launch_queue():
    for case in verify_cases.table_cases() + verify_cases.quick_cases() + verify_cases.random_cases(50, 1):
        assert pools_needed(case.shape.bytes, H200) <= MAX_CALLS_PER_SAMPLE
        assert verify_bench.count_pools(case, H200, BenchOptions()) >= 2


def test_the_table_has_the_published_shapes():
    case = VerifyCase(1, 8, 16, 46080, "random")
    assert case in verify_cases.table_cases()
    assert verify_cases.published_us(case, "h200")["flashinfer_fa2"] == pytest.approx(77.8, abs=0.1)
    assert verify_cases.published_us(case, "h100") == {}


def test_a_good_variant_passes_and_a_wrong_one_gets_no_timing(monkeypatch):
    from workbench.attention import torch_split

    launch = torch_split.launch
    bench = Bench(CPU, BenchOptions(n=3))
    [row] = bench.run(SMALL, make_candidates(SMALL, [find("torch_split")]))
    assert row.status is RowStatus.PASSED and row.timing is not None and row.errors["rel_fro"] < 1e-5

    def slightly_wrong(plan, call):
        launch(plan, call)
        call.out[0, 0, 0] += 0.01

    monkeypatch.setattr(torch_split, "launch", slightly_wrong)
    [row] = bench.run(SMALL, make_candidates(SMALL, [find("torch_split")]))
    assert row.status is RowStatus.INCORRECT and row.timing is None and "rel_fro" in row.reason


def test_a_result_that_turns_wrong_while_it_is_timed_is_not_reported(monkeypatch):
    from workbench.attention import torch_split

    launch, calls = torch_split.launch, []

    def tires(plan, call):
        launch(plan, call)
        calls.append(1)
        if len(calls) > 4:
            call.out.mul_(1.5)

    monkeypatch.setattr(torch_split, "launch", tires)
    [row] = Bench(CPU, BenchOptions(n=3)).run(SMALL, make_candidates(SMALL, [find("torch_split")]))
    assert row.status is RowStatus.INCORRECT and row.timing is None


def test_an_unwritten_output_is_noticed(monkeypatch):
    from workbench.attention import torch_split

    monkeypatch.setattr(torch_split, "launch", lambda plan, call: None)
    [row] = Bench(CPU, BenchOptions(n=3)).run(SMALL, make_candidates(SMALL, [find("torch_split")]))
    assert row.status is RowStatus.INCORRECT and "NaN" in row.reason


def test_one_failing_variant_does_not_stop_the_others(monkeypatch):
    from workbench.attention import torch_split

    def broken(plan, call):
        raise RuntimeError("boom\nsecond line")

    monkeypatch.setattr(torch_split, "launch", broken)
    wanted = [find("torch_split"), find("cuda_flash"), find("reference")]
    rows = Bench(CPU, BenchOptions(n=3)).run(SMALL, make_candidates(SMALL, wanted))
    assert [row.status for row in rows] == [RowStatus.RUNTIME_ERROR, RowStatus.UNSUPPORTED, RowStatus.PASSED]
    assert rows[0].reason == "RuntimeError: boom" and "cuda" in rows[1].reason
    assert rows[2].timing is not None


def test_errors_are_classified():
    assert classify(torch.OutOfMemoryError("x"))[0] is RowStatus.OUT_OF_MEMORY
    assert classify(type("CompilationError", (Exception,), {})("no\nmore"))[0] is RowStatus.COMPILE_ERROR
    assert classify(KeyError("k"))[0] is RowStatus.RUNTIME_ERROR


def test_after_the_time_limit_the_rest_is_skipped_with_the_reason():
    bench = Bench(CPU, BenchOptions(n=3), deadline=0.0)
    [row] = bench.run(SMALL, make_candidates(SMALL, [find("torch_split")]))
    assert row.status is RowStatus.SKIPPED and "--max-s" in row.reason


def test_a_lost_context_skips_the_rest(monkeypatch):
    def lost(*args):
        raise verify_bench.ContextLost("illegal address")

    monkeypatch.setattr(verify_bench, "run_case", lost)
    bench = Bench(CPU, BenchOptions(n=3))
    for _ in range(2):
        [row] = bench.run(SMALL, make_candidates(SMALL, [find("torch_split")]))
        assert row.status is RowStatus.SKIPPED and "illegal address" in row.reason


def test_interpreted_kernels_are_checked_but_never_timed():
    case = nsplit_sweep.INTERPRETED_CASES[1]
    [row] = Bench(CPU, BenchOptions(n=3)).run(case, make_candidates(case, [find("triton_split")], nsplit=2))
    assert row.status is RowStatus.PASSED and row.timing is None and row.metrics["interpreted"] is True


def test_the_sweep_finds_the_regret_and_the_partial_traffic():
    case = VerifyCase(1, 4, 2, 400, "random", "tree", "fp32", latent=32, rope=8)
    rows = nsplit_sweep.sweep(case, find("torch_split"), [1, 4, 32], Bench(CPU, BenchOptions(n=4)))
    assert [row.axes["nsplit"] for row in rows] == ["1", "4", "32", "auto"]
    [found] = regrets(rows)
    auto, best = found.auto, found.best
    assert best.timing.median_us <= auto.timing.median_us * (1 + 1e-9) or found.share == 0.0
    assert best.axes["nsplit"] != "auto" and found.is_noise, "4 samples say nothing with 95 % confidence"
    derived = [nsplit_sweep.partial_traffic(row) for row in rows[1:3]]
    assert all(row.origin is Origin.DERIVED and row.timing is None for row in derived)
    assert derived[1].bytes == pytest.approx(8 * derived[0].bytes)


def swept_row(nsplit: str, plan_nsplit: int, median_us: float, half_us: float | None = 1.0) -> Row:
    """A timed row of a sweep: what it asked for, what the plan resolved to, its 95 % interval or none."""
    interval = {"ci95_low_us": median_us - half_us, "ci95_high_us": median_us + half_us} if half_us else {}
    times = {"median_us": median_us, "p10_us": median_us, "p90_us": median_us, "n": 20}
    return Row.model_validate({
        "case_id": f"c-{nsplit}", "experiment": "nsplit_sweep", "variant": "v", "target": "cpu",
        "origin": "measured", "status": "PASSED", "timing": {"mode": "host", "l2": "cold", **times},
        "axes": {
            "case": "c", "nsplit": nsplit, "bs": 1, "heads": 1, "q_len": 1, "ctx": 8, "layout": "random",
            "dtype": "fp32",
        },
        "metrics": {"plan_nsplit": plan_nsplit, "workspace_bytes": 64 * plan_nsplit} | interval,
    })  # fmt: skip


@pytest.mark.parametrize(
    "rows, is_noise, sentence",
    [
        # auto resolves to the plan of nsplit=2, which is the fastest
        ([("1", 1, 120), ("2", 2, 100), ("auto", 2, 107)], True, "auto picks 2 splits, the fastest"),
        # nsplit=64 is cut to the 2 splits that auto picks as well: the same plan under another name
        ([("1", 1, 120), ("64", 2, 100), ("auto", 2, 107)], True, "auto picks 2 splits, the fastest"),
        # auto measured slower, the same plan asked for by its number did not
        ([("1", 1, 100), ("2", 2, 101), ("auto", 2, 107)], True, "measured 7.0% faster, within the noise"),
        ([("1", 1, 100), ("2", 2, 115), ("auto", 2, 107)], False, "1 split would be 7.0% faster"),
        # the intervals touch
        ([("1", 1, 100), ("2", 2, 101), ("auto", 2, 101.5)], True, "measured 1.5% faster, within the noise"),
        ([("1", 1, 100), ("2", 2, 129), ("auto", 2, 130)], False, "1 split would be 30.0% faster"),
        # a count that the sweep does not have is the fastest of all
        (
            [("1", 1, 140), ("2", 2, 120), ("auto", 3, 100)],
            True,
            "every count of the sweep; 2 splits take 20.0%",
        ),
        # the same, but the intervals touch
        ([("1", 1, 140), ("2", 2, 101), ("auto", 3, 100)], True, "3 splits, not told apart from 2 splits."),
        # auto's own plan was also measured by its number, and was not the fastest
        ([("2", 2, 120), ("3", 3, 121), ("auto", 3, 100)], True, "3 splits, not told apart from 2 splits;"),
    ],
)
def test_a_regret_is_one_only_above_the_noise(rows, is_noise, sentence):
    from workbench.report.figures.nsplit_sweep import main_figure

    swept = [swept_row(*row) for row in rows]
    [found] = regrets(swept)
    assert found.is_noise is is_noise
    assert sentence in nsplit_sweep.findings(swept)[0]
    title = main_figure(swept).layout.title.text
    assert ("auto is slower" in title) is not is_noise and ("%" in title) is not is_noise


@pytest.mark.parametrize("few", ["1", "2", "auto"])
@pytest.mark.parametrize(
    "rows, sentence",
    [
        ([("1", 1, 100), ("2", 2, 129), ("auto", 2, 130)], "1 split measured 30.0% faster, too few samples;"),
        ([("1", 1, 120), ("2", 2, 140), ("auto", 2, 100)], "not told apart from 1 split, too few samples;"),
    ],
)
def test_a_plan_of_too_few_samples_tells_nothing(few, rows, sentence):
    """Fewer than 6 samples have no 95 % interval: neither noise nor a regret."""
    from workbench.cli.verify_tables import splits_table
    from workbench.report.figures.nsplit_sweep import main_figure

    swept = [swept_row(*row, None if row[0] == few else 1.0) for row in rows]
    [found] = regrets(swept)
    assert not found.is_told and not found.is_ahead and found.is_noise
    [told] = nsplit_sweep.findings(swept)[:1]
    assert sentence in told and "noise" not in told
    [cell] = list(splits_table([found]).columns[-1].cells)
    assert cell == ("30.0 % (too few samples)" if found.share else "0.0 %")
    title = main_figure(swept).layout.title.text.replace("<br>", " ")
    assert "On 0 of 1 sweeps" in title and "1 with too few samples" in title


def test_a_plan_that_has_no_twin_in_the_sweep_is_still_compared():
    [found] = regrets([swept_row("1", 1, 100), swept_row("auto", 3, 140)])
    assert not found.twins and not found.is_noise and found.share == pytest.approx(0.4)


def test_shapes_are_named_by_what_tells_them_apart():
    from workbench.report.figures.verify_variants import short_labels

    names = ["bs1 h8 q16 2048 contiguous tree fp32", "bs1 h8 q16 2048 random tree fp32"]
    assert short_labels(names) == (
        dict(zip(names, ("contiguous", "random"))), " (all: bs1 h8 q16 2048 tree fp32)"
    )  # fmt: skip
    assert short_labels(["alone here"]) == ({"alone here": "alone here"}, "")
    assert short_labels(["a b", "a b c"]) == ({"a b": "a b", "a b c": "a b c"}, "")


def test_projected_rows_carry_no_timing():
    rows = list(verify_variants.project_floors("cpu"))
    assert {row.origin for row in rows} == {Origin.PROJECTED} and "rtx-pro-6000" in {
        row.target for row in rows
    }
    assert all(row.timing is None and row.floor_us > 0 for row in rows)


def test_findings_and_figures_come_from_the_rows(monkeypatch):
    from workbench.report.figures import nsplit_sweep as sweep_figures
    from workbench.report.figures import theme
    from workbench.report.figures import verify_variants as figures

    monkeypatch.setattr(verify_variants, "cpu_cases", lambda: [SMALL])
    rows = verify_variants.run(verify_variants.Params(samples=6), step=lambda name: None)
    told = " ".join(verify_variants.findings(rows))
    assert "Projected, not measured" in told and "Not run here: cuda_flash" in told
    for figure in (figures.main_figure, figures.error_figure, figures.projection_figure):
        theme.require_words(figure(rows))
    swept = nsplit_sweep.sweep(SMALL, find("torch_split"), [1, 2], Bench(CPU, BenchOptions(n=3)))
    swept += [nsplit_sweep.partial_traffic(row) for row in swept[:2]]
    assert nsplit_sweep.findings(swept)
    for figure in (sweep_figures.main_figure, sweep_figures.drift_figure, sweep_figures.traffic_figure):
        theme.require_words(figure(swept))


@pytest.mark.gpu
def test_the_quick_list_on_the_device():
    bench = Bench(targets.detect(), BenchOptions(n=5, budget_s=1.0))
    case = VerifyCase(1, 8, 16, 4096)
    rows = bench.run(case, make_candidates(case, [find("triton_split")]))
    assert [row.status for row in rows] == [RowStatus.PASSED]
    assert rows[0].timing.mode == "graph" and rows[0].timing.l2 == "cold" and rows[0].floor_ratio > 0.9
