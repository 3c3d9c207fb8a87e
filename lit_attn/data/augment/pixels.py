"""Operations on pixel values with Pillow's arithmetic, a batch at a time.

Every operation maps uint8 images (N, C, H, W) and a magnitude for each image (N,) to uint8 images.
It equals Pillow's on each image to the last bit (tests/data/test_augment_ops.py).
"""

import torch
from torch import Tensor


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
