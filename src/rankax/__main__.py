# SPDX-License-Identifier: MIT
"""Kernels for one item, called on any batch, from the shell.

Each command has a page of help: python -m rankax stream --help
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import logging
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rankax

__all__ = ["main"]

# What the library says of a call, in words of a command.
_WORDS = {
    "the same call resumes": "the same command with --resume goes on",
    "resume=False": "--resume is not given",
    "on_nan='keep'": "--on-nan keep",
    'call jax.config.update("jax_enable_x64", True) first': "set JAX_ENABLE_X64=1",
}


def stream(kernel: str, inputs: Any, *, plan_only: bool, **options: Any) -> None:
    r"""Call a kernel on arrays in files that are larger than memory, and store what it returns.

    The kernel is decorated with rankax.auto_vmap, in a module that Python can import from here.
    Arrays are read block by block, and results are written to a group of zarr. If the command is
    stopped or killed, the same command with --resume goes on where it was.

      python -m rankax stream sky.kernels:distance --in x=stars.zarr/x --in y=points.npy \
          --out result.zarr --memory-limit 2GB

    Inputs, one --in for each:

      x=points.npy         an array that numpy.save wrote
      x=store.zarr/x       an array of zarr, in a folder
      x=data.h5/group/x    a data set of HDF5, which needs h5py
      x=2.5                a number

    Nothing is unpickled. JAX computes with 32 bits unless the environment has JAX_ENABLE_X64=1;
    arrays of 64 bits are refused without it, because digits would be lost.

    Results: one array is called output, as in zarr.open_array("result.zarr/output"), or has the
    name in --out result.zarr/name. Several have the keys of the dict, the names of the fields or
    the numbers of the tuple. The command ends with a line that opens each of them.
    """
    arrays = {name: _opened(name, value) for name, value in _once(inputs)}
    called = _kernel(kernel, arrays)
    if plan_only:
        prepared = importlib.import_module("rankax.stream._job").prepared
        job = prepared(called, (), arrays, options["memory_limit"], kernel, {})
        sys.stdout.write(f"{job}\n")
    else:
        stored = importlib.import_module("rankax.stream").run(called, **options, **arrays)
        for x in jax.tree.leaves(stored):
            sys.stdout.write(f'zarr.open_array("{x.store.root}")  {x.shape}  {x.dtype}\n')


def plan(kernel: str, shapes: Any) -> None:
    """Show how a call with arguments of these shapes would be evaluated. Nothing is computed.

      python -m rankax plan sky.kernels:distance x=100000x3 y=5000x3:int32 scale=

    Shapes:

      x=100000x3           an array of float32
      x=100000x3:int32     an array of another dtype
      x=                   a number
    """
    arguments = dict(_once(shapes))
    sys.stdout.write(f"{_kernel(kernel, arguments).plan(**arguments)}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m rankax", description=__doc__)
    version = f"rankax {rankax.__version__}, JAX {jax.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, dest="COMMAND")

    def command(fun: Callable[..., None]) -> argparse.ArgumentParser:
        text, kind = inspect.getdoc(fun) or "", argparse.RawDescriptionHelpFormatter
        sub = commands.add_parser(
            fun.__name__, help=text.split(".")[0], description=text, formatter_class=kind
        )
        sub.set_defaults(command=fun)
        sub.add_argument("kernel", metavar="PACKAGE.MODULE:KERNEL", help="where Python imports it")
        return sub

    sub = command(stream)
    path: Any = {"metavar": "NAME=PATH", "action": "append", "type": _pair}
    sub.add_argument("--in", dest="inputs", required=True, help="an argument", **path)
    sub.add_argument("--out", metavar="PATH", required=True, help="the store of the results")
    sub.add_argument("--memory-limit", metavar="SIZE", default="1GB", help="1GB by default")
    sub.add_argument("--resume", action="store_true", help="resume a run that was stopped")
    nan = "a result that is NaN is stored (keep, the default), or ends the command"
    sub.add_argument("--on-nan", choices=("keep", "raise"), default="keep", help=nan)
    sub.add_argument("--plan", dest="plan_only", action="store_true", help="show the blocks only")
    sub = command(plan)
    sub.add_argument("shapes", metavar="NAME=SHAPE", nargs="*", type=_shape, help="an argument")
    given = vars(parser.parse_args(arguments))
    del given["COMMAND"]
    try:
        given.pop("command")(**given)
    except (Exception, KeyboardInterrupt) as error:
        sys.stderr.write(_told(error, given))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _told(error: BaseException, given: dict[str, Any]) -> str:
    """Say what is wrong in words of the command, and in which line of the kernel."""
    first, out = str(error) or type(error).__name__, given.get("out")
    if isinstance(error, OSError) and out and str(error.filename).startswith(out):
        first = f"--out {out}: a store cannot be written there: {first}"
    # JAX adds what it says of a traceback, which is not shown here.
    notes = [note for note in getattr(error, "__notes__", ()) if not note.startswith("-----")]
    module = sys.modules.get(given["kernel"].partition(":")[0])
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if frame.filename == getattr(module, "__file__", None)]
    text = "\n".join([first, *notes, *traceback.format_list(lines[-1:]), ""])
    for of_call, of_command in _WORDS.items():
        text = text.replace(of_call, of_command)
    return f"{text.rstrip()}\n"


def _once(given: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Refuse an argument that is given twice, because the last would win."""
    names = [name for name, _ in given]
    for name in names:
        if names.count(name) > 1:
            raise TypeError(f"{name}= is given {names.count(name)} times; keep one")
    return given


def _pair(argument: str) -> tuple[str, str]:
    name, equals, value = argument.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{argument} must be NAME=VALUE, NAME being a parameter")
    return name, value


def _shape(argument: str) -> tuple[str, jax.ShapeDtypeStruct]:
    name, value = _pair(argument)
    shape, _, dtype = value.partition(":")
    try:
        sizes = tuple(int(size) for size in shape.split("x") if size)
        return name, jax.ShapeDtypeStruct(sizes, np.dtype(dtype or "float32"))
    except (TypeError, ValueError):
        like = f"{name}=100000x3, {name}=100000x3:int32 or, for a number, {name}="
        raise argparse.ArgumentTypeError(f"{argument} must be like {like}") from None


def _kernel(name: str, arguments: dict[str, Any]) -> Any:
    """Import ``package.module:kernel``, which has to have these parameters."""
    found = _imported(name)
    module, _, wanted = name.partition(":")
    kernels = [key for key, value in vars(found).items() if hasattr(value, "with_options")]
    has = f"{module} has {', '.join(sorted(kernels)) or 'no kernel'}"
    if wanted and not hasattr(found, wanted.partition(".")[0]):
        raise TypeError(f"{name} must be MODULE:KERNEL, and there is no {wanted!r}: {has}")
    kernel = pkgutil.resolve_name(name)
    if not hasattr(kernel, "with_options"):
        raise TypeError(f"{name} must be MODULE:KERNEL, decorated with rankax.auto_vmap: {has}")
    signature = inspect.signature(kernel)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        names = ", ".join(signature.parameters)
        raise TypeError(f"{name}: {error}; its parameters: {names}") from None
    return kernel


def _imported(name: str) -> Any:
    """Import the module of ``package.module:kernel``, or tell the line that raises."""
    module, colon, wanted = name.partition(":")
    if module.endswith(".py") or "/" in module:
        dotted = ".".join(Path(module).with_suffix("").parts)
        raise TypeError(f"{name} must be a name as in import, not a file: {dotted}{colon}{wanted}")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            error.add_note(f"{module} is looked for in {Path.cwd()}, and among installed packages")
            raise
        lines = _lines_of(error)
    except Exception as error:
        lines = _lines_of(error)
    raise ImportError(f"{name}: {module} cannot be imported:\n{lines}")


def _lines_of(error: Exception) -> str:
    """Format an error in a module that is imported, without frames of the import and of rankax."""
    frames = traceback.extract_tb(error.__traceback__)[2:]
    hidden = "<frozen", str(Path(__file__).parent)
    own = [frame for frame in frames if not frame.filename.startswith(hidden)]
    return "".join([*traceback.format_list(own), *traceback.format_exception_only(error)]).rstrip()


def _opened(name: str, value: str) -> Any:
    """Open an array in a file, or read a number."""
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(value)
    path = Path(value)
    site, stem = f"--in {name}={value}", value.removesuffix(path.suffix)
    for file in path.parents:
        if file.suffix in (".h5", ".hdf5") and file.exists():
            if importlib.util.find_spec("h5py") is None:
                raise ImportError(f"{value} needs h5py: pip install h5py")
            return importlib.import_module("h5py").File(file, "r")[str(path.relative_to(file))]
    if not path.exists():
        raise FileNotFoundError(f"{site}: there is no such file in {Path.cwd()}")
    if path.suffix == ".npy":
        try:
            return np.load(path, mmap_mode="r", allow_pickle=False)
        except (EOFError, ValueError) as error:
            why = "numpy.save did not write this, or it has Python objects"
            raise ValueError(f"{site}: {why}") from error
    if path.suffix == ".npz":
        names = ", ".join(np.load(path, allow_pickle=False).files)
        raise ValueError(
            f"{site}: an archive is not read block by block; it has {names}; in Python, "
            f"numpy.save('{stem}.npy', numpy.load('{value}')['NAME'])"
        )
    if path.is_file():
        raise ValueError(
            f"{site}: must be a .npy file, an array of zarr or a data set of HDF5; of text, in "
            f"Python, numpy.save('{stem}.npy', numpy.loadtxt('{value}', 'float32', delimiter=','))"
            "; add skiprows=1 if it begins with names"
        )
    if not any((path / file).exists() for file in ("zarr.json", ".zarray")):
        raise ValueError(f"{site}: must be an array of zarr, but is another folder")
    found = importlib.import_module("zarr").open(path, mode="r")
    if not hasattr(found, "shape"):
        arrays = ", ".join(f"{value}/{key}" for key, _ in found.arrays())
        raise ValueError(f"{site}: must be an array, but is a group of zarr; it has {arrays}")
    return found


if __name__ == "__main__":
    # On a full disk, what zarr had begun would log hundreds of lines below the error.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    sys.exit(main())
