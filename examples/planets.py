# SPDX-License-Identifier: MIT
"""Eight planets at any number of times, from a kernel written for one planet at one time.

``position`` knows nothing of batches. Called with elements of shape ``(8, 1, 12)`` and times of
shape ``(T,)`` it returns ``(8, T, 3)``; called with times of shape ``(8, N)``, so that each planet
has its own, it returns ``(8, N, 3)``. The program checks the first against astropy's built-in
ephemeris, which is an independent theory, and draws the second.

    python examples/planets.py          # writes examples/out/planets.png
"""

import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rankax import auto_vmap


@auto_vmap(elements=1, t=0)
def position(elements, t):
    """Heliocentric position of one planet at one time.

    Parameters
    ----------
    elements : shape (12,)
        Six Keplerian elements at J2000, then their six rates: a row of ``ELEMENTS``.
    t : shape ()
        Julian centuries (36525 days) of TDB since J2000.

    Returns
    -------
    shape (3,)
        x, y, z in au, on the mean ecliptic and equinox of J2000.
    """
    a, e, inclination, longitude, perihelion, node = elements[:6] + elements[6:] * t
    mean_anomaly = jnp.deg2rad(jnp.remainder(longitude - perihelion + 180, 360) - 180)

    # Kepler's equation, E - e sin E = M, by Newton. Every step doubles the number of right digits:
    # for e <= 0.21 the start is within 0.04 rad, so the third step reaches float64's last bits.
    anomaly = mean_anomaly + e * jnp.sin(mean_anomaly)
    for _ in range(3):
        excess = anomaly - e * jnp.sin(anomaly) - mean_anomaly
        anomaly = anomaly - excess / (1 - e * jnp.cos(anomaly))

    # In the plane of the orbit, with x towards perihelion; then three turns into the ecliptic.
    x = a * (jnp.cos(anomaly) - e)
    y = a * jnp.sqrt(1 - e**2) * jnp.sin(anomaly)
    x, y = turn(x, y, perihelion - node)
    y, z = turn(y, jnp.zeros_like(y), inclination)
    x, y = turn(x, y, node)
    return jnp.stack([x, y, z])


def turn(x, y, degrees):
    """The plane vector (x, y), turned anticlockwise."""
    cos, sin = jnp.cos(jnp.deg2rad(degrees)), jnp.sin(jnp.deg2rad(degrees))
    return cos * x - sin * y, sin * x + cos * y


PLANETS = ("Mercury", "Venus", "Earth-Moon", "Mars", "Jupiter", "Saturn", "Uranus", "Neptune")

# E. M. Standish, "Keplerian elements for approximate positions of the major planets", Table 1,
# fitted to the years 1800 to 2050: https://ssd.jpl.nasa.gov/planets/approx_pos.html
# The third row is the barycentre of Earth and Moon. Columns:
#   semi-major axis (au), eccentricity, inclination (deg), mean longitude (deg),
#   longitude of perihelion (deg), longitude of the ascending node (deg);
# and in the second line of a planet the rates of the same six, per Julian century.
# fmt: off
ELEMENTS = np.array([
    [ 0.38709927,  0.20563593,  7.00497902,    252.25032350,  77.45779628,  48.33076593,
      0.00000037,  0.00001906, -0.00594749, 149472.67411175,   0.16047689,  -0.12534081],
    [ 0.72333566,  0.00677672,  3.39467605,    181.97909950, 131.60246718,  76.67984255,
      0.00000390, -0.00004107, -0.00078890,  58517.81538729,   0.00268329,  -0.27769418],
    [ 1.00000261,  0.01671123, -0.00001531,    100.46457166, 102.93768193,   0.0,
      0.00000562, -0.00004392, -0.01294668,  35999.37244981,   0.32327364,   0.0],
    [ 1.52371034,  0.09339410,  1.84969142,     -4.55343205, -23.94362959,  49.55953891,
      0.00001847,  0.00007882, -0.00813131,  19140.30268499,   0.44441088,  -0.29257343],
    [ 5.20288700,  0.04838624,  1.30439695,     34.39644051,  14.72847983, 100.47390909,
     -0.00011607, -0.00013253, -0.00183714,   3034.74612775,   0.21252668,   0.20469106],
    [ 9.53667594,  0.05386179,  2.48599187,     49.95424423,  92.59887831, 113.66242448,
     -0.00125060, -0.00050991,  0.00193609,   1222.49362201,  -0.41897216,  -0.28867794],
    [19.18916464,  0.04725744,  0.77263783,    313.23810451, 170.95427630,  74.01692503,
     -0.00196176, -0.00004397, -0.00242939,    428.48202785,   0.40805281,   0.04240589],
    [30.06992276,  0.00859048,  1.77004347,    -55.12002969,  44.96476227, 131.78422574,
      0.00026291,  0.00005105,  0.00035372,    218.45945325,  -0.32241464,  -0.00508664],
])
# fmt: on
LONGITUDE_RATE = ELEMENTS[:, 9]  # deg per Julian century

# Errors in heliocentric longitude over 1800 to 2050, in arcseconds, as published: the "nominal
# errors" of the table above, on the same page, and the largest errors of the theory behind
# astropy's built-in ephemeris (Simon et al., Astron. Astrophys. 282, 663, 1994).
NOMINAL = (15, 20, 20, 40, 400, 600, 50, 10)
REFERENCE = (4, 5, 6, 17, 71, 81, 86, 11)


def astropy_position(t):
    """Where astropy's built-in ephemeris has the planets: shape (8, T, 3), as ``position``."""
    from astropy.coordinates import get_body_barycentric, solar_system_ephemeris
    from astropy.time import Time
    from astropy.utils import iers
    from erfa import ErfaWarning

    with (
        # TDB needs no table of the Earth's rotation; make sure that none is fetched.
        iers.conf.set_temp("auto_download", False),
        solar_system_ephemeris.set("builtin"),
        warnings.catch_warnings(),
    ):
        # Before 1900 the Sun's own place is worse, but it is in both terms of the difference below.
        warnings.filterwarnings("ignore", ".*epv00.*outside", category=ErfaWarning)
        when = Time(2451545.0, 36525 * np.asarray(t), format="jd", scale="tdb")
        sun = get_body_barycentric("sun", when)
        bodies = [name.lower().replace("moon", "moon-barycenter") for name in PLANETS]
        xyz = [(get_body_barycentric(body, when) - sun).xyz.to_value("au").T for body in bodies]
    x, y, z = np.moveaxis(np.stack(xyz), -1, 0)
    obliquity = np.deg2rad(84381.448 / 3600)  # of the ecliptic of J2000 (IAU 1976)
    cos, sin = np.cos(obliquity), np.sin(obliquity)
    return np.stack([x, cos * y + sin * z, cos * z - sin * y], axis=-1)


def angle(a, b):
    """Angle between vectors in arcseconds; exact also for tiny angles, where arccos is not."""
    cross = np.linalg.norm(np.cross(a, b), axis=-1)
    return 3600 * np.rad2deg(np.arctan2(cross, np.sum(a * b, axis=-1)))


def draw(path, t):
    """Draw each planet at the time ``t``, with its last revolution as a trail that fades."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.collections import LineCollection
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patheffects import withStroke

    age = np.linspace(1, 0, 400)  # in revolutions
    period = 360 / LONGITUDE_RATE  # Julian centuries
    trails = np.asarray(position(ELEMENTS[:, None], t - period[:, None] * age))  # (8, 400, 3)

    night, ink = "#0d1020", "#7c839c"
    inner_colors = ("#b5a8a0", "#e8c07d", "#6fb1ff", "#e0694a")
    outer_colors = ("#d9a47c", "#ead9a0", "#8fe0e0", "#5b7cff")
    colors = inner_colors + outer_colors
    figure, panels = plt.subplots(1, 2, figsize=(13, 6.8), facecolor=night, layout="constrained")
    for panel, chosen, reach in zip(panels, (range(4), range(4, 8)), (1.9, 36), strict=True):
        panel.set(facecolor=night, aspect="equal", xlim=(-reach, reach), ylim=(-reach, reach))
        panel.plot(0, 0, "o", color="#ffd75e", markersize=13 / reach**0.2)
        for k in chosen:
            xy = trails[k, :, :2]
            fading = LinearSegmentedColormap.from_list("fading", [night, colors[k]])
            trail = LineCollection(np.stack([xy[:-1], xy[1:]], axis=1), linewidth=1.6)
            trail.set_capstyle("round")
            trail.set_color(fading(1 - 0.85 * age[1:]))
            panel.add_collection(trail)
            panel.plot(*xy[-1], "o", color=colors[k], markersize=8)
            label = panel.annotate(
                PLANETS[k], xy[-1], (0, -17), textcoords="offset points", ha="center", va="center"
            )
            label.set(color=colors[k], path_effects=[withStroke(linewidth=4, foreground=night)])
        panel.set_xlabel("x, towards the equinox of J2000 (au)", color=ink)
        panel.set_ylabel("y (au)", color=ink)
        panel.tick_params(colors=ink)
        panel.spines[:].set_color("#2a3050")
    title = f"The planets on the ecliptic at {2000 + 100 * t:.1f}, each with its last revolution"
    figure.suptitle(title, color="#e6e8f0", size=14)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(out=Path(__file__).parent / "out", times=3001):
    """Print the plan and the check against astropy for 1800 to 2050, and draw the orbits."""
    # Mercury goes round 149473 degrees a century. Two centuries from J2000 the float32 numbers are
    # 1/32 degree apart, 112 arcseconds, which is more than the errors looked for.
    jax.config.update("jax_enable_x64", True)

    t = np.linspace(-2, 0.5, times)
    elements = ELEMENTS[:, None, :]
    print(position.plan(elements, t))
    error = angle(np.asarray(position(elements, t)), astropy_position(t))  # (8, times)

    print(f"\nAngle to astropy's built-in ephemeris at {times} times, 1800 to 2050 (arcsec)")
    print(f"{'':<12}{'largest':>8}{'rms':>8}{'nominal':>10}{'astropy':>10}")
    rms = np.sqrt(np.mean(error**2, axis=1))
    for row in zip(PLANETS, error.max(axis=1), rms, NOMINAL, REFERENCE, strict=True):
        print("{:<12}{:8.1f}{:8.1f}{:10}{:10}".format(*row))
    print(
        "nominal: accuracy published with the table, about twice the rms rather than a bound.\n"
        "astropy: largest error published for astropy's own theory.\n"
        "Uranus and Neptune are off by more, since the Sun itself swings by 0.01 au about the\n"
        "barycentre of the solar system, 70 arcsec seen from Neptune, and their elements do not."
    )

    out.mkdir(parents=True, exist_ok=True)
    draw(out / "planets.png", t=0.26)
    print(f"\nwrote {out / 'planets.png'}")


if __name__ == "__main__":
    main()
