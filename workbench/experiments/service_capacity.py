"""How many tokens of KV does a service hold, and what would a step cost at best?"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from workbench import targets
from workbench.model.capacity import (
    GIB,
    QUANTISATIONS,
    Assumptions,
    Bracket,
    Plan,
    Service,
    bracket,
    make_plan,
)
from workbench.model.hf_config import drafter_config, expert_quantisation, read_config, target_config
from workbench.model.presets import KIMI_DRAFTER, KIMI_K2
from workbench.model.roofline import step_floor
from workbench.rows import Origin, Row, RowStatus, Scalar

EXPERIMENT = "service_capacity"
STORY_POOL_TOKENS = 218_000  # the pool a running service reported: Kimi K2.6, 8 x RTX PRO 6000, fraction 0.94
VISION_BYTES = 800_000_000  # Kimi K2.5's vision tower: 0.4 billion parameters in bf16
CONTEXTS = (4_096, 16_384, 46_000, 65_536, 131_072, 200_000)
PROJECTED = ("h100", "h200", "b200", "rtx-pro-6000")


class Params(BaseModel):
    """Which service is planned."""

    model_config = ConfigDict(extra="forbid")
    target: str = Field("cpu", description="hardware target that runs this notebook")
    seed: int = Field(0, description="unused: nothing here is drawn")
    model: str = Field("kimi-k2.6", description="kimi-k2.6, or a folder with a config.json")
    quantisation: str = Field("", description="of the routed experts; empty = what the model's config says")
    drafter: str = Field("kimi-dflash", description="kimi-dflash, none, or a folder with a config.json")
    hardware: str = Field("rtx-pro-6000", description="hardware target that serves")
    ranks: int = Field(8, ge=1, description="tensor-parallel ranks")
    mem_fraction: float = Field(0.94, gt=0, lt=1, description="--mem-fraction-static")
    context: int = Field(200_000, ge=1, description="tokens per request that should fit")
    running: int = Field(8, ge=1, description="requests that run at once")
    verify_rows: int = Field(8, ge=1, description="verify rows per request: draft budget + 1")
    observed_tokens: int = Field(STORY_POOL_TOKENS, ge=0, description="pool a server reported; 0 = none")
    larger_context: int = Field(256_000, ge=1, description="context to find the fraction for")


def service_of(params: Params) -> Service:
    """The service that `params` describe. Raises ValueError or FileNotFoundError naming what is wrong."""
    model = KIMI_K2
    if params.model != "kimi-k2.6":
        folder = Path(params.model)
        model = target_config(read_config(folder), folder)
    drafter = KIMI_DRAFTER if params.drafter == "kimi-dflash" else None
    if params.drafter not in ("kimi-dflash", "none"):
        folder = Path(params.drafter)
        drafter = drafter_config(read_config(folder), folder)
    return Service(
        model=model,
        hardware=targets.load(params.hardware),
        ranks=params.ranks,
        mem_fraction=params.mem_fraction,
        drafter=drafter,
        verify_rows=params.verify_rows,
        running=params.running,
    )


def bracket_of(params: Params) -> Bracket:
    """All assumption combinations; only Kimi K2.6 is known to carry a vision tower."""
    vision = VISION_BYTES if params.model == "kimi-k2.6" else 0
    return bracket(service_of(params), quantisations=quantisations_of(params), vision_bytes=vision)


def quantisations_of(params: Params) -> tuple[str, ...]:
    """How routed experts may be stored: as asked, as config.json says, or both 4-bit forms of Kimi."""
    if params.quantisation:
        return (params.quantisation,)
    if params.model == "kimi-k2.6":
        return ("int4-g32", "mxfp4")
    folder = Path(params.model)
    return (expert_quantisation(read_config(folder), folder),)


def run(params: Params, step: Callable[[str], None] = print) -> list[Row]:
    """Rows `plan/*` per assumption combination, `term/*` of the chosen one, `target/*`, `roofline/*`."""
    step("plan every combination of assumptions")
    plans = bracket_of(params)
    chosen = choose(plans, params)
    rows = [plan_row(plan, params, plans) for plan in plans.plans]
    rows += [term_row(kind, term, chosen, params) for kind, term in ledger(chosen)]
    step("plan the other targets")
    rows += [target_row(name, chosen, params) for name in PROJECTED]
    step("project step times")
    return rows + [roofline_row(name, context, chosen, params) for name in PROJECTED for context in CONTEXTS]


def choose(plans: Bracket, params: Params) -> Plan:
    """The combination nearest to what was observed, else the default assumptions."""
    if params.observed_tokens:
        return plans.nearest(params.observed_tokens)
    return make_plan(replace(plans.best.service, assumptions=Assumptions(plans.best.quantisation)))


def ledger(plan: Plan) -> list[tuple[str, object]]:
    """(kind, term) of every line of a plan."""
    groups = {
        "loaded": plan.loaded,
        "fixed KV": plan.kv_fixed,
        "reserve": plan.reserve,
        "per token": plan.kv_per_token,
    }
    return [(kind, term) for kind, terms in groups.items() for term in terms]


def repro(params: Params) -> str:
    return (
        f"workbench capacity --model {params.model} --drafter {params.drafter} --hardware {params.hardware} "
        f"--ranks {params.ranks} --mem-fraction {params.mem_fraction} --running {params.running} "
        f"--verify-rows {params.verify_rows} --observed {params.observed_tokens}"
    )


def make_row(
    case: str, origin: Origin, params: Params, variant: str, axes: dict[str, Scalar], **extra: object
) -> Row:
    return Row(
        case_id=case,
        experiment=EXPERIMENT,
        variant=variant,
        target=str(axes.get("hardware", params.hardware)),
        origin=origin,
        status=RowStatus.PASSED,
        axes=axes,
        repro=repro(params),
        **extra,  # type: ignore[arg-type]
    )


def plan_metrics(plan: Plan, params: Params) -> dict[str, Scalar]:
    return {
        "pool_tokens": plan.pool_tokens,
        "pool_gib": plan.pool_bytes / GIB,
        "loaded_gib": plan.loaded_bytes / GIB,
        "token_bytes": plan.token_bytes,
        "longest_context": plan.longest_context,
        "fits": plan.longest_context >= params.context,
        "requests_at_46k": plan.requests_at(46_000),
        "fraction_for_larger": plan.fraction_for(params.larger_context),
        "reserve_left_gib": plan.reserve_left_bytes / GIB,
    }


def plan_row(plan: Plan, params: Params, plans: Bracket) -> Row:
    a = plan.service.assumptions
    name = plan.name
    axes: dict[str, Scalar] = {
        "quantisation": a.quantisation,
        "drafter_weights": a.drafter_weights,
        "drafter_kv": a.drafter_kv,
        "outside_gib": a.outside_bytes / GIB,
        "vision_gib": round(a.vision_bytes / GIB, 2),
    }
    marks = {
        "worst": plan is plans.worst,
        "best": plan is plans.best,
        "nearest": plan is choose(plans, params),
    }
    metrics = (
        plan_metrics(plan, params)
        | marks
        | {"context": params.context, "larger_context": params.larger_context}
    )
    if params.observed_tokens:
        off = plan.pool_tokens / params.observed_tokens - 1
        metrics |= {"observed_tokens": params.observed_tokens, "off_by": off}
    return make_row(f"plan/{name}", Origin.DERIVED, params, name, axes, metrics=metrics)


def term_row(kind: str, term: object, plan: Plan, params: Params) -> Row:
    name, size, source = term.name, term.bytes, term.source  # type: ignore[attr-defined]
    axes: dict[str, Scalar] = {"kind": kind, "term": name}
    metrics: dict[str, Scalar] = {"gib": size / GIB, "source": source}
    return make_row(
        f"term/{kind}/{name}", Origin.DERIVED, params, name, axes, bytes=int(size), metrics=metrics
    )


def target_row(name: str, chosen: Plan, params: Params) -> Row:
    """The chosen assumptions on another target; a model that does not fit is UNSUPPORTED there."""
    plan = make_plan(replace(chosen.service, hardware=targets.load(name)))
    axes: dict[str, Scalar] = {"hardware": name}
    row = make_row(f"target/{name}", Origin.DERIVED, params, name, axes, metrics=plan_metrics(plan, params))
    if plan.pool_tokens:
        return row
    reason = (
        f"{plan.loaded_bytes / GIB:.0f} GiB of weights leave no room for KV at fraction {params.mem_fraction}"
    )
    return row.model_copy(update={"status": RowStatus.UNSUPPORTED, "reason": reason})


def roofline_row(name: str, context: int, chosen: Plan, params: Params) -> Row:
    bits = QUANTISATIONS[chosen.service.assumptions.quantisation].bits_per_weight
    floor = step_floor(
        chosen.service.model,
        targets.load(name),
        context=context,
        rows=params.verify_rows,
        ranks=params.ranks,
        expert_bits=bits,
        drafter=chosen.service.drafter,
    )
    axes: dict[str, Scalar] = {"hardware": name, "context": context, "bs": 1}
    metrics: dict[str, Scalar] = {
        "weights_us": floor.weights_us,
        "attention_us": floor.attention_us,
        "drafter_us": floor.drafter_us,
        "collectives_us": floor.collectives_us,
    }
    case = f"roofline/{name}/{context}"
    return make_row(case, Origin.PROJECTED, params, name, axes, floor_us=floor.total_us, metrics=metrics)


def findings(rows: list[Row]) -> list[str]:
    """The bracket, what lies nearest, whether the context fits, the inverse questions, the projection."""
    plans = [row for row in rows if row.case_id.startswith("plan/")]
    worst, best, nearest = (
        next((r for r in plans if r.metrics[k]), None) for k in ("worst", "best", "nearest")
    )
    assert worst and best
    found = [
        f"The pool holds between {worst.metrics['pool_tokens']:,} tokens ({worst.variant}) and "
        f"{best.metrics['pool_tokens']:,} ({best.variant}), depending on what the configuration leaves open."
    ]
    reference = nearest or best
    if nearest and "observed_tokens" in nearest.metrics:
        found += observed_findings(plans, nearest, worst, best)
    fitting = sum(bool(row.metrics["fits"]) for row in plans)
    context = int(str(reference.metrics["context"]))
    verdict = "fits" if reference.metrics["fits"] else "does not fit"
    found.append(
        f"A request of {context:,} tokens {verdict} with {reference.variant}, and fits in {fitting} of "
        f"{len(plans)} combinations."
    )
    fraction = float(str(reference.metrics["fraction_for_larger"]))
    larger = int(str(reference.metrics["larger_context"]))
    need = f"a memory fraction of {fraction:.3f}" if fraction < 1 else f"{fraction:.2f} times the free memory"
    found.append(
        f"{larger:,} tokens would need {need}; {reference.metrics['requests_at_46k']} requests run "
        "at 46,000 tokens each."
    )
    return found + roofline_findings(rows)


def observed_findings(plans: list[Row], nearest: Row, worst: Row, best: Row) -> list[str]:
    """How the observed pool lies in the bracket, and which combination explains it best."""
    observed = int(str(nearest.metrics["observed_tokens"]))
    inside = int(str(worst.metrics["pool_tokens"])) <= observed <= int(str(best.metrics["pool_tokens"]))
    published = [row for row in plans if row.axes["quantisation"] == "int4-g32"] or plans
    close = min(published, key=lambda row: abs(float(str(row.metrics["off_by"]))))
    text = (
        f"The observed {observed:,} tokens lie {'inside' if inside else 'outside'} that bracket; nearest is "
        f"{nearest.variant} with {nearest.metrics['pool_tokens']:,} ({nearest.metrics['off_by']:+.1%})"
    )
    if close is not nearest:
        text += (
            f", and with the published int4 scales {close.variant} with {close.metrics['pool_tokens']:,} "
            f"({close.metrics['off_by']:+.1%})"
        )
    return [text + "."]


def roofline_findings(rows: list[Row]) -> list[str]:
    floors = [row for row in rows if row.origin is Origin.PROJECTED and row.axes["context"] == 46_000]
    parts = [f"{(row.floor_us or 0) / 1e3:.1f} ms on {row.variant}" for row in floors]
    return [f"Projected, not measured: a verify step at 46,000 tokens takes at least {', '.join(parts)}."]
