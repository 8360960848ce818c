# SPDX-License-Identifier: MIT
"""What an H100 would do with a kernel of your own, on a machine that has none: see ``h100.py``.

python benchmarks/own_kernel.py
"""

import h100  # first: it keeps JAX from looking for a GPU

# isort: split
import jax
import jax.numpy as jnp

import hlo
from rankax import auto_vmap


@auto_vmap(x=1, y=1, reduce="logsumexp", reduce_axis=-1)
def kernel(x, y):
    return -jnp.sum((x - y) ** 2)


def total(x, y):
    return jnp.sum(kernel(x[:, None], y))


points = h100.shaped(100_000, 3)  # a shape on the GPU, not an array
for fun in (total, jax.grad(total)):
    program = hlo.read(h100.compiled(fun, points, points))
    print(f"{program.temporaries / 1e6:.1f} MB, {program.launches} launches; {program}")
