"""Optional adapters to other projects' kernels: used when importable, else `supports` says what is missing.

Peers plan on the host from the lengths of one step. An eager call plans anew; a captured call replays the
plan of the call before it (so warm up with the lengths to be measured). Planning is not part of a captured
call's time.
"""

import inspect
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch

from workbench.attention import reference
from workbench.attention.plan import VerifyCall, VerifyPlan
from workbench.shapes import VerifyShape
from workbench.targets import HardwareTarget

LN2 = 0.6931471805599453
FLASHMLA_PAGE = 64


def row_counts(indptr: torch.Tensor) -> list[int]:
    """Lengths that an indptr [bs+1] describes."""
    return [b - a for a, b in pairwise(indptr.tolist())]


def listed_slots(call: VerifyCall) -> tuple[list[torch.Tensor], list[int]]:
    """(slots of every request, draft rows last; q_len of every request)."""
    q_lens = row_counts(call.qo_indptr)
    slots = list(call.kv_indices[: int(call.kv_indptr[-1])].split(row_counts(call.kv_indptr)))
    if call.draft_slots is not None:
        drafts = call.draft_slots[: sum(q_lens)].split(q_lens)
        slots = [torch.cat([prefix.long(), draft.long()]) for prefix, draft in zip(slots, drafts)]
    return slots, q_lens


def _indptr(lens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)


@dataclass(frozen=True)
class Peer:
    """A launcher (see `variants`) around a library: `prepare` reads lengths on the host, `run` launches."""

    package: str

    def supports(self, shape: VerifyShape, target: HardwareTarget) -> str | None:
        """None when the package can be imported."""
        root = self.package.split(".")[0]
        return None if find_spec(root) is not None else f"needs {root}, which is not installed"

    def default_tunables(
        self, shape: VerifyShape, target: HardwareTarget, batch_invariant: bool
    ) -> dict[str, Any]:
        return {}

    def choose_nsplit(
        self, shape: VerifyShape, target: HardwareTarget, tunables: dict[str, Any], batch_invariant: bool
    ) -> int:
        return 1  # the library decides

    def workspaces(self, shape: VerifyShape, nsplit: int, tunables: dict[str, Any]) -> dict[str, Any]:
        return {}

    def launch(self, plan: VerifyPlan, call: VerifyCall) -> None:
        """Plan, unless a capture is under way, then run; rows of q that no request owns are cleared."""
        if not (call.q.is_cuda and torch.cuda.is_current_stream_capturing()):
            plan.state["peer"] = self.prepare(plan, call)
            plan.state["used"] = int(call.qo_indptr[-1])
        self.run(plan.state["peer"], call)
        if plan.state["used"] < call.q.shape[0]:
            call.out[plan.state["used"] :].zero_()
            call.lse[plan.state["used"] :].fill_(-torch.inf)

    def prepare(self, plan: VerifyPlan, call: VerifyCall) -> Any:
        """What `run` needs besides the call; may read tensors."""
        raise NotImplementedError

    def run(self, state: Any, call: VerifyCall) -> None:
        """Write out and lse of every owned row."""
        raise NotImplementedError


@dataclass(frozen=True)
class FlashInferMla(Peer):
    """flashinfer.mla.BatchMLAPagedAttentionWrapper, page_size 1, causal."""

    package: str = "flashinfer"
    backend: str = "fa2"

    def prepare(self, plan: VerifyPlan, call: VerifyCall) -> Any:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        slots, q_lens = listed_slots(call)
        kv_lens, device = [len(s) for s in slots], call.q.device
        workspace = plan.state.setdefault(
            "float_workspace", torch.empty(1 << 27, dtype=torch.int8, device=device)
        )
        wrapper = BatchMLAPagedAttentionWrapper(workspace, backend=self.backend)
        wrapper.plan(
            _indptr(q_lens, device), _indptr(kv_lens, device), torch.cat(slots).int(),
            torch.tensor(kv_lens, dtype=torch.int32, device=device), call.q.shape[1], call.latent,
            call.q.shape[2] - call.latent, 1, True, call.sm_scale, call.q.dtype, call.kv.dtype,
        )  # fmt: skip
        return wrapper, sum(q_lens)

    def run(self, state: Any, call: VerifyCall) -> None:
        wrapper, used = state
        pool = call.kv.unsqueeze(1)  # [pool, page 1, D]
        wrapper.run(
            call.q[:used, :, : call.latent], call.q[:used, :, call.latent :], pool[..., : call.latent],
            pool[..., call.latent :], out=call.out[:used], lse=call.lse[:used], return_lse=True,
        )  # fmt: skip
        call.lse[:used].mul_(LN2)  # FlashInfer's is base 2


@dataclass(frozen=True)
class FlashMlaDense(Peer):
    """flash_mla's dense decode: 64-token pages in order, one q_len for all requests, causal."""

    package: str = "flash_mla"

    def prepare(self, plan: VerifyPlan, call: VerifyCall) -> Any:
        from flash_mla import get_mla_metadata

        slots, q_lens = listed_slots(call)
        if len(set(q_lens)) != 1:
            raise ValueError(
                f"qo_indptr gives q_len {sorted(set(q_lens))}: flashmla takes one for all requests"
            )
        seqlens = torch.tensor([len(s) for s in slots], dtype=torch.int32, device=call.q.device)
        metadata = get_mla_metadata(seqlens, q_lens[0] * call.q.shape[1], 1)
        return _page_table(slots), seqlens, metadata, q_lens[0]

    def run(self, state: Any, call: VerifyCall) -> None:
        from flash_mla import flash_mla_with_kvcache

        table, seqlens, (tiles, splits), q_len = state
        bs, used = len(seqlens), len(seqlens) * q_len
        pages = len(call.kv) // FLASHMLA_PAGE
        pool = call.kv[: pages * FLASHMLA_PAGE].view(pages, FLASHMLA_PAGE, 1, call.kv.shape[1])
        q = call.q[:used].view(bs, q_len, *call.q.shape[1:])
        out, lse = flash_mla_with_kvcache(
            q, pool, table, seqlens, call.latent, tiles, splits, softmax_scale=call.sm_scale, causal=True
        )
        call.out[:used].copy_(out.view(used, *out.shape[2:]))
        call.lse[:used].copy_(lse.transpose(1, 2).reshape(used, -1))  # lse [bs, H, q_len]


def _page_table(slots: list[torch.Tensor]) -> torch.Tensor:
    """[bs, pages] int32. Raises ValueError unless each run of 64 slots is one aligned page in order."""
    table = torch.zeros(
        (len(slots), max(-(-len(s) // FLASHMLA_PAGE) for s in slots)),
        dtype=torch.int32,
        device=slots[0].device,
    )
    for row, request in zip(table, slots):
        first = request[::FLASHMLA_PAGE]
        offset = torch.arange(len(request), device=request.device)
        in_order = first.repeat_interleave(FLASHMLA_PAGE)[: len(request)] + offset % FLASHMLA_PAGE
        if bool((first % FLASHMLA_PAGE != 0).any()) or not torch.equal(in_order, request):
            raise ValueError(
                "kv_indices are not aligned 64-token pages in order: flashmla takes no page_size 1"
            )
        row[: len(first)] = first // FLASHMLA_PAGE
    return table


@dataclass(frozen=True)
class SglangExtend(Peer):
    """SGLang's Triton extend attention, its custom mask over prefix and draft columns; it gives no LSE."""

    package: str = "sglang.srt.layers.attention.triton_ops.extend_attention"

    def prepare(self, plan: VerifyPlan, call: VerifyCall) -> Any:
        slots, q_lens = listed_slots(call)
        prefixes = [s[: len(s) - q] for s, q in zip(slots, q_lens)]
        cells = [q * len(s) for s, q in zip(slots, q_lens)]
        device = call.q.device
        visible = [reference.visibility(call, r, len(s)).flatten() for r, s in enumerate(slots)]
        return {
            "drafts": torch.cat([s[len(s) - q :] for s, q in zip(slots, q_lens)]).long(),
            "kv_indptr": _indptr([len(p) for p in prefixes], device),
            "kv_indices": torch.cat(prefixes),
            "custom_mask": None if call.tree_mask is None else torch.cat(visible).to(torch.uint8),
            "mask_indptr": _indptr(cells, device).long(),
            "max_len_extend": max(q_lens),
            "skip_prefix_custom_mask": call.mask_layout != "full",
        }

    def run(self, state: Any, call: VerifyCall) -> None:
        from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd

        arguments = dict(state)
        drafts = call.kv.index_select(0, arguments.pop("drafts")).unsqueeze(1)  # [T, 1, D]
        pool, used = call.kv.unsqueeze(1), len(drafts)
        known = inspect.signature(extend_attention_fwd).parameters
        scales = {name: 1.0 for name in ("k_scale", "v_scale") if name in known}  # added by later versions
        extend_attention_fwd(
            call.q[:used], drafts, drafts[..., : call.latent], call.out[:used], pool, pool[..., :
            call.latent], qo_indptr=call.qo_indptr, is_causal=True, sm_scale=call.sm_scale, **arguments,
            **scales,
        )  # fmt: skip
        call.lse.fill_(torch.nan)


@dataclass(frozen=True)
class FlexAttention(Peer):
    """torch.nn.attention.flex_attention over gathered rows: compiled on a GPU, materialised on CPU."""

    package: str = "torch"

    def prepare(self, plan: VerifyPlan, call: VerifyCall) -> Any:
        slots, q_lens = listed_slots(call)
        bs, q_max, kv_max = len(slots), max(1, *q_lens), max(1, *(len(s) for s in slots))
        device = call.q.device
        gather = torch.full((bs, kv_max), int(slots[0][0]) if len(slots[0]) else 0, device=device)
        rows = torch.zeros((bs, q_max), dtype=torch.long, device=device)
        visible = torch.zeros((bs, q_max, kv_max), dtype=torch.bool, device=device)
        owned, start = [], 0
        for r, (request, q_len) in enumerate(zip(slots, q_lens)):
            gather[r, : len(request)] = request
            rows[r, :q_len] = torch.arange(start, start + q_len, device=device)
            visible[r, :q_len, : len(request)] = reference.visibility(call, r, len(request))
            owned += [r * q_max + i for i in range(q_len)]
            start += q_len
        return gather, rows, torch.tensor(owned, device=device, dtype=torch.long), _block_mask(visible)

    def run(self, state: Any, call: VerifyCall) -> None:
        gather, rows, owned, block_mask = state
        if not len(owned):
            return
        k = call.kv[gather].nan_to_num_(0.0)[:, None]  # [bs, 1, kv, D]; a hidden row may hold anything
        q = call.q[rows].transpose(1, 2)  # [bs, H, q, D]
        options = {"block_mask": block_mask, "scale": call.sm_scale, "enable_gqa": True}
        out, lse = _flex(q, k, k[..., : call.latent], options)
        used = len(owned)
        call.out[:used].copy_(out.transpose(1, 2).flatten(0, 1)[owned])
        call.lse[:used].copy_(lse.transpose(1, 2).flatten(0, 1)[owned])


def _block_mask(visible: torch.Tensor) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        return visible[b, q, k]

    bs, q_len, kv_len = visible.shape
    return create_block_mask(mask_mod, bs, None, q_len, kv_len, device=visible.device.type)


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [bs, H, q, latent], lse [bs, H, q]); torch 2.9 renamed the request for the LSE."""
    from torch.nn.attention import flex_attention as flex

    attend = torch.compile(flex.flex_attention, dynamic=False) if q.is_cuda else flex.flex_attention
    with warnings.catch_warnings():
        # On CPU the unfused form is what is asked for: compiling it there takes longer than it saves.
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile", UserWarning)
        if hasattr(flex, "AuxRequest"):
            out, aux = attend(q, k, v, return_aux=flex.AuxRequest(lse=True), **options)
            return out, aux.lse
        return attend(q, k, v, return_lse=True, **options)


flashinfer_fa2 = FlashInferMla(backend="fa2")
flashinfer_fa3 = FlashInferMla(backend="fa3")
flashmla = FlashMlaDense()
sglang_extend = SglangExtend()
torch_flex = FlexAttention()
