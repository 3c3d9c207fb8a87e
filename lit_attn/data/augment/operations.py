"""Operations on images (N, C, H, W), uint8 unless a function states another type.

Parameters have one value for each image (N,), and `fill` (C,) is the colour outside the image. The
operations on pixel values, and shears, translations and rotations with float64 parameters equal
Pillow's to the last bit (tests/data/test_augment_ops.py).
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


def brightness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with black: factor 0 is black, 1 the image."""
    return _blend(torch.zeros_like(images[..., :1, :1]), images, factor)


def color(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with grey: factor 0 is grey, 1 the image; grey images do not change."""
    return images if images.shape[1] == 1 else _blend(_grey(images), images, factor)


def contrast(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with the mean grey: factor 0 is the image's mean grey, 1 the image."""
    grey = _grey(images) if images.shape[1] == 3 else images
    pixels = grey.shape[-2] * grey.shape[-1]
    total = grey.sum((1, 2, 3), dtype=torch.long).view(-1, 1, 1, 1)
    mean = (2 * total + pixels) // (2 * pixels)
    return _blend(mean, images, factor)


def sharpness(images: Tensor, factor: Tensor) -> Tensor:
    """Blend with a smoothed image: factor 0 is smoothed, 1 the image.

    The kernel is 1 1 1 / 1 5 1 / 1 1 1; borders stay.
    """
    wide = images.to(torch.int16)
    rows = wide[..., :-2, :] + wide[..., 1:-1, :] + wide[..., 2:, :]
    total = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * wide[..., 1:-1, 1:-1]
    smooth = images.clone()
    # A multiple of 1/13 is never halfway between integers, so rounding in float32 is exact.
    smooth[..., 1:-1, 1:-1] = (total / 13 + 0.5).to(torch.uint8)
    return _blend(smooth, images, factor)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the `bits` highest bits."""
    mask = 256 - 2 ** (8 - bits.long())
    return images & mask.to(torch.uint8).view(-1, 1, 1, 1)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert the values at or above the threshold."""
    first = threshold.ceil().to(torch.int16).view(-1, 1, 1, 1)
    return torch.where(images < first, images, 255 - images)


def solarize_add(images: Tensor, addition: Tensor) -> Tensor:
    """Add to every value, clip, then solarize at 128."""
    added = images.to(torch.int16) + addition.to(torch.int16).view(-1, 1, 1, 1)
    return solarize(added.clamp_(0, 255).to(torch.uint8), torch.full_like(addition, 128))


def autocontrast(images: Tensor, magnitude: Tensor) -> Tensor:
    """Stretch every channel to 0..255; the magnitude is unused."""
    low = images.amin((2, 3), keepdim=True).double()
    high = images.amax((2, 3), keepdim=True).double()
    # Torch computes `255 / x` as a rounded reciprocal times 255; a tensor divides exactly.
    scale = torch.full_like(low, 255) / (high - low).clamp_min(1)
    stretched = images.double().mul_(scale).sub_(low * scale).clamp_(0, 255).to(torch.uint8)
    return torch.where(high > low, stretched, images)


def _grey(images: Tensor) -> Tensor:
    """Return the ITU-R 601 luma (N, 1, H, W) with Pillow's 16-bit integer weights."""
    red, green, blue = images.to(torch.int32).split(1, dim=1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16).to(torch.uint8)


def _blend(start: Tensor, end: Tensor, factor: Tensor) -> Tensor:
    """Return start + factor (end - start) in float32, clipped and truncated as Pillow does."""
    mixed, base = end.float(), start.float()
    mixed.sub_(base).mul_(factor.float().view(-1, 1, 1, 1)).add_(base)
    return mixed.clamp_(0, 255).to(torch.uint8)
