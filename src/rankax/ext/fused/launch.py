# SPDX-License-Identifier: MIT
"""Kernels compiled and called by NVIDIA Warp, which keeps their machine code on disk.

The text of a kernel does not depend on the lengths of axes, so that one compiled kernel serves all.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import linecache
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from rankax.core.base.cache import Kept
from rankax.ext.fused.kernel import Source
from rankax.ext.fused.scalars import DTYPES

_kernels = Kept[Any](1024, "fused kernels")


@functools.cache
def warp() -> Any:
    """Return the module, which reports nothing unless the caller has imported it before."""
    is_new = "warp" not in sys.modules
    module = importlib.import_module("warp")
    if is_new:
        module.config.log_level = module.LOG_WARNING
    return module


def built(kernel: Source) -> Any:
    """Return the kernel of Warp for a text."""
    return _kernels.get_or_make(kernel, functools.partial(_build, kernel))


def _build(kernel: Source) -> Any:
    key = hashlib.sha1(repr(kernel).encode(), usedforsecurity=False).hexdigest()[:16]
    arrays = [f"A{k}: wp.array(dtype=wp.{DTYPES[x]})" for k, x in enumerate(kernel.operands)]
    outs = [f"O{k}: wp.array(dtype=wp.{DTYPES[x]})" for k, x in enumerate(kernel.outs)]
    params = [*arrays, *(f"{name}: int" for name in kernel.numbers), *outs]
    names = ", ".join(param.split(":")[0] for param in params)
    source = (
        f"@wp.func_native({kernel.body!r})\n"
        f"def pairs_{key}({', '.join(params)}, tid: int): ...\n"
        "@wp.kernel(enable_backward=False, module='unique')\n"
        f"def rankax_{key}({', '.join(params)}):\n"
        f"    pairs_{key}({names}, wp.tid())\n"
    )
    # Warp reads the source of a kernel as `inspect` does, from the file it was compiled from.
    file = f"<rankax {key}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    space: dict[str, Any] = {"wp": warp()}
    exec(compile(source, file, "exec"), space)
    return space[f"rankax_{key}"]


def launch(
    kernel: Source, operands: Sequence[Any], numbers: Sequence[int], threads: int, sizes: Any
) -> list[Any]:
    """Return what the threads of a kernel write, as flat arrays of these ``sizes``."""
    call = warp().jax_kernel(built(kernel), num_outputs=len(kernel.outs))
    pairs = zip(operands, kernel.operands, strict=True)
    flat = [jnp.ravel(x).astype(DTYPES[type_]) for x, type_ in pairs]
    dims = {f"O{k}": size for k, size in enumerate(sizes)}
    return list(call(*flat, *numbers, launch_dims=threads, output_dims=dims))
