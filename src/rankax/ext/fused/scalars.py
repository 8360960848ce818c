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
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.interpreters.partial_eval import dce_jaxpr

from rankax.core.base.arrays import plainly
from rankax.core.loop.shared import add_exactly
from rankax.core.reduce.extrema import Arg
from rankax.core.trace.programs import evaluate, name_and_params, only

MOST_LINES = 2048  # of one item; larger programs take minutes to compile, and spill
MOST_NUMBERS = 256  # of an argument of one item, of a state, or moved by an operation


class Refused(Exception):  # noqa: N818  # an error only with `fused=True`
    """What cannot be part of a kernel: why, which operation, and where that is called."""

    def of(self, eqn: JaxprEqn) -> Refused:
        """Return the same for the operation of an equation, unless one inside it is named."""
        reason, name, place = (*self.args, "", "", "")[:3]
        place = place or source_info_util.summarize(eqn.source_info)
        return Refused(reason, name or name_and_params(eqn)[0], place)

    def __str__(self) -> str:
        reason, name, place = (*self.args, "", "", "")[:3]
        return ": ".join(filter(None, (name + (place and f" ({place})"), reason)))


def type_of(dtype: Any) -> str:
    """Return the type in C++ of numbers of this dtype."""
    name = np.dtype(dtype).name if not jnp.issubdtype(dtype, jax.dtypes.extended) else str(dtype)
    if name not in _types:
        raise Refused(f"dtype {name}")
    return _types[name]


_types = {"float16": "float", "bfloat16": "float", "float32": "float", "float64": "double"}
_types |= {"int8": "signed char", "int16": "short", "int32": "int", "int64": "long long"}
_types |= {"uint8": "unsigned char", "uint16": "unsigned short", "uint32": "unsigned"}
_types |= {"uint64": "unsigned long long", "bool": "bool"}
DTYPES = {type_: name for name, type_ in _types.items()}  # of what a kernel reads and writes


class Lines:
    """Lines that each define one number, by the depth of the loop in which they stand.

    The depth of a name says in which of the nested loops it is known: a line stands in the
    innermost loop of what it reads. Equal lines are written once.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix, self.depth = prefix, dict[str, int]()
        self.lines = defaultdict[int, list[str]](list)
        self.chooses = False  # whether one reads a float of an argument by a computed index
        self.names: dict[tuple[str, str], str] = {}

    def let(self, type_: str, text: str, inputs: Iterable[str] = (), of: str = "") -> str:
        """Return the name of a number, given by an expression of ``inputs``; or of an array."""
        if (name := self.names.get((type_, text))) is None:
            if len(self.names) >= MOST_LINES:
                raise Refused(f"more than {MOST_LINES} operations")
            name = self.names[type_, text] = f"{self.prefix}{len(self.names)}"
            self.depth[name] = at = max((self.depth.get(x, 0) for x in inputs), default=0)
            self.lines[at].append(f"{of and 'static '}const {type_} {name}{of} = {text};")
        return name


def literal(value: Any, type_: str) -> str:
    """Return a number as C++ has it."""
    if type_ == "bool":
        return "true" if value else "false"
    if type_ not in ("float", "double"):
        # A minus is an operator, before a number that may be too large.
        suffix = {"long long": "LL", "unsigned long long": "ULL"}.get(type_, "")
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
    max: ({0}>{1}||{0}!={0}?{0}:{1})
    min: ({0}<{1}||{0}!={0}?{0}:{1})
    is_finite: (({0}-{0})==0)
    one_minus_square: ((1-{0})*(1+{0}))
    sign: ({0}!={0}?{0}:(T)(({0}>0)-({0}<0)))
    logistic: (1/(1+F(-{0})))
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
    max: ({0}>{1}?{0}:{1})
    min: ({0}<{1}?{0}:{1})
    square: ({0}*{0})
    clamp: ({1}<{0}?{0}:({1}>{2}?{2}:{1}))
""")
_FUNCTIONS = {"rem": "fmod", "abs": "fabs", "erf_inv": "erfinv", "logistic": "exp"}
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


def _text_of(name: str, type_: str) -> str:
    """Return an operation on single numbers of this type as an expression."""
    tables = {"float": (_FLOATS,), "double": (_FLOATS,), "bool": (_BOOLS,)}
    whole = (_UNSIGNED, _INTEGERS) if type_.startswith("unsigned") else (_INTEGERS,)
    found = next((t[name] for t in (*tables.get(type_, whole), _ALL) if name in t), None)
    if found is None:
        raise Refused
    function = _FUNCTIONS.get(name, name) + ("f" if type_ == "float" else "")
    function = f"rankax_{function}" if name in _OURS else function
    unsigned = "unsigned long long" if type_.endswith("long long") else "unsigned"
    found = found.replace("F(", f"{function}(").replace("(T)", f"({type_})")
    return found.replace("(U)", f"({unsigned})")


def _converted(old: str, new: str) -> str:
    """Return a conversion as an expression; integers from floats are the nearest there are."""
    if old == new:
        return "{0}"
    if new == "bool":
        return "({0}!=0)"
    if old in ("float", "double") and new not in ("float", "double"):
        info = np.iinfo(DTYPES[new])
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
        jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.out_avals), instantiate=True)
        consts = [np.asarray(x) for x in closed.consts]
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

        def read(var: Any) -> Any:
            return np.asarray(var.val, var.aval.dtype) if hasattr(var, "val") else env[var]

        for eqn in jaxpr.eqns:
            ins = list(map(read, eqn.invars))
            try:
                outs = self._equation(eqn, jaxpr, ins)
            except Refused as error:
                raise error.of(eqn) from None
            pairs: Any = zip(eqn.outvars, outs, strict=True)
            env.update((v, x.reshape(v.aval.shape)) for v, x in pairs)
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
        if name in ("rankax_add", "argmax", "argmin"):
            return self.program(_simpler(name, params, [v.aval for v in eqn.invars]), ins)
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
        if name in _folds:
            return self._folded(_folds[name], params["axes"], out.dtype, ins[0])
        return self.each("add" if name == "add_any" else name, out.dtype, dtypes, ins)

    def each(self, name: str, dtype: Any, dtypes: Sequence[Any], ins: Sequence[Any]) -> Any:
        """Return an operation on single numbers."""
        text, simple = _text_of(name, type_of(dtypes[0])), _simplified(name, ins)
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
        name += "f" * (type_of(out.dtype) == "float")
        return self.numbers(name + "({0})", out.dtype, dtypes, ins)

    def _integer_pow(self, params: Any, out: Any, dtypes: Sequence[Any], ins: Any) -> Any:
        exponent, base, power = params["y"], ins[0], np.ones(out.shape, out.dtype)
        product = functools.partial(self.each, "mul", out.dtype, [out.dtype] * 2)
        left = abs(exponent)
        while left:
            power = product([power, base]) if left & 1 else power
            base, left = product([base, base]) if left > 1 else base, left >> 1
        return power if exponent >= 0 else self.numbers("(1/{0})", out.dtype, dtypes, [power])

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
            return [self._looked_up(eqn, ins)]
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

    def _looked_up(self, eqn: Any, ins: Sequence[Any]) -> Any:
        """Return rows of an array by computed indices, which are clipped."""
        x, index, out, params = ins[0], ins[1], eqn.outvars[0].aval, eqn.params
        row, dims = (1, *x.shape[1:]), params.get("dimension_numbers")
        is_row = eqn.primitive.name == "dynamic_slice"
        if eqn.primitive.name == "gather":
            trailing = tuple(range(out.ndim - x.ndim + 1, out.ndim))
            wanted = trailing, (0,), (0,), (), ()
            is_row = tuple(dims) == wanted and not str(params["mode"]).endswith("DROP")
        if not is_row or params["slice_sizes"] != row:
            raise Refused("its index is computed")
        columns, dtype = x.reshape(len(x), -1).T, eqn.invars[1].aval.dtype
        clip = f"({{0}}<0?0:({{0}}<{len(x)}?{{0}}:{len(x) - 1}))"
        rows = self.numbers(clip, dtype, [dtype], [index]).ravel()
        found = [self._entry(x, len(columns), i, out) for i in rows for x in columns]
        return np.array(found, object)

    def _entry(self, column: Any, step: int, index: str, out: Any) -> str:
        """Return the number of a column that an index counts: of a table, or of an argument."""
        type_ = type_of(out.dtype)
        if is_known(column):
            table = self.lines.let(type_, f"{{{', '.join(named(column, out.dtype))}}}", of="[]")
            return self.lines.let(type_, f"{table}[{index}]", [index])
        at = re.fullmatch(r"a(\d+)_(\d+)", column[0])
        if not at or [*column] != [f"a{at[1]}_{int(at[2]) + i * step}" for i in range(len(column))]:
            raise Refused("its index is computed")
        self.lines.chooses |= type_ in ("float", "double")
        text = f"A{at[1]}.data[o{at[1]}+{index}*{step}+{at[2]}]"
        return self.lines.let(type_, text, [index, column[0]])

    def _branches(self, eqn: Any, branches: Sequence[Any], ins: Sequence[Any]) -> list[Any]:
        which, *operands = ins
        if is_known(which):
            return self.program(branches[int(np.clip(which, 0, len(branches) - 1))], operands)
        each = [self.program(branch, operands) for branch in branches]
        dtype = eqn.invars[0].aval.dtype
        pairs = zip(eqn.outvars, zip(*each, strict=True), strict=True)
        return [self._choice(which, dtype, cases, var.aval) for var, cases in pairs]


def _simpler(name: str, params: Any, avals: Sequence[Any]) -> ClosedJaxpr:
    """Return an operation as a program of simpler ones."""
    fun: Any = add_exactly
    if name != "rankax_add":
        fun = functools.partial(_place, **params, largest=name == "argmax")
    with plainly(True):
        return jax.make_jaxpr(fun)(*avals)


def _place(x: jax.Array, *, axes: Sequence[int], index_dtype: Any, largest: bool) -> jax.Array:
    arg = Arg((), x.dtype, index_dtype, largest)
    rows = enumerate(jnp.moveaxis(x, axes[0], 0))
    pairs = [(row, jnp.full_like(row, i, index_dtype)) for i, row in rows]
    return functools.reduce(arg.merge, pairs)[1]


def _simplified(name: str, ins: Sequence[Any]) -> Any:
    """Return what is left of an operation with a number that does nothing, such as 0 in a sum.

    The transpose of an index makes sums with zeros, and -0 + 0 is the only one that changes.
    """
    for known, other in (ins, ins[::-1]) if name in ("add", "mul") else ():
        if is_known(known) and (known == (name == "mul")).all():
            return np.broadcast_to(other, np.broadcast_shapes(known.shape, other.shape))
    return None


_OWN = ("select_n", "convert_element_type", "bitcast_convert_type", "integer_pow", "round")
_moves = {"broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
_moves |= {"transpose", "slice", "concatenate"}
_moving = {"gather": [0], "dynamic_slice": [0], "dynamic_update_slice": [0, 1]}
_moving |= {"scatter": [0, 2], "scatter-add": [0, 2]}  # others move all arguments
_LINEAR = {*_moving, "cumsum", "rev", "pad", "split", "tile", "stack", "unstack"}
_folds = {f"reduce_{name}": name for name in ("max", "min", "and", "or")}
_folds |= {"reduce_sum": "add", "reduce_prod": "mul"}


def _moved(name: str, params: Any, eqn: JaxprEqn, ins: list[Any]) -> list[Any]:
    """Return an operation that only moves numbers."""
    out: Any = eqn.outvars[0].aval
    if not all(map(is_known, ins)):
        ins = [named(x, out.dtype) for x in ins]
    x = ins[0]
    match name:
        case "broadcast_in_dim":
            new = {*range(out.ndim)} - {*params["broadcast_dimensions"]}
            x = np.broadcast_to(np.expand_dims(x, (*new,)), out.shape)
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
