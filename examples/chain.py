# SPDX-License-Identifier: MIT
"""The chain of Fermi, Pasta, Ulam and Tsingou, for 200,000 steps of which every 1000th is kept.

Thirty-two masses between two walls, joined by springs that are slightly nonlinear. All the energy
starts in the slowest mode, leaks into a few others, and, against all expectation of 1955, comes
back nearly complete. The program watches that through `sliced_scan`, then differentiates the final
energy with respect to the initial state, with one carry stored per kept step. Energy is conserved,
so the gradient should be that of the initial energy, which takes no simulation to find.

    python examples/chain.py            # writes examples/out/chain.png

E. Fermi, J. Pasta, S. Ulam, *Studies of nonlinear problems*, Los Alamos report LA-1940 (1955).
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rankax import sliced_scan

MASSES = 32
ALPHA = 0.25  # strength of the quadratic term of each spring
STEPS, KEEP = 200_000, 1000
DT = 0.1  # the fastest mode has a period of pi


def stretches(q):
    """Elongation of the 33 springs, walls included."""
    return jnp.diff(q, prepend=0.0, append=0.0)


def energy(state):
    """Kinetic plus potential energy of ``(q, p)``."""
    q, p = state
    stretch = stretches(q)
    return jnp.sum(p**2) / 2 + jnp.sum(stretch**2 / 2 + ALPHA * stretch**3 / 3)


def force(q):
    stretch = stretches(q)
    return jnp.diff(stretch + ALPHA * stretch**2)


def verlet(state, _):
    """One step of velocity Verlet (leapfrog), which is symplectic; its output is the state."""
    q, p = state
    p = p + DT / 2 * force(q)
    q = q + DT * p
    p = p + DT / 2 * force(q)
    return (q, p), (q, p)


def initial_state():
    """All energy in the slowest mode, at rest."""
    site = np.arange(1, MASSES + 1)
    q = jnp.asarray(np.sin(np.pi * site / (MASSES + 1)))
    return q, jnp.zeros_like(q)


def mode_energies(states):
    """Energy of each of the 32 linear modes, shape ``(..., 32)``."""
    k = np.arange(1, MASSES + 1)
    modes = np.sqrt(2 / (MASSES + 1)) * np.sin(np.pi * np.outer(k, k) / (MASSES + 1))
    frequency = 2 * np.sin(np.pi * k / (2 * (MASSES + 1)))
    q, p = (np.asarray(x) @ modes for x in states)
    return (p**2 + (frequency * q) ** 2) / 2


def run(state, steps=STEPS, keep=KEEP, *, checkpoint=False):
    """Final state, and the state after every ``keep`` steps."""
    return sliced_scan(
        verlet, state, length=steps, start=keep - 1, step=keep, checkpoint=checkpoint
    )


def run_and_slice(state, steps=STEPS, keep=KEEP):
    """What `run` does, by way of all states."""
    state, states = lax.scan(verlet, state, length=steps)
    return state, jax.tree.map(lambda x: x[keep - 1 :: keep], states)


def final_energy(state, scan=run):
    return energy(scan(state)[0])


def temporaries(fun, state):
    """Megabytes that the compiled function needs besides its arguments and results."""
    return jax.jit(fun).lower(state).compile().memory_analysis().temp_size_in_bytes / 1e6


def report_memory(state, steps, keep):
    sliced, plain = (
        functools.partial(scan, steps=steps, keep=keep) for scan in (run, run_and_slice)
    )
    checkpointed = functools.partial(sliced, checkpoint=True)
    print(f"temporaries (MB), {steps} steps, every {keep}th kept")
    for name, scan in (
        ("lax.scan, then slice", plain),
        ("sliced_scan", sliced),
        ("sliced_scan, checkpoint", checkpointed),
    ):
        gradient = jax.grad(functools.partial(final_energy, scan=scan))
        print(f"{name:24} run {temporaries(scan, state):8.3f}   "
              f"gradient {temporaries(gradient, state):8.3f}")  # fmt: skip


def draw(path, times, energies):
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(7, 3.5), layout="constrained")
    for mode in range(5):
        ax.plot(times, energies[:, mode], label=f"mode {mode + 1}")
    ax.set(xlabel="time", ylabel="energy", ylim=(0, 1.25 * energies.max()))
    ax.set_title("Energy comes back to the mode that had it")
    ax.legend(ncols=5, loc="upper center")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main(out=Path(__file__).parent / "out", steps=STEPS, keep=KEEP):
    jax.config.update("jax_enable_x64", True)  # float32 rounding would hide the gradient's error
    state = initial_state()
    report_memory(state, steps, keep)

    final, states = jax.jit(functools.partial(run, steps=steps, keep=keep))(state)
    energies = mode_energies(states)
    drift = abs(energy(final) / energy(state) - 1)
    print(f"relative error of the energy after {steps} steps: {drift:.1e}")
    times = DT * keep * np.arange(1, len(energies) + 1)
    share = energies[:, 0] / mode_energies(state)[0]
    fallen = np.argmax(share < 0.5)
    back = fallen + np.argmax(share[fallen:])
    print(
        f"mode 1 falls to {share[: back + 1].min():.0%} of its energy, "
        f"and has {share[back]:.0%} again at time {times[back]:.0f}"
    )

    scan = functools.partial(run, steps=steps, keep=keep, checkpoint=True)
    gradient = jax.jit(jax.grad(functools.partial(final_energy, scan=scan)))(state)
    expected = jax.grad(energy)(state)
    error = jnp.hypot(*(jnp.linalg.norm(a - b) for a, b in zip(gradient, expected, strict=True)))
    print(
        f"gradient of the final energy: off by {error / jnp.linalg.norm(expected[0]):.1e} of itself"
    )
    draw(Path(out) / "chain.png", times, energies)


if __name__ == "__main__":
    main()
