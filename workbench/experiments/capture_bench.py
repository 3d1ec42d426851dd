"""What capturing costs: seconds and reserved memory per bucket, all buckets in one pool."""

from collections.abc import Callable, Sequence
from typing import Any

from workbench.decode.loop import SpeculativeDecoder
from workbench.experiments.step_bench import NAME, StepCase
from workbench.rows import Origin, Row, RowStatus
from workbench.targets import HardwareTarget


def bench_capture(
    case: StepCase,
    models: tuple[Any, Any],
    target: HardwareTarget,
    batch_sizes: Sequence[int],
    step: Callable[[str], None] = print,
) -> list[Row]:
    """One row per bucket: capture seconds and reserved bytes, all buckets in one pool, largest first."""
    width_slots = max(batch_sizes) * (case.budget + 1) + 1
    decoder = SpeculativeDecoder(
        *models, mode="step_graph", shape=case.shape, budget=case.budget,
        max_batch=max(batch_sizes), batch_sizes=batch_sizes, max_context=case.context,
        pool_tokens=width_slots,
        capture_progress=lambda bucket, done, n: step(f"captured bs {bucket.bs}: {done} of {n}"),
    )  # fmt: skip
    decoder.use_sampling(0.0)
    decoder.capture()
    error, report = decoder.runner.capture_error, decoder.runner.capture_report()
    total_s = sum(entry["capture_s"] for entry in report)
    common: dict[str, Any] = {
        "experiment": NAME, "variant": "capture", "target": target.name, "origin": Origin.MEASURED,
    }  # fmt: skip
    if error is not None:
        return [
            Row(case_id=f"{case.model}-capture", status=RowStatus.RUNTIME_ERROR, reason=str(error), **common)
        ]
    return [
        Row(
            case_id=f"{case.model}-capture-bs{entry['bs']}", status=RowStatus.PASSED,
            axes={"model": case.model, "ctx": case.context, "bs": entry["bs"], "width": entry["width"]},
            metrics={
                "capture_s": entry["capture_s"], "reserved_bytes": entry["reserved_bytes"],
                "nodes": entry["nodes"], "total_capture_s": total_s,
            },
            **common,
        )
        for entry in report
    ]  # fmt: skip
