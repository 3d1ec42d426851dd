"""How far a result is from the oracle, and the bars it must pass before it may be timed."""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Relative Frobenius error per dtype; the peers measure 1.6e-3 to 2.3e-3 in bf16.
REL_FRO = {"bf16": 4e-3, "fp16": 1e-3, "fp32": 1e-5, "fp64": 1e-12}
COS_DIFF = 5e-6  # FlashMLA's bar for 1 - cosine, the tightest in the field
# LSE error over max(1, |lse|): scores are accumulated in fp32 whatever the inputs are. Other projects set a
# wider bar (FlashMLA's tests: 8.01 / 65536) and need it: FlashInfer's fa2 is at 1e-5 to 5e-5.
LSE_ERROR, PEER_LSE_ERROR = 1e-5, 8.01 / 65536


@dataclass(frozen=True)
class Errors:
    """Distance of one tensor from its fp64 reference; `finite` is False when a value is NaN or infinite."""

    rel_fro: float
    cos_diff: float
    max_abs: float
    finite: bool

    def as_dict(self) -> dict[str, float]:
        """The numbers, as a row's `errors`."""
        return {name: float(value) for name, value in asdict(self).items() if name != "finite"}


def compare(out: "torch.Tensor", ref: "torch.Tensor") -> Errors:
    """Errors of `out` against `ref` (same shape, any device); both are taken to fp64 first."""
    a, b = out.detach().double().cpu().flatten(), ref.detach().double().cpu().flatten()
    if a.shape != b.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}: expected {tuple(ref.shape)}, as ref has")
    finite = bool(a.isfinite().all())
    if not finite:
        return Errors(float("nan"), float("nan"), float("nan"), False)
    if a.numel() == 0:
        return Errors(0.0, 0.0, 0.0, True)
    norm = float(b.norm())
    difference = float((a - b).norm())
    energy = float(a @ a + b @ b)
    return Errors(
        rel_fro=difference / norm if norm else difference,
        cos_diff=1 - 2 * float(a @ b) / energy if energy else 0.0,
        max_abs=float((a - b).abs().max()),
        finite=True,
    )


def lse_distance(lse: "torch.Tensor", ref: "torch.Tensor") -> float:
    """Largest LSE error over max(1, |lse|); infinite on a NaN or where the rows that see nothing differ."""
    a, b = lse.detach().double().cpu(), ref.detach().double().cpu()
    empty = b == -float("inf")
    if bool(((a == -float("inf")) != empty).any()) or bool(a.isnan().any()):
        return float("inf")
    difference = (a - b)[~empty].abs() / b[~empty].abs().clamp_min(1.0)
    return float(difference.max()) if difference.numel() else 0.0


def judge(
    errors: Errors, dtype: str, lse_error: float | None = None, lse_bar: float = LSE_ERROR
) -> str | None:
    """None when within the bars of `dtype`, else the reason with the value and the bar."""
    if not errors.finite:
        return "out holds NaN or infinite values"
    if errors.rel_fro > REL_FRO[dtype]:
        return f"rel_fro {errors.rel_fro:.2e} exceeds {REL_FRO[dtype]:.0e} for {dtype}"
    if errors.cos_diff > COS_DIFF:
        return f"cos_diff {errors.cos_diff:.2e} exceeds {COS_DIFF:.0e}"
    if lse_error is not None and lse_error > lse_bar:
        return f"lse differs by {lse_error:.2e} of max(1, |lse|): expected at most {lse_bar:.1e}"
    return None
