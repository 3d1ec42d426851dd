"""How many tokens of KV fit beside a model: a ledger of named bytes, nothing fitted.

The pool follows SGLang's rule (`--mem-fraction-static`): fraction x free memory before loading, less what is
loaded. Graphs and activations live in the remaining 1 - fraction; the plan checks that they fit there.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from workbench.model.config import DrafterConfig, TargetConfig
from workbench.model.presets import rank_config, rank_drafter
from workbench.targets import HardwareTarget

GIB = 2**30
Placement = Literal["sharded", "replicated"]
DrafterKV = Literal["sharded", "replicated", "windowed"]


@dataclass(frozen=True)
class Quantisation:
    """Bits of one routed-expert weight: `bits` plus one scale of `scale_bits` per `group` weights."""

    name: str
    bits: float
    scale_bits: float = 0.0
    group: int = 1

    @property
    def bits_per_weight(self) -> float:
        return self.bits + self.scale_bits / self.group


QUANTISATIONS = {
    q.name: q
    for q in (
        Quantisation("bf16", 16),
        Quantisation("fp8", 8, 32, 128 * 128),
        Quantisation("int4-g32", 4, 16, 32),  # Kimi K2.5/K2.6 as published: bf16 scales
        Quantisation("mxfp4", 4, 8, 32),  # e8m0 scales
    )
}


@dataclass(frozen=True)
class Assumptions:
    """What a configuration file does not say. Each value is one side of a question a reader can check."""

    quantisation: str = "int4-g32"
    drafter_weights: Placement = "sharded"
    drafter_kv: DrafterKV = "sharded"
    outside_bytes: int = GIB // 2  # CUDA context and collectives, gone before the free memory is read
    vision_bytes: int = 0  # a multimodal checkpoint's vision tower on this rank

    def describe(self, *, has_drafter: bool) -> str:
        drafter = f", drafter {self.drafter_weights}, its KV {self.drafter_kv}" if has_drafter else ""
        vision = f", vision {self.vision_bytes / GIB:.2f} GiB" if self.vision_bytes else ", no vision"
        outside = f", context and collectives {self.outside_bytes / GIB:.1f} GiB"
        return f"{self.quantisation}{drafter}{outside}{vision}"


@dataclass(frozen=True)
class Service:
    """One deployment: the whole model over `ranks` cards of `hardware`."""

    model: TargetConfig
    hardware: HardwareTarget
    ranks: int = 8
    mem_fraction: float = 0.94
    drafter: DrafterConfig | None = None
    verify_rows: int = 8  # rows per request and step: budget + 1
    running: int = 8
    prefill_tokens: int = 8192  # one chunk
    assumptions: Assumptions = Assumptions()

    def __post_init__(self) -> None:
        if not 0 < self.mem_fraction < 1:
            raise ValueError(f"mem_fraction={self.mem_fraction} must lie between 0 and 1, e.g. 0.9")
        if self.model.num_heads % self.ranks:
            raise ValueError(
                f"{self.model.num_heads} heads do not divide over {self.ranks} ranks: change --ranks"
            )
        if self.assumptions.quantisation not in QUANTISATIONS:
            known = ", ".join(QUANTISATIONS)
            raise ValueError(f"quantisation {self.assumptions.quantisation!r}: choose one of {known}")


@dataclass(frozen=True)
class Term:
    """One line of the ledger, bytes on one rank."""

    name: str
    bytes: float
    source: str


@dataclass(frozen=True)
class Plan:
    """The ledger of a service and what follows from it."""

    service: Service
    loaded: tuple[Term, ...]  # weights, inside the fraction
    reserve: tuple[Term, ...]  # graphs and activations, outside it
    kv_per_token: tuple[Term, ...]
    kv_fixed: tuple[Term, ...]  # KV that does not grow with the pool

    @property
    def name(self) -> str:
        """The assumptions in words."""
        return self.service.assumptions.describe(has_drafter=self.service.drafter is not None)

    @property
    def free_bytes(self) -> float:
        """Free memory before the model is loaded."""
        return self.service.hardware.memory_bytes - self.service.assumptions.outside_bytes

    @property
    def loaded_bytes(self) -> float:
        return sum(term.bytes for term in (*self.loaded, *self.kv_fixed))

    @property
    def token_bytes(self) -> float:
        return sum(term.bytes for term in self.kv_per_token)

    @property
    def pool_bytes(self) -> float:
        """Room for KV; negative when the weights alone do not fit."""
        return self.service.mem_fraction * self.free_bytes - self.loaded_bytes

    @property
    def quantisation(self) -> str:
        return self.service.assumptions.quantisation

    @property
    def pool_tokens(self) -> int:
        return max(0, int(self.pool_bytes // self.token_bytes))

    @property
    def reserve_left_bytes(self) -> float:
        """What is left of 1 - fraction after graphs and activations; negative = out of memory at run time."""
        return (1 - self.service.mem_fraction) * self.free_bytes - sum(term.bytes for term in self.reserve)

    @property
    def longest_context(self) -> int:
        """One request's tokens: the pool less its verify rows, capped by the model's positions."""
        return max(0, min(self.pool_tokens - self.service.verify_rows, self.service.model.max_position))

    def requests_at(self, context: int) -> int:
        """How many requests of `context` tokens run at once, each with its verify rows."""
        return min(self.pool_tokens // (context + self.service.verify_rows), self.service.running)

    def fraction_for(self, tokens: int) -> float:
        """The mem_fraction that gives a pool of `tokens`; above 1 means it does not fit at any setting."""
        return (tokens * self.token_bytes + self.loaded_bytes) / self.free_bytes


def make_plan(service: Service) -> Plan:
    """Every term of one rank, from the configurations and the named assumptions."""
    rank = rank_config(service.model, service.ranks)
    return Plan(
        service=service,
        loaded=(*weight_terms(rank, service), *drafter_terms(service)),
        reserve=reserve_terms(rank, service),
        kv_per_token=kv_terms(service),
        kv_fixed=fixed_kv_terms(service),
    )


def weight_terms(rank: TargetConfig, service: Service) -> tuple[Term, ...]:
    """Weights of the target on one rank; everything but the routed experts is bf16."""
    quantisation = QUANTISATIONS[service.assumptions.quantisation]
    attention = rank.num_layers * rank.attention_params
    rest = rank.dense_params - rank.embedding_params - attention
    bits = quantisation.bits_per_weight
    terms = [
        Term(
            "routed experts",
            rank.routed_params * bits / 8,
            f"{rank.routed_params:,} weights at {bits:g} bits",
        ),
        Term("attention", attention * 2, "bf16; latent projections whole on every rank, heads divided"),
        Term("dense MLP, shared experts, routers", rest * 2, "bf16, widths divided by the ranks"),
        Term("embedding and head", rank.embedding_params * 2, "bf16, vocabulary divided by the ranks"),
    ]
    if service.assumptions.vision_bytes:
        terms.append(Term("vision tower", service.assumptions.vision_bytes, "assumed: whole on every rank"))
    return tuple(terms)


def drafter_terms(service: Service) -> tuple[Term, ...]:
    if service.drafter is None:
        return ()
    placement = service.assumptions.drafter_weights
    config = rank_drafter(service.drafter, service.ranks) if placement == "sharded" else service.drafter
    return (Term("drafter weights", config.weight_bytes, f"bf16, {placement}"),)


def kv_terms(service: Service) -> tuple[Term, ...]:
    model = Term(
        "target KV", service.model.kv_bytes_per_token, "latent + rope of every layer, whole on every rank"
    )
    if service.drafter is None:
        return (model,)
    kind = service.assumptions.drafter_kv
    layers = 1 if kind == "windowed" else service.drafter.num_layers
    config = service.drafter if kind == "replicated" else rank_drafter(service.drafter, service.ranks)
    per_token = config.kv_bytes_per_token // service.drafter.num_layers * layers
    return (model, Term("drafter KV", per_token, f"{kind}, {layers} layers grow with the context"))


def fixed_kv_terms(service: Service) -> tuple[Term, ...]:
    """Sliding-window layers hold one window per running request."""
    if service.drafter is None or service.assumptions.drafter_kv != "windowed":
        return ()
    config = rank_drafter(service.drafter, service.ranks)
    layers, window = config.num_layers - 1, config.sliding_window or 2048
    held = service.running * window * layers * config.kv_bytes_per_token // config.num_layers
    return (Term("drafter windows", held, f"{service.running} requests x {window} tokens x {layers} layers"),)


def reserve_terms(rank: TargetConfig, service: Service) -> tuple[Term, ...]:
    """Outside the fraction: activations of a prefill chunk, the graphs' shared pool at the largest bucket."""
    rows = service.running * service.verify_rows
    vocab = service.model.vocab_size
    return (
        Term(
            "prefill activations",
            activation_bytes(rank, service.prefill_tokens),
            f"{service.prefill_tokens} tokens",
        ),
        Term(
            "graph pool",
            activation_bytes(rank, rows) + 2 * rows * vocab * 4,
            f"{rows} rows, logits twice in fp32",
        ),
    )


def activation_bytes(rank: TargetConfig, tokens: int) -> float:
    """bf16 tensors alive at once in one layer: residual, its norm, the queries, or the routed expert rows."""
    attention = rank.num_heads * (rank.nope + rank.width + rank.latent + rank.v_head_dim)
    mlp = 2 * rank.intermediate_size
    if rank.moe:
        mlp = max(mlp, rank.moe.per_token * (3 * rank.moe.width + rank.hidden_size))
    return 2.0 * tokens * (3 * rank.hidden_size + max(attention, mlp))


def assumption_grid(service: Service, quantisations: tuple[str, ...], vision_bytes: int) -> list[Assumptions]:
    """Both sides of every question that the configuration leaves open."""
    weights_sides: tuple[Placement, ...] = ("sharded", "replicated") if service.drafter else ("sharded",)
    kv_sides: tuple[DrafterKV, ...] = (
        ("sharded", "replicated", "windowed") if service.drafter else ("sharded",)
    )
    low, high = GIB // 2, 2 * GIB
    return [
        Assumptions(quantisation, weights, kv, outside, vision)
        for quantisation, weights, kv, outside, vision in product(
            quantisations,
            weights_sides,
            kv_sides,
            (low, high),
            dict.fromkeys((0, vision_bytes)),
        )
    ]


@dataclass(frozen=True)
class Bracket:
    """The plans of all assumption combinations, worst first."""

    plans: tuple[Plan, ...]

    @property
    def worst(self) -> Plan:
        return self.plans[0]

    @property
    def best(self) -> Plan:
        return self.plans[-1]

    def nearest(self, tokens: int, quantisation: str | None = None) -> Plan:
        """The combination whose pool is closest to an observed one, of those with `quantisation` if given."""
        plans = [p for p in self.plans if quantisation in (None, p.service.assumptions.quantisation)]
        return min(plans, key=lambda plan: abs(plan.pool_tokens - tokens))


def bracket(
    service: Service, *, quantisations: tuple[str, ...] = ("int4-g32", "mxfp4"), vision_bytes: int = 0
) -> Bracket:
    """Plans under every combination of assumptions."""
    grid = assumption_grid(service, quantisations, vision_bytes)
    plans = [make_plan(replace(service, assumptions=assumptions)) for assumptions in grid]
    return Bracket(tuple(sorted(plans, key=lambda plan: plan.pool_tokens)))
