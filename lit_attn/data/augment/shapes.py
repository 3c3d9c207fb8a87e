"""Operations that move pixels: flips, crops, Pillow's nearest-neighbour affine maps, rectangles.

Images are (N, C, H, W), uint8 unless said otherwise; parameters are one per image, (N,).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def flip(images: Tensor, which: Tensor) -> Tensor:
    """Mirror left-right the images whose entry of `which` (bool) is set."""
    return torch.where(which.view(-1, 1, 1, 1), images.flip(-1), images)


def crop(images: Tensor, padding: int, top: Tensor, left: Tensor) -> Tensor:
    """Cut the original size out of the zero-padded image, at rows `top` and columns `left`."""
    n, _, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    rows = top.view(n, 1) + torch.arange(height, device=images.device)
    columns = left.view(n, 1) + torch.arange(width, device=images.device)
    sample = torch.arange(n, device=images.device).view(n, 1, 1)
    picked = padded.permute(0, 2, 3, 1)[sample, rows.unsqueeze(2), columns.unsqueeze(1)]
    return picked.permute(0, 3, 1, 2).contiguous()


def affine(images: Tensor, matrix: Tensor, fill: Tensor) -> Tensor:
    """Output pixel (x, y) takes input pixel floor(matrix (x + 0.5, y + 0.5, 1)), or `fill`.

    `matrix` is (N, 6), Pillow's AFFINE coefficients; `fill` is (C,) uint8. Coordinates are in
    16-bit fixed point as in Pillow's nearest-neighbour code.
    """
    n, _, height, width = images.shape
    fixed = torch.floor(matrix.double() * 65536 + 0.5).long()
    start = torch.stack(
        [
            matrix[:, 2] + matrix[:, 0] * 0.5 + matrix[:, 1] * 0.5,
            matrix[:, 5] + matrix[:, 3] * 0.5 + matrix[:, 4] * 0.5,
        ],
        dim=1,
    )
    start = torch.floor(start.double() * 65536 + 0.5).long()
    x = torch.arange(width, device=images.device).view(1, 1, width)
    y = torch.arange(height, device=images.device).view(1, height, 1)

    def source(origin: Tensor, along_x: Tensor, along_y: Tensor) -> Tensor:
        return (origin.view(n, 1, 1) + along_x.view(n, 1, 1) * x + along_y.view(n, 1, 1) * y) >> 16

    column = source(start[:, 0], fixed[:, 0], fixed[:, 1])
    row = source(start[:, 1], fixed[:, 3], fixed[:, 4])
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    index = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
    moved = images.flatten(2).gather(2, index.view(n, 1, -1).expand(-1, images.shape[1], -1))
    return torch.where(inside.unsqueeze(1), moved.view_as(images), fill.view(1, -1, 1, 1))


def shear_x(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    """x' = x + amount y."""
    return affine(images, _matrix(amount, b=amount), fill)


def shear_y(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    """y' = y + amount x."""
    return affine(images, _matrix(amount, d=amount), fill)


def translate_x(images: Tensor, pixels: Tensor, fill: Tensor) -> Tensor:
    """x' = x + pixels."""
    return affine(images, _matrix(pixels, c=pixels), fill)


def translate_y(images: Tensor, pixels: Tensor, fill: Tensor) -> Tensor:
    """y' = y + pixels."""
    return affine(images, _matrix(pixels, f=pixels), fill)


def rotate(images: Tensor, degrees: Tensor, fill: Tensor) -> Tensor:
    """Turn counter-clockwise about the centre."""
    height, width = images.shape[-2:]
    angle = -degrees.double() * (math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    x, y = width / 2, height / 2
    matrix = torch.stack([cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], dim=1)
    return affine(images, matrix, fill)


def cutout(images: Tensor, side: float, x: Tensor, y: Tensor, fill: Tensor) -> Tensor:
    """Fill the square of `side` pixels about (x, y), cut at the image's edges."""
    height, width = images.shape[-2:]
    left = (x - side / 2).clamp_min(0).floor().view(-1, 1, 1)
    top = (y - side / 2).clamp_min(0).floor().view(-1, 1, 1)
    # Pillow's rectangle includes its far corner.
    right, bottom = (left + side).clamp_max(width).floor(), (top + side).clamp_max(height).floor()
    columns = torch.arange(width, device=images.device).view(1, 1, width)
    rows = torch.arange(height, device=images.device).view(1, height, 1)
    covered = (columns >= left) & (columns <= right) & (rows >= top) & (rows <= bottom)
    return torch.where(covered.unsqueeze(1), fill.view(1, -1, 1, 1), images)


def erase(images: Tensor, box: Tensor, value: Tensor) -> Tensor:
    """Set the box (N, 4: top, left, height, width; empty where height is 0) to `value` (C,)."""
    top, left, tall, wide = (part.view(-1, 1, 1) for part in box.unbind(1))
    rows = torch.arange(images.shape[-2], device=images.device).view(1, -1, 1)
    columns = torch.arange(images.shape[-1], device=images.device).view(1, 1, -1)
    covered = (rows >= top) & (rows < top + tall) & (columns >= left) & (columns < left + wide)
    return torch.where(covered.unsqueeze(1), value.view(1, -1, 1, 1).to(images.dtype), images)


def _matrix(
    like: Tensor,
    b: Tensor | float = 0,
    c: Tensor | float = 0,
    d: Tensor | float = 0,
    f: Tensor | float = 0,
) -> Tensor:
    """Identity with the given coefficients; Pillow names them a to f, row by row."""
    zero = torch.zeros_like(like, dtype=torch.float64)
    return torch.stack([zero + 1, zero + b, zero + c, zero + d, zero + 1, zero + f], dim=1)
