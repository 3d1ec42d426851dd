"""Latency of one attention call by the layout of its slots: the same rows, somewhere else in the pool."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.measure import gpu_state, timing
from workbench.measure.correctness import compare, judge, lse_distance
from workbench.rows import Origin, Row, RowStatus, Scalar, Timing
from workbench.shapes import VerifyShape
from workbench.targets import HardwareTarget

if TYPE_CHECKING:
    import torch

    from workbench.kv.fragmentation import LayoutScore
    from workbench.kv.pool import KVPool


LAST_LEVEL_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")  # "32768K"
SPARE_SLOTS = 63  # pages of 64 start one page behind the dummy


@dataclass
class LayoutCase:
    """One layout on its way to a row; `axes` and `metrics` say where it came from."""

    name: str  # as in every row: contiguous, churned:<policy>, runs:<k>, random, ...
    slots: "torch.Tensor"  # [ctx] int64, the last q_len are the draft rows
    variant: str = "layout"
    axes: dict[str, Scalar] = field(default_factory=dict)
    metrics: dict[str, Scalar] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    reason: str = ""  # of a wrong result
    timing: Timing | None = None

    @property
    def case_id(self) -> str:
        tail = "".join(f"-{key}{value}" for key, value in self.axes.items() if key != "layout")
        return f"{self.variant}-{self.name}{tail}"

    def score(self) -> "LayoutScore":
        from workbench.kv.fragmentation import layout_score

        return layout_score(self.slots)


class LayoutBench:
    """A pool, a query and logical KV rows; layouts are filled, checked and timed against each other."""

    def __init__(
        self,
        shape: VerifyShape,
        target: HardwareTarget,
        pool_slots: int,
        *,
        variant: str = "auto",
        pool_layers: int = 0,
        seed: int = 0,
    ) -> None:
        """`pool_layers` 0: as many as keep L2 cold."""
        import torch

        from workbench.attention import make_plan
        from workbench.kv.pool import KVPool as Pool

        self.shape, self.target, self.seed = shape, target, seed
        device = torch.device("cuda" if target.backend == "cuda" else "cpu")
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[shape.dtype]
        layers = max(pool_layers, timing.pools_needed(shape.bytes, target))
        self.pool_slots = pool_slots
        self.pool = Pool(layers, pool_slots + SPARE_SLOTS, shape.width, dtype, device)
        generator = torch.Generator(device).manual_seed(seed)
        self.rows = torch.randn(shape.max_kv_len, shape.width, generator=generator, device=device).to(dtype)
        q_size = (shape.max_q_len, shape.heads, shape.width)
        self.q = torch.randn(q_size, generator=generator, device=device).to(dtype)  # [T, H, D]
        self.qo_indptr = torch.tensor([0, shape.max_q_len], dtype=torch.int32, device=device)
        self.kv_indptr = torch.tensor([0, shape.max_kv_len], dtype=torch.int32, device=device)
        self.plan = make_plan(shape, variant=variant, device=device)
        self.out = torch.empty(*q_size[:2], shape.latent, dtype=dtype, device=device)
        self.lse = torch.empty(q_size[:2], dtype=torch.float32, device=device)
        self.expected = self._reference()

    def fill(self, slots: "torch.Tensor") -> None:
        """Put the logical rows into these slots of every layer."""
        self.pool.buffer[:, slots.to(self.rows.device)] = self.rows

    def attend(self, layer: int, indices: "torch.Tensor") -> None:
        """One call of the planned kernel on one layer; indices [ctx] int32."""
        self._call(self.pool.layer(layer), indices)

    def check(self, case: LayoutCase) -> None:
        """Attend into poisoned outputs on the last layer; a wrong result leaves its reason on the case."""
        import torch

        self.out.fill_(float("nan"))
        self.lse.fill_(float("nan"))
        self.attend(self.pool.layers - 1, case.slots.to(self.out.device, torch.int32))
        errors, lse_abs = compare(self.out, self.expected[0]), lse_distance(self.lse, self.expected[1])
        case.errors = errors.as_dict() | {"lse_error": lse_abs}
        case.reason = judge(errors, self.shape.dtype, lse_abs) or ""

    def measure(
        self, cases: Sequence[LayoutCase], *, n: int, budget_s: float, fill: bool = True
    ) -> list[Row]:
        """Fill and check each layout, then sample all of them interleaved; a row each."""
        prepared = {}
        for case in cases:
            if fill:
                self.fill(case.slots)
            self.check(case)
            if not case.reason:
                prepared[case.case_id] = self._prepare(case)
        if len({case.case_id for case in cases}) != len(cases):
            raise ValueError("two layouts share a case_id: give them different axes")
        with gpu_state.GpuSampler() as sampler:
            if prepared:
                timing.sample_together(prepared, n=n, budget_s=budget_s, seed=self.seed)
        for case in cases:
            if case.case_id in prepared:
                self._finish(case, prepared[case.case_id])
        return [self.row(case, sampler) for case in cases]

    def row(self, case: LayoutCase, sampler: gpu_state.GpuSampler) -> Row:
        """The case as a row, with its score."""
        scalars = case.score().metrics() | case.metrics
        if case.timing is not None:
            scalars |= {"gbps": self.shape.bytes / case.timing.median_us / 1e3}
        return Row(
            case_id=f"{case.case_id}-ctx{self.shape.max_kv_len}-slots{self.pool_slots}",
            experiment="kv_fragmentation",
            variant=case.variant,
            target=self.target.name,
            origin=Origin.MEASURED,
            status=RowStatus.INCORRECT if case.reason else RowStatus.PASSED,
            reason=case.reason,
            axes=self.axes() | {"layout": case.name} | case.axes,
            errors=case.errors,
            timing=case.timing,
            bytes=self.shape.bytes,
            flops=self.shape.flops,
            floor_us=self.shape.floor_us(self.target),
            metrics=scalars,
            gpu=sampler.state() if case.timing is not None else None,
            repro=f"workbench bench kv --target {self.target.name} --context {self.shape.max_kv_len}",
        )

    def axes(self) -> dict[str, Scalar]:
        """What all layouts of this bench share."""
        return {
            "kernel": self.plan.variant,
            "context": self.shape.max_kv_len,
            "heads": self.shape.heads,
            "q_len": self.shape.max_q_len,
            "dtype": self.shape.dtype,
            "pool_slots": self.pool_slots,
            "pool_gb": round(self.pool.bytes / 1e9, 3),
        }

    def _finish(self, case: LayoutCase, prepared: timing.Prepared) -> None:
        try:
            case.timing = prepared.timing()
        except timing.ImpossibleBandwidth as error:
            case.reason = str(error)

    def _prepare(self, case: LayoutCase) -> timing.Prepared:
        import torch

        indices = case.slots.to(self.out.device, torch.int32)
        calls = [partial(self.attend, layer, indices) for layer in range(self.pool.layers)]
        on_cuda = self.target.backend == "cuda"
        return timing.prepare(
            calls,
            target=self.target,
            mode="graph" if on_cuda else "eager",
            l2="cold",
            bytes_per_call=self.shape.bytes,
        )

    def _call(self, kv: "torch.Tensor", indices: "torch.Tensor") -> None:
        from workbench.attention import verify_attention

        verify_attention(
            self.q,
            kv,
            self.qo_indptr,
            self.kv_indptr,
            indices,
            sm_scale=self.shape.width**-0.5,
            latent=self.shape.latent,
            plan=self.plan,
            out=self.out,
            lse=self.lse,
        )

    def _reference(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """fp64 dense attention over the rows in token order: no slots, no pool."""
        import torch

        rows, q = self.rows.double(), self.q.double()
        scores = torch.einsum("thd,kd->thk", q, rows) * self.shape.width**-0.5
        q_len, kv_len = self.shape.max_q_len, self.shape.max_kv_len
        last = torch.arange(q_len, device=q.device) + kv_len - q_len  # causal among the draft rows
        hidden = torch.arange(kv_len, device=q.device)[None, :] > last[:, None]
        scores = scores.masked_fill(hidden[:, None, :], -torch.inf)
        return scores.softmax(-1) @ rows[:, : self.shape.latent], scores.logsumexp(-1)


def measure_copy(pool: "KVPool", rows: int, target: HardwareTarget, *, n: int, seed: int = 0) -> Row:
    """Copy `rows` random slots of every layer into a free run, checked, beside a plain copy of as many bytes.

    Both go through as many sets of rows as the pool holds, so that neither finds its data in a cache; where
    the pool is too small for that, the metric beyond_cache says so.
    """
    import torch

    from workbench.kv.relocation import copy_disjoint_rows

    copy_bytes = 2 * rows * pool.token_bytes
    sets = _copy_sets(pool, rows, -(-4 * _cache_bytes(target) // copy_bytes), seed)
    for sources, targets in sets:
        pool.buffer[:, sources] += 1  # so that the targets cannot hold the answer already
        copy_disjoint_rows(pool.buffer, sources, targets)
    is_same = all(torch.equal(pool.buffer[:, a], pool.buffer[:, b]) for a, b in sets)
    measured: Timing | None = None
    metrics: dict[str, Scalar] = {"rows": rows, "layers": pool.layers}
    if is_same:
        there = [pool.buffer[:, targets] for _, targets in sets]
        moved = [torch.empty_like(each) for each in there]
        measured, plain = _time_copies(
            [partial(copy_disjoint_rows, pool.buffer, *pair) for pair in sets],
            [partial(b.copy_, a) for a, b in zip(there, moved)],
            copy_bytes, target, n,
        )  # fmt: skip
        metrics |= {
            "copy_gbps": copy_bytes / measured.median_us / 1e3,
            "device_copy_gbps": copy_bytes / plain.median_us / 1e3,
            "share_of_device_copy": plain.median_us / measured.median_us,
            "beyond_cache": len(sets) * copy_bytes >= 2 * _cache_bytes(target),
        }
    return Row(
        case_id=f"copy-rows{rows}-layers{pool.layers}-slots{pool.size}",
        experiment="kv_fragmentation",
        variant="copy_rows",
        target=target.name,
        origin=Origin.MEASURED,
        status=RowStatus.PASSED if is_same else RowStatus.INCORRECT,
        reason="" if is_same else "copied rows differ from their sources",
        axes={"rows": rows, "pool_layers": pool.layers, "pool_gb": round(pool.bytes / 1e9, 3)},
        timing=measured,
        bytes=copy_bytes,
        floor_us=copy_bytes / (target.dram_gbps * 1e3),
        metrics=metrics,
        repro=f"workbench bench kv --target {target.name}",
    )


def _copy_sets(pool: "KVPool", rows: int, most: int, seed: int) -> "list[tuple[torch.Tensor, torch.Tensor]]":
    """Disjoint (sources [rows] in random order, targets [rows] in a run), at most as many as fit the pool."""
    import torch

    count = max(1, min(most, pool.size // (2 * rows)))
    first_target = pool.size - count * rows + 1
    order = torch.randperm(first_target - 1, generator=torch.Generator().manual_seed(seed)) + 1
    device = pool.buffer.device
    return [
        (
            order[i * rows : (i + 1) * rows].to(device),
            torch.arange(first_target + i * rows, first_target + (i + 1) * rows, device=device),
        )
        for i in range(count)
    ]


def _cache_bytes(target: HardwareTarget) -> int:
    """The last-level cache: the target's or, on cpu, this machine's if that is larger."""
    kib = LAST_LEVEL_CACHE.read_text().strip().removesuffix("K") if LAST_LEVEL_CACHE.exists() else ""
    here = int(kib) * 1024 if target.backend == "cpu" and kib.isdigit() else 0
    return max(timing.l2_bytes(target), here)


def _time_copies(
    moves: Sequence[Callable[[], object]],
    plain: Sequence[Callable[[], object]],
    copy_bytes: int,
    target: HardwareTarget,
    n: int,
) -> tuple[Timing, Timing]:
    """Both sampled in turn. L2 is cold when one call moves more than eight times its size."""
    is_cold = target.backend == "cuda" and copy_bytes > 8 * timing.l2_bytes(target)
    prepared = {}
    for name, calls in (("moves", moves), ("plain", plain)):
        pools = [*calls, *calls] if is_cold and len(calls) == 1 else calls
        prepared[name] = timing.prepare(
            pools,
            target=target,
            l2="cold" if is_cold else "warm",
            bytes_per_call=copy_bytes if is_cold else 0,
        )
    timing.sample_together(prepared, n=n)
    return prepared["moves"].timing(), prepared["plain"].timing()
