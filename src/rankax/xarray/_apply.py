# SPDX-License-Identifier: MIT
"""``apply``: a kernel on named arrays, through `xarray.apply_ufunc`.

xarray aligns the arguments and puts the core dimensions last; reduced dimensions count as core
dimensions there, in front of the others. `_named` finds the dimensions.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import numpy as np

from rankax._front.kernel import Kernel
from rankax._options import Options
from rankax.call.kernels import bind, bind_leaves, bind_unchecked, refuse_nodes
from rankax.core.base.arrays import is_staged
from rankax.ext.jit import kept_with_programs
from rankax.pipeline import evaluate
from rankax.xarray import _named


def apply(
    kernel: Callable[..., Any],
    *args: Any,
    core_dims: Any = None,
    output_dims: Any = None,
    output_coords: Any = None,
    reduce_dims: Any = None,
    dtype: Any = None,
    to: Literal["dataset"] | None = None,
    **kwargs: Any,
) -> Any:
    r"""Call a kernel of `rankax.auto_vmap` with named arrays, whose dimensions are matched by name.

    With ``x`` of dimensions ``("level", "time")`` and a kernel of rank ``"level"`` equivalent to ::

        xarray.apply_ufunc(kernel, x, input_core_dims=[["level"]], dask="allowed")

    Core dimensions are matched by the names that the kernel declares, in any order. All others are
    batch dimensions, broadcast by name; a batch axis with a name, as in ``x="i | 3"``, is the
    dimension of that name. A core dimension may have a length of its own in each argument and
    output; the coordinates along it are then left out.

    Parameters
    ----------
    kernel : callable
        Decorated with `rankax.auto_vmap`; a bound method too.
    *args, **kwargs
        Its arguments. Each array with a rank, also inside a pytree, may be an `xarray.DataArray`
        or an `xarray.Dataset`, whose variables are taken in turn. Other arrays have no names, so
        they must have exactly the axes of their rank.
    core_dims : dict or str, optional
        Maps parameters to the names of their core dimensions, in the order of the kernel's axes:
        ``{"v": ("level",)}``. It is needed if the rank has no names (an int), or if the
        array has other names. For an array inside a pytree the key is its path, as in error
        messages: ``"pose['R']"``. If every array has the same, single core dimension, its name is
        enough: ``"level"``.
    output_dims : str, tuple of str, or a pytree of those, optional
        The names of the outputs' core dimensions; for several outputs, a tree like the output of
        the kernel with one entry for each array, or a dict by path. By default, the names that the
        kernel declares; a name shared with an argument stands for the dimension of that argument.
    output_coords : dict, optional
        Coordinates of the outputs' core dimensions: ``{"degree": [2, 1, 0]}``.
    reduce_dims : str or tuple of str, optional
        The batch dimensions that a kernel with ``reduce`` reduces, instead of its ``reduce_axis``.
        By default those of its option ``over``, or all of them.
    dtype : dtype, optional
        To which floats of the named arrays are converted, such as ``"float32"`` for data of 64
        bits.
    to : "dataset", optional
        Return one `xarray.Dataset`, whatever the kernel returns. With a Dataset among the arguments
        its variables are called ``t2m_trend``, ``sst_trend``: the variable, then the output.

    Returns
    -------
    DataArray, Dataset, dict or tuple
        Like the output of the kernel: an `xarray.DataArray` for one array; an `xarray.Dataset` for
        a dict, NamedTuple or dataclass; a tuple for a tuple. With a Dataset among the arguments,
        each array is a Dataset with the same variables, and a dict remains a dict. xarray's rules
        decide which coordinates, names and attributes are kept (`xarray.set_options` of
        ``keep_attrs``); ``units`` are left out, unless ``keep_attrs=True`` is set.

        If the data are dask or cubed arrays, so are the results, and nothing is computed yet.

    Raises
    ------
    TypeError
        An array holds dates or objects, or 64-bit numbers while JAX computes with 32 bits.
    TypeError
        An array without names has batch axes, or one with names has no rank.
    ValueError
        A core dimension is absent, ambiguous or cut into chunks.
    ValueError
        A core dimension of an output has no name.

    Examples
    --------
    >>> import jax.numpy as jnp, numpy as np, xarray as xr
    >>> import rankax, rankax.xarray
    >>> @rankax.auto_vmap(p="level", t="level")
    ... def mean_temperature(p, t):
    ...     return jnp.trapezoid(t, p) / (p[-1] - p[0])
    >>> p = xr.DataArray(np.array([1000.0, 800.0, 500.0], "float32"), dims="level")
    >>> t = xr.DataArray(np.ones((3, 4), "float32"), dims=("level", "time"), name="t")
    >>> rankax.xarray.apply(mean_temperature, p, t).dims
    ('time',)
    """
    if not isinstance(kernel, Kernel):
        raise TypeError(
            f"rankax.xarray.apply: kernel must be decorated with rankax.auto_vmap, got {kernel!r}"
        )
    kernel, args = kernel.unbound(args)
    declared = kernel.spec
    site = f"rankax.xarray.apply({declared.name})"
    if declared.preset.batch_shape is not None:
        raise TypeError(
            f"{site}: the axes of batch_shape={declared.preset.batch_shape} have no names; pass a "
            "DataArray that has these dimensions, and kernel.with_options(batch_shape=None)"
        )
    if to not in (None, "dataset"):
        raise ValueError(f"{site}: to must be 'dataset' or None, got {to!r}")
    call = refuse_nodes(bind_unchecked(declared, args, kwargs))
    named = _named.named_leaves(call, core_dims, _named.checked_dtype(dtype, site), site)
    named_leaves = list(named.values())
    batch = _named.batch_dims(named_leaves, site)
    reduced = _named.reduced_dims(declared, reduce_dims, batch, site)
    dims = [leaf.dims(reduced, site) for leaf in named_leaves]
    if declared.declaration.axes:  # xarray has compared them
        kernel = Kernel(declared.unnamed)
        declared = kernel.spec
    reduce, axes = declared.preset.reduce, None
    if reduce is not None:
        axes = tuple(range(-len(reduced), 0))
        kernel = kernel.with_options(reduce_axis=axes)

    def bound(arrays: Iterable[Any]) -> inspect.BoundArguments:
        values = {**dict(enumerate(call.leaves)), **dict(zip(named, arrays, strict=True))}
        return bind_leaves(declared, call.shell, [*values.values()], call.others).bound

    def on_data(*data: Any) -> Any:  # bare arrays, core axes last
        pairs = zip(named_leaves, data, strict=True)
        passed = bound(leaf.aligned(x, reduced) for leaf, x in pairs)
        of_data = bind(kernel.spec, passed.args, passed.kwargs, takes_foreign=True)
        outs = jax.tree.leaves(kernel.run(of_data))
        if not any(isinstance(x, jax.Array) for x in data):
            outs = [np.array(x) if isinstance(x, jax.Array) else x for x in outs]
        return outs[0] if len(outs) == 1 else tuple(outs)

    def on_shapes(*shapes: Any) -> Any:
        passed = bound(shapes)
        call = bind(declared, passed.args, passed.kwargs)
        return evaluate(call, Options(reduce=reduce, reduce_axis=axes))

    # Without the batch dimensions that remain.
    shapes = [leaf.shape(reduced) for leaf in named_leaves]
    find = functools.partial(jax.eval_shape, on_shapes, *shapes)
    if declared.preset.jit and not is_staged():
        passed = bound(shapes)
        of_shapes = bind(declared, passed.args, passed.kwargs, shapes_only=True)
        out = kept_with_programs(of_shapes, find, "xarray", axes)
    else:
        out = find()
    treedef = jax.tree.structure(out)
    if not treedef.num_leaves:
        raise TypeError(f"{site}: the kernel returns no array")
    out_dims = _named.dims_of_outputs(
        declared, named_leaves, out, output_dims, batch, reduced, site
    )
    results = _named.xr.apply_ufunc(
        on_data,
        *(leaf.value for leaf in named_leaves),
        input_core_dims=dims,
        output_core_dims=out_dims,
        exclude_dims=_named.resized_dims(named_leaves, jax.tree.leaves(out), out_dims),
        dask="allowed",
    )
    tree = treedef.unflatten([results] if len(out_dims) == 1 else results)
    tree = _named.with_coords(tree, {} if output_coords is None else output_coords, out_dims, site)
    return _named.assembled(tree) if to is None else _named.as_dataset(tree, declared.name)
