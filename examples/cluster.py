# SPDX-License-Identifier: MIT
"""The potential of a million charges, which lie in the memories of several processes.

The charges fill a ball evenly, at random. Each process holds its own, and never sees the others';
together they are one array of JAX, sharded over the devices of all processes. ``coulomb`` is the
kernel for one pair of a point and a charge; ``reduce="sum"`` adds the charges up, a chunk at a
time, where they lie. What travels between the processes is one sum for each point. The potential of
the ball is known, so the result is checked.

    python examples/cluster.py              # starts two processes on this machine
    srun python examples/cluster.py join    # on a cluster: each task of Slurm is a process
"""

import os
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rankax import auto_vmap

CHARGES = 1_000_000  # in all
POINTS = 25
TIMEOUT = 120  # seconds, for two processes on this machine


@auto_vmap(point=1, charge=1, reduce="sum", reduce_axis=-1, chunk_size=2**16, jit=True)
def coulomb(point, charge):
    """The potential at one point of a unit charge at another, each of shape (3,)."""
    return 1 / jnp.linalg.norm(point - charge)


def own_charges(process, count):
    """What one process holds: in place of this it would read its part of a file."""
    rng = np.random.default_rng(process)
    ways = rng.normal(size=(count, 3))
    radii = np.cbrt(rng.uniform(size=(count, 1)))
    return np.float32(radii * ways / np.linalg.norm(ways, axis=1, keepdims=True))


def line_of_points(count):
    """Points from the centre of the ball to three times its radius."""
    away = np.linspace(0, 3, count)
    direction = np.array([1, 2, 2]) / 3
    return away, np.float32(away[:, None] * direction)


def in_closed_form(away):
    """The potential of a ball of radius 1 and charge 1, at a distance from its centre."""
    return np.where(away < 1, (3 - away**2) / 2, 1 / np.maximum(away, 1))


def work(count=CHARGES):
    """What every process does, once `jax.distributed` is initialised."""
    mesh = jax.make_mesh((jax.device_count(),), ("charges",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("charges"))
    each = count // jax.device_count() * jax.local_device_count()
    own = own_charges(jax.process_index(), each)
    charges = jax.make_array_from_process_local_data(sharding, own)
    away, points = line_of_points(POINTS)

    # That the charges are sharded is seen: each device sums its own, then the sums are added.
    found = np.asarray(coulomb(points[:, None], charges)) / count
    program = coulomb.lower(points[:, None], charges).compile()
    sent = re.findall(r"= \S+ (all-\w+|collective-\w+|reduce-scatter)\(", program.as_text())
    error = np.max(np.abs(found - in_closed_form(away)))
    print(
        f"process {jax.process_index()} of {jax.process_count()}: {len(own)} of {len(charges)} "
        f"charges; sent: {', '.join(sent)}; at the centre {found[0]:.3f}; error {error:.1e}",
        flush=True,
    )


def join(**where):
    """Be one of the processes; ``where`` says which, if no scheduler does."""
    if where:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(**where)
    work()
    jax.distributed.shutdown()


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def main(processes=2):
    """Start the processes on this machine, and print what they say."""
    address = f"localhost:{free_port()}"
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "join", address, str(processes), str(number)],
            # One device each, whatever flags this process was started with.
            env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(processes)
    ]
    try:
        for process in started:
            print(process.communicate(timeout=TIMEOUT)[0], end="")
        if any(process.returncode for process in started):
            raise SystemExit("a process failed")
    finally:
        for process in started:
            process.kill()  # one that waits for another that failed


if __name__ == "__main__":
    if sys.argv[1:2] != ["join"]:
        main()
    elif sys.argv[2:]:
        address, processes, number = sys.argv[2:]
        join(coordinator_address=address, num_processes=int(processes), process_id=int(number))
    else:
        join()
