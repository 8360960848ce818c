# SPDX-License-Identifier: MIT
"""``checkpoint_while_loop``: a while loop with a reverse pass in bounded memory."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from rankax.core.base import messages
from rankax.core.base.arrays import is_ref
from rankax.core.base.trees import check_leaves, type_name
from rankax.core.loop.loop import varying_axes
from rankax.core.trace.derivatives import call_of, call_with_derivative_of, without_derivative
from rankax.core.trace.programs import (
    evaluate,
    has_order,
    subprograms,
    with_equations,
    with_subprograms,
)
from rankax.ext.equations import has_rule, split_loop
from rankax.ext.scan.loops import check_carry, trace_step
from rankax.ext.scan.reversible import is_zero, program_of, pushed_through

Carry = TypeVar("Carry")

_STORED = 32  # carries, by default


def checkpoint_while_loop(
    cond_fun: Callable[[Carry], Any],
    body_fun: Callable[[Carry], Carry],
    init_val: Carry,
    *,
    max_stored: int = _STORED,
) -> Carry:
    r"""Loop while a condition holds, with a reverse pass that stores some of the carries.

    Equivalent to ::

        jax.lax.while_loop(cond_fun, body_fun, init_val)

    in values and in forward mode. `jax.lax.while_loop` has no reverse mode. Here, it is exact for
    any number of steps, also with respect to values that the functions close over.

    Parameters
    ----------
    cond_fun : callable
        Takes the carry and returns a boolean scalar: whether to make another step.
    body_fun : callable
        Takes the carry and returns the next one, of the same structure, shapes and dtypes.
    init_val : pytree
        The first carry: arrays and scalars of any dtype, also PRNG keys.
    max_stored : int, default 32
        The largest number of carries that the reverse pass stores at a time.

    Returns
    -------
    pytree
        The first carry for which the condition does not hold.

    Raises
    ------
    TypeError
        An argument has the wrong type, ``cond_fun`` does not return a boolean scalar, or the carry
        that ``body_fun`` returns differs from ``init_val`` in structure, shape or dtype.
    ValueError
        ``max_stored`` is not positive.
    ValueError
        The loop is differentiated, and one of the functions uses a `jax.Ref` or has an ordered
        effect, because the reverse pass evaluates steps again.
    ValueError
        The reverse pass is itself differentiated in reverse mode.
    ValueError
        Inside `jax.shard_map`, the loop is differentiated with respect to a value that is the same
        on all devices, while its carry is not.

    See Also
    --------
    checkpoint_chunked_scan : For a number of steps that is known beforehand.

    Notes
    -----
    *Memory.* The reverse pass stores ``max_stored`` carries and the one before the current step,
    whatever the number of steps, up to ``2**31 - 1``; and a table of 440 bytes for each.

    *Time.* The reverse pass first evaluates steps again, then each of them once with its
    derivative. The carries are placed by the binomial rule of Griewank and Walther (*Algorithm 799:
    revolve*, 2000): with ``s`` of them, :math:`\binom{s + r}{s}` steps take at most ``r`` more
    evaluations each. With 32, these are 2.4 on average for 1,000 steps, 3.8 for 32,769 and
    4.3 for 100,000, and at most 11 for any number of steps. Forward mode evaluates the loop a
    second time, along with its derivative.

    *Under jax.vmap*, all items share the schedule of the item with the most steps. Items that
    have ended wait, so neighbours should have similar numbers of steps.

    *Derivatives* of higher order: forward mode of everything, such as `jax.hessian`, and reverse
    mode of forward mode.

    *Eager calls* are compiled every time, as with `jax.lax.while_loop` and new functions.
    Put them inside `jax.jit`.

    Examples
    --------
    The square root of ``a`` by Newton's method, and its derivative:

    >>> import jax, jax.numpy as jnp
    >>> from rankax import checkpoint_while_loop
    >>> @jax.jit
    ... def root(a):
    ...     return checkpoint_while_loop(
    ...         lambda x: jnp.abs(x * x - a) > 1e-4, lambda x: (x + a / x) / 2, a
    ...     )
    >>> print(f"{root(9.0):.3f} {jax.grad(root)(9.0):.3f}")
    3.000 0.167
    >>> (1 / jax.vmap(jax.grad(root))(jnp.array([4.0, 9.0, 100.0]))).round(2)
    Array([ 4.,  6., 20.], dtype=float32)
    """
    name = "checkpoint_while_loop"
    for fun, parameter in ((cond_fun, "cond_fun"), (body_fun, "body_fun")):
        messages.check_callable(fun, name, parameter)
    site = f"{name}({messages.function_name(body_fun)})"
    max_stored = messages.positive_int(max_stored, site, "max_stored")
    check_leaves(site, init_val, "init_val")
    if _runs_in_python(cond_fun, init_val):
        return lax.while_loop(cond_fun, body_fun, init_val)
    init_val = jax.tree.map(jnp.asarray, init_val)
    tree = jax.tree.structure(init_val)
    of_body = f"{site}: body_fun {messages.function_location(body_fun)}"

    def body(carry: Sequence[Any]) -> list[Any]:
        out = body_fun(tree.unflatten(carry))
        check_carry(site, of_body, "init_val", init_val, out)
        return jax.tree.leaves(out)

    def cond(carry: Sequence[Any]) -> Any:
        out = cond_fun(tree.unflatten(carry))
        if type_name(out) not in ("bool", "bool[]"):
            raise TypeError(
                f"{site}: cond_fun {messages.function_location(cond_fun)} must return a boolean "
                f"scalar, got {type_name(out)}"
            )
        return out

    step, init = trace_step(of_body, "init_val", init_val, body)
    programs = jax.make_jaxpr(cond)(init), step
    refusal = _refusal(site, (cond_fun, body_fun), programs)
    arrays = [list(closed.consts) for closed in programs], init
    funs = [functools.partial(evaluate, closed.jaxpr) for closed in programs]
    return tree.unflatten(_loop(funs, arrays, max_stored, site, refusal))


def _runs_in_python(cond_fun: Callable[..., Any], init_val: Any) -> bool:
    """Whether JAX runs the loop without a program, step by step: not under `jax.vmap`."""
    if not jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    try:
        bool(cond_fun(init_val))
    except jax.errors.ConcretizationTypeError:
        return False
    return True


def _loop(
    programs: Sequence[Any], arrays: Any, max_stored: int, site: str, refusal: str | None = None
) -> list[Any]:
    """Return the last carry of the loop of a condition and a body.

    Each is a function of constants and the carry; ``arrays`` are both constants and the first
    carry. ``refusal`` says why the loop has no derivative, if it has none.
    """
    cond, body = programs

    def plain(consts: Sequence[Any], init: list[Any]) -> tuple[Any, list[Any]]:
        def step(state: Any) -> Any:
            steps, carry = state
            return steps + 1, body(consts[1], *carry)

        start = jnp.int32(0), init
        return lax.while_loop(lambda state: cond(consts[0], *state[1])[0], step, start)

    if refusal is not None:
        words = refusal
        arrays = jax.tree.map(lambda x: x if is_ref(x) else without_derivative(x, words), arrays)
        return plain(*arrays)[1]
    differentiable = jax.custom_jvp(plain)

    @functools.partial(differentiable.defjvp, symbolic_zeros=True)
    def _(primals: Any, tangents: Any) -> Any:
        # There may be another derivative. JAX 0.10.0 fails where it drops outputs of a custom rule.
        steps, carry = call_with_derivative_of(differentiable, plain, *primals)
        ((_, consts), init), ((_, of_consts), of_init) = primals, tangents
        live = [x for x, t in zip(consts, of_consts, strict=True) if not is_zero(t)]
        _check_axes(site, live, (steps, init))
        program = program_of(lambda consts, carry: body(consts, *carry), consts, init)
        groups = (consts, of_consts), (init, of_init)
        pushed = pushed_through(steps, program, groups, max_stored=max_stored, site=site)
        symbolic = [SymbolicZero(t.aval) if is_zero(t) else t for t in pushed]
        return (steps, carry), (SymbolicZero(jax.typeof(steps).to_tangent_aval()), symbolic)

    key = "checkpoint_while_loop", max_stored, site
    return call_with_derivative_of(differentiable, plain, *arrays, key=key)[1]


def with_reverse_pass(jaxpr: Jaxpr, site: str) -> Jaxpr:
    """Return a program whose `while` loops have a reverse pass, at any depth.

    A loop inside a function with its own derivative rule stays. ``site``: the program, for errors.
    """
    return with_equations(jaxpr, functools.partial(_with_reverse_pass, site=site))


def has_plain_loop(eqns: Sequence[Any]) -> bool:
    """Whether there is a `while` loop that can be reversed, outside all derivative rules."""

    def has_one(eqn: JaxprEqn) -> bool:
        if has_rule(eqn) or has_order(eqn) or any(map(is_ref, eqn.invars)):
            return False
        inside = any(has_plain_loop(jaxpr.eqns) for jaxpr in subprograms(eqn))
        return eqn.primitive.name == "while" or inside

    return any(map(has_one, eqns))


def _with_reverse_pass(eqn: JaxprEqn, site: str) -> Any:
    if not has_plain_loop([eqn]):
        return eqn
    eqn = with_subprograms(eqn, functools.partial(with_reverse_pass, site=site))
    if eqn.primitive.name != "while":
        return eqn
    site = f"{site}: while at {source_info_util.summarize(eqn.source_info)}"

    def program(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
        return lambda consts, *carry: evaluate(closed.jaxpr, closed.consts, *consts, *carry)

    def loop(*values: Any) -> list[Any]:
        *consts, init = split_loop(eqn, values)
        programs = [program(eqn.params[name]) for name in ("cond_jaxpr", "body_jaxpr")]
        return _loop(programs, (consts, init), _STORED, site)

    traced = jax.make_jaxpr(loop)(*(v.aval for v in eqn.invars))
    consts = [Literal(x, jax.typeof(x)) for x in traced.consts]
    return call_of(eqn, [*consts, *eqn.invars], traced.jaxpr)


def _check_axes(site: str, live: Sequence[Any], carry: Any) -> None:
    """Refuse derivatives by values that are the same on all devices while the carry is not.

    JAX adds up the cotangents of such a value over the devices, wherever it is used: here in each
    step, whose number may differ from device to device, so that they would wait for each other.
    """
    axes = frozenset[Any]().union(*map(varying_axes, jax.tree.leaves(carry)))
    if any(axes - varying_axes(x) for x in live):
        names = messages.listed(sorted(map(repr, axes)))
        raise ValueError(
            f"{site}: inside jax.shard_map, it is differentiated with respect to a value that "
            f"does not vary over {names}, but its carry does; declare it as varying before the "
            "loop: jax.lax.pcast(x, axes, to='varying')"
        )


def _refusal(site: str, funs: Sequence[Callable[..., Any]], programs: Sequence[Any]) -> str | None:
    """Return why the loop has no derivative, if it has none."""
    for fun, closed in zip(funs, programs, strict=True):
        uses_ref = any(map(is_ref, closed.jaxpr.constvars))
        if uses_ref or has_order(closed):
            reason = "uses a jax.Ref" if uses_ref else "has an ordered effect"
            return (
                f"{site}: {messages.function_location(fun)} {reason}, so the loop has no "
                "derivative, because the reverse pass would evaluate steps again; "
                "jax.lax.while_loop has forward mode"
            )
    return None
