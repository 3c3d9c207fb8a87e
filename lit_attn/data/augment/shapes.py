"""Operations that move pixels: flips, crops, Pillow's affine maps, rectangles.

Images are (N, C, H, W), uint8 unless a function states another type. Parameters have one value for
each image (N,), and `fill` (C,) is the colour outside the image. Shears, translations and rotations
with float64 parameters equal Pillow's to the last bit (tests/data/test_augment_ops.py).
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def flip(images: Tensor, which: Tensor) -> Tensor:
    """Mirror left-right the images whose entry of `which` (bool) is True."""
    return torch.where(which.view(-1, 1, 1, 1), images.flip(-1), images)


def crop(images: Tensor, padding: int, top: Tensor, left: Tensor) -> Tensor:
    """Crop the zero-padded images to their original size at rows `top` and columns `left`."""
    n, _, height, width = images.shape
    windows = F.pad(images, (padding,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(n, device=images.device), :, top, left]


def affine(images: Tensor, matrix: Tensor, fill: Tensor) -> Tensor:
    """Give output pixel (x, y) the input pixel floor(matrix (x + 0.5, y + 0.5, 1)), or `fill`.

    `matrix` is (N, 6), Pillow's AFFINE coefficients. Coordinates are in 16-bit fixed point as in
    Pillow's nearest-neighbour code.
    """
    n, channels, height, width = images.shape
    a, b, c, d, e, f = matrix.double().unbind(1)
    x = torch.arange(width, device=images.device).view(1, 1, width)
    y = torch.arange(height, device=images.device).view(1, height, 1)

    def source(along_x: Tensor, along_y: Tensor, offset: Tensor) -> Tensor:
        origin = offset + along_x * 0.5 + along_y * 0.5
        fixed = [
            torch.floor(part * 65536 + 0.5).long().view(n, 1, 1)
            for part in (origin, along_x, along_y)
        ]
        return (fixed[0] + fixed[1] * x + fixed[2] * y) >> 16

    column, row = source(a, b, c), source(d, e, f)
    inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    index = row.clamp_(0, height - 1) * width + column.clamp_(0, width - 1)
    moved = images.flatten(2).gather(2, index.view(n, 1, -1).expand(-1, channels, -1))
    return torch.where(inside.unsqueeze(1), moved.view_as(images), fill.view(1, -1, 1, 1))


def shear_x(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    """Shear by x' = x + amount y."""
    return affine(images, _matrix(amount, b=amount), fill)


def shear_y(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    """Shear by y' = y + amount x."""
    return affine(images, _matrix(amount, d=amount), fill)


def shear_x_bicubic(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    """Shear by x' = x + amount y with Pillow's bicubic interpolation along x."""
    n, channels, height, width = images.shape
    x = torch.arange(width, dtype=torch.double, device=images.device).view(1, 1, width) + 0.5
    y = torch.arange(height, dtype=torch.double, device=images.device).view(1, height, 1) + 0.5
    source = x + amount.double().view(n, 1, 1) * y
    inside = ((source >= 0) & (source < width)).unsqueeze(1)
    left = (source - 0.5).floor()
    t = (source - 0.5 - left).unsqueeze(1)
    taps = (left.long().unsqueeze(3) + torch.arange(-1, 3, device=images.device)).clamp_(
        0, width - 1
    )
    index = taps.view(n, 1, height, width * 4).expand(-1, channels, -1, -1)
    p0, p1, p2, p3 = images.gather(3, index).double().view(n, channels, height, width, 4).unbind(4)
    # Horner's rule in Pillow's order, so that rounding agrees.
    cubic = 2 * (p0 - p1) + p2 - p3 + t * (p1 - p0 - p2 + p3)
    value = p1 + t * (p2 - p0 + t * cubic)
    return torch.where(inside, value.clamp_(0, 255).to(torch.uint8), fill.view(1, -1, 1, 1))


def shear_y_bicubic(images: Tensor, amount: Tensor, fill: Tensor) -> Tensor:
    """Shear by y' = y + amount x with Pillow's bicubic interpolation along y."""
    return shear_x_bicubic(images.transpose(2, 3), amount, fill).transpose(2, 3)


def translate_x(images: Tensor, pixels: Tensor, fill: Tensor) -> Tensor:
    """Translate by x' = x + pixels."""
    return affine(images, _matrix(pixels, c=pixels), fill)


def translate_y(images: Tensor, pixels: Tensor, fill: Tensor) -> Tensor:
    """Translate by y' = y + pixels."""
    return affine(images, _matrix(pixels, f=pixels), fill)


def rotate(images: Tensor, degrees: Tensor, fill: Tensor) -> Tensor:
    """Rotate counter-clockwise about the centre."""
    height, width = images.shape[-2:]
    angle = -degrees.double() * (math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    x, y = width / 2, height / 2
    matrix = torch.stack([cos, sin, x - cos * x - sin * y, -sin, cos, y + sin * x - cos * y], dim=1)
    return affine(images, matrix, fill)


def cutout(images: Tensor, side: Tensor, x: Tensor, y: Tensor, fill: Tensor) -> Tensor:
    """Fill the square of `side` pixels around (x, y), cut at the image's edges."""
    height, width = images.shape[-2:]
    left, top = ((centre - side / 2).clamp_min(0).floor() for centre in (x, y))
    # Pillow's rectangle includes its far corner.
    right, bottom = (left + side).clamp_max(width).floor(), (top + side).clamp_max(height).floor()
    box = torch.stack([top, left, bottom - top + 1, right - left + 1], dim=1)
    return erase(images, box, fill)


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
    """Return the identity with other coefficients; Pillow names them a to f, row by row."""
    zero = torch.zeros_like(like, dtype=torch.float64)
    return torch.stack([zero + 1, zero + b, zero + c, zero + d, zero + 1, zero + f], dim=1)
