"""What ptxas makes of the Triton kernels for compute capability 9.0. Compiling needs no GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

NVIDIA = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
HOPPER = GPUTarget("cuda", 90, 32)


@dataclass(frozen=True, slots=True)
class Compiled:
    registers: int
    """Per thread."""
    stack: int
    """Bytes per thread: registers that were spilled to memory."""
    shared: int
    """Bytes per program."""
    loads: set[str]
    """Kinds of loads from global memory in its PTX."""


def compiled(kernel: Any, num_warps: int, **arguments: Any) -> Compiled:
    """Compile `kernel` for arguments by name: a type such as "*bf16" or "i32", else a constant.

    Pointers, and integers of type "i32:16", are multiples of 16.
    """
    arguments = {name: arguments[name] for name in kernel.arg_names}
    types = {n: v.partition(":")[0] if isinstance(v, str) else "constexpr" for n, v in arguments.items()}
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={n: v for n, v in arguments.items() if types[n] == "constexpr"},
        attrs={
            (list(types).index(n),): [["tt.divisibility", 16]]
            for n, v in arguments.items()
            if isinstance(v, str) and (v[0] == "*" or v.endswith(":16"))
        },
    )
    made = triton.compile(source, target=HOPPER, options={"num_warps": num_warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(NVIDIA / "cuobjdump"), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", usage)}
    loads = set(re.findall(r"ld\.global\S*", made.asm["ptx"]))
    return Compiled(numbers["REG"], numbers["STACK"], made.metadata.shared, loads)
