# SPDX-License-Identifier: MIT
"""A depth picture of the Utah teapot, from a kernel written for one ray and one triangle.

Every ray is tried on every triangle, without any acceleration structure: 120 000 rays and 6402
triangles make 768 million pairs, whose hits alone would need 21 GB. ``hit`` is the kernel for one
pair. ``reduce=Best("distance")`` keeps, of each ray, the hit with the smallest distance, and
``reduce="any"`` asks for shadows; neither stores the hits. The program prints what each needs.

    python examples/rays.py             # writes examples/out/rays.png
"""

import base64
import re
import zlib
from importlib.metadata import distribution
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from rankax import auto_vmap, options
from rankax.reductions import Best


@auto_vmap(origin=1, direction=1, triangle=2, color=1, jit=True)
def hit(origin, direction, triangle, color):
    """Where one ray hits one triangle: the distance in lengths of ``direction``; ``inf``: missed.

    Shapes (3,), (3,), (3, 3) with a corner in each row, and (3,). The method is Moller's and
    Trumbore's ("Fast, minimum storage ray-triangle intersection", 1997): solve
    ``origin + t * direction == corner + u * side + v * other`` by Cramer's rule.
    """
    corner, side, other = triangle[0], triangle[1] - triangle[0], triangle[2] - triangle[0]
    offset = origin - corner
    p, q = jnp.cross(direction, other), jnp.cross(offset, side)
    volume = p @ side  # 0 if the ray runs along the triangle: u is then inf or nan, no hit
    u, v, t = offset @ p / volume, direction @ q / volume, other @ q / volume
    inside = (u >= 0) & (v >= 0) & (u + v <= 1)
    distance = jnp.where(inside & (t > 0), t, jnp.inf)
    return {"distance": distance, "normal": jnp.cross(side, other), "color": color}


# What a ray hits first: the whole output of one triangle, with its normal and its color.
nearest = hit.with_options(reduce=Best("distance"), reduce_axis=-1, chunk_size=2**16)


@auto_vmap(point=1, light=1, triangle=2, reduce="any", reduce_axis=-1, chunk_size=2**16, jit=True)
def is_shadowed(point, light, triangle):
    """Whether one triangle stands between a point and the light."""
    return jnp.isfinite(hit(point, light, triangle, jnp.zeros(3))["distance"])


def teapot():
    """The corners of the teapot's 6400 triangles and of 2 for the ground: shape (6402, 3, 3).

    The mesh is a data file of the package visvis. It is read without importing the package, which
    would ask for OpenGL. In its format an array is a line of base64-encoded zlib blocks.
    """
    text = distribution("visvis").locate_file("visvis/visvisResources/teapot.ssdf").read_text()
    arrays = {}
    stored = r"(?m)^(\w+) = array (\S+) (\w+) (\S+)$"
    for name, shape, dtype, blocks in re.findall(stored, text):
        data = b"".join(zlib.decompress(base64.b64decode(b)) for b in blocks.split(";") if b)
        arrays[name] = np.frombuffer(data, dtype).reshape([int(n) for n in shape.split("x")])
    mesh = arrays["vertices"][arrays["faces"].reshape(-1, 3)]
    low = mesh[..., 2].min()
    a, b, c, d = np.float32([[-2, -2, low], [3, -2, low], [3, 2, low], [-2, 2, low]])
    return np.concatenate([mesh, [[a, b, c], [a, c, d]]])


def camera(height, width, eye, target, zoom):
    """Unit directions of the pixels' rays: shape (height, width, 3), top row first."""
    forward = (target - eye) / np.linalg.norm(target - eye)
    right = np.cross(forward, [0, 0, 1])
    right /= np.linalg.norm(right)
    up = np.cross(right, forward)
    x = (2 * np.arange(width) + 1 - width) / (zoom * width)
    y = (height - 1 - 2 * np.arange(height)) / (zoom * width)
    rays = forward + x[:, None] * right + y[:, None, None] * up
    return np.float32(rays / np.linalg.norm(rays, axis=-1, keepdims=True))


def paint(mesh):
    """Colors of the triangles, the last two of which are the ground: shape (6402, 3)."""
    ground = np.arange(len(mesh)) >= len(mesh) - 2
    return np.where(ground[:, None], [0.72, 0.76, 0.82], [0.95, 0.62, 0.38]).astype(np.float32)


def shade(eye, rays, found, mesh, light):
    """Brightness of each pixel, 0 to 1: Lambert's cosine law, with shadows and some sky light."""
    distance, normals = np.asarray(found["distance"]), np.array(found["normal"])
    points = eye + np.where(np.isfinite(distance), distance, 0)[..., None] * rays
    normals /= np.maximum(np.linalg.norm(normals, axis=-1, keepdims=True), 1e-12)
    normals *= -np.sign(np.sum(normals * rays, axis=-1, keepdims=True))  # towards the eye
    shadowed = is_shadowed((points + 1e-3 * normals)[..., None, :], light, mesh)
    cosine = np.maximum(np.sum(normals * light, axis=-1), 0)
    return 0.25 + 0.75 * cosine * ~np.asarray(shadowed)


def draw(path, found, brightness):
    """Two panels: the depth with lines of equal distance, and the same hits lit by the light."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    distance = np.asarray(found["distance"])
    depth = np.where(np.isfinite(distance), distance, np.nan)
    lit = np.where(np.isfinite(distance)[..., None], found["color"] * brightness[..., None], 1)
    figure, panels = plt.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    colors = panels[0].imshow(depth, cmap="magma_r")
    panels[0].contour(depth, np.arange(0, 10, 0.1), colors="black", linewidths=0.25)
    figure.colorbar(colors, ax=panels[0], label="distance from the eye", shrink=0.9)
    panels[1].imshow(lit)
    for panel, title in zip(panels, ("depth", "the same hits, lit from the left"), strict=True):
        panel.set(title=title, xticks=[], yticks=[])
    figure.savefig(path, dpi=120)
    plt.close(figure)


def memory(kernel, *args):
    """The output and the temporaries of the compiled call in MB, as a text; nothing is run."""
    needs = kernel.lower(*args).compile().memory_analysis()
    return f"{needs.output_size_in_bytes / 1e6:12.1f} {needs.temp_size_in_bytes / 1e6:14.1f}"


def main(out=Path(__file__).parent / "out", height=300, width=400):
    """Print what the product of rays and triangles costs, whole and reduced, and draw it."""
    mesh, eye = teapot(), np.float32([1.7, -3.2, 2.2])
    rays = camera(height, width, eye, target=np.float32([0.1, 0, 0.42]), zoom=2.5)
    scene = eye, rays[:, :, None], mesh, paint(mesh)

    print(nearest.plan(*scene))
    print(f"\n{'MB':<24}{'output':>12} {'temporaries':>14}")
    print(f"{'hit, every pair':<24}{memory(hit, *scene)}  not run")
    print(f"{'nearest':<24}{memory(nearest, *scene)}")

    light = np.float32([-0.48, -0.36, 0.8])
    with options(progress=True):
        found = nearest(*scene)
        brightness = shade(eye, rays, found, mesh, light)
    out.mkdir(parents=True, exist_ok=True)
    draw(out / "rays.png", found, brightness)
    print(f"\nwrote {out / 'rays.png'}")


if __name__ == "__main__":
    main()
