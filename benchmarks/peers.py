# SPDX-License-Identifier: MIT
"""The ways to map a kernel that are compared; each takes a kernel and a chunk size."""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels import Kernel
from rankax import chunked_vmap

Peer = Callable[[Kernel, Callable[..., Any], int], Callable[..., Any]]


def _lax_map(kernel: Kernel, fun: Callable[..., Any], chunk_size: int) -> Callable[..., Any]:
    return lambda x: jax.lax.map(fun, x, batch_size=chunk_size)


def _powerpax(kernel: Kernel, fun: Callable[..., Any], chunk_size: int) -> Callable[..., Any]:
    import powerpax

    return powerpax.chunked_vmap(fun, chunk_size)


def _netket(kernel: Kernel, fun: Callable[..., Any], chunk_size: int) -> Callable[..., Any]:
    # NetKet turns 64-bit numbers on for the whole process unless told not to.
    os.environ["NETKET_ENABLE_X64"] = "0"
    import netket

    return netket.jax.vmap_chunked(fun, in_axes=0, chunk_size=chunk_size)


def _adv_jax_math(kernel: Kernel, fun: Callable[..., Any], chunk_size: int) -> Callable[..., Any]:
    import adv_jax_math

    return adv_jax_math.batch_vmap(fun, batch_size=chunk_size)


def _autovmap(kernel: Kernel, fun: Callable[..., Any], chunk_size: int) -> Callable[..., Any]:
    import jax_autovmap

    return jax_autovmap.auto_vmap(len(kernel.item_shape))(fun)


def _vectorize(kernel: Kernel, fun: Callable[..., Any], chunk_size: int) -> Callable[..., Any]:
    return jnp.vectorize(fun, signature=kernel.signature)


# The chunked ones first; the last three hold all items at once.
PEERS: dict[str, Peer] = {
    "rankax": lambda kernel, fun, chunk_size: chunked_vmap(fun, chunk_size),
    "lax.map": _lax_map,
    "powerpax": _powerpax,
    "netket": _netket,
    "adv-jax-math": _adv_jax_math,
    "jax.vmap": lambda kernel, fun, chunk_size: jax.vmap(fun),
    "jax-autovmap": _autovmap,
    "jnp.vectorize": _vectorize,
}
CHUNKED = ("rankax", "lax.map", "powerpax", "netket", "adv-jax-math")
