"""Compiles the Triton kernels for GPUs this machine may not have; prints one JSON line per kernel.

Runs in its own process: under Triton's interpreter, which CPU tests use, nothing can be compiled.
usage: compile_kernels.py VARIANT TARGET [tunable=value ...]
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from workbench import targets
from workbench.attention.variants import find
from workbench.shapes import VerifyShape

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    "q": "*bf16", "kv": "*bf16", "qo_indptr": "*i32", "kv_indptr": "*i32", "kv_indices": "*i64",
    "draft_slots": "*i64", "tree_mask": "*u8", "partial_out": "*bf16", "partial_lse": "*fp32", "out": "*bf16",
    "lse": "*fp32",
}  # fmt: skip
CONSTANTS = {
    "LATENT": 512, "ROPE": 64, "LATENT_P2": 512, "ROPE_P2": 64, "MASK": 1, "HAS_DRAFT_SLOTS": True,
    "REQUESTS_P2": 8, "INTERPRETED": False, "SPLITS_P2": 64, "AHEAD": 8,
}  # fmt: skip


def compile_kernel(kernel: Any, arch: int, constants: dict[str, Any], **options: int) -> dict[str, Any]:
    """Registers, stack, shared memory and instruction counts of one kernel."""
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    signature, hints = {}, {}
    for i, name in enumerate(kernel.arg_names):
        signature[name] = "constexpr" if name in constants else POINTERS.get(name, "i32")
        if name == "scale_log2":
            signature[name] = "fp32"
        if name in POINTERS or "stride" in name:
            hints[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs=constants, attrs=hints)
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    path = Path(built.metadata_group[next(n for n in built.metadata_group if n.endswith(".cubin"))])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found is not None, usage
    ptx = built.asm["ptx"]
    return {
        "kernel": kernel.__name__, "arch": arch, "registers": int(found[1]), "stack_bytes": int(found[2]),
        "smem_bytes": built.metadata.shared, "async_copies": ptx.count("cp.async.cg"),
        "wgmma": ptx.count("wgmma.mma_async"), "mma": ptx.count("mma.sync"),
    }  # fmt: skip


def main(variant: str, target_name: str, *overrides: str) -> None:
    """Compile the variant's kernels with its default tunables for small and large row counts."""
    target, launcher = targets.load(target_name), find(variant).load()
    arch = int("".join(c for c in target.arch if c.isdigit()))
    for q_len in (1, 64):
        shape = VerifyShape(8, 8, q_len, 46080)
        tune = launcher.default_tunables(shape, target, False) | {
            name: int(value) for name, value in (pair.split("=") for pair in overrides)
        }
        constants = CONSTANTS | {
            "BLOCK_M": tune["block_m"], "BLOCK_N": tune["block_n"], "COLUMNS": tune.get("reduce_columns"),
            "PDL": tune.get("pdl"), "PREFETCH_LINES": 16 if tune.get("prefetch") else 0,
            "KEEP_IN_LOOP": tune["block_m"] >= 64 and target.compute_capability[0] == 9,
        }  # fmt: skip
        for kernel in launcher.KERNELS:
            is_reduce = kernel.__name__ == "_reduce_kernel"
            warps, stages = (
                (tune["reduce_warps"], 3) if is_reduce else (tune["num_warps"], tune["num_stages"])
            )
            options = {"num_warps": warps, "num_stages": stages}
            print(
                json.dumps({"rows": shape.rows} | compile_kernel(kernel, arch, constants, **options)),
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
