"""The contract around the kernels: bad input, plans, the CPU op, views, tolerances."""

import gc
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from workbench import targets
from workbench.attention import make_plan, variants, verify_attention
from workbench.attention.case_inputs import build
from workbench.attention.cases import AttentionCase
from workbench.attention.conformance import expected, poisoned_outputs, verdict_of
from workbench.attention.variants import AUTO_ORDER, find
from workbench.measure.correctness import compare, judge, lse_distance
from workbench.shapes import VerifyShape

TRITON_REASON = find("triton_split").supports(AttentionCase().shape, targets.load("cpu"))
CASE = AttentionCase(q_lens=(3, 2), kv_lens=(10, 20), heads=2, latent=16, rope=4)


def arguments(**changes: Any) -> dict[str, Any]:
    return build(CASE).arguments() | changes


BASE = arguments()
BAD = {
    "kv": (dict(kv=BASE["kv"][:, :19]), r"kv has 19 columns: expected 20"),
    "q dtype": (dict(q=BASE["q"].int()), r"q.dtype is torch.int32"),
    "kv dtype": (dict(kv=BASE["kv"].half()), r"kv.dtype is torch.float16: expected torch.float32"),
    "device": (dict(kv_indices=BASE["kv_indices"].to("meta")), r"kv_indices is on meta: expected cpu"),
    "indptr dtype": (dict(qo_indptr=BASE["qo_indptr"].long()), r"qo_indptr.dtype is torch.int64"),
    "indptr size": (dict(kv_indptr=BASE["kv_indptr"][:2]), r"kv_indptr has 2 entries: expected 3"),
    "indptr start": (dict(qo_indptr=BASE["qo_indptr"] + 1), r"qo_indptr\[0\] is 1: expected 0"),
    "monotone": (
        dict(kv_indptr=torch.tensor([0, 30, 10], dtype=torch.int32)),
        r"kv_indptr falls from 30 to 10 at entry 2",
    ),
    "nsplit": (dict(nsplit=0), r"nsplit=0: expected 'auto' or an integer"),
    "nsplit text": (dict(nsplit="many"), r"nsplit='many'"),
    "serial nsplit": (dict(nsplit=2, variant="reference"), r"nsplit=2: reference does not split"),
    "variant": (dict(variant="fastest"), r"variant='fastest': choose 'auto' or one of reference"),
    "gpu variant": (dict(variant="cuda_flash"), r"variant='cuda_flash' cannot run this bucket"),
    "layout": (dict(mask_layout="columns"), r"mask_layout='columns': choose one of tree, full, packed"),
    "mask dtype": (dict(tree_mask=torch.ones(13)), r"tree_mask.dtype is torch.float32"),
    "mask size": (dict(tree_mask=torch.ones(12).bool()), r"tree_mask has 12 entries: .*needs 13"),
    "slot": (
        dict(kv_indices=BASE["kv_indices"].clone().fill_(-1)),
        r"kv_indices holds slot -1: expected 0 to",
    ),
    "slot high": (dict(kv_indices=BASE["kv_indices"].clone().fill_(999)), r"kv_indices holds slot 999"),
    "indices short": (dict(kv_indices=BASE["kv_indices"][:9]), r"kv_indices has 9 entries"),
    "kv shorter than q": (
        dict(kv_indptr=torch.tensor([0, 2, 20], dtype=torch.int32)),
        r"kv_indptr gives request 0 2 rows",
    ),
    "latent": (dict(latent=21), r"latent=21: expected 1 to 20"),
    "out": (dict(out=torch.empty(5, 2, 15)), r"out has shape \(5, 2, 15\): expected \(5, 2, 16\)"),
    "lse": (dict(lse=torch.empty(5, 2).half()), r"lse.dtype is torch.float16"),
    "q rows": (dict(q=BASE["q"][:4]), r"q has 4 rows: qo_indptr ends at 5"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(ValueError, match=message) as error:
        verify_attention(**(BASE | changes))
    assert "\n" not in str(error.value)


def plan(**changes: Any) -> Any:
    shape = VerifyShape(**({"bs": 2, "heads": 2, "max_q_len": 3, "max_kv_len": 20, "dtype": "fp32",
    "latent": 16,
                            "rope": 4} | changes))  # fmt: skip
    return make_plan(shape, variant="torch_split", nsplit=2, device="cpu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bs": 1}, "qo_indptr holds 2 requests: the plan's bucket holds 1"),
        ({"heads": 3}, "q has 2 heads: the plan's bucket has 3"),
        ({"max_q_len": 2}, "qo_indptr gives a q_len of 3: the bucket holds 2"),
        ({"max_kv_len": 19}, "kv_indptr gives a kv_len of 20: the bucket holds 19"),
        ({"dtype": "bf16"}, "q.dtype is torch.float32: the plan's bucket has bf16"),
        ({"latent": 12, "rope": 8}, "latent=16: the plan's bucket has 12"),
        ({"rope": 5}, "q has 20 columns: the plan's bucket has 21"),
    ],
)
def test_a_call_outside_its_bucket_is_refused(changes: dict[str, Any], message: str) -> None:
    out, lse = poisoned_outputs(BASE["q"], 16)
    with pytest.raises(ValueError, match=message):
        verify_attention(**BASE, plan=plan(**changes), out=out, lse=lse)
    assert out.isnan().all()


@pytest.mark.parametrize(
    "options", [{"variant": "reference"}, {"nsplit": 3}, {"batch_invariant": True}], ids=str
)
def test_a_plan_is_not_overruled(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}=.*: the plan was made"):
        verify_attention(**BASE, plan=plan(), **options)


def test_tunables_are_named() -> None:
    shape = CASE.shape
    with pytest.raises(ValueError, match="block_k=3: torch_split has no tunables"):
        make_plan(shape, variant="torch_split", device="cpu", block_k=3)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("reduce_ahead", 0, "an integer of at least 1"),
        ("reduce_ahead", 1.5, "an integer of at least 1"),
        ("reduce_columns", 8, "a power of two of at least 16"),
        ("reduce_columns", 96, "a power of two of at least 16"),
        ("reduce_warps", 0, "a power of two of at least 1"),
        ("reduce_warps", 3, "a power of two of at least 1"),
        ("partial_dtype", "fp8", "bf16, fp16, fp32"),
    ],
)
@pytest.mark.skipif(TRITON_REASON is not None, reason=str(TRITON_REASON))
def test_tunables_that_triton_cannot_run_are_refused_by_the_plan(
    name: str, value: object, expected: str
) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r}: triton_split takes {expected}"):
        make_plan(CASE.shape, variant="triton_split", device="cpu", **{name: value})


@pytest.mark.skipif(TRITON_REASON is not None, reason=str(TRITON_REASON))
def test_tunables_that_triton_can_run_are_taken() -> None:
    fine = {"reduce_ahead": 3, "reduce_columns": 16, "reduce_warps": 8}
    plan = make_plan(CASE.shape, variant="triton_split", device="cpu", **fine)
    assert fine.items() <= plan.tunables.items()


class Recorder(TorchDispatchMode):
    """Names of the ops a call dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func, args))
        return func(*args, **(kwargs or {}))


def test_a_planned_cpu_call_is_one_op_that_reads_lengths_at_replay() -> None:
    inputs = build(CASE)
    out, lse = poisoned_outputs(inputs.q, 16)
    made = plan()
    with Recorder() as recorder:
        verify_attention(**inputs.arguments(), plan=made, out=out, lse=lse)
    (func, args), *rest = recorder.calls
    assert str(func) == "workbench.verify_attention.default" and rest == []
    shorter = build(AttentionCase(q_lens=(1, 3), kv_lens=(12, 9), heads=2, latent=16, rope=4, padding_rows=1))
    for name in ("q", "qo_indptr", "kv_indptr"):
        getattr(inputs, name).copy_(getattr(shorter, name))
    inputs.kv_indices[: len(shorter.kv_indices)].copy_(shorter.kv_indices)
    inputs.kv[: len(shorter.kv)].copy_(shorter.kv)
    assert shorter.tree_mask is not None and inputs.tree_mask is not None
    inputs.tree_mask[:10].copy_(shorter.tree_mask[:10])
    out.fill_(torch.nan)
    func(*args)
    assert verdict_of(out, lse, *expected(inputs), "fp32").reason is None


def test_a_dropped_plan_is_named() -> None:
    made, inputs = plan(), build(CASE)
    handle = made.handle
    out, lse = poisoned_outputs(inputs.q, 16)
    del made
    gc.collect()
    with pytest.raises(ValueError, match=f"plan={handle} no longer exists"):
        torch.ops.workbench.verify_attention(
            inputs.q, inputs.kv, inputs.qo_indptr, inputs.kv_indptr, inputs.kv_indices, None, None,
            "causal", 1.0, handle, out, lse,
        )  # fmt: skip


@given(
    st.integers(0, 2**31),
    st.integers(1, 40),
    st.integers(1, 9),
    st.sampled_from(["wide", "odd", "transposed"]),
)
@settings(max_examples=25, deadline=None)
def test_views_give_the_bits_of_contiguous_tensors(seed: int, kv_len: int, nsplit: int, view: str) -> None:
    case = AttentionCase((min(3, kv_len),), (kv_len,), heads=3, latent=16, rope=4, view=view, seed=seed)
    inputs = build(case)
    strided = verify_attention(**inputs.arguments(), nsplit=nsplit)
    plain = inputs.arguments() | {"q": inputs.q.contiguous(), "kv": inputs.kv.contiguous()}
    for a, b in zip(strided, verify_attention(**plain, nsplit=nsplit)):
        assert torch.equal(a, b)


@given(st.integers(0, 2**31), st.integers(2, 60), st.integers(1, 200))
@settings(max_examples=30, deadline=None)
def test_every_split_count_agrees(seed: int, kv_len: int, nsplit: int) -> None:
    inputs = build(AttentionCase((2,), (kv_len,), heads=2, latent=16, rope=4, mask="full", seed=seed))
    out, lse = verify_attention(**inputs.arguments(), nsplit=nsplit)
    assert verdict_of(out, lse, *expected(inputs), "fp32").reason is None


def test_hidden_rows_may_hold_anything() -> None:
    """A draft row no other node sees is NaN: only the node that sees itself turns NaN."""
    case = AttentionCase(q_lens=(3,), kv_lens=(9,), tree="star", heads=2, latent=16, rope=4, nsplit=2)
    inputs = build(case)
    inputs.kv[inputs.kv_indices[8].long()] = torch.nan
    for variant in ("torch_split", "triton_split", "triton_serial"):
        if find(variant).supports(case.shape, targets.load("cpu")) is None:
            out, _ = verify_attention(**inputs.arguments(), variant=variant)
            assert out[:2].isfinite().all() and out[2].isnan().all(), variant


def test_auto_is_the_first_that_supports_the_bucket_and_reports_itself() -> None:
    assert make_plan(CASE.shape, device="cpu").variant == AUTO_ORDER["cpu"][0]
    names = [variant.name for variant in variants()]
    assert len(names) == len(set(names)) and set(sum(AUTO_ORDER.values(), ())) <= set(names)


@pytest.mark.parametrize(
    ("variant", "target", "shape", "reason"),
    [
        ("cuda_flash", "h200", {"dtype": "fp32"}, "takes bf16, fp16, not fp32"),
        ("cuda_flash", "h200", {"latent": 256}, r"takes 512 \+ 64 columns, not 256 \+ 64"),
        ("cuda_flash", "cpu", {}, "runs on cuda, not on cpu"),
        ("torch_split", "h200", {}, "runs on cpu, not on cuda"),
    ],
)
def test_unsupported_buckets_say_why(variant: str, target: str, shape: dict[str, Any], reason: str) -> None:
    found = find(variant).supports(VerifyShape(**({"bs": 1, "heads": 8, "max_q_len": 4, "max_kv_len": 64} |
    shape)),
                                   targets.load(target))  # fmt: skip
    assert found is not None and re.search(reason, found), found


def test_errors_are_measured_and_judged() -> None:
    ref = torch.randn(100, dtype=torch.float64)
    errors = compare(ref * 1.01, ref)
    assert abs(errors.rel_fro - 0.01) < 1e-12 and 4e-5 < errors.cos_diff < 6e-5
    assert judge(errors, "bf16") is not None and judge(compare(ref.float(), ref), "fp32") is None
    assert not compare(ref / 0, ref).finite and judge(compare(ref / 0, ref), "bf16") is not None
    inf = torch.tensor([-torch.inf])
    assert lse_distance(inf, inf) == 0 and lse_distance(inf, inf * 0 + 1) == torch.inf
    with pytest.raises(ValueError, match="out has shape"):
        compare(ref[:3], ref)
