"""Verify-attention cases: their shapes, their KV layouts, and inputs built on the device from a seed."""

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from workbench.rows import Scalar
from workbench.shapes import VerifyShape
from workbench.targets import ROOT, HardwareTarget

if TYPE_CHECKING:
    import torch

PEERS_DIR = ROOT / "data" / "peers"
SM_SCALE = 192**-0.5  # MLA scales by its unabsorbed head width, 128 + 64
CASE_NAME = re.compile(
    r"bs(?P<bs>\d+)-h(?P<heads>\d+)-q(?P<q_len>\d+)-ctx(?P<ctx>\d+)"
    r"-(?P<layout>[\w:]+)-(?P<mask>tree|causal)-(?P<dtype>bf16|fp16|fp32)"
)
TORCH_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class VerifyCase:
    """`bs` requests of `ctx` prefix tokens, each with `q_len` draft rows (root included)."""

    bs: int
    heads: int
    q_len: int
    ctx: int
    layout: str = "random"  # contiguous | random | reversed | runs:<tokens> | pages:<tokens>
    mask: str = "tree"  # tree = a random one | causal
    dtype: str = "bf16"
    latent: int = 512
    rope: int = 64

    @property
    def kv_len(self) -> int:
        """Rows a request attends to: prefix and its own draft rows."""
        return self.ctx + self.q_len

    @property
    def shape(self) -> VerifyShape:
        widths = {"latent": self.latent, "rope": self.rope, "mask_layout": self.mask}
        return VerifyShape(self.bs, self.heads, self.q_len, self.kv_len, self.dtype, **widths)  # type: ignore[arg-type]

    @property
    def name(self) -> str:
        """Stable and readable: bs1-h8-q16-ctx46080-random-tree-bf16."""
        return f"bs{self.bs}-h{self.heads}-q{self.q_len}-ctx{self.ctx}-{self.layout}-{self.mask}-{self.dtype}"

    @property
    def axes(self) -> dict[str, Scalar]:
        return {
            "bs": self.bs, "heads": self.heads, "q_len": self.q_len, "ctx": self.ctx, "kv_len": self.kv_len,
            "layout": self.layout, "mask": self.mask, "dtype": self.dtype,
        }  # fmt: skip


@dataclass
class VerifyInputs:
    """One case's tensors: `kv` holds the disjoint rows of all pools; queries and indices per pool."""

    case: VerifyCase
    kv: "torch.Tensor"  # [slots, D], row 0 unused and poisoned
    q: "list[torch.Tensor]"  # per pool [T, H, D]
    kv_indices: "list[torch.Tensor]"  # per pool [bs * kv_len] int32, draft rows last in each request
    qo_indptr: "torch.Tensor"  # [bs+1] int32
    kv_indptr: "torch.Tensor"  # [bs+1] int32
    tree_mask: "torch.Tensor | None"  # flat bool, q_len x q_len per request

    @property
    def pools(self) -> int:
        return len(self.q)


def build_inputs(case: VerifyCase, *, pools: int, device: str, seed: int = 0) -> VerifyInputs:
    """Random inputs on `device`; the same seed gives the same numbers on the same device kind."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, TORCH_DTYPES[case.dtype])
    slots = request_slots(case.layout, pools * case.bs, case.kv_len, device=device, seed=seed)
    kv = torch.empty(int(slots.max()) + 1, case.shape.width, device=device, dtype=dtype)
    kv.normal_(generator=generator)
    kv[0] = float("nan")
    q_rows = case.bs * case.q_len
    q = torch.empty(pools, q_rows, case.heads, case.shape.width, device=device, dtype=dtype)
    q.normal_(generator=generator)
    starts = torch.arange(case.bs + 1, device=device, dtype=torch.int32)
    return VerifyInputs(
        case=case,
        kv=kv,
        q=list(q.unbind(0)),
        kv_indices=list(slots.view(pools, -1).unbind(0)),
        qo_indptr=starts * case.q_len,
        kv_indptr=starts * case.kv_len,
        tree_mask=random_tree_mask(case, seed).to(device) if case.mask == "tree" else None,
    )


def request_slots(layout: str, requests: int, kv_len: int, *, device: str, seed: int) -> "torch.Tensor":
    """Slots of every request [requests * kv_len] int32, no slot twice; pages are aligned and never shared."""
    import torch

    kind, _, length = layout.partition(":")
    if kind != "pages":
        return layout_slots(layout, requests * kv_len, device=device, seed=seed)
    if not length.isdigit() or int(length) < 1:
        raise ValueError(f"layout {layout!r}: write pages:<tokens>, as in pages:64")
    page, each = int(length), -(-kv_len // int(length))
    generator = torch.Generator(device).manual_seed(seed + 1)
    order = 1 + torch.randperm(requests * each, device=device, generator=generator)  # page 0 holds the dummy
    slots = order[:, None] * page + torch.arange(page, device=device)
    return slots.view(requests, each * page)[:, :kv_len].flatten().int()


def layout_slots(layout: str, count: int, *, device: str, seed: int) -> "torch.Tensor":
    """Slots 1..count in the order that `layout` names, int32. Raises ValueError for an unknown layout."""
    import torch

    slots = torch.arange(1, count + 1, device=device, dtype=torch.int32)
    generator = torch.Generator(device).manual_seed(seed + 1)
    if layout == "contiguous":
        return slots
    if layout == "reversed":
        return slots.flip(0)
    if layout == "random":
        return slots[torch.randperm(count, device=device, generator=generator)]
    kind, _, length = layout.partition(":")
    if kind != "runs" or not length.isdigit() or int(length) < 1:
        raise ValueError(f"layout {layout!r}: choose contiguous, random, reversed, runs:<n> or pages:<n>")
    run = int(length)
    order = torch.randperm(-(-count // run), device=device, generator=generator)
    shuffled = (order[:, None] * run + torch.arange(run, device=device)).flatten()
    return slots[shuffled[shuffled < count]]


def random_tree_mask(case: VerifyCase, seed: int) -> "torch.Tensor":
    """Flat bool mask: every node hangs on a random earlier node and sees its ancestors and itself."""
    import torch

    choose = random.Random(seed)
    mask = torch.zeros(case.bs, case.q_len, case.q_len, dtype=torch.bool)
    for tree in mask:
        for node in range(case.q_len):
            if node:
                tree[node] = tree[choose.randrange(node)]
            tree[node, node] = True
    return mask.flatten()


@cache
def published(target_name: str) -> tuple[str, list[dict[str, Any]]]:
    """(note, rows) of peers measured elsewhere on this target, from data/peers; empty when there are none."""
    path = PEERS_DIR / f"{target_name}.json"
    if not path.is_file():
        return "", []
    data = json.loads(path.read_text())
    return data["note"], data["rows"]


def published_us(case: VerifyCase, target_name: str) -> dict[str, float]:
    """{peer: microseconds} published for this case; the layout must match, the mask cannot (see the note)."""
    key = (case.bs, case.heads, case.q_len, case.ctx, case.layout)
    for row in published(target_name)[1]:
        if (row["bs"], row["heads"], row["q_len"], row["ctx"], row["layout"]) == key:
            return {name.removesuffix("_us"): value for name, value in row.items() if name.endswith("_us")}
    return {}


def parse_case(name: str) -> VerifyCase:
    """The case that `VerifyCase.name` spells. Raises ValueError that shows the form."""
    found = CASE_NAME.fullmatch(name)
    if not found:
        raise ValueError(f"case {name!r}: write it like bs1-h8-q16-ctx46080-random-tree-bf16")
    bs, heads, q_len, ctx = (int(found[key]) for key in ("bs", "heads", "q_len", "ctx"))
    return VerifyCase(bs, heads, q_len, ctx, found["layout"], found["mask"], found["dtype"])


def table_cases() -> list[VerifyCase]:
    """The shapes of the peers table (data/peers/h200.json) in its layouts, and each in random layout."""
    rows = published("h200")[1]
    cases = [VerifyCase(r["bs"], r["heads"], r["q_len"], r["ctx"], r["layout"]) for r in rows]
    shuffled = [VerifyCase(c.bs, c.heads, c.q_len, c.ctx, "random") for c in cases]
    return list(dict.fromkeys(cases + shuffled))


def quick_cases() -> list[VerifyCase]:
    """A minute's worth: the issue's figures."""
    sizes = [(1, 1, 46080), (1, 16, 4096), (1, 16, 16384), (1, 16, 46080), (1, 64, 46080), (1, 16, 200000)]
    return [VerifyCase(bs, 8, q_len, ctx) for bs, q_len, ctx in sizes] + [VerifyCase(8, 8, 16, 25600)]


def random_cases(count: int = 20, seed: int = 0) -> list[VerifyCase]:
    """Unlisted shapes, log-uniform in context; the same for the same seed."""
    choose = random.Random(seed)
    cases = []
    for _ in range(count):
        bs, heads = choose.choice([1, 1, 1, 2, 3, 5, 8]), choose.choice([8, 8, 12, 16, 64])
        ctx = int(2 ** choose.uniform(11, 17))
        cases.append(VerifyCase(bs, heads, choose.randint(1, 65), max(512, ctx // bs)))
    return cases


def cpu_cases() -> list[VerifyCase]:
    """Small enough for two cores, fp32, both layouts."""
    sizes = [(1, 8, 1, 1024), (1, 8, 16, 512), (1, 8, 16, 2048), (4, 8, 8, 512)]
    return [
        VerifyCase(*size, layout, "tree", "fp32") for size in sizes for layout in ("contiguous", "random")
    ]


def pools_fit(case: VerifyCase, pools: int, target: HardwareTarget) -> bool:
    """Whether the rotating pools and a reference beside them fit in half of the device's memory."""
    return pools * case.shape.bytes < target.memory_bytes // 2
