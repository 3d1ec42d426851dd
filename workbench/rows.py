"""The row schema: one measured, derived or projected result, and the rules that keep it honest."""

from enum import StrEnum
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

SCHEMA_VERSION = 1
Scalar = bool | int | float | str | None


def first_line(error: BaseException) -> str:
    """What an error says, in one line; its type when it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


class Origin(StrEnum):
    MEASURED = "measured"
    DERIVED = "derived"
    PROJECTED = "projected"


class RowStatus(StrEnum):
    PASSED = "PASSED"
    INCORRECT = "INCORRECT"
    UNSUPPORTED = "UNSUPPORTED"
    COMPILE_ERROR = "COMPILE_ERROR"
    RUNTIME_ERROR = "RUNTIME_ERROR"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TIMEOUT = "TIMEOUT"
    SKIPPED = "SKIPPED"


class RunStatus(StrEnum):
    RUNNING = "RUNNING"
    PASSED = "PASSED"
    FAILED = "FAILED"
    KILLED = "KILLED"
    TIMEOUT = "TIMEOUT"
    INTERRUPTED = "INTERRUPTED"
    SKIPPED = "SKIPPED"


class Timing(BaseModel):
    """A distribution of latencies in microseconds, with the state it was taken in."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    mode: Literal["eager", "graph", "host"]
    l2: Literal["cold", "warm", "n/a"]
    n: int = Field(ge=1)
    median_us: float = Field(gt=0)
    p10_us: float = Field(gt=0)
    p90_us: float = Field(gt=0)
    samples: tuple[float, ...] = ()
    stable: bool | None = None  # relative spread small enough to compare with others
    span_us: float | None = None  # end to end, launches and gaps included


class GpuState(BaseModel):
    """What the device was doing while the samples were taken; None where it cannot tell."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    clock_min_mhz: float | None = None
    clock_max_mhz: float | None = None
    temperature_c: float | None = None
    throttle_reasons: str | None = None
    dram_util: float | None = None  # 0..1
    tensor_util: float | None = None  # 0..1


class Row(BaseModel):
    """One result. `axes` identify the case, `metrics` hold further numbers with units in their names."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: int = SCHEMA_VERSION
    run_id: str = ""
    case_id: str
    experiment: str
    variant: str
    target: str
    origin: Origin
    status: RowStatus
    reason: str = ""
    axes: dict[str, Scalar] = Field(default_factory=dict)
    errors: dict[str, float] = Field(default_factory=dict)  # rel_fro, cos_diff, max_abs, lse_error
    timing: Timing | None = None
    bytes: int | None = None
    flops: int | None = None
    floor_us: float | None = None
    metrics: dict[str, Scalar] = Field(default_factory=dict)
    gpu: GpuState | None = None
    repro: str = ""

    @model_validator(mode="after")
    def _timing_needs_a_passed_check(self) -> "Row":
        if self.timing is not None and self.status is not RowStatus.PASSED:
            raise ValueError(f"row {self.case_id!r} is {self.status} and has a timing: drop the timing")
        if self.status is not RowStatus.PASSED and not self.reason:
            raise ValueError(f"row {self.case_id!r} has status {self.status} without a reason: say why")
        if self.timing is not None and self.origin is not Origin.MEASURED:
            raise ValueError(
                f"row {self.case_id!r} is {self.origin} but carries a timing: put the number into metrics"
            )
        return self

    @property
    def floor_ratio(self) -> float | None:
        """Measured median over the floor; 1.0 is the limit of the hardware."""
        return self.timing.median_us / self.floor_us if self.timing and self.floor_us else None

    def flat(self) -> dict[str, Any]:
        """One level of columns for a table: axis_*, error_*, metric_*, gpu_* and the timing's fields."""
        flat: dict[str, Any] = self.model_dump(
            mode="json", exclude={"axes", "errors", "metrics", "timing", "gpu"}
        )
        flat["floor_ratio"] = self.floor_ratio
        timing = self.timing.model_dump() if self.timing else dict.fromkeys(Timing.model_fields)
        flat |= timing | {"samples": list(timing["samples"] or ())}
        gpu = self.gpu.model_dump() if self.gpu else dict.fromkeys(GpuState.model_fields)
        for prefix, values in (
            ("axis", self.axes),
            ("error", self.errors),
            ("metric", self.metrics),
            ("gpu", gpu),
        ):
            flat |= {f"{prefix}_{name}": value for name, value in values.items()}
        return flat
