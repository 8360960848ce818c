# SPDX-License-Identifier: MIT
"""What GPUs that are not here would run for a pair, compiled by the NVRTC that Warp has."""

import functools
import importlib.util
import re
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from helpers import at_each_run, equations, name_of, slow
from pair_kernels import gauss, gravity
from rankax import auto_vmap
from rankax.ext.fused.launch import built
from rankax.reductions import ByLabel

warp = pytest.importorskip("warp", reason="needs NVIDIA Warp: pip install 'rankax[warp]'")


def disassembler():
    """Return the program of NVIDIA's package for it, or None."""
    found = importlib.util.find_spec("nvidia")
    folders = found.submodule_search_locations if found else []
    return next((path for x in folders for path in Path(x).glob("*/bin/nvdisasm")), None)


NVDISASM = disassembler()
pytestmark = pytest.mark.skipif(NVDISASM is None, reason="needs the package nvidia-cuda-nvdisasm")


def folds_of(fun, *args):
    """Return the kernels that a function calls."""
    found = equations(jax.make_jaxpr(fun)(*args).jaxpr)
    return [eqn.params["fold"] for eqn in found if name_of(eqn) == "rankax_fused"]


@functools.cache
def instructions(kernel, arch, folder):
    """Return the instructions of a kernel, each with its label if it has one."""
    module, nvdisasm = built(kernel).module, [NVDISASM, "-c"]
    (cubin,) = warp.compile_aot_module(module, arch=arch, module_dir=folder, use_ptx=False)
    run = subprocess.run([*nvdisasm, cubin], capture_output=True, text=True, check=True)
    found, labels = [], {}
    for line in run.stdout.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(found)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            found.append(instruction[1])
    return found, labels


def per_pair(kernel, arch, folder):
    """Return how many instructions the innermost loop has for a pair, of four in each round."""
    found, labels = instructions(kernel, arch, str(folder))
    jumps = [(i, re.search(r"\bBRA\b.*?(\.L_\w+)", text)) for i, text in enumerate(found)]
    loops = [(labels[jump[1]], i) for i, jump in jumps if jump and labels[jump[1]] < i]
    inner = [
        (a, b) for a, b in loops if not any(a <= c and d <= b for c, d in loops if (c, d) != (a, b))
    ]
    return max(b - a + 1 for a, b in inner) / 4, found


ARGS = [jnp.ones(shape) for shape in ((600, 1, 3), (2000, 3), (2000,))]


def lennard_jones(x, y, w):
    d = x - y
    s = 1 / (d @ d + 0.1)
    return w * (s**6 - s**3)


def cauchy(x, y, w):
    d = x - y
    return w / (1 + d @ d)


def exponent(x, y, w):
    d = x - y
    return w - 0.5 * (d @ d)


def in_shells(x, y, w):
    d = x - y
    r2 = d @ d
    return {"shell": jnp.floor(r2).astype(int), "v": w * jnp.exp(-r2)}


# The instructions of a pair at most: forward, and in both passes of the gradient.
KERNELS = {
    "gravity": (gravity, "sum", 30, 100),
    "gauss": (gauss, "sum", 30, 75),
    "logsumexp": (exponent, "logsumexp", 40, 75),
    "lennard_jones": (lennard_jones, "sum", 30, 125),
    "cauchy": (cauchy, "sum", 30, 95),
    "largest": (exponent, "max", 30, 0),
    "labels": (in_shells, ByLabel("shell", 16), 60, 110),
}
QUICK = "gravity", "gauss", "logsumexp", "labels"


@pytest.mark.parametrize("arch", [90, slow(80)])
@pytest.mark.parametrize("case", at_each_run(QUICK, KERNELS))
def test_a_pair_takes_few_instructions_and_no_memory(case, arch, tmp_path):
    fun, reduce, most, gradient = case
    kernel = auto_vmap(1, 1, 0, reduce=reduce, reduce_axis=1, fused=True)(fun)
    out = jax.tree.map(jnp.ones_like, jax.eval_shape(kernel, *ARGS))
    folds = folds_of(lambda *args: jax.vjp(kernel, *args[:3])[1](args[3]), *ARGS, out)
    counts = []
    for i, fold in enumerate(folds):
        count, found = per_pair(fold.kernel, arch, tmp_path / str(i))
        counts.append(count)
        assert [text for text in found if re.match(r"(@\S+ )?(LDL|STL)", text)] == []
    back = counts[-2:] if gradient else []
    assert max(counts[: len(counts) - len(back)]) <= most
    assert sum(back) <= gradient
