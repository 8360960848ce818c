# SPDX-License-Identifier: MIT
"""Where a call runs, as far as that is known when it is traced.

A process with a GPU also computes on its CPU, and a program may be compiled for a machine that is
elsewhere. So what depends on the platform asks where the call runs, not for the default of the
process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax import core


class Target(NamedTuple):
    """Where a call runs, if that need not be where JAX runs by default.

    Attributes
    ----------
    platform : str
        ``"cpu"``, ``"gpu"`` or ``"tpu"``.
    device : jax.Device or None
        One to compile for, if one is known.
    """

    platform: str
    device: Any = None


def is_cpu(target: Target | None) -> bool:
    """Whether a call to this target runs on a CPU."""
    return (target.platform if target else jax.default_backend()) == "cpu"


def target_of(arrays: Iterable[Any] = ()) -> Target | None:
    """Return where a call with these arrays runs; None: where JAX runs by default.

    The first of these that is known decides:

    * the device that an array is committed to, also one that `jax.grad` differentiates now;
    * the mesh in the type of a tracer, and the sharding of a `jax.ShapeDtypeStruct`;
    * the mesh that is set, and the call in whose kernel this one is (`inside_call`);
    * `jax.default_device`.

    Inside `jax.jit`, an array on a single device shows none of that, because JAX chooses the
    platform when it lowers the program, after the trace.
    """
    known = next(filter(None, map(_target, arrays)), None)
    around = _of_mesh(jax.sharding.get_abstract_mesh()) or _outer.get() or _set_by_caller()
    if around is None and known is not None and known.platform == jax.default_backend():
        return None
    return known or around


_outer: ContextVar[Target | None] = ContextVar("rankax_target", default=None)


@contextlib.contextmanager
def inside_call(target: Target | None) -> Generator[None]:
    """Enter a call that runs there: so do those that its kernel makes, with tracers."""
    token = _outer.set(target)
    try:
        yield
    finally:
        _outer.reset(token)


def _set_by_caller() -> Target | None:
    config: Any = jax.config
    device = config.jax_default_device
    if device is None:
        return None
    return Target(device) if isinstance(device, str) else _of_device(device)


def _target(value: Any) -> Target | None:
    while isinstance(value, core.Tracer):
        if found := _of_mesh(getattr(jax.typeof(value).sharding, "mesh", None)):
            return found
        # The value itself, where `jax.grad` or `jax.vmap` evaluates now.
        value = getattr(value, "primal", getattr(value, "val", None))
    sharding = getattr(value, "sharding", None)
    if sharding is None or not getattr(value, "committed", True):
        return None  # JAX moves it to where it runs by default
    mesh = getattr(sharding, "mesh", None)
    if isinstance(mesh, jax.sharding.AbstractMesh):
        return _of_mesh(mesh)
    return _of_device(next(iter(sharding.device_set)))


def _of_device(device: Any) -> Target:
    return Target(device.platform, device)


def _of_mesh(mesh: Any) -> Target | None:
    """Return the target of an abstract mesh; None if it does not tell, as before JAX 0.12."""
    device = getattr(mesh, "abstract_device", None)
    if device is None:
        return None
    platform = getattr(device, "platform", None) or ("cpu" if device.device_kind == "cpu" else None)
    return platform and Target(platform)
