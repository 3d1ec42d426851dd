"""Building draft trees: device builders beside the host heap with its parts apart; correct, then timed."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.measure import gpu_state, timing
from workbench.measure.statistics import is_stable, quantile
from workbench.rows import Origin, Row, RowStatus, Scalar, Timing, first_line
from workbench.shapes import DTYPE_BYTES
from workbench.targets import HardwareTarget

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.tree.batch import Method
    from workbench.tree.buffers import TreeBuffers

EXPERIMENT = "tree_build"
TOLERANCE = 1e-4  # of total mass and of each log-probability: fp32 sums in another order
HOST_PARTS = ("topk_dispatch", "transfer", "heap", "visibility", "upload")


@dataclass(frozen=True)
class TreeCase:
    """One batch of draft logits and the tree asked for."""

    bs: int
    budget: int
    vocab: int
    slots: int = 7
    dtype: str = "bf16"

    @property
    def name(self) -> str:
        return f"bs{self.bs}-L{self.slots}-B{self.budget}-V{self.vocab}-{self.dtype}"

    @property
    def read_bytes(self) -> int:
        """The logits, once."""
        return self.bs * self.slots * self.vocab * DTYPE_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """The logits once, and every output once: per node 44 bytes and a mask row."""
        nodes = self.budget + 1
        return self.read_bytes + self.bs * (nodes * (8 + 4 + 4 + 4 + 24 + nodes) + 8)

    def floor_us(self, target: HardwareTarget) -> float:
        """`bytes` at the target's DRAM rate; no launch, no sort."""
        return self.bytes / (target.dram_gbps * 1e3)

    def axes(self) -> dict[str, Scalar]:
        return {
            "bs": self.bs,
            "slots": self.slots,
            "budget": self.budget,
            "vocab": self.vocab,
            "dtype": self.dtype,
        }


@dataclass
class TreeBench:
    """Rows of one case after another."""

    target: HardwareTarget
    mode: timing.Mode = "graph"
    l2: timing.L2 = "cold"
    n: int = 20
    budget_s: float = 3.0
    seed: int = 0
    kernels: bool = False  # also each Triton kernel alone
    methods: "tuple[Method, ...]" = ("triton", "torch", "heap")
    rows: list[Row] = field(default_factory=list)

    def run(self, case: TreeCase) -> list[Row]:
        """A row per method, whatever happens; those timed on the device take turns."""
        from workbench.tree.buffers import TreeBuffers

        device = "cuda" if self.target.backend == "cuda" else "cpu"
        pools = self._make_pools(case, device)
        out = TreeBuffers(case.bs, case.budget + 1, device)
        prepared: dict[str, timing.Prepared] = {}
        rows: list[Row] = []
        for method in self.methods:
            if method == "triton" and device == "cpu":
                rows.append(self._row(case, method, RowStatus.UNSUPPORTED, "Triton on cpu is an interpreter"))
            elif method == "heap":
                rows.append(self._run_host(case, pools[0], out))
            else:
                rows += self._prepare(case, method, pools, out, prepared)
        with gpu_state.GpuSampler() as sampler:
            timing.sample_together(prepared, n=self.n, budget_s=self.budget_s, seed=self.seed)
        for name, ready in prepared.items():
            rows.append(self._timed_row(case, name, ready, sampler))
        rows.sort(
            key=lambda row: self.methods.index(row.variant.partition(".")[0])
        )  # stable: kernels keep order
        self.rows += rows
        return rows

    def _make_pools(self, case: TreeCase, device: str) -> "list[Tensor]":
        import torch

        count = timing.pools_needed(case.read_bytes, self.target) if self.l2 == "cold" else 1
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[case.dtype]
        g = torch.Generator(device).manual_seed(self.seed)
        shape = (case.bs, case.slots, case.vocab)
        return [(torch.randn(shape, generator=g, device=device) * 3).to(dtype) for _ in range(count)]

    def _prepare(
        self,
        case: TreeCase,
        method: "Method",
        pools: "list[Tensor]",
        out: "TreeBuffers",
        prepared: dict[str, timing.Prepared],
    ) -> list[Row]:
        """Check a method and make it ready; a row only where it cannot be timed."""
        from workbench.tree.batch import build_ddtree_batch

        build = partial(build_ddtree_batch, method=method)
        try:
            build(pools[0], case.budget, out)
            wrong = describe_difference(out, pools[0], case.budget)
            if wrong:
                return [self._row(case, method, RowStatus.INCORRECT, wrong)]
            prepared[method] = self._ready([partial(build, pool, case.budget, out) for pool in pools], case)
            if method == "triton" and self.kernels:
                self._prepare_kernels(case, pools, out, prepared)
        except RuntimeError as error:
            return [self._row(case, method, RowStatus.RUNTIME_ERROR, first_line(error))]
        return []

    def _prepare_kernels(
        self,
        case: TreeCase,
        pools: "list[Tensor]",
        out: "TreeBuffers",
        prepared: dict[str, timing.Prepared],
    ) -> None:
        from workbench.tree.ddtree_gpu import plan_kernels

        plans = [plan_kernels(pool, case.budget, out) for pool in pools]
        for name in plans[0]:
            prepared[f"triton.{name}"] = self._ready([plan[name] for plan in plans], case, bytes_moved=0)

    def _ready(
        self, calls: list[Callable[[], Any]], case: TreeCase, bytes_moved: int | None = None
    ) -> timing.Prepared:
        on_cpu = self.target.backend == "cpu"
        ready = timing.prepare(
            calls,
            target=self.target,
            mode="eager" if on_cpu else self.mode,
            l2=self.l2,
            bytes_per_call=case.read_bytes,
            warmup=1 if on_cpu else 2,
        )
        ready.bytes_per_call = case.read_bytes if bytes_moved is None else bytes_moved
        return ready

    def _run_host(self, case: TreeCase, logits: "Tensor", out: "TreeBuffers") -> Row:
        """The conventional way, its parts timed apart by the host's clock."""
        parts: dict[str, list[float]] = {part: [] for part in HOST_PARTS}
        stop = time.monotonic() + self.budget_s
        build_on_host(logits, case.budget, out)
        wrong = describe_difference(out, logits, case.budget)
        if wrong:
            return self._row(case, "heap", RowStatus.INCORRECT, wrong)
        for index in range(self.n):
            if index >= 3 and time.monotonic() > stop:
                break
            for part, us in build_on_host(logits, case.budget, out).items():
                parts[part].append(us)
        totals = [sum(values) for values in zip(*parts.values())]
        metrics: dict[str, Scalar] = {f"{part}_us": quantile(us, 0.5) for part, us in parts.items()}
        return self._row(case, "heap", RowStatus.PASSED, timing=host_timing(totals), metrics=metrics)

    def _timed_row(
        self, case: TreeCase, name: str, ready: timing.Prepared, sampler: gpu_state.GpuSampler
    ) -> Row:
        return self._row(case, name, RowStatus.PASSED, timing=ready.timing(), gpu=sampler.state())

    def _row(self, case: TreeCase, variant: str, status: RowStatus, reason: str = "", **fields: Any) -> Row:
        whole = "." not in variant  # a single kernel has no floor of its own here
        return Row(
            case_id=f"{variant}/{case.name}",
            experiment=EXPERIMENT,
            variant=variant,
            target=self.target.name,
            origin=Origin.MEASURED,
            status=status,
            reason=reason,
            axes=case.axes() | {"mode": self.mode if variant != "heap" else "host"},
            bytes=case.bytes if whole else None,
            floor_us=case.floor_us(self.target) if whole else None,
            repro=(
                f"workbench bench tree --target {self.target.name} --batches {case.bs} "
                f"--budgets {case.budget} --vocabs {case.vocab} --slots {case.slots} --dtype {case.dtype}"
            ),
            **fields,
        )


def host_timing(samples_us: list[float]) -> Timing:
    """A distribution taken with the host's clock."""
    return Timing(
        mode="host",
        l2="n/a",
        n=len(samples_us),
        median_us=quantile(samples_us, 0.5),
        p10_us=quantile(samples_us, 0.1),
        p90_us=quantile(samples_us, 0.9),
        samples=tuple(round(s, 3) for s in samples_us),
        stable=is_stable(samples_us),
    )


def build_on_host(logits: "Tensor", budget: int, out: "TreeBuffers") -> dict[str, float]:
    """Build trees the conventional way into `out`; microseconds per part.

    topk_dispatch: enqueueing top-k and log-normaliser (on CPU: running them). transfer: waiting for them and
    copying. heap, visibility (with the walk arrays): plain Python. upload: into the device's buffers.
    """
    import torch

    from workbench.tree.buffers import TreeBuffers
    from workbench.tree.ddtree import ancestor_matrix, best_first, link_children

    clock = [time.perf_counter_ns()]
    x = logits.float()
    values, tokens = torch.topk(x, min(budget, x.shape[-1]), dim=-1)
    log_probs = values - torch.logsumexp(x, -1, keepdim=True)
    clock.append(time.perf_counter_ns())
    ranked = list(zip(log_probs.cpu().tolist(), tokens.cpu().tolist()))
    clock.append(time.perf_counter_ns())
    picked = [best_first(list(zip(*slots)), budget) for slots in ranked]
    clock.append(time.perf_counter_ns())
    links = [[-1, *parents] for _, _, parents, _ in picked]
    frames = [(ancestor_matrix(parents), *link_children(parents)) for parents in links]
    clock.append(time.perf_counter_ns())
    host = TreeBuffers(out.bs, out.width)
    for b, ((ids, depths, _, weights), parents, (mask, child, sibling)) in enumerate(
        zip(picked, links, frames)
    ):
        n = len(parents)
        host.token_ids[b, 1:n] = torch.tensor(ids)
        host.depths[b, 1:n] = torch.tensor(depths)
        host.parents[b, :n] = torch.tensor(parents)
        host.log_probs[b, 1:n] = torch.tensor(weights)
        host.num_nodes[b] = n
        host.mask[b, :n, :n] = torch.from_numpy(mask)
        host.next_token[b, :n] = torch.tensor(child)
        host.next_sibling[b, :n] = torch.tensor(sibling)
    for theirs, ours in zip(out.tensors(), host.tensors()):
        theirs.copy_(ours)
    if logits.is_cuda:
        torch.cuda.synchronize()
    clock.append(time.perf_counter_ns())
    return {part: (end - begin) / 1e3 for part, begin, end in zip(HOST_PARTS, clock, clock[1:])}


def describe_difference(out: "TreeBuffers", logits: "Tensor", budget: int) -> str:
    """What is wrong with the trees in `out`, "" when they equal the heap's in prefixes and mass."""
    from workbench.tree.batch import read_tree
    from workbench.tree.ddtree import build_ddtree

    for b in range(out.bs):
        want, got = build_ddtree(logits[b].cpu(), budget), read_tree(out, b)
        if len(want) != len(got):
            return f"request {b} has {len(got)} nodes, the heap {len(want)}"
        mass, wanted_mass = got.log_probs.exp().sum(), want.log_probs.exp().sum()
        if not abs(mass - wanted_mass) <= TOLERANCE * wanted_mass:
            return f"request {b} covers probability {mass - 1:.6f}, the heap {wanted_mass - 1:.6f}"
        weight = dict(zip(want.paths(), want.log_probs.tolist()))
        least = want.log_probs.min().item()
        strays = [p for p in set(weight) - set(got.paths()) if weight[p] - least > TOLERANCE]
        if strays:
            return (
                f"request {b} lacks prefix {strays[0]}, {weight[strays[0]] - least:.2e} above the last taken"
            )
    return ""
