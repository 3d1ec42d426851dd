"""What capturing costs: seconds and reserved memory per bucket, all buckets in one pool.

Warm-up (buffers, plans, compiling kernels, one eager step) comes before each capture and is counted apart.
"""

from collections.abc import Callable, Sequence
from typing import Any

from workbench.decode.loop import SpeculativeDecoder
from workbench.experiments.step_case import NAME, StepCase
from workbench.rows import Origin, Row, RowStatus
from workbench.targets import HardwareTarget


def bench_capture(
    case: StepCase,
    models: tuple[Any, Any],
    target: HardwareTarget,
    batch_sizes: Sequence[int],
    step: Callable[[str], None] = print,
) -> list[Row]:
    """One row per bucket, largest first: seconds of warm-up and of capture, reserved bytes."""
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
    totals = {f"total_{name}": sum(entry[name] for entry in report) for name in ("capture_s", "warmup_s")}
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
                **totals, **{n: entry[n] for n in ("capture_s", "warmup_s", "reserved_bytes", "nodes")},
            },
            **common,
        )
        for entry in report
    ]  # fmt: skip
