# SPDX-License-Identifier: MIT
"""A depth picture of the Utah teapot, from a kernel written for one ray and one triangle.

Every ray is tried on every triangle, without any acceleration structure: 120 000 rays and 6402
triangles make 768 million pairs, whose intermediate vectors would need 31 GB at once. ``hit`` is
the kernel for one pair; ``nearest``, for one ray, calls it on all the triangles and keeps the first
hit, and its ``chunk_size`` bounds the rays in flight: 15 MB. The program prints these figures.

    python examples/rays.py             # writes examples/out/rays.png
"""

import base64
import re
import zlib
from importlib.metadata import distribution
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rankax import auto_vmap


@auto_vmap(origin=1, direction=1, triangle=2)
def hit(origin, direction, triangle):
    """How far along one ray one triangle is hit, in lengths of ``direction``; ``inf``: missed.

    Shapes (3,), (3,) and (3, 3), a corner in each row; the result has shape (). The method is
    Moller's and Trumbore's ("Fast, minimum storage ray-triangle intersection", 1997): solve
    ``origin + t * direction == corner + u * side + v * other`` by Cramer's rule.
    """
    corner, side, other = triangle[0], triangle[1] - triangle[0], triangle[2] - triangle[0]
    offset = origin - corner
    p, q = jnp.cross(direction, other), jnp.cross(offset, side)
    volume = p @ side  # 0 if the ray runs along the triangle: u is then inf or nan, no hit
    u, v, t = offset @ p / volume, direction @ q / volume, other @ q / volume
    inside = (u >= 0) & (v >= 0) & (u + v <= 1)
    return jnp.where(inside & (t > 0), t, jnp.inf)


@auto_vmap(origin=1, direction=1, triangles=3, chunk_size=64)
def nearest(origin, direction, triangles):
    """What one ray hits first: the distance, and the number of the triangle.

    Shapes (3,), (3,) and (T, 3, 3). All the triangles are tried at once, so that ``chunk_size=64``
    rays are 64 T pairs.
    """
    distance = hit(origin, direction, triangles)
    first = jnp.argmin(distance)
    return distance[first], first


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


def shade(eye, rays, distance, index, mesh, light):
    """Brightness of each pixel, 0 to 1: Lambert's cosine law, with shadows and some sky light."""
    points = eye + np.where(np.isfinite(distance), distance, 0)[..., None] * rays
    normals = np.cross(mesh[:, 1] - mesh[:, 0], mesh[:, 2] - mesh[:, 0])[index]
    normals /= np.maximum(np.linalg.norm(normals, axis=-1, keepdims=True), 1e-12)
    normals *= -np.sign(np.sum(normals * rays, axis=-1, keepdims=True))  # towards the eye
    # The kernel of before: now the origins carry the batch axes and the direction is one vector.
    blocked, _ = nearest(points + 1e-3 * normals, light, mesh)
    cosine = np.maximum(np.sum(normals * light, axis=-1), 0)
    return 0.25 + 0.75 * cosine * np.isinf(blocked)


def draw(path, distance, brightness, ground):
    """Two panels: the depth with lines of equal distance, and the same hits lit by the light."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    depth = np.where(np.isfinite(distance), distance, np.nan)
    paint = np.where(ground[..., None], [0.72, 0.76, 0.82], [0.95, 0.62, 0.38])
    lit = np.where(np.isfinite(distance)[..., None], paint * brightness[..., None], 1)
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
    needs = jax.jit(kernel).lower(*args).compile().memory_analysis()
    return f"{needs.output_size_in_bytes / 1e6:12.1f} {needs.temp_size_in_bytes / 1e6:14.1f}"


def main(out=Path(__file__).parent / "out", height=300, width=400):
    """Print what the product of rays and triangles costs, whole and in chunks, and draw it."""
    mesh, eye = teapot(), np.float32([1.7, -3.2, 2.2])
    rays = camera(height, width, eye, target=np.float32([0.1, 0, 0.42]), zoom=2.5)

    every_ray = rays.reshape(-1, 1, 3)
    print(hit.plan(eye, every_ray, mesh))
    ranks, pairs = {"origin": 1, "direction": 1, "triangle": 2}, 64 * len(mesh)
    chunked_hit = auto_vmap(**ranks, chunk_size=pairs)(hit.__wrapped__)
    print(f"\n{'MB':<38}{'output':>12} {'temporaries':>14}")
    print(f"{'hit, every pair at once':<38}{memory(hit, eye, every_ray, mesh)}  not run")
    name = f"hit, chunk_size={pairs}"
    print(f"{name:<38}{memory(chunked_hit, eye, every_ray, mesh)}  not run")
    print(f"{'nearest, chunk_size=64':<38}{memory(nearest, eye, rays, mesh)}")

    distance, index = map(np.asarray, nearest(eye, rays, mesh))
    light = np.float32([-0.48, -0.36, 0.8])
    brightness = shade(eye, rays, distance, index, mesh, light)
    out.mkdir(parents=True, exist_ok=True)
    draw(out / "rays.png", distance, brightness, ground=index >= len(mesh) - 2)
    print(f"\nwrote {out / 'rays.png'}")


if __name__ == "__main__":
    main()
