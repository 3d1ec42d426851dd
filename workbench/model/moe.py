"""Mixture of experts: which experts a token takes, and the grouped products over just those."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.model.config import MoEConfig
from workbench.model.grouped_gemm import grouped_mlp
from workbench.model.layers import GatedMLP


class Router(nn.Module):
    """Scores, groups and picks experts in fp32 (DeepSeek-V3's `noaux_tc`, V2's two softmax rules)."""

    e_score_correction_bias: Tensor

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.routed, hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.routed, dtype=torch.float32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [T, k] fp32, expert ids [T, k] int64) of x [T, hidden]."""
        c = self.config
        logits = F.linear(x.float(), self.weight.float())
        scores = logits.sigmoid() if c.scoring == "sigmoid" else logits.softmax(dim=-1)
        choice = scores + self.e_score_correction_bias if c.selection == "noaux_tc" else scores
        if c.groups > 1 and c.selection != "greedy":
            choice = self.keep_best_groups(choice)
        ids = choice.topk(c.per_token, dim=-1, sorted=False).indices
        weights = scores.gather(1, ids)
        if c.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * c.scaling, ids

    def keep_best_groups(self, choice: Tensor) -> Tensor:
        """Mask the experts of all but the best groups; noaux_tc ranks groups by their two best experts."""
        c = self.config
        grouped = choice.unflatten(-1, (c.groups, -1))  # [T, groups, routed / groups]
        group_score = (
            grouped.topk(2, dim=-1).values.sum(-1) if c.selection == "noaux_tc" else grouped.amax(-1)
        )
        kept = torch.zeros_like(group_score, dtype=torch.bool)
        kept.scatter_(1, group_score.topk(c.groups_kept, dim=-1, sorted=False).indices, True)
        hidden = float("-inf") if c.selection == "noaux_tc" else 0.0
        return grouped.masked_fill(~kept[..., None], hidden).flatten(-2)


class Experts(nn.Module):
    """Stacked weights of the experts held in memory: gate and up in one matrix, [E, 2 * width, hidden]."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        held = config.resident_experts
        self.gate_up_proj = nn.Parameter(torch.empty(held, 2 * config.width, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(held, hidden_size, config.width))


class MoE(nn.Module):
    """Routed experts plus the shared ones that every token takes."""

    def __init__(self, config: MoEConfig, hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.gate = Router(config, hidden_size)
        self.experts = Experts(config, hidden_size)
        self.shared_experts = GatedMLP(hidden_size, config.width * config.shared) if config.shared else None

    def forward(self, x: Tensor) -> Tensor:
        """x [T, hidden] -> [T, hidden]."""
        weights, ids = self.gate(x)
        if self.config.resident:
            ids = ids % self.config.resident
        routed = grouped_mlp(x, ids, weights, self.experts.gate_up_proj, self.experts.down_proj)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)

    def forward_dense(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Every expert on every token, weighted by its route: for training few small experts.

        Returns (output [..., hidden], load [routed]: the share of routes each expert got).
        """
        flat = x.flatten(0, -2)
        with torch.autocast(x.device.type, enabled=False):  # routes are decided in fp32, as at decode
            weights, ids = self.gate(flat.float())
        routes = torch.zeros(len(flat), self.config.routed, device=x.device).scatter(1, ids, weights)
        gate, up = (
            F.linear(flat, self.experts.gate_up_proj.flatten(0, 1))
            .unflatten(-1, (-1, 2, self.config.width))
            .unbind(-2)
        )
        hidden = F.silu(gate) * up * routes[..., None].to(gate.dtype)  # [T, E, width]
        out = F.linear(hidden.flatten(1), self.experts.down_proj.transpose(0, 1).flatten(1))
        if self.shared_experts is not None:
            out = out + self.shared_experts(flat)
        load = torch.zeros_like(self.gate.e_score_correction_bias).scatter_add(
            0, ids.flatten(), torch.full((ids.numel(),), 1 / ids.numel(), device=x.device)
        )
        return out.view_as(x), load
