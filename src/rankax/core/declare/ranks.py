# SPDX-License-Identifier: MIT
"""The declaration of a kernel: every way of writing ranks, reduced to one normal form.

The normal form is a tree per parameter whose entries are `Rank` or ``None`` (untouched). It is
built and checked once, when the kernel is decorated.

A return annotation is read only if it has one rank (`ext/annotations.py`); of explicit ranks, only
a signature says what is returned.
A keyword that names a parameter is its rank, and not the option of that name, so that no later
option changes what a kernel means; an option it is only if the parameter has its explicit rank from
elsewhere. ``with_options`` takes options only.

Ranks are assigned to parameters first, or to items of ``*args`` or ``**kwargs`` (`bind_ranks`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from rankax.core.base.messages import checked_int, function_name, listed, plural
from rankax.core.base.trees import (
    HasFields,
    Items,
    Node,
    children_of,
    entries,
    field_names,
    flatten_once,
    is_leaf,
    spread_prefix,
    subtrees_with_entries,
)
from rankax.core.declare.dims import Dim, Rank, parse_axes, parse_dims
from rankax.core.declare.mask import Mask, mask_rank
from rankax.core.declare.split_key import SplitKey, key_rank

# As keywords take them, so that a type checker sees ``chunksize=100``, which is no rank; in
# ``ranks=``, any int is one.
_Number = Literal[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
_Entry = _Number | str | type[SplitKey] | SplitKey | Mask | HasFields | None
RankTree: TypeAlias = "_Entry | tuple[RankTree, ...] | list[RankTree] | Mapping[Any, RankTree]"
Parameter = inspect.Parameter
_MANY = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_BY_NAME = (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)


class BoundRanks(NamedTuple):
    """The explicit ranks of a kernel: of parameters, of single items of some, and of the outputs.

    ``items`` has the ranks of items of ``*args`` and ``**kwargs``, by parameter and key:
    ``{"args": {"[0]": 1}}``. The other items have the rank of the parameter.
    """

    whole: dict[str, Any]
    items: dict[str, dict[str, Any]]
    outputs: Any = None


def _by_position(ranks: inspect.BoundArguments) -> BoundRanks:
    """Return ranks that were bound as arguments.

    One rank for ``*args`` holds for all its items; of several, each holds for one.
    """
    bound = BoundRanks({}, {})
    for name, rank in ranks.arguments.items():
        if ranks.signature.parameters[name].kind is not Parameter.VAR_POSITIONAL:
            bound.whole[name] = rank
        elif len(rank) == 1:
            (bound.whole[name],) = rank
        else:
            bound.items[name] = {f"[{i}]": one for i, one in enumerate(rank)}
    return bound


def bind_ranks(
    ranks: tuple[Any, ...],
    named: Mapping[str, Any],
    by_parameter: Mapping[str, Any],
    signature: inspect.Signature,
    site: str,
    known_options: Collection[str],
) -> BoundRanks:
    """Assign ranks to parameters, as a call would bind arguments.

    The ranks in ``named`` were written as keywords, where an option may have been meant, and the
    ranks in ``by_parameter`` in ``ranks=``.
    """
    parameters = signature.parameters
    try:
        bound = _by_position(signature.bind_partial(*ranks))
    except TypeError:
        positional = [name for name, p in parameters.items() if p.kind not in _BY_NAME]
        raise TypeError(
            f"{site}: too many ranks; {plural(len(ranks), 'rank')} for "
            f"{plural(len(positional), 'positional parameter')}"
            + (f" ({', '.join(positional)})" if positional else "")
        ) from None
    several = {name: tuple(by_key.values()) for name, by_key in bound.items.items()}
    given = {name: (rank, "by position") for name, rank in {**bound.whole, **several}.items()}
    many = next((p.name for p in parameters.values() if p.kind is Parameter.VAR_KEYWORD), None)
    for ranks_by_name, origin in ((named, "by name"), (by_parameter, "in ranks")):
        for name, rank in ranks_by_name.items():
            if name in given:
                first, before = given[name]
                raise TypeError(
                    f"{site}: parameter {name!r} has two ranks, {first!r} {before} and {rank!r} "
                    f"{origin}"
                )
            given[name] = rank, origin
            if name in parameters:
                bound.whole[name] = rank
            elif many is None:
                hint = _hint(name, parameters, known_options)
                raise TypeError(f"{site}: the kernel has no parameter {name!r}; {hint}")
            elif origin == "by name" and _is_like_an_option(name, known_options):
                # Misspelled, it would become the rank of an item that no call passes.
                raise TypeError(
                    f"{site}: {name!r} would be the rank of an item of **{many}; "
                    f"{_hint(name, (), known_options)} (for an item of that name, write "
                    f"ranks={{{name!r}: ...}})"
                )
            else:
                bound.items.setdefault(many, {})[f"[{name!r}]"] = rank
    return bound


def checked_ranks(value: Any, site: str) -> Mapping[str, Any]:
    """Return what ``ranks=`` maps; refuse anything but names of parameters and their ranks."""
    if value is None:
        return {}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return value
    raise TypeError(
        f"{site}: ranks must map names of parameters to ranks, as in ranks={{'x': 0}}, got "
        f"{type(value).__name__} {value!r}"
    )


SYNONYMS = {  # in JAX and NumPy
    "axis": "did you mean the option 'reduce_axis', or 'over' for the name of an axis?",
    "axis_size": "did you mean the option 'batch_shape'?",
    "batch_size": "did you mean the option 'chunk_size'?",
    "in_axes": (
        "auto_vmap takes ranks in place of in_axes: the number of axes of each argument for one "
        "item, as in auto_vmap(0, 1)"
    ),
    "out_axes": "the batch axes of the outputs always come first; use jnp.moveaxis on the result",
    "signature": (
        "pass a gufunc signature as the first argument, as in auto_vmap('(n,3),(n)->()')"
    ),
    "shards": "did you mean the option 'devices'?",
}


def _hint(name: str, parameters: Collection[str], known_options: Collection[str]) -> str:
    """Return a hint for a name that is neither a parameter nor an option."""
    known = [*parameters, "ranks", *known_options, *SYNONYMS]
    close = next(iter(difflib.get_close_matches(name, known, n=1)), None)
    if close is None:
        return f"it has {', '.join(parameters) or 'no parameters'}"
    if close in parameters:
        return f"did you mean {close!r}?"
    return SYNONYMS.get(close) or f"did you mean the option {close!r}?"


def _is_like_an_option(name: str, known_options: Collection[str]) -> bool:
    close = difflib.get_close_matches(name, known_options, cutoff=0.7)
    return name in SYNONYMS or bool(close)


# Gufunc signatures.

_GROUP = re.compile(r"\(([^()]*)\)")
_SIDE = re.compile(r"\s*\([^()]*\)\s*(,\s*\([^()]*\)\s*)*")
_CORE_DIM = re.compile(r"[A-Za-z_]\w*|\d+")


def _is_gufunc(positional: tuple[Any, ...]) -> bool:
    return len(positional) == 1 and isinstance(positional[0], str) and "(" in positional[0]


def from_gufunc(
    text: str, others: Mapping[str, Any], signature: inspect.Signature, site: str
) -> BoundRanks:
    """Read a signature for the whole kernel: ``"(n,3),(n)->()"``.

    ``*args`` takes all groups that remain for it. ``self`` and ``cls`` are skipped because a
    signature cannot express "no rank". The ``others`` are masks, which callers do not pass.
    """
    if not all(isinstance(rank, Mask) for rank in others.values()):
        raise TypeError(f"{site}: a gufunc signature declares every rank; drop the named ones")
    passed = [p for name, p in signature.parameters.items() if name not in others]
    signature = signature.replace(parameters=passed)
    inputs, arrow, outputs = text.partition("->")
    if not arrow or not _SIDE.fullmatch(inputs) or not _SIDE.fullmatch(outputs):
        raise ValueError(
            f"{site}: {text!r} is not a gufunc signature; one looks like '(n,3),(n)->()'"
        )
    ranks = [_core_dims(group, text, site) for group in _GROUP.findall(inputs)]
    results = [_core_dims(group, text, site) for group in _GROUP.findall(outputs)]
    parameters = [p for p in signature.parameters.values() if p.kind not in _BY_NAME]
    if parameters and parameters[0].name in ("self", "cls"):
        parameters = parameters[1:]
    try:
        bound = _by_position(inspect.Signature(parameters).bind(*ranks))
    except TypeError:
        raise TypeError(
            f"{site}: {text!r} has {plural(len(ranks), 'input')}, which does not fit the "
            f"parameters {signature}"
        ) from None
    bound.whole.update(others)
    return bound._replace(outputs=results[0] if len(results) == 1 else tuple(results))


def _core_dims(group: str, text: str, site: str) -> Rank:
    words = [word.strip() for word in group.split(",")] if group.strip() else []
    for word in words:
        if not _CORE_DIM.fullmatch(word):
            flexible = "?" in word or "|" in word
            raise ValueError(
                f"{site}: {text!r} cannot be read at {word!r}; a core dimension is a name or a "
                f"size{' (optional and broadcastable ones are not supported)' if flexible else ''}"
            )
    return parse_dims(" ".join(words)) or Rank(0, ())


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The ranks of one kernel.

    Attributes
    ----------
    signature : inspect.Signature
        Of the kernel as callers see it: without the parameters of rank `Mask`.
    ranks : dict
        Rank trees by parameter, without the parameters that are passed through untouched.
    outputs : pytree of Rank or None
        The declared ranks of the outputs, if any.
    silent : frozenset of str
        Parameters without a rank whose annotations have nothing to do with arrays.
    axes : tuple of str
        The names of all batch axes, in the order that results have them.
    masks : dict
        The name of the dimension of each parameter of rank `Mask`.
    written : inspect.Signature, optional
        Of the kernel as it was written, if it has such parameters.
    """

    signature: inspect.Signature
    ranks: dict[str, Any]
    outputs: Any
    silent: frozenset[str] = frozenset()
    axes: tuple[str, ...] = ()
    masks: dict[str, str] = dataclasses.field(default_factory=dict)
    written: inspect.Signature | None = None


@dataclasses.dataclass(frozen=True)
class Unpacked:
    """The rank tree of ``*args`` or ``**kwargs`` as a whole: ``**kwargs: Unpack[Options]``."""

    tree: Any


def declare(
    fun: Callable[..., Any],
    positional: tuple[Any, ...],
    named: Mapping[str, Any],
    ranks: Any,
    known_options: Collection[str],
    annotated_ranks: Callable[..., tuple[dict[str, Any], Collection[str]]],
) -> tuple[Declaration, dict[str, Any]]:
    """Reduce all declared ranks of ``fun`` to the normal form; return the options among ``named``.

    Parameters
    ----------
    fun : callable
    positional, named : tuple, dict
        What was passed to `auto_vmap` by position and by name.
    ranks : dict, optional
        The option of `auto_vmap` of this name, as passed.
    known_options : collection of str
        The names of all options.
    annotated_ranks : callable
        What reads the annotations: `rankax.ext.annotations.annotated_ranks`.
    """
    site = f"auto_vmap({function_name(fun)})"
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):  # as many builtins
        raise TypeError(
            f"{site}: Python cannot tell the parameters of {function_name(fun)}, so ranks cannot "
            "be bound to them; wrap it in a function that names its own"
        ) from None
    by_parameter = checked_ranks(ranks, site)
    options = _options_among(named, positional, by_parameter, signature, known_options)
    named = {name: rank for name, rank in named.items() if name not in options}
    if _is_gufunc(positional):
        bound = from_gufunc(positional[0], {**named, **by_parameter}, signature, site)
    else:
        bound = bind_ranks(positional, named, by_parameter, signature, site, known_options)
    also = dict.fromkeys(named.keys() & {*known_options}, "; as an option, pass it to with_options")
    explicit = {
        name: _normal(rank, f"{site}: {name}", also.get(name, ""))
        for name, rank in bound.whole.items()
    }
    overridden = {*explicit, *([] if bound.outputs is None else ["return"])}
    # The annotations of a kernel that takes a batch itself describe the batch.
    takes_batch = options.get("batched") is True
    annotated, silent = {}, ()
    if not takes_batch and getattr(fun, "__annotations__", True):
        annotated, silent = annotated_ranks(fun, overridden, signature, site)
    for name, by_key in bound.items.items():
        items = {key: _normal(rank, f"{site}: {name}{key}") for key, rank in by_key.items()}
        rest = explicit.get(name, annotated.get(name))
        # Unpack[...] declares all items together, so explicit ranks override it as a whole.
        explicit[name] = Items(items, None if isinstance(rest, Unpacked) else rest)
    declared = {**annotated, **explicit}
    trees = {
        name: _for_parameter(declared.get(name), parameter)
        for name, parameter in signature.parameters.items()
    }
    _check_names(explicit, trees, site)
    axes = _ordered_axes(trees, site)
    if by_parameter and "ranks" in signature.parameters and "ranks" not in declared:
        raise TypeError(
            f"{site}: ranks={ranks!r} are ranks by name, but the kernel has a parameter 'ranks' "
            "too; give it its rank with ranks={'ranks': ...}, by position, in a signature or by "
            "annotation (None leaves it untouched)"
        )
    if not explicit and not any(tree is not None for tree in trees.values()):
        other = "or annotate the parameters with jaxtyping"
        if takes_batch:
            other = "because with batched=True, annotations describe the batch"
        raise TypeError(f"{site}: no rank is declared; give ranks, as in auto_vmap(0, 1), {other}")
    # With any explicit rank, a missing one is taken as deliberate.
    implicit = all(rank is None for rank in explicit.values())
    declaration = Declaration(
        signature,
        {name: tree for name, tree in trees.items() if tree is not None},
        bound.outputs if bound.outputs is not None else annotated.get("return"),
        frozenset(name for name in silent if implicit and name not in explicit),
        axes,
    )
    return _without_masks(declaration, site), options


def _options_among(
    named: Mapping[str, Any],
    positional: tuple[Any, ...],
    by_parameter: Mapping[str, Any],
    signature: inspect.Signature,
    known_options: Collection[str],
) -> dict[str, Any]:
    """Return the options: a name of a parameter is one if the parameter has its rank elsewhere."""
    ranked = {*by_parameter}
    if _is_gufunc(positional):
        ranked |= signature.parameters.keys()
    with contextlib.suppress(TypeError):  # too many, which is refused later
        ranked |= signature.bind_partial(*positional).arguments.keys()
    parameters = signature.parameters.keys() - ranked
    return {k: v for k, v in named.items() if k in known_options and k not in parameters}


def _without_masks(declaration: Declaration, site: str) -> Declaration:
    """Take the parameters of rank `Mask` out of what callers pass."""
    parameters = declaration.signature.parameters
    masks: dict[str, str] = {}
    for name, tree in declaration.ranks.items():
        for mask in entries(tree):
            if mask is None or not mask.is_mask:
                continue
            if tree is not mask or parameters[name].kind in _MANY:
                raise TypeError(
                    f"{site}: {name}: Mask is the rank of a whole parameter, which callers do not "
                    "pass"
                )
            masks[name] = mask.dims[0].text
    if not masks:
        return declaration
    ranks = {name: tree for name, tree in declaration.ranks.items() if name not in masks}
    first = [r.dims[0].name for t in ranks.values() for r in entries(t) if r and r.dims]
    for name, dim in masks.items():
        if dim not in first:
            raise ValueError(
                f"{site}: {name} is the mask of {dim!r}, but no parameter has {dim!r} as its first "
                f'core dimension, as in x="{dim} 3"'
            )
    passed = [parameter for name, parameter in parameters.items() if name not in masks]
    signature = declaration.signature.replace(parameters=passed)
    changed = {"signature": signature, "written": declaration.signature}
    return dataclasses.replace(declaration, ranks=ranks, masks=masks, **changed)


def subtrees_with_ranks(tree: Any, value: Any, name: str) -> list[tuple[str, Any, Rank | None]]:
    """Return ``(path, subtree, rank)`` for each subtree of an argument under one rank."""
    return list(
        subtrees_with_entries(tree, value, name, is_entry=_is_rank, what="rank", by_field=True)
    )


def ranks_of_output(declared: Any, out: Any) -> list[Rank | None]:
    """Return the declared rank of each leaf of an output."""
    return spread_prefix(declared, out, "output", is_entry=_is_rank, what="rank")


def _is_rank(entry: Any) -> bool:
    return entry is None or isinstance(entry, Rank)


def _for_parameter(tree: Any, parameter: Parameter) -> Any:
    """Return the rank tree of the one container that ``*args`` or ``**kwargs`` arrive in."""
    if isinstance(tree, Unpacked):
        return tree.tree
    many = parameter.kind in _MANY
    return Items({}, tree) if many and not (_is_rank(tree) or isinstance(tree, Items)) else tree


def _normal(rank: Any, site: str, also: str = "") -> Any:
    """Turn an explicit rank, or a tree of ranks, into a tree of `Rank` and None."""
    if rank is None or isinstance(rank, Rank):
        return rank
    if rank is SplitKey:
        return key_rank()
    if isinstance(rank, SplitKey):
        return key_rank(rank.axes)
    if isinstance(rank, Mask):
        return mask_rank(rank)
    if isinstance(rank, str):
        return _dims(rank, site)
    if rank is Mask:
        raise TypeError(f"{site}: Mask needs the name of a dimension, as in Mask('n')")
    if is_leaf(rank):
        expected = "a rank is an int >= 0, None, a dimension string, SplitKey, or a tree of those"
        return Rank(checked_int(rank, f"{site}: {expected}{also}; got", least=0))
    # The class of a container may not accept `Rank` objects as children.
    return Node(type(rank), {c.key: _normal(c.value, site + c.name) for c in children_of(rank)})


def _dims(text: str, site: str) -> Rank | None:
    if "(" in text or "->" in text:
        raise ValueError(
            f"{site}: {text!r} looks like a gufunc signature, which stands alone: "
            "auto_vmap('(n,3),(n)->()'); a dimension string has no parentheses: 'n 3'"
        )
    try:
        axes, core = parse_axes(text)
        rank = parse_dims(core)
    except ValueError as error:
        raise ValueError(f"{site}: {error}") from None
    return dataclasses.replace(rank, batch=axes) if rank and axes else rank


def _ordered_axes(trees: Mapping[str, Any], site: str) -> tuple[str, ...]:
    """Order the names of batch axes as they first appear, and as each rank has them."""
    ranks = [(name, rank) for name, tree in trees.items() for rank in entries(tree) if rank]
    waiting = list(dict.fromkeys(axis for _, rank in ranks for axis in rank.batch))
    for name, rank in ranks if waiting else ():
        for dim in rank.dims or ():
            for axis in {dim.name, *dim.names}.intersection(waiting):
                first = next(other for other, own in ranks if axis in own.batch)
                raise ValueError(
                    f"{site}: {axis!r} is a batch axis of {first} and a core dimension of {name}, "
                    "whose sizes are never compared; give one of them another name"
                )
    ordered: list[str] = []
    while waiting:
        left = ([axis for axis in rank.batch if axis in waiting] for _, rank in ranks)
        behind = {axis for own in left for axis in own[1:]}
        ready = next((axis for axis in waiting if axis not in behind), None)
        if ready is None:
            shown = [f"{name}={rank}" for name, rank in ranks if len(rank.batch) > 1]
            raise ValueError(
                f"{site}: the batch axes have no common order in {listed(shown)}; name them in the "
                "same order, and pass the array with its axes swapped"
            )
        waiting.remove(ready)
        ordered.append(ready)
    return tuple(ordered)


def _check_names(explicit: Mapping[str, Any], trees: Mapping[str, Any], site: str) -> None:
    """Refuse expressions in explicit ranks with a name that no parameter declares.

    Annotations may have them: jaxtyping evaluates any Python there.
    """
    declared = {dim.name for tree in trees.values() for dim in _dims_in(tree)}
    for parameter, tree in explicit.items():
        for dim in _dims_in(tree):
            problem = None
            if "{" in dim.text:
                problem = "the value of an argument is not looked up; name the size, or write '_'"
            elif unknown := [repr(name) for name in dim.names if name not in declared]:
                problem = f"no argument has a dimension named {listed(unknown, 'or')}"
            if problem is not None:
                raise ValueError(
                    f"{site}: {parameter}: the dimension {dim.text!r} could never be checked: "
                    f"{problem}"
                )


def _dims_in(tree: Any) -> list[Dim]:
    ranks = [rank for rank in entries(tree) if isinstance(rank, Rank)]
    return [dim for rank in ranks for dim in rank.dims or ()]


def ranks_like(item: Any) -> Any:
    """Return the ranks of an example of one item, as `auto_vmap` takes them.

    Equivalent to ::

        jax.tree.map(lambda leaf: leaf.ndim, item)

    with rank 0 for a Python number, and None for any other leaf, which passes through untouched.

    Parameters
    ----------
    item : pytree
        One item without batch axes, of arrays or `jax.ShapeDtypeStruct`. Only their numbers of
        axes count.

    Returns
    -------
    pytree of int and None
        In the containers of ``item``. A class that does not accept ints as its children is
        replaced by a dict of its fields, which means the same to `auto_vmap`.

    Raises
    ------
    ValueError
        If ``item`` holds an instance of a class that does not accept ints and whose children have
        no names, neither in JAX nor as attributes.

    Examples
    --------
    >>> from typing import NamedTuple
    >>> import jax, jax.numpy as jnp
    >>> from rankax import auto_vmap, ranks_like
    >>> class Pose(NamedTuple):
    ...     rotation: jax.Array
    ...     translation: jax.Array
    >>> pose = Pose(jnp.eye(3), jnp.zeros(3))
    >>> ranks_like(pose)
    Pose(rotation=2, translation=1)
    >>> move = auto_vmap(ranks_like(pose), 1)(lambda pose, x: pose.rotation @ x + pose.translation)
    >>> move(Pose(jnp.eye(3), jnp.ones((6, 1, 3))), jnp.ones((1000, 3))).shape
    (6, 1000, 3)
    """
    return _ranks_of(item, "item")


def _ranks_of(item: Any, name: str) -> Any:
    if item is None or is_leaf(item):
        return _rank_of(item)
    children = children_of(item)
    ranks = [_ranks_of(child.value, name + child.name) for child in children]
    with contextlib.suppress(Exception):  # a class may check its children, or convert them
        tree = flatten_once(item)[1].unflatten(ranks)
        inside = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
        given = jax.tree.leaves(ranks, is_leaf=lambda x: x is None)
        if list(map(id, inside)) == list(map(id, given)):
            return tree
    if (fields := field_names(item, children)) is not None:
        return dict(zip(fields, ranks, strict=True))
    raise ValueError(
        f"ranks_like: {name} is {type(item).__name__}, which accepts no ints in place of its "
        "arrays and has no field names; give one rank for all of it, or None"
    )


def _rank_of(leaf: Any) -> int | None:
    arrays: Any = (int, float, complex, np.generic, np.ndarray, jax.Array, jax.ShapeDtypeStruct)
    is_array = isinstance(leaf, arrays) or hasattr(leaf, "__jax_array__")
    return jnp.ndim(leaf) if is_array else None
