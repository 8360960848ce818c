# SPDX-License-Identifier: MIT
"""The program of an item as straight lines of C++, one name for each number.

An array is a NumPy array: of numbers, if the program knows them, or else of names (dtype `object`).
So indexing, reshaping and the like take no time when the kernel runs: they move names. A sum over
three numbers is two additions. An operation without such a form raises `Refused`, which names it.

Numbers of float16 and bfloat16 are computed in float32, and not rounded between operations.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from rankax.core.trace.programs import evaluate, name_and_params, only

MOST_LINES = 2048  # of one item; larger programs take minutes to compile, and spill
MOST_NUMBERS = 256  # of an argument of one item, of a state, or moved by an operation


class Refused(Exception):  # noqa: N818  # an error only with `fused=True`
    """What cannot be part of a kernel: why, which operation, and where that is called."""

    def __init__(self, reason: str = "", name: str = "", place: str = "") -> None:
        super().__init__(reason)
        self.reason, self.name, self.place = reason, name, place

    def __str__(self) -> str:
        name = self.name + (self.place and f" ({self.place})")
        return ": ".join(filter(None, (name, self.reason)))

    def of(self, eqn: JaxprEqn) -> Refused:
        """Return the same for the operation of an equation, unless one inside it is named."""
        place = self.place or source_info_util.summarize(eqn.source_info)
        return Refused(self.reason, self.name or name_and_params(eqn)[0], place)


def type_of(dtype: Any) -> str:
    """Return the type in C++ of numbers of this dtype."""
    name = np.dtype(dtype).name if not jnp.issubdtype(dtype, jax.dtypes.extended) else str(dtype)
    if name not in _types:
        raise Refused(f"dtype {name}")
    return _types[name]


_types: dict[str, str] = dict.fromkeys(("float32", "float16", "bfloat16"), "float")
_types |= {"float64": "double", "int32": "int", "uint32": "unsigned"}
_types |= {"int64": "long long", "bool": "bool"}


class Lines:
    """Lines that each define one number, by the depth of the loop in which they stand.

    The depth of a name says in which of the nested loops it is known: a line stands in the
    innermost loop of what it reads. Equal lines are written once.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix, self.depth = prefix, dict[str, int]()
        self.lines = defaultdict[int, list[str]](list)
        self.names: dict[tuple[str, str], str] = {}

    def let(self, type_: str, text: str, inputs: Iterable[str]) -> str:
        """Return the name of a number, given by an expression of ``inputs``."""
        if (name := self.names.get((type_, text))) is None:
            if len(self.names) >= MOST_LINES:
                raise Refused(f"more than {MOST_LINES} operations")
            name = self.names[type_, text] = f"{self.prefix}{len(self.names)}"
            self.depth[name] = at = max((self.depth.get(x, 0) for x in inputs), default=0)
            self.lines[at].append(f"const {type_} {name} = {text};")
        return name


def literal(value: Any, type_: str) -> str:
    """Return a number as C++ has it."""
    if type_ == "bool":
        return "true" if value else "false"
    if type_ not in ("float", "double"):
        # A minus is an operator, before a number that may be too large.
        suffix = "LL" if type_ == "long long" else ""
        return f"(~{~int(value)}{suffix})" if value < 0 else f"{int(value)}{suffix}"
    number = float(value)
    if not math.isfinite(number):
        text = "NAN" if number != number else "INFINITY" if number > 0 else "(-INFINITY)"
        return f"(({type_}){text})"
    text = repr(number) + ("f" if type_ == "float" else "")
    return f"({text})" if text[0] == "-" else text


def is_known(array: Any) -> bool:
    """Whether the numbers of an array are known, not only named."""
    return array.dtype != object


def named(array: Any, dtype: Any) -> Any:
    """Return an array as one of names."""
    type_ = type_of(dtype)
    if not is_known(array):
        return array
    texts = [literal(x, type_) for x in array.ravel()]
    return np.array(texts, object).reshape(array.shape)


# The operations on single numbers. F: the function of this name for a type; T, U: the type, and the
# unsigned one, whose overflow is defined. Those `_OURS` are macros of `kernel.py`.


def _table(text: str) -> dict[str, str]:
    """Return expressions by the names of operations."""
    pairs = (line.strip().partition(": ") for line in text.strip().splitlines())
    return {name: expression for names, _, expression in pairs for name in names.split()}


_FLOATS = _table("""
    div rem pow atan2: F({0},{1})
    exp exp2 log log2 sqrt rsqrt cbrt log1p expm1 erf erfc erf_inv abs floor ceil: F({0})
    sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh: F({0})
    add: ({0}+{1})
    sub: ({0}-{1})
    mul: ({0}*{1})
    neg: (-{0})
    is_finite: (({0}-{0})==0)
    one_minus_square: ((1-{0})*(1+{0}))
    sign: ({0}!={0}?{0}:(T)(({0}>0)-({0}<0)))
    logistic: (1/(1+E(-{0})))
""")
_INTEGERS = _table("""
    add: (T)((U){0}+(U){1})
    sub: (T)((U){0}-(U){1})
    mul: (T)((U){0}*(U){1})
    square: (T)((U){0}*(U){0})
    neg: (T)(0-(U){0})
    abs: ({0}<0?(T)(0-(U){0}):{0})
    sign: (T)(({0}>0)-({0}<0))
    div: ({1}==0?(T)-1:({1}==(T)-1?(T)(0-(U){0}):(T)({0}/{1})))
    rem: ({1}==0?{0}:({1}==(T)-1?(T)0:(T)({0}%{1})))
    and: ({0}&{1})
    or: ({0}|{1})
    xor: ({0}^{1})
    not: (~{0})
""")
_UNSIGNED = _table("""
    div: ({1}==0?(T)-1:{0}/{1})
    rem: ({1}==0?{0}:{0}%{1})
    abs: {0}
""")
_BOOLS = _table("""
    and mul: ({0}&&{1})
    or add: ({0}||{1})
    xor: ({0}!={1})
    not: (!{0})
""")
_ALL = _table("""
    lt: ({0}<{1})
    le: ({0}<={1})
    gt: ({0}>{1})
    ge: ({0}>={1})
    eq: ({0}=={1})
    ne: ({0}!={1})
    max: ({0}>{1}||{0}!={0}?{0}:{1})
    min: ({0}<{1}||{0}!={0}?{0}:{1})
    square: ({0}*{0})
    clamp: ({1}<{0}?{0}:({1}>{2}?{2}:{1}))
""")
_FUNCTIONS = {"rem": "fmod", "abs": "fabs", "erf_inv": "erfinv"}
_OURS = ("div", "rsqrt", "log1p", "expm1", "asinh", "acosh", "atanh")
_COMMUTE = ("({0}+{1})", "({0}*{1})")
_SAME = _table("""
    stop_gradient copy copy_p optimization_barrier name CheckpointName pvary pcast: {0}
    rankax_in_each sharding_constraint reshard mesh_cast: {0}
""")
_CALLS = _table("""
    jit pjit closed_call core_call remat remat2 checkpoint RematTraced: jaxpr
    rankax_call HighLevelCall custom_jvp_call custom_vjp_call: call_jaxpr
    custom_vjp_call_jaxpr: fun_jaxpr
""")


def _text_of(name: str, type_: str) -> str | None:
    """Return an operation on single numbers of this type as an expression, or None."""
    tables = {"float": (_FLOATS,), "double": (_FLOATS,), "bool": (_BOOLS,)}
    tables |= {"unsigned": (_UNSIGNED, _INTEGERS)}
    found = next((t[name] for t in (*tables.get(type_, (_INTEGERS,)), _ALL) if name in t), None)
    if found is None:
        return None
    function = _FUNCTIONS.get(name, name) + ("f" if type_ == "float" else "")
    function = f"rankax_{function}" if name in _OURS else function
    unsigned = {"int": "unsigned", "long long": "unsigned long long"}.get(type_, type_)
    words = {"F(": f"{function}(", "(T)": f"({type_})", "(U)": f"({unsigned})"}
    words["E("] = "expf(" if type_ == "float" else "exp("
    for letter, word in words.items():
        found = found.replace(letter, word)
    return found


def _converted(old: str, new: str) -> str:
    """Return a conversion as an expression; integers from floats are the nearest there are."""
    if old == new:
        return "{0}"
    if new == "bool":
        return "({0}!=0)"
    if old in ("float", "double") and new not in ("float", "double"):
        info = np.iinfo({"int": np.int32, "unsigned": np.uint32}.get(new, np.int64))
        low, high = literal(info.min, new), literal(info.max, new)
        inside = f"{{0}}<={float(info.min)}?({new}){low}:({new}){{0}}"
        return f"({{0}}!={{0}}?0:({{0}}>={float(info.max + 1)}?({new}){high}:({inside})))"
    return f"(({new}){{0}})"


class Translation:
    """The translation of programs into some `Lines`."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines

    def program(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Return the outputs of a program, given its arguments: arrays of numbers or names."""
        jaxpr, consts = closed.jaxpr, [np.asarray(x) for x in closed.consts]
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(var: Any) -> Any:
            return np.asarray(var.val, var.aval.dtype) if hasattr(var, "val") else env[var]

        for eqn in _needed(jaxpr):
            ins = list(map(read, eqn.invars))
            try:
                outs = self._equation(eqn, jaxpr, ins)
            except Refused as error:
                raise error.of(eqn) from None
            pairs: Any = zip(eqn.outvars, outs, strict=True)
            env.update((v, _array(x).reshape(v.aval.shape)) for v, x in pairs)
        return list(map(read, jaxpr.outvars))

    def _equation(self, eqn: Any, jaxpr: Jaxpr, ins: list[Any]) -> Sequence[Any]:
        name, params = name_and_params(eqn)
        if name in _SAME:
            return ins[: len(eqn.outvars)]
        if name in _CALLS:
            inner = params[_CALLS[name]]
            closed = inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
            return self.program(closed, ins)
        if eqn.effects:
            raise Refused("it has an effect")
        if name == "cond":
            return self._branches(eqn, params["branches"], ins)
        if name in _moves:
            return _moved(name, params, eqn, ins)
        if all(map(is_known, ins)) and eqn.outvars:
            return _constants(eqn, jaxpr, ins)
        if name == "rankax_add":
            return self._added_exactly(eqn, ins)
        if name in _LINEAR:
            return self._linear(eqn, ins)
        return [self._numbers(name, params, eqn, ins)]

    def _numbers(self, name: str, params: Any, eqn: Any, ins: list[Any]) -> Any:
        dtypes: list[Any] = [v.aval.dtype for v in eqn.invars]
        out: Any = eqn.outvars[0].aval
        if name in _OWN:
            return getattr(self, f"_{name}")(params, out, dtypes, ins)
        if name == "polynomial":
            horner = functools.partial(self.numbers, "({0}*{1}+{2})", out.dtype, [out.dtype] * 3)
            return functools.reduce(lambda found, c: horner([found, ins[0], c]), ins[:0:-1])
        if name == "dot_general":
            return self._product(params, out, dtypes, ins)
        if name in _FOLDS:
            return self._folded(_FOLDS[name], params["axes"], out.dtype, ins[0])
        return self.each("add" if name == "add_any" else name, out.dtype, dtypes, ins)

    def each(self, name: str, dtype: Any, dtypes: Sequence[Any], ins: Sequence[Any]) -> Any:
        """Return an operation on single numbers."""
        if (text := _text_of(name, type_of(dtypes[0]))) is None:
            raise Refused
        simple = _simplified(name, ins)
        return self.numbers(text, dtype, dtypes, ins) if simple is None else simple

    def numbers(self, text: str, dtype: Any, dtypes: Sequence[Any], ins: Sequence[Any]) -> Any:
        """Return an expression of single numbers."""
        names = np.broadcast_arrays(*map(named, ins, dtypes))
        type_, let = type_of(dtype), self.lines.let
        if text == "{0}":
            return names[0]

        def number(*own: str) -> str:
            own = tuple(sorted(own)) if text in _COMMUTE else own
            cube = self._cube_of_root(type_, *own) if text.startswith("rankax_div") else None
            return cube or let(type_, text.format(*own), own)

        return np.asarray(np.frompyfunc(number, len(names), 1)(*names), object)

    def _cube_of_root(self, type_: str, root: str, x: str) -> str | None:
        """Return the cube of a reciprocal root that is divided by its ``x``, as a derivative does.

        To multiply twice takes a quarter of the time, and other forces need the square anyway.
        """
        suffix = "f" if type_ == "float" else ""
        if self.lines.names.get((type_, f"rankax_rsqrt{suffix}({x})")) != root:
            return None
        square = self.lines.let(type_, f"({root}*{root})", [root])
        return self.lines.let(type_, f"({'*'.join(sorted((root, square)))})", [root, square])

    def _select_n(self, _: Any, out: Any, dtypes: Sequence[Any], ins: Sequence[Any]) -> Any:
        return self._choice(ins[0], dtypes[0], ins[1:], out)

    def _choice(self, which: Any, dtype: Any, cases: Sequence[Any], out: Any) -> Any:
        """Return the case that ``which`` counts; the last one, if there are not so many."""
        found, own = cases[-1], [dtype, out.dtype, out.dtype]
        for i, case in reversed([*enumerate(cases[:-1])]):
            test = "!{0}" if type_of(dtype) == "bool" else f"{{0}}<={i}"
            found = self.numbers(f"({test}?{{1}}:{{2}})", out.dtype, own, [which, case, found])
        return found

    def _convert_element_type(self, _: Any, out: Any, dtypes: Sequence[Any], ins: Any) -> Any:
        text = _converted(type_of(dtypes[0]), type_of(out.dtype))
        return self.numbers(text, out.dtype, dtypes, ins)

    def _bitcast_convert_type(self, _: Any, out: Any, dtypes: Sequence[Any], ins: Any) -> Any:
        old, new = type_of(dtypes[0]), type_of(out.dtype)
        if old == new or dtypes[0].itemsize != out.dtype.itemsize:
            raise Refused(f"from {old} to {new}")
        return self.numbers(f"rankax_bits({{0}}, ({new})0)", out.dtype, dtypes, ins)

    def _round(self, params: Any, out: Any, dtypes: Sequence[Any], ins: Any) -> Any:
        name = "rint" if int(params["rounding_method"]) == 1 else "round"
        name += "f" if type_of(out.dtype) == "float" else ""
        return self.numbers(name + "({0})", out.dtype, dtypes, ins)

    def _integer_pow(self, params: Any, out: Any, dtypes: Sequence[Any], ins: Any) -> Any:
        exponent, base, power = params["y"], ins[0], None
        product = functools.partial(self.each, "mul", out.dtype, [out.dtype] * 2)
        left = abs(exponent)
        while left:
            if left & 1:
                power = base if power is None else product([power, base])
            base, left = product([base, base]) if left > 1 else base, left >> 1
        if power is None:
            return np.ones(out.shape, out.dtype)
        return power if exponent > 0 else self.numbers("(1/{0})", out.dtype, dtypes, [power])

    def _folded(self, name: str, axes: Any, dtype: Any, array: Any) -> Any:
        """Return an array reduced along some axes, one number after another."""
        axes = tuple(axes)
        kept = tuple([n for i, n in enumerate(array.shape) if i not in axes])
        moved = np.moveaxis(named(array, dtype), axes, range(len(axes))).reshape(-1, *kept)
        rows = [np.asarray(row, object) for row in moved]
        if not rows:
            raise Refused("it reduces no numbers")
        return functools.reduce(lambda a, b: self.each(name, dtype, [dtype] * 2, [a, b]), rows)

    def _product(self, params: Any, out: Any, dtypes: Sequence[Any], ins: Sequence[Any]) -> Any:
        (contracted, batches), sides = params["dimension_numbers"], []
        for x, dtype, own, batch in zip(ins, dtypes, contracted, batches, strict=True):
            x = self._convert_element_type(None, out, [dtype], [named(x, dtype)])
            free = [i for i in range(x.ndim) if i not in (*own, *batch)]
            shape = [math.prod(x.shape[i] for i in axes) for axes in (batch, free, own)]
            sides.append(x.transpose(*batch, *free, *own).reshape(shape))
        a, b = sides[0][:, :, None], sides[1][:, None]
        if a.size * b.shape[2] > MOST_LINES:
            raise Refused("a product of so many numbers")
        products = self.each("mul", out.dtype, [out.dtype] * 2, [a, b])
        return self._folded("add", (3,), out.dtype, products)

    def _linear(self, eqn: Any, ins: Sequence[Any]) -> list[Any]:
        """Return sums of numbers that an operation, given its indices, moves and adds up."""
        name, outs = eqn.primitive.name, [v.aval for v in eqn.outvars]
        dtype, sizes = outs[0].dtype, [out.size for out in outs]
        moving = _moving.get(name, [*range(len(ins))])
        if not all(is_known(x) for i, x in enumerate(ins) if i not in moving):
            raise Refused("its index is computed")
        whole = np.concatenate([named(ins[i], dtype).ravel() for i in moving])
        if max(whole.size, sum(sizes)) > MOST_NUMBERS:
            raise Refused("an array of so many numbers")
        matrix = _matrix(eqn, ins, moving)
        if not np.isin(matrix, (0, 1)).all():
            raise Refused("it reads outside of an array")
        found = np.empty(len(matrix), object)
        add = functools.partial(self.each, "add", dtype, [dtype] * 2)
        for i, row in enumerate(matrix):
            own = [np.asarray(x, object) for x in whole[row == 1]]
            zero = np.asarray(literal(0, type_of(dtype)), object)
            found[i] = functools.reduce(lambda a, b: add([a, b]), own or [zero]).item()
        return np.split(found, np.cumsum(sizes)[:-1])

    def _branches(self, eqn: Any, branches: Sequence[Any], ins: Sequence[Any]) -> list[Any]:
        which, *operands = ins
        if is_known(which):
            return self.program(branches[int(np.clip(which, 0, len(branches) - 1))], operands)
        each = [self.program(branch, operands) for branch in branches]
        dtype = eqn.invars[0].aval.dtype
        pairs = zip(eqn.outvars, zip(*each, strict=True), strict=True)
        return [self._choice(which, dtype, cases, var.aval) for var, cases in pairs]

    def _added_exactly(self, eqn: Any, ins: Sequence[Any]) -> list[Any]:
        """Return what `rankax.core.loop.shared.add_exactly` does."""
        dtype = eqn.outvars[0].aval.dtype
        total, lost, x = map(named, ins, [dtype] * 3)

        def of(text: str, *own: Any) -> Any:
            return self.numbers(text, dtype, [dtype] * len(own), own)

        x = of("({0}+{1})", x, lost)
        after = of("({0}+{1})", total, x)
        taken = of("({0}-{1})", after, total)
        error = of("(({0}-({1}-{2}))+({3}-{2}))", total, after, taken, x)
        return [after, of("({0}=={0}?{0}:0)", error)]


def _array(x: Any) -> Any:
    return np.asarray(x, object) if isinstance(x, str) else np.asarray(x)


def _needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return the equations that the outputs of a program need."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    found: list[JaxprEqn] = []
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or not needed.isdisjoint(eqn.outvars):
            found.append(eqn)
            needed |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return found[::-1]


def _simplified(name: str, ins: Sequence[Any]) -> Any:
    """Return what is left of an operation with a number that does nothing, such as 0 in a sum.

    The transpose of an index makes sums with zeros, and -0 + 0 is the only one that changes.
    """
    neutral = {"add": 0, "mul": 1}.get(name)
    if neutral is None:
        return None
    for known, other in (ins, ins[::-1]):
        if is_known(known) and (known == neutral).all():
            return np.broadcast_to(other, np.broadcast_shapes(known.shape, other.shape))
    return None


_OWN = ("select_n", "convert_element_type", "bitcast_convert_type", "integer_pow", "round")
_moves = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
_moves |= {"transpose", "slice", "concatenate"}
_moving = {"gather": [0], "dynamic_slice": [0], "dynamic_update_slice": [0, 1]}
_moving |= {"scatter": [0, 2], "scatter-add": [0, 2]}  # others move all arguments
_LINEAR = {*_moving, "cumsum", "rev", "pad", "split", "tile", "stack", "unstack"}
_FOLDS = _table("""
    reduce_sum: add
    reduce_prod: mul
    reduce_max: max
    reduce_min: min
    reduce_and: and
    reduce_or: or
""")


def _moved(name: str, params: Any, eqn: JaxprEqn, ins: list[Any]) -> list[Any]:
    """Return an operation that only moves numbers."""
    out: Any = eqn.outvars[0].aval
    if not all(map(is_known, ins)):
        ins = [named(x, out.dtype) for x in ins]
    x = ins[0]
    match name:
        case "broadcast_in_dim":
            shape = [1] * len(out.shape)
            for i, at in enumerate(params["broadcast_dimensions"]):
                shape[at] = x.shape[i]
            x = np.broadcast_to(x.reshape(shape), out.shape)
        case "transpose":
            x = x.transpose(params["permutation"])
        case "slice":
            strides = params["strides"] or [1] * x.ndim
            triples = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
            x = x[tuple([slice(*own) for own in triples])]
        case "concatenate":
            x = np.concatenate(ins, params["dimension"])
        case _:  # a reshape
            x = x.reshape(out.shape)
    return [x]


def _constants(eqn: JaxprEqn, jaxpr: Jaxpr, ins: Sequence[Any]) -> list[Any]:
    """Return an operation on numbers that are all known."""
    values = {v: x for v, x in zip(eqn.invars, ins, strict=True) if not isinstance(v, Literal)}
    with jax.ensure_compile_time_eval():
        outs = evaluate(only(eqn, jaxpr, [*values]), (), *map(jnp.asarray, values.values()))
        return list(map(np.asarray, outs))


def _matrix(eqn: JaxprEqn, ins: Sequence[Any], moving: Sequence[int]) -> Any:
    """Return by which numbers of its arguments an operation makes each of its results."""
    sizes = [ins[i].size for i in moving]

    def fun(numbers: Any) -> Any:
        parts = jnp.split(numbers, np.cumsum(sizes)[:-1])
        given = {i: jnp.reshape(x, ins[i].shape) for i, x in zip(moving, parts, strict=True)}
        values = [given.get(i, x) for i, x in enumerate(ins)]
        outs = eqn.primitive.bind(*map(jnp.asarray, values), **eqn.params)
        return jnp.concatenate([jnp.ravel(x) for x in jax.tree.leaves(outs)])

    with jax.ensure_compile_time_eval():
        return np.asarray(jax.vmap(fun, out_axes=1)(jnp.eye(sum(sizes), dtype=jnp.float32)))
