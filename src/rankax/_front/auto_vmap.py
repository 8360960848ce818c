# SPDX-License-Identifier: MIT
"""``auto_vmap``: the decorator and its options.

`auto_vmap` takes options and named ranks in one ``**named``, because it has to know which options
were passed: one may share its name with a parameter of the kernel (`rankax.core.declare.ranks`).
The signature that `help` shows is set separately.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, Protocol, TypeVar

import jax

from rankax._front.kernel import ClassMethod, Kernel
from rankax.core.base.cache import Members
from rankax.core.base.messages import function_name
from rankax.core.call.bind import KernelSpec
from rankax.core.declare.ranks import declare
from rankax.core.declare.split_key import SplitKey
from rankax.core.options import DEFAULTS, checked_options

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Decorator(Protocol):
    """The type of ``auto_vmap(...)``: it keeps the kernel's parameters and result."""

    def __call__(self, fun: Callable[P, R], /) -> Kernel[P, R]: ...


@typing.overload
def auto_vmap(fun: Callable[P, R], /) -> Kernel[P, R]: ...


@typing.overload
def auto_vmap(
    *positional_ranks: Any,
    ranks: Mapping[str, Any] | None = None,
    chunk_size: int | Literal["auto"] | None = "auto",
    memory_limit: int | str | None = None,
    reduce: Any = None,
    reduce_axis: int | Sequence[int] | None = None,
    where: str | int | None = None,
    batch_shape: int | Sequence[int] | None = None,
    checkpoint: bool | None = None,
    jit: bool = False,
    compiler_options: Mapping[str, Any] | None = None,
    progress: bool | str | Callable[[int, int], object] = False,
    devices: int | str | Sequence[Any] | jax.sharding.PartitionSpec | None = None,
    lockstep: bool = True,
    bucket: bool | Sequence[int] = False,
    batched: bool = False,
    cpu_math: bool = False,
    xla_cpu: bool = True,
    **named_ranks: Any,
) -> Decorator: ...


def auto_vmap(*positional_ranks: Any, ranks: Mapping[str, Any] | None = None, **named: Any) -> Any:
    r"""Let a kernel written for one item take any broadcastable batch of each argument.

    ``auto_vmap(0, 1)(f)(s, v)`` with ``s`` of shape ``(4, 1)`` and ``v`` of shape ``(5, 3)`` is
    equivalent to ::

        jax.vmap(jax.vmap(f, in_axes=(None, 0)), in_axes=(0, None))(s[:, 0], v)

    The leading axes that an argument has beyond its rank are batch axes. The batch axes of all
    arguments broadcast together by NumPy's rules, and each is mapped by one `jax.vmap`. An argument
    that lacks an axis, or has it with length 1, is not mapped there, so no broadcast is ever
    materialised. The compiled program is the same as with nesting by hand.

    Parameters
    ----------
    *positional_ranks : int, None, str, SplitKey, or a pytree prefix of those
        How many core axes one item of each argument has, bound to the parameters of the kernel as
        a call binds arguments. An int counts them: 0 for a scalar, 1 for a vector. A dimension
        string names or fixes them: ``"n 3"``, ``""``; sizes are then checked across arguments.
        ``None``, or no rank, passes any Python object through untouched. `SplitKey` is the rank of
        a random key that is split, one key per item. A dict, tuple, list, NamedTuple or registered
        dataclass of ranks spreads over a pytree argument as ``in_axes`` of `jax.vmap` does; a dict
        also spreads over a class with fields of those names, and `ranks_like` makes such a tree
        from an example. One string with parentheses is a gufunc signature for the whole kernel:
        ``"(n,3),(n)->()"``.
    ranks : dict, optional
        Ranks by parameter name, like ``**named_ranks``, but also for parameters that share their
        name with an option: ``ranks={"bucket": 0, "x": 0}``. A parameter has one rank, by position,
        by name or here.
    chunk_size : int, "auto" or None, default "auto"
        Maximum number of evaluations in flight, counted over all batch axes together (see
        `chunked_vmap`). Fewer are used if that is faster; ``plan`` shows how many. None: no bound.
        ``"auto"``: none for a map; with ``reduce``, and no ``memory_limit``, as many as have their
        values in the cache. On a GPU, a small number is slow, because each step launches kernels.
    memory_limit : int or str, optional
        Bytes, ``"2 GB"``, ``"500 MiB"``, or ``"50%"`` of the memory that the first device (or else
        the machine) has free when a call with these shapes is first made. rankax picks a chunk size
        whose reported temporary memory, forward and gradient, fits the limit (see Notes). Together
        with ``chunk_size`` the smaller bound counts.
    reduce : str, Reduction, None, or a pytree prefix of those, optional
        How the outputs are reduced along ``reduce_axis``: ``"sum"``, ``"mean"``, ``"prod"``,
        ``"max"``, ``"min"``, ``"argmax"``, ``"argmin"``, ``"any"``, ``"all"``, ``"logsumexp"``,
        ``"gram"``, or an object of `rankax.reductions`, such as ``Several("min", "argmin")`` for
        more than one reduction of an output. ``None`` inside a tree keeps an output whole. Unless
        ``chunk_size=None``, the reduced outputs are never stored (see `chunked_reduce` for memory,
        derivatives and order).
    reduce_axis : int or tuple of int, optional
        The axes of the batch shape that are reduced, counted as in NumPy; None: all of them. The
        others stay, in their order, in front of the core axes.
    where : str or int, optional
        The key, field or index of the output that says whether an item counts, with ``reduce``: one
        boolean. An output inside another is given by its path: ``"['masks']['ok']"``. Items left
        out add nothing, and their derivative is 0, even if their value or derivative is infinite or
        NaN. In the result, None takes the place of that output unless it has an entry of its own in
        ``reduce``. Objects of `rankax.reductions` take ``where`` as well; theirs takes precedence.
        See Notes.
    batch_shape : int or tuple of int, optional
        Batch axes besides those of the arguments, with which they broadcast: the counterpart of
        ``axis_size`` in `jax.vmap`. With ``key=SplitKey, batch_shape=2000``, one key gives 2000
        draws. None: only the axes of the arguments.
    checkpoint : bool, optional
        Recompute each chunk in the reverse pass instead of storing the intermediate values of all
        chunks. None: store them only if they stay within a ``memory_limit``, and cost more to
        recompute than to store.
    jit : bool, default False
        Compile the mapped call, once for each set of shapes, dtypes and static values. Arrays are
        traced, and so are Python scalars on parameters with a rank; everything else is static and
        must be hashable. Inside another ``jit`` it has no effect. A method's ``self`` is static too
        unless it is a pytree: later changes to its attributes are not seen.
    compiler_options : dict, optional
        Passed to `jax.jit` with ``jit=True``. Inside another ``jit`` the outer one's options count.
    progress : bool, str or callable, default False
        Show the progress of the outermost loop. True shows a ``tqdm`` bar with the kernel's name
        (it needs the extra ``progress``), a string is the bar's label, and a function is called
        with ``(done, total)``, in items. See Notes.
    devices : "all", int, sequence of devices, PartitionSpec or False, optional
        Which devices share the batch: ``"all"`` local devices, the first n, a list, or
        mesh axes. Each evaluates a part of the longest batch axis. ``None``:
        as the arrays are sharded. ``False``: do not divide the batch. With several CPU devices
        (``jax_num_cpu_devices``), all cores work. See Notes.
    lockstep : bool, default True
        With ``jax.vmap``, and so by default, a ``while_loop`` runs for all items as long as the
        slowest one needs, and both branches of a ``cond`` run. ``False``: each item stops when it
        is done. ``chunk_size`` is the number of lanes (by default 256 on a CPU, and elsewhere 4096
        to 65,536, the fewer the more each of them keeps); a lane whose item is done takes the next
        one. If no loop depends on the item, nothing changes. See Notes.
    bucket : bool or sequence of int, default False
        With ``jit=True``: compile one program for many batch lengths. Each batch axis is padded to
        the next of these lengths with copies of the last item, and the results are cut. True: a
        series of lengths, each a quarter longer than the one before. Inside another ``jit`` it has
        no effect, and with dask or cubed arrays it is an error. See Notes.
    batched : bool, default False
        The kernel takes a batch itself, as a network or a simulator may: in each argument with a
        rank, and in each output, it has one axis in front, for the items of a chunk. Ranks are
        still those of one item. See Notes.
    cpu_math : bool, default False
        On a CPU, compute sines, angles and powers such as ``x**1.5`` by vectorised programs in
        place of the C library, each to 4 units in the last place. See Notes.
    xla_cpu : bool, default True
        Apply the rules for XLA on a CPU, with JAX 0.12: chunks are evaluated in tiles that fit the
        cache, and some values are stored where the compiler would recompute them. ``False`` leaves
        the plain program, a scan over `jax.vmap`. The environment variable ``RANKAX_XLA_CPU=0``,
        set before rankax is imported, makes that the default.
    **named_ranks : int, None, str, or a pytree prefix of those
        Ranks by parameter name; the only way for keyword-only parameters. One rank on ``*args``
        applies to each of them, and several apply one by one; a rank on ``**kwargs`` applies to
        each value without a rank under its own name. Values without a rank have that of the
        annotation, as parameters do, or are untouched. A parameter with the name of an option gets
        its rank in ``ranks``, by position, in a signature or by annotation.

    Returns
    -------
    callable
        The kernel for batches, if the first argument is the kernel (``@auto_vmap``); otherwise a
        decorator. Every array that the kernel returns has the batch shape in front, without the
        reduced axes; without batch axes the kernel is simply called. The result keeps the name,
        docstring, signature and type of the kernel, which is its ``__wrapped__``. Its
        ``plan(*args, **kwargs)`` shows what a call with such arguments (or `jax.ShapeDtypeStruct`
        in their place) would do. ``with_options(**options)`` returns the same kernel with other
        options; equal options give the same object, so nothing is compiled twice. See `options` for
        setting many kernels at once. ``check(*args)`` compares items of a call with single
        evaluations, and ``nonfinite(*args)`` finds items that are NaN or infinite. All of these
        work on bound methods: ``body.energy.plan(x)``. ``signature`` is the gufunc signature, with
        made-up names for unnamed axes; None if the output is not declared.

    Raises
    ------
    TypeError
        When decorating: a rank for an unknown parameter, two for one, too many, one of a wrong
        type, or none at all.
    TypeError
        When called: the arguments do not fit the signature.
    TypeError
        When called: an argument with a rank is not an array, or is a list of numbers.
    TypeError
        When called: the kernel returns None. Return ``()`` from one that is called for its effects.
    TypeError
        When called, with ``jit=True``: a static argument cannot be hashed.
    ValueError
        When decorating: a negative rank, a string that cannot be read, an unknown reduction.
    ValueError
        When called: an argument does not have the tree structure of its ranks.
    ValueError
        When called: an axis to reduce is out of range, or an output cannot be reduced this way.
    ValueError
        When called: one item alone needs more than ``memory_limit``.
    RankError
        When called: an argument has fewer axes than its rank.
    BatchShapeError
        When called: the batch axes do not broadcast together.
    CoreDimensionError
        When called: a named or fixed dimension disagrees; while tracing, that of an output.

    Notes
    -----
    *Annotations.* A parameter without a rank gets that of its jaxtyping annotation, and a bare
    ``@auto_vmap`` relies on them alone. ``Float[Array, "*batch n 3"]`` and ``Float[Array, "n 3"]``
    both have rank 2; ``Float[Array, "..."]`` and ``Array`` declare none. NamedTuples, dataclasses
    and Equinox modules are read by their fields. A return annotation is checked. Without ranks
    passed to `auto_vmap`, an array in a parameter whose annotation does not mention arrays causes a
    ``UserWarning`` at the first call; ``name=None`` declares that it is to be left untouched.

    *Options.* ``None`` as an argument's value passes through whatever its rank.

    *Memory limit.* For each set of shapes and dtypes the call is compiled for a few chunk sizes,
    usually three, but not run; ``plan`` does the same and shows the measurements. The limit applies
    to the call itself and to its gradient with respect to all floating arrays that it uses. With
    ``checkpoint=False`` the gradient does not count, because chunks do not bound it. Where no chunk
    of a fitting size divides the batch, the gradient copies the outputs, and this copy counts.
    Memory held by the surrounding program is not counted. Under an outer `jax.vmap`, one item
    counts.

    *Progress.* A call has one bar, however many axes it loops over, even inside `jax.vmap`; kernels
    called by the kernel have none. A gradient shows its forward pass; some reductions make two
    forward passes, and a new bar begins (the function receives 0 again). A call in one chunk has no
    loop and shows nothing. Updates are at least a tenth of a second apart. A pass reports at most
    50 times, and a report costs less than a millisecond. The function runs on another thread and
    must not call JAX; an exception in it ends the call. The bar is closed when the call fails;
    inside your own `jax.jit`, when the next call with the same label begins. Only the first of
    several processes shows it. Pass the same function at each call, because a new one is compiled
    again.

    *What counts.* With ``where``, ``"mean"`` and ``Moments`` divide by the number of items that
    count. Indices number all items. If none counts, ``"argmin"`` and ``"argmax"`` are -1, ``"min"``
    and ``"max"`` the value that no item is worse than (``inf`` and ``-inf``, or the limit of the
    integers), means and variances NaN, and other results the identity. ``TopK`` and ``BottomK``
    fill the places of missing items with that worst value and the index -1; ``Best`` has it in the
    output that decides, and zeros in the others. A derivative makes one more pass over the items,
    which evaluates their masks.

    *Items that end by themselves.* With ``lockstep=False``, items may end in any order. Values are
    those of the call in lockstep, up to rounding, and each item has the same number for reductions
    and split keys. All derivatives work, except reverse mode of a gradient, and of a loop without
    batch axes, where the kernel is simply called. They run in lockstep, in chunks of items with
    similar numbers of steps; a ``while_loop`` or ``fori_loop`` stores 32 carries and recomputes the
    others, unless it is inside a function with its own derivative rule. Each device has its own
    lanes and does not wait for the others. The kernel must have no ordered effects.

    *Buckets.* With ``bucket``, values, gradients and reductions are those of the call without it:
    copies are neither counted nor differentiated. One case differs: where the derivative of the
    last item is infinite, that of an argument that all items share may be NaN instead. NumPy pads
    arrays and cuts results on the host, because XLA would compile a program for each length. So a
    call waits for its result, which may lose a weak type. A length that occurs often gets a program
    that cuts its results. Axes of length 0 and 1 are not padded. Options that count items, such as
    ``progress``, ``memory_limit`` and ``devices``, count the copies, too.

    *Kernels that take a batch.* With ``batched=True``, one call of the kernel evaluates the items
    of a chunk, along all batch axes together; without ``chunk_size``, those of the whole batch.
    Arrays that some items share are copied for them, but never for more than a chunk. A chunk has
    ``chunk_size`` items, or a few less. The kernel is traced for one item and for the length of a
    chunk; only the first axis of an output may differ. An item must not depend on the others, which
    ``kernel.check`` tests.

    *Ragged items.* An argument whose first core dimension has a name may be `Ragged`: items of
    different lengths. Each is padded to one of a few lengths; a parameter of rank `Mask` says which
    rows are real.

    *Blocks.* If an argument with a rank is a dask or cubed array, so is the result, and nothing is
    computed yet: the scheduler evaluates the compiled kernel block by block, each with its own
    bound on memory. Core axes must be whole in each chunk. Reduced axes may be cut: the states of
    blocks are merged in a tree. These calls are not differentiable. For arrays with named
    dimensions see `rankax.xarray.apply`.

    *CPU math.* XLA calls the C library for each single sine. With ``cpu_math=True``, ``sin``,
    ``cos`` and ``tan`` are three times as fast, ``asin``, ``acos``, ``atan`` and ``atan2``
    eighteen times (all in ``float32``), and powers with a constant exponent, an odd multiple of a
    half up to 3.5 or a whole number up to 4, about ten times (``float32`` and ``float64``). In
    ``float32``, each result is within 4 units in the last place of the exact one, and 3 for ``sin``
    and ``cos`` of any argument. Subnormal numbers may count as 0, and a negative power above a
    quarter of the largest float may be infinite. All derivatives have the same functions in them.
    Each call of such a function takes about 0.03 seconds to compile, and 0.1 in a gradient. A sine
    of 32 numbers or more in one item stays, because XLA vectorises it where it is summed. Without
    batch axes, with an ``axis_name`` in one chunk, on other platforms, and with JAX before 0.12,
    the option does nothing. ``plan`` shows where it would help, if the call has chunks or reduces.

    *Devices.* A batch axis that devices share is evaluated in parts, one per device, side by side:
    ``chunk_size`` and ``memory_limit`` count per device. Nothing is sent between devices in the
    forward pass or for the gradient of mapped arguments; the gradient of a shared argument, and a
    reduction, are combined over the devices once. Outputs have the same sharding as with
    `jax.vmap`; if the devices do not divide the axis, some items are evaluated twice but count
    once, and each device gets all outputs. With ``devices``, a call copies its inputs to them once,
    except those that are already there; inside ``jax.jit`` and transformations, JAX refuses inputs
    that are committed elsewhere. Kernels that the kernel calls use no other devices. Without
    ``devices``, sharding is read from concrete arrays, in an eager call or with ``jit=True``, and
    always on a mesh with explicit axes.

    *Cost.* Binding and planning take about twenty microseconds per call, and no time in a compiled
    program. The kernel is traced once per call.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from rankax import auto_vmap
    >>> @auto_vmap(s=0, v=1, m=2)
    ... def energy(s, v, m):
    ...     return v @ m @ v + s * v.size
    >>> energy(2.0, jnp.ones(3), jnp.ones((3, 3)))
    Array(15., dtype=float32)
    >>> energy(2.0, jnp.ones((5, 3)), jnp.ones((4, 1, 3, 3))).shape
    (4, 5)
    """
    is_bare = ranks is None and named.keys() <= DEFAULTS.keys()
    if len(positional_ranks) == 1 and is_bare and _is_function(positional_ranks[0]):
        return _decorate(positional_ranks[0], (), None, named)
    for rank in positional_ranks:
        if _is_function(rank) and not _is_rank_tree(rank):
            raise TypeError(
                f"auto_vmap: got the function {function_name(rank)} among the ranks; write "
                f"auto_vmap(...)({function_name(rank)})"
            )
    return functools.partial(_decorate, positional=positional_ranks, ranks=ranks, named=named)


# What `help` shows: `auto_vmap` itself takes options and ranks in one ``**named``.
_shown = inspect.signature(typing.get_overloads(auto_vmap)[-1]).parameters.values()
vars(auto_vmap)["__signature__"] = inspect.Signature(
    [p.replace(annotation=p.empty) for p in _shown]
)


def _is_function(value: Any) -> bool:
    is_callable = callable(value) and value is not SplitKey
    return is_callable or isinstance(value, (staticmethod, classmethod))


def _is_rank_tree(value: Any) -> bool:
    """Whether this is a pytree that only happens to be callable, as an Equinox module may be."""
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(leaf is SplitKey or isinstance(leaf, (int, str)) for leaf in leaves)


def _decorate(fun: Any, positional: tuple[Any, ...], ranks: Any, named: dict[str, Any]) -> Any:
    if isinstance(fun, (staticmethod, classmethod)):
        kind = ClassMethod if type(fun) is classmethod else type(fun)
        return kind(_decorate(fun.__func__, positional, ranks, named))
    if not callable(fun):
        raise TypeError(f"auto_vmap(...) decorates a function, got {type(fun).__name__}")
    site = f"auto_vmap({function_name(fun)})"
    given = {name: value for name, value in named.items() if name in DEFAULTS}
    named_ranks = {name: rank for name, rank in named.items() if name not in DEFAULTS}
    # First, because an option that is refused may be meant as the rank of a parameter.
    declaration = declare(fun, positional, named_ranks, ranks, given, DEFAULTS)
    plain: Kernel[..., Any] = Kernel(KernelSpec(fun, declaration, {}, Members("kernels")))
    return plain.with_explicit(checked_options(given, site), site)
