# SPDX-License-Identifier: MIT
"""``load_tuning``: apart from the types of results, because the reference has those elsewhere."""

import os

from rankax.ext.tune.table import Tunings, read_tunings


def load_tuning(path: str | os.PathLike[str]) -> Tunings:
    """Read a file that `rankax.plans.Tuning.save` wrote.

    Equivalent to ``json.load``, with a check of the contents. Nothing in the file is executed.

    Parameters
    ----------
    path : str or path
        The file.

    Returns
    -------
    Tunings
        ``find(kernel, *args)`` returns the `rankax.plans.Tuning` for this kernel, arguments like
        these, this kind of device and this version of JAX, or None.

    Raises
    ------
    FileNotFoundError
        The file does not exist.
    ValueError
        The file holds anything else.

    Examples
    --------
    >>> import os, tempfile, jax.numpy as jnp
    >>> from rankax import auto_vmap, load_tuning
    >>> norm = auto_vmap(1, jit=True)(lambda v: jnp.sqrt(v @ v))
    >>> x = jnp.ones((1000, 3))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "tuning.json")
    ...     norm.tune(x, seconds=0.1).tuning.save(path)
    ...     saved = load_tuning(path)
    >>> fast = norm.with_options(**saved.find(norm, x).options)
    >>> saved.find(norm, x[:500]) is None
    True
    """
    return read_tunings(path)
