# SPDX-License-Identifier: MIT
"""Items that differ in cost: ``lockstep=False`` against `jax.vmap` and the best `jax.lax.map`.

    python benchmarks/lockstep.py             # six cases, in two minutes
    python benchmarks/lockstep.py oscillator  # one

``diffrax`` and ``nuts`` need the packages of these names (nuts: blackjax), and run only if they are
named. ``gradient`` is the oscillator's, beside `jax.vmap` of a `rankax.checkpoint_while_loop`.
Every program is compiled first; then all take turns, so that a slow moment of the machine falls on
each of them. The table has processor times; before it come, on the standard error, all ways:
medians of the time, and in brackets of the processor time, in milliseconds, and how many times as
long as the best number of lanes the others take.
"""

import platform
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import page
from rankax import checkpoint_while_loop, chunked_vmap

RESULT = page.RESULTS / "lockstep.md"
HEAD = """\
# Items that differ in cost

Written by `python benchmarks/lockstep.py --write`. {machine}, JAX {jax}.
Medians of {rounds} rounds in turns, of the processor time in ms, which other programs on the
machine do not change much.

| kernel | items | `jax.vmap` | best `lax.map(batch_size=)` | `lockstep=False`, 256 lanes |
|---|---:|---:|---:|---:|
"""
TITLES = {
    "escape": "escape times of a picture",
    "oscillator": "Van der Pol's oscillator, adaptive steps, stiffness from 0.1 to 100",
    "gradient": "its gradient; `jax.vmap` of a `checkpoint_while_loop`",
    "sampler": "a sampler: a scan around a loop of geometric length",
    "equal": "200 cheap steps for each item",
    "branch": "a branch that is expensive for one item in eight",
}
OTHERS = {"diffrax": "the oscillator, by diffrax", "nuts": "the No-U-Turn sampler of BlackJAX"}
ROUNDS = 7
BATCHES = (16, 64, 256, 1024)  # of `jax.lax.map`
LANES = (64, 256, 512)
MOST, STEPS, WIDTH = 2000, 20, 8

data = jax.random.normal(jax.random.key(5), (200, WIDTH))
labels = (jax.random.uniform(jax.random.key(6), (200,)) < 0.5).astype(jnp.float32)
matrix = jax.random.normal(jax.random.key(7), (64, 64)) / 8


def escape(c):
    """Steps until a point leaves the circle of radius 2."""

    def step(s):
        z, n = s
        return jnp.stack([z[0] ** 2 - z[1] ** 2 + c[0], 2 * z[0] * z[1] + c[1]]), n + 1

    def goes_on(s):
        return (s[1] < MOST) & (jnp.sum(s[0] ** 2) < 4.0)

    return lax.while_loop(goes_on, step, (jnp.zeros(2), 0))[1]


def oscillator(mu, while_loop=lax.while_loop):
    """Van der Pol's oscillator, by Bogacki and Shampine's method with adaptive steps."""

    def slope(y):
        return jnp.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])

    def step(s):
        y, at, h, n = s
        h = jnp.minimum(h, 10.0 - at)
        k1 = slope(y)
        k2 = slope(y + h / 2 * k1)
        k3 = slope(y + 3 * h / 4 * k2)
        new = y + h * (2 / 9 * k1 + 1 / 3 * k2 + 4 / 9 * k3)
        off = h * (-5 / 72 * k1 + 1 / 12 * k2 + 1 / 9 * k3 - 1 / 8 * slope(new))
        error = jnp.max(jnp.abs(off) / (1e-4 + 1e-4 * jnp.abs(new)))
        is_good = error <= 1
        factor = jnp.clip(0.9 * (error + 1e-10) ** (-1 / 3), 0.2, 5.0)
        return jnp.where(is_good, new, y), jnp.where(is_good, at + h, at), h * factor, n + 1

    start = jnp.array([2.0, 0.0]), jnp.float32(0), jnp.float32(1e-3), 0
    y, *_, n = while_loop(lambda s: (s[1] < 10.0) & (s[3] < 20_000), step, start)
    return y, n


def reversible(mu):
    """The oscillator with a loop that `jax.vmap` can reverse, too."""
    return oscillator(mu, checkpoint_while_loop)


def sampler(key, x):
    """A chain whose trajectories of gradient steps have a geometric length, 50 on average."""

    def move(s):
        x, size, n = s
        gradient = data.T @ (labels - jax.nn.sigmoid(data @ x)) - x
        return x + 1e-3 * size * gradient, size * 0.999, n + 1

    def step(x, key):
        log = jnp.log(jax.random.uniform(key, minval=1e-6)) / np.log(1 - 1 / 50.0)
        length = 1 + jnp.floor(log).astype(jnp.int32)
        x, *_ = lax.while_loop(lambda s: s[2] < length, move, (x, jnp.float32(1), 0))
        return x, x[0]

    return lax.scan(step, x, jax.random.split(key, STEPS))[1].sum()


def equal(n):
    """As many steps for each item."""
    return lax.while_loop(lambda s: s[1] < n, lambda s: (jnp.cos(s[0]), s[1] + 1), (1.0, 0))[0]


def branch(x):
    """One item in eight takes the expensive branch."""

    def expensive(x):
        return lax.fori_loop(0, 8, lambda _, v: jnp.tanh(matrix @ v), jnp.full(64, x))[0]

    return lax.cond(jnp.abs(x) < 1 / 8, expensive, lambda x: 2 * x, x)


def diffrax(mu):
    """The same oscillator, by a library."""
    import diffrax

    def slope(time, y, args):
        return jnp.stack([y[1], mu * (1 - y[0] ** 2) * y[1] - y[0]])

    start = jnp.array([2.0, 0.0])
    control = diffrax.PIDController(rtol=1e-4, atol=1e-4)
    options = {"stepsize_controller": control, "max_steps": 20_000}
    term, solver = diffrax.ODETerm(slope), diffrax.Bosh3()
    return diffrax.diffeqsolve(term, solver, 0.0, 10.0, 1e-3, start, **options).ys[0]


def nuts(key, x):
    """A chain of the No-U-Turn sampler, whose trajectories differ in length."""
    import blackjax

    many = jax.random.normal(jax.random.key(8), (5000, WIDTH))
    odds = many @ jax.random.normal(jax.random.key(9), (WIDTH,))
    outcomes = jnp.where(odds > jax.random.logistic(jax.random.key(10), (5000,)), 1.0, 0.0)

    def log_density(x):
        z = many @ x
        return jnp.sum(outcomes * z - jnp.logaddexp(0.0, z)) - x @ x / 2

    sampler = blackjax.nuts(log_density, 0.02, jnp.ones(WIDTH))
    keys = jax.random.split(key, 10)
    return lax.scan(lambda s, key: (sampler.step(key, s)[0], None), sampler.init(x), keys)[0][0]


def cases():
    real, imaginary = np.linspace(-2, 0.6, 400), np.linspace(-1.2, 1.2, 200)
    grid = np.stack(np.meshgrid(real, imaginary), -1).reshape(-1, 2)
    stiffness = np.exp(np.random.default_rng(0).uniform(np.log(0.1), np.log(100), 20_000))
    keys = jax.random.split(jax.random.key(0), 500)
    return {
        "escape": (escape, (jnp.asarray(grid, jnp.float32),)),
        "oscillator": (oscillator, (jnp.asarray(stiffness, jnp.float32),)),
        "gradient": (oscillator, (jnp.asarray(stiffness[:2000], jnp.float32),)),
        "sampler": (sampler, (keys, jax.random.normal(jax.random.key(1), (500, WIDTH)))),
        "equal": (equal, (jnp.full(20_000, 200),)),
        "branch": (branch, (jnp.linspace(-1, 1, 20_000),)),
        "diffrax": (diffrax, (jnp.asarray(stiffness, jnp.float32),)),
        "nuts": (nuts, (keys[:128], jax.random.normal(jax.random.key(1), (128, WIDTH)))),
    }


def gradients(kernel):
    """Return the programs of the value and gradient: plain JAX refuses `jax.vmap` of the kernel."""

    def of_sum(mapped):
        # The number of steps has no derivative.
        return jax.value_and_grad(lambda x: jnp.sum(mapped(x)[0]))

    yield "vmap", of_sum(jax.vmap(reversible))
    for size in LANES:
        yield f"{size} lanes", of_sum(chunked_vmap(kernel, size, lockstep=False))


def programs(kernel):
    """Return the programs of one case, as functions of its arrays."""
    yield "vmap", jax.vmap(kernel)
    for size in BATCHES:
        yield f"map {size}", lambda *x, n=size: lax.map(lambda x: kernel(*x), x, batch_size=n)
    for size in LANES:
        yield f"chunks of {size}", chunked_vmap(kernel, size)
        yield f"{size} lanes", chunked_vmap(kernel, size, lockstep=False)


def measured(compiled, arrays):
    """Return the medians of time and processor time of each program, in milliseconds."""
    times = {name: [] for name in compiled}
    for _ in page.turns(ROUNDS):
        for name, run in compiled.items():
            begin = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(*arrays))
            end = time.perf_counter(), time.process_time()
            times[name].append([1e3 * (b - a) for a, b in zip(begin, end, strict=True)])
    return {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in times.items()
    }


def row(name, items, rows):
    """Return the row of one case in the table of results."""
    maps = [took for way, (_, took) in rows.items() if way.startswith("map")]
    best = f"{min(maps):.1f}" if maps else ""
    (_, whole), (_, lanes) = rows["vmap"], rows["256 lanes"]
    return f"| {(TITLES | OTHERS)[name]} | {items:,} | {whole:.1f} | {best} | {lanes:.1f} |\n"


def main():
    parser = page.arguments(__doc__)
    parser.add_argument("names", nargs="*", metavar="CASE", help=", ".join(TITLES | OTHERS))
    given = parser.parse_args()
    if unknown := set(given.names) - (TITLES | OTHERS).keys():
        parser.error(f"no case {min(unknown)!r}: the cases are {', '.join(TITLES | OTHERS)}")
    packages = {"diffrax": "diffrax", "nuts": "blackjax"}
    page.needs(*(packages[name] for name in given.names if name in packages))
    if given.names and given.write:
        parser.error("--write is for all cases: name none")
    found, lines = cases(), []
    for name in given.names or TITLES:
        page.progress(f"{TITLES.get(name, name)}: compiling")
        kernel, arrays = found[name]
        ways = gradients(kernel) if name == "gradient" else programs(kernel)
        compiled = {way: jax.jit(program).lower(*arrays).compile() for way, program in ways}
        want = jax.tree.leaves(compiled["vmap"](*arrays))
        for way, run in compiled.items():
            for a, b in zip(jax.tree.leaves(run(*arrays)), want, strict=True):
                # Chaotic items differ by rounding.
                assert np.mean(~np.isclose(a, b, rtol=1e-3, atol=1e-2)) < 0.02, (name, way)
        rows = measured(compiled, arrays)
        ours = min(took for way, (_, took) in rows.items() if way.endswith("lanes"))
        for way, (wall, took) in rows.items():
            temporaries = compiled[way].memory_analysis().temp_size_in_bytes
            page.progress(
                f"  {way:14} {wall:8.1f} ({took:8.1f}) {took / ours:6.1f} {temporaries:12,} bytes"
            )
        lines.append(row(name, len(arrays[0]), rows))
    head = HEAD.format(machine=platform.machine(), jax=jax.__version__, rounds=ROUNDS)
    page.finish(RESULT, head + "".join(lines), write=given.write)


if __name__ == "__main__":
    main()
