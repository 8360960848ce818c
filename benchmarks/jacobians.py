# SPDX-License-Identifier: MIT
"""Memory and time of a Jacobian of 20,000 outputs by 2000 inputs, and of its Gram matrix.

    python benchmarks/jacobians.py

compares with JAX, adv-jax-math and NetKet. Two functions:

* waves: each output depends on many inputs, by way of 160,000 numbers. Forward mode.
* network: 20,000 samples of a network of 2000 parameters. Each output has a sample of its own, so
  its row is `jax.grad` of one sample, mapped.

Memory is what the compiler reports beyond inputs and outputs. All cases are compiled first, and
checked against the first one; then they take turns, and the medians are shown.
"""

import os
import platform
import statistics
import time

import page

if __name__ == "__main__":
    page.needs("adv_jax_math", "netket")
import jax
import jax.numpy as jnp
import netket
from adv_jax_math import batch_jacfwd
from jax.flatten_util import ravel_pytree

from rankax import chunked_jacfwd, chunked_reduce, chunked_vmap

jax.config.update("jax_enable_x64", False)  # which NetKet has enabled

RESULTS = page.RESULTS / "jacobians.md"
HEAD = """# Jacobians

Written by `python benchmarks/jacobians.py --write`. {machine}, {cores} cores,
JAX {jax}, float32.

{m:,} outputs, {n:,} inputs, `chunk_size={chunk}`. Medians of {rounds} turns in one process.

|  | temporaries, MB | output, MB | s | times the first of its group |
|---|---:|---:|---:|---:|
"""
M, N, CHUNK, ROUNDS = 20_000, 2000, 100, 3
RATES = jnp.linspace(1, 2, 4)
FEATURES, HIDDEN = 18, 100


def waves(p):
    u = jnp.repeat(p, M // N)
    features = jnp.sin(jnp.cumsum(u[:, None] * RATES[None], axis=0) / M)
    return u + jnp.cumsum(features, axis=0).sum(1) / M


def network(parameters, x):
    """The output of a network, for one sample or for samples on axis 0."""
    hidden = jnp.tanh(x @ parameters["inner"] + parameters["shift"])
    return hidden @ parameters["outer"]


def gram(jacobian):
    return lambda *args: (lambda j: j.T @ j)(jacobian(*args))


def cases_of_waves():
    cases = {
        "jax.jacfwd": jax.jacfwd(waves),
        "chunked_jacfwd": chunked_jacfwd(waves, chunk_size=CHUNK),
        "adv_jax_math.batch_jacfwd": batch_jacfwd(waves, batch_size=CHUNK),
    }
    grams = {
        "J.T @ J of jax.jacfwd": gram(jax.jacfwd(waves)),
        'chunked_jacfwd(reduce="gram", chunk_size=10)': chunked_jacfwd(
            waves, reduce="gram", chunk_size=10
        ),
    }
    return cases, grams


def cases_of_network():
    def row(parameters, x):
        return ravel_pytree(jax.grad(network)(parameters, x))[0]

    def apply(variables, x):
        return network(variables["params"], x)

    def of_netket(parameters, x):
        options = {"mode": "real", "dense": True, "chunk_size": CHUNK}
        return netket.jax.jacobian(apply, parameters, x, **options)

    plain = jax.vmap(row, (None, 0))
    cases = {
        "jax.vmap(jax.grad)": plain,
        "chunked_vmap(jax.grad)": chunked_vmap(row, CHUNK, (None, 0)),
        "netket.jax.jacobian": of_netket,
    }
    grams = {
        "J.T @ J of jax.vmap": gram(plain),
        'chunked_reduce(jax.grad, "gram")': chunked_reduce(row, "gram", CHUNK, (None, 0)),
    }
    return cases, grams


def compare(cases, *args):
    compiled = {name: jax.jit(fun).lower(*args).compile() for name, fun in cases.items()}
    times = {name: [] for name in cases}
    want = None
    for turn in page.turns(ROUNDS):
        for name, program in compiled.items():
            begin = time.perf_counter()
            got = jax.block_until_ready(program(*args))
            times[name].append(time.perf_counter() - begin)
            if turn == 0:
                want = got if want is None else want
                assert jnp.allclose(got, want, rtol=1e-3, atol=1e-3 * jnp.abs(want).max()), name
    first = statistics.median(next(iter(times.values())))
    for name, program in compiled.items():
        memory, seconds = program.memory_analysis(), statistics.median(times[name])
        line = (
            f"| `{name}` | {memory.temp_size_in_bytes / 1e6:.1f} | "
            f"{memory.output_size_in_bytes / 1e6:.0f} | {seconds:.2f} | {seconds / first:.2f} |\n"
        )
        page.progress(line.rstrip())
        yield line


def main():
    given = page.arguments(__doc__).parse_args()
    page.progress("compiling")
    keys = jax.random.split(jax.random.key(0), 4)
    parameters = {
        "inner": jax.random.normal(keys[0], (FEATURES, HIDDEN)),
        "shift": jax.random.normal(keys[1], (HIDDEN,)),
        "outer": jax.random.normal(keys[2], (HIDDEN,)),
    }
    samples = jax.random.normal(keys[3], (M, FEATURES))
    text = HEAD.format(
        machine=platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        jax=jax.__version__,
        m=M,
        n=N,
        chunk=CHUNK,
        rounds=ROUNDS,
    )
    for cases in cases_of_waves():
        text += "".join(compare(cases, jnp.linspace(0, 1, N)))
    for cases in cases_of_network():
        text += "".join(compare(cases, parameters, samples))
    page.finish(RESULTS, text, write=given.write)


if __name__ == "__main__":
    main()
