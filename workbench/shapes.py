"""Problem shapes: what a step must move and compute, and the time no kernel can beat."""

from dataclasses import dataclass

from workbench.targets import HardwareTarget

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class VerifyShape:
    """Maxima of one verify-attention bucket: `heads` query heads of a request share each latent row."""

    bs: int
    heads: int
    max_q_len: int  # tree rows per request, root included
    max_kv_len: int  # rows a request attends to: prefix plus its own draft rows
    dtype: str = "bf16"
    latent: int = 512
    rope: int = 64
    index_dtype: str = "int32"
    mask_layout: str = "tree"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype {self.dtype!r}: choose one of {', '.join(DTYPE_BYTES)}")
        for name in ("bs", "heads", "latent"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("max_q_len", "max_kv_len", "rope"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")

    @property
    def width(self) -> int:
        """Columns of a latent row: latent + rope."""
        return self.latent + self.rope

    @property
    def rows(self) -> int:
        """Query rows that share a request's KV: heads x q_len."""
        return self.heads * self.max_q_len

    @property
    def kv_bytes(self) -> int:
        """Each request's rows read once."""
        return self.bs * self.max_kv_len * self.width * DTYPE_BYTES[self.dtype]

    @property
    def q_bytes(self) -> int:
        return self.bs * self.rows * self.width * DTYPE_BYTES[self.dtype]

    @property
    def out_bytes(self) -> int:
        """Output in the query's dtype and a 4-byte LSE per row."""
        return self.bs * self.rows * (self.latent * DTYPE_BYTES[self.dtype] + 4)

    @property
    def index_bytes(self) -> int:
        return self.bs * self.max_kv_len * (8 if self.index_dtype == "int64" else 4)

    @property
    def bytes(self) -> int:
        """Least bytes through DRAM: every input read once, every output written once."""
        return self.kv_bytes + self.q_bytes + self.out_bytes + self.index_bytes

    @property
    def flops(self) -> int:
        """Multiply-adds of q.k over `width` and p.v over `latent` columns, two operations each."""
        return 2 * self.bs * self.rows * self.max_kv_len * (self.width + self.latent)

    def memory_us(self, target: HardwareTarget) -> float:
        return self.bytes / (target.dram_gbps * 1e3)

    def compute_us(self, target: HardwareTarget) -> float:
        return self.flops / (target.tensor_tflops * 1e6)

    def floor_us(self, target: HardwareTarget) -> float:
        """max(bytes / bandwidth, flops / tensor rate); no launch, merge or padding cost."""
        return max(self.memory_us(target), self.compute_us(target))

    def bound(self, target: HardwareTarget) -> str:
        """Which of the two sets the floor: "memory" or "compute"."""
        return "memory" if self.memory_us(target) >= self.compute_us(target) else "compute"
