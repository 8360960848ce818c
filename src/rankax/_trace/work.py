# SPDX-License-Identifier: MIT
"""What one item costs: the only traversal of all operations of a program.

`operations` yields each equation, also those of loops, branches and called functions, with how
often one evaluation of the program runs it, which of its inputs depend on the item, and in which
order they are read. Three questions are answered from these:

* `work_of` chooses tiles (`rankax._fit.cpu`).
* `cost` decides which branches are cut (`rankax._lockstep.machine`).
* `evaluates_functions` decides whether extremes postpone work (`rankax._reduce.extrema`).
"""

import dataclasses
import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rankax._trace.programs import Literal, lengths_of_scan, name_and_params, subprograms

STEPS_OF_WHILE = 16  # assumed

_LOOPS = ("scan", "while")
FUNCTIONS = {
    *("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh"),
    *("cbrt", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc"),
    *("exp", "exp2", "expm1", "lgamma", "log", "log1p", "logistic"),
    *("pow", "sin", "sinh", "tan", "tanh"),
}

_LONG = 16  # numbers for each result, from which on a library of XLA:CPU is faster than a loop
SUMS = ("reduce_sum", "reduce_max", "reduce_min")
LIBRARIES = {
    *("cholesky", "eig", "eigh", "fft", "householder_product", "lu", "lu_pivots_to_permutation"),
    *("qr", "schur", "sort", "svd", "top_k", "triangular_solve", "tridiagonal"),
    "tridiagonal_solve",
}
# What stores its result, or joins operands.
_IN_ORDER = {
    *(*SUMS, *LIBRARIES, "argmax", "argmin", "concatenate", "conv_general_dilated", "cumlogsumexp"),
    *("cummax", "cummin", "cumprod", "cumsum", "dot_general", "dynamic_update_slice"),
    *("optimization_barrier", "pad", "reduce_and", "reduce_or", "reduce_prod"),
}


class Order(enum.Enum):
    """How the loop that computes a value reads what is stored, if not in order.

    A library of XLA:CPU needs the operand of a sum stored by a loop of its own. If that loop reads
    in another order, it takes 3 to 15 times as long as a loop that sums as well (JAX 0.10, 0.12).
    """

    CUT = "parts of rows"
    GATHERED = "by indices"
    SPREAD = "smaller arrays, each several times"


class Operation(NamedTuple):
    """One equation of a program, or of a program inside it."""

    name: str
    eqn: Any
    times: int  # how often one evaluation runs it
    varying: tuple[bool, ...]  # which of its inputs depend on the item
    is_loop: bool
    calls: bool  # another program, whose operations come next
    orders: tuple[Order | None, ...]  # in which its inputs are read


Orders = dict[Any, Order | None]  # by value


def operations(
    jaxpr: Any, moving: set[Any] | None = None, times: int = 1, orders: Orders | None = None
) -> Iterator[Operation]:
    """Yield all operations of the program of an item; of a branch, those of all programs.

    ``moving``: the inputs that depend on the item; by default all. ``orders``: those of inputs, to
    which those of results are added.
    """
    moving = set(jaxpr.invars) if moving is None else moving
    orders = {} if orders is None else orders
    for eqn in jaxpr.eqns:
        name, params = name_and_params(eqn)
        varying = tuple(not isinstance(v, Literal) and v in moving for v in eqn.invars)
        programs = list(subprograms(eqn))
        is_loop = name in _LOOPS
        of_inputs = _all_of(orders, eqn.invars)
        yield Operation(name, eqn, times, varying, is_loop, bool(programs), of_inputs)
        if any(varying):
            moving.update(eqn.outvars)
        if not programs and len(eqn.outvars) == 1:
            orders[eqn.outvars[0]] = _order(name, eqn, of_inputs)
        steps = times * params.get("length", STEPS_OF_WHILE) if is_loop else times
        for program in programs:
            # A branch is none: its first input is the index. Its operands are stored.
            is_call = not is_loop and _shape_of(program) == _shape_of(eqn)
            own = dict(zip(program.invars, of_inputs, strict=True)) if is_call else {}
            moved = _inputs_that_vary(eqn, program, varying)
            yield from operations(program, moved, steps, own)
            if is_call:
                orders.update(zip(eqn.outvars, _all_of(own, program.outvars), strict=True))


def _shape_of(program: Any) -> tuple[int, int]:
    return len(program.invars), len(program.outvars)


def _all_of(orders: Orders, values: Sequence[Any]) -> tuple[Order | None, ...]:
    return tuple(None if isinstance(v, Literal) else orders.get(v) for v in values)


def _order(name: str, eqn: Any, of_inputs: Sequence[Order | None]) -> Order | None:
    """Return the order in which a loop that computes the result reads what is stored."""
    out, size = eqn.outvars[0].aval, _size(eqn.outvars[0])
    if name in _IN_ORDER:
        return None
    if name == "gather":
        return Order.GATHERED
    if name in ("slice", "dynamic_slice") and eqn.invars[0].aval.shape[1:] != out.shape[1:]:
        return Order.CUT
    of_whole = [order for order, v in zip(of_inputs, eqn.invars, strict=True) if _size(v) >= size]
    for order in (Order.CUT, Order.GATHERED):
        if order in of_whole:
            return order
    is_spread = all(of_whole) and max(map(_size, eqn.invars), default=1) > 1
    return Order.SPREAD if is_spread else None


def _inputs_that_vary(eqn: Any, program: Any, varying: Sequence[bool]) -> set[Any]:
    """Return the inputs of a called program that depend on the item; all if it is not clear."""
    if not any(varying):
        return set()
    if len(program.invars) != len(varying):
        return set(program.invars)
    flags = list(varying)
    if eqn.primitive.name == "scan":  # what is carried may depend on it after one step
        consts, carried = lengths_of_scan(eqn)
        flags[consts : consts + carried] = [True] * carried
    return {v for v, varies in zip(program.invars, flags, strict=True) if varies}


def cost(jaxpr: Any) -> int:
    """Return about how many numbers a program computes."""
    return sum(
        operation.times
        * max(map(_size, (*operation.eqn.invars, *operation.eqn.outvars)), default=0)
        for operation in operations(jaxpr)
        if not operation.calls
    )


def _size(variable: Any) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))


def evaluates_functions(jaxpr: Any) -> bool:
    """Whether a program has operations that cost more than storing a result, on a CPU."""
    # Random numbers, and sines as polynomials (`functions.py`), have one name in common.
    names = {*FUNCTIONS, "bitcast_convert_type"}
    return jax.default_backend() == "cpu" and any(
        operation.name in names for operation in operations(jaxpr)
    )


@dataclasses.dataclass
class Work:
    """What an item does.

    Attributes
    ----------
    bytes : int
        Of all inputs, and all values that it computes.
    libraries, convolutions : int
        How many it calls.
    kept : int
        How many of its values a barrier stores (`kept_values.py`).
    products : int
        Of its numbers with those of matrices that all items share.
    sums : list of (int, bool, int)
        Of how many numbers, whether they are long rows that are read in order, and how often.
    loops : int
        How many it runs.
    """

    bytes: int = 0
    libraries: int = 0
    convolutions: int = 0
    kept: int = 0
    products: int = 0
    sums: list[tuple[int, bool, int]] = dataclasses.field(default_factory=list)
    loops: int = 0


def work_of(jaxpr: Any) -> Work:
    """Count what one item does; only what depends on the item counts."""
    work = Work(sum(map(_bytes, (*jaxpr.invars, *jaxpr.outvars))))
    for name, eqn, times, varying, is_loop, calls, orders in operations(jaxpr):
        if not any(varying):
            continue
        if name == "optimization_barrier":
            work.kept += 1
            continue
        work.loops += is_loop
        if is_loop or not calls:
            work.bytes += sum(map(_bytes, eqn.outvars))
        if calls or not eqn.outvars:
            continue
        out, shares = eqn.outvars[0].aval, not all(varying)
        if name in LIBRARIES:
            work.libraries += times
        elif name == "conv_general_dilated":
            work.convolutions += times
        elif name in (*SUMS, "dot_general") and jnp.issubdtype(out.dtype, jnp.floating):
            operand = eqn.invars[0].aval
            if name == "dot_general":
                (contracted, _), (batch, _) = eqn.params["dimension_numbers"]
                numbers = out.size * math.prod(operand.shape[axis] for axis in contracted)
                # By indices, the library is slower on JAX 0.12, and faster on 0.10.
                is_sum, is_row = not shares and out.ndim == len(batch), Order.CUT not in orders
                work.products += numbers * times if shares else 0
            else:
                numbers, axes = operand.size, eqn.params["axes"]
                is_row = {*axes} == {*range(operand.ndim)[-len(axes) :]} and orders == (None,)
                is_sum = numbers > out.size
            if is_sum:
                work.sums.append((numbers, is_row and numbers >= _LONG * out.size, times))
    return work


def _bytes(variable: Any) -> int:
    aval = variable.aval
    return aval.size * getattr(aval.dtype, "itemsize", 1) if hasattr(aval, "size") else 0
