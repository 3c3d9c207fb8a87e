"""Pictures turned into pixels: one set of rules for all readers of image files.

Class folders, tables, tar files, data sets of the hub, and segmentation read every file here.

| file                              | picture                              | label mask           |
|-----------------------------------|--------------------------------------|----------------------|
| grey or RGB, 8 bits               | unchanged                            | grey: numbers        |
| grey, 1, 2 or 4 bits              | black is 0, white is 255             | numbers of the file  |
| grey, 16 bits (a TIFF also 12)    | the highest 8 bits                   | numbers              |
| RGB, 16 bits                      | the highest 8 bits                   | only with `colours`  |
| palette                           | colours of the palette               | indices              |
| transparent pixels of any kind    | laid over white                      | palette's: ignored   |
| CMYK, YCbCr                       | RGB without a colour profile         | refused              |
| 32-bit float, grey                | 0 to 1 is spread; others refused     | refused              |
| 32-bit float, RGB                 | refused                              | refused              |
| 32-bit and signed integers, Lab   | refused                              | integers: numbers    |
| EXIF orientation                  | turned upright                       | turned upright       |
| animated GIF, WebP, PNG           | first frame                          | first frame          |
| TIFF of several pages             | refused                              | refused              |
| JPEG, WebP, JPEG 2000, PPM        | read                                 | refused              |
| damaged, empty, other formats     | refused                              | refused              |

The range of 16 bits is that of the type, 0 to 65535, and never that of one picture. Colour
profiles and gamma values are ignored. With `colours` a label mask has RGB colours, directly or
through a palette, and no transparent pixel.
"""

import io
import warnings
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, ImageFile

from lit_attn.schema.errors import ConfigError
from lit_attn.schema.mistakes import describe_mistake, is_unexpected

Pixels = NDArray[Any]

FORMATS = ("BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded, as Pillow names them. Pillow's other formats include EPS, whose decoder
starts another program."""

MASK_FORMATS = ("BMP", "GIF", "PNG", "TIFF")
"""Formats that store numbers exactly. Pillow scales the numbers of a PPM file."""

ENDINGS = frozenset(
    {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
)
"""Endings of files that are pictures, in lower case."""

MASK_ENDINGS = frozenset({".bmp", ".gif", ".png", ".tif", ".tiff"})
"""Endings of files that are label masks, in lower case."""

BYTE_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"}
"""Pillow's modes with at most 8 bits for each channel, which Pillow converts correctly."""

NUMBER_MODES = {"1", "L", "P", "I", "I;16", "I;16B"}
"""Pillow's modes with one integer for each pixel."""

COLOUR_MODES = {"1", "L", "P", "RGB", "RGBA"}
"""Pillow's modes of label masks with colours."""

UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""Transposition that turns a picture upright, by its EXIF orientation. 1 is upright."""

TIFF_MARKS = (b"II*\0", b"MM\0*")  # First bytes of a TIFF file.
WHITE = 255
REMEDY = "replace the file or leave it out"


class Decoded(NamedTuple):
    """First frame of a file, upright, with the facts that Pillow's mode does not tell."""

    image: Image.Image
    format: str
    grey_bits: int
    """Bits of one grey value in the file; 8 if the file has no grey values."""
    is_signed: bool
    is_white_zero: bool
    """True if a TIFF stores white as 0. Pillow inverts such numbers in some modes only."""


def read_picture(source: Path | bytes, name: str, mode: Literal["L", "RGB"]) -> Image.Image:
    """Return a picture as 8-bit grey ("L") or colour ("RGB"), by the rules of this module.

    `source` is a file or the content of one. Raises ConfigError, which begins with `name`, for a
    picture that cannot be read or has no known range.
    """
    decoded = _decode(source, name)
    image = decoded.image
    if decoded.is_signed:
        raise ConfigError(
            f"{name} has signed integers, whose range for black and white is not known; "
            "save it with unsigned integers of 8 or 16 bits"
        )
    if decoded.grey_bits > 8:
        return _keep_highest_bits(decoded, name).convert(mode)
    if image.mode == "F":
        return _spread_unit_range(decoded, name).convert(mode)
    if image.mode not in BYTE_MODES:
        raise ConfigError(
            f"{name} has pixels of mode {image.mode}, whose range for black and white is not "
            "known; save it with 8 or 16 bits for each channel, as grey or RGB"
        )
    if image.has_transparency_data:
        return _lay_over_white(image).convert(mode)
    return image.convert(mode)


def read_mask(source: Path | bytes, name: str, *, has_colours: bool) -> Pixels:
    """Return the numbers (h, w) int32 of a label mask, or its RGB colours (h, w, 3) uint8.

    `source` is a file or the content of one. Raises ConfigError, which begins with `name`, for a
    file that cannot be read or does not store what is needed exactly.
    """
    decoded = _decode(source, name)
    image = decoded.image
    if decoded.format not in MASK_FORMATS:
        raise ConfigError(
            f"{name} is a {decoded.format} file, which need not keep the numbers of classes "
            "exactly; save the labels as PNG"
        )
    if decoded.is_white_zero:
        raise ConfigError(f"{name} is a TIFF with white stored as 0; save the labels as PNG")
    if decoded.is_signed and image.mode == "L":
        # Pillow reads -1 as 255.
        raise ConfigError(f"{name} is a TIFF with signed integers; save the labels as PNG")
    if has_colours:
        return _read_colours(image, name)
    if image.mode not in NUMBER_MODES:
        raise ConfigError(
            f"{name} has pixels of mode {image.mode}; save labels as PNG with one number in each "
            "pixel (grey or palette), or set data.colours (kind: masks) if colours mean classes"
        )
    numbers = np.asarray(image).astype(np.int32)
    if image.mode == "L" and decoded.grey_bits < 8:
        # Pillow has spread the values over 0 to 255.
        highest = 2**decoded.grey_bits - 1
        numbers //= 255 // highest
    return numbers


def _decode(source: Path | bytes, name: str) -> Decoded:
    """Decode the first frame of a file and turn it upright; raise ConfigError."""
    content = _read_bytes(source, name)
    with warnings.catch_warnings():
        # Pillow warns about large pictures below its limit, and about damaged EXIF data.
        warnings.simplefilter("ignore")
        try:
            opened = Image.open(io.BytesIO(content), formats=FORMATS)
            kind = str(opened.format)
            pages = getattr(opened, "n_frames", 1) if kind == "TIFF" else 1
            # Loading the pixels removes some of these facts.
            grey_bits = _count_grey_bits(opened)
            sample_format = _read_tiff_tag(opened, 339, 1)
            photometric = _read_tiff_tag(opened, 262, 1)
            opened.load()
            image = _turn_upright(opened)
        except Image.UnidentifiedImageError as error:
            if content.startswith(TIFF_MARKS):
                raise ConfigError(
                    f"{name} is a TIFF of a form that Pillow cannot read, such as floats with 3 "
                    "channels; save it with 8 bits for each channel"
                ) from error
            raise ConfigError(
                f"{name} is not a readable image: it is damaged or has none of the formats "
                f"{', '.join(FORMATS)}; {REMEDY}"
            ) from error
        except Image.DecompressionBombError as error:
            limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
            raise ConfigError(
                f"{name} is not a readable image: it has more than {limit:,} pixels; "
                "make it smaller or leave it out"
            ) from error
        except Exception as error:
            if is_unexpected(error):
                raise ConfigError(f"{name}: {describe_mistake(error)}") from error
            # Decoders raise errors of many types for damaged files.
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"{name} is not a readable image: {reason}; {REMEDY}") from error
    if pages > 1:
        raise ConfigError(
            f"{name} has {pages} pages, and it is not known which one is meant; "
            "save each page as a file"
        )
    return Decoded(image, kind, grey_bits, sample_format == 2, photometric == 0)


def _read_bytes(source: Path | bytes, name: str) -> bytes:
    """Return the content of a file; raise ConfigError for an unreadable or empty one."""
    content = source
    if isinstance(content, Path):
        try:
            content = content.read_bytes()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(f"{name} cannot be read: {reason}; {REMEDY}") from error
    if not content:
        raise ConfigError(f"{name} is not a readable image: it is empty (0 bytes); {REMEDY}")
    return content


def _count_grey_bits(opened: ImageFile.ImageFile) -> int:
    """Return the bits of one grey value in the file that Pillow has opened, but not loaded."""
    if opened.mode.startswith("I;16"):
        return int(_read_tiff_tag(opened, 258, 16))
    if opened.mode == "I" and opened.format in ("PNG", "PPM"):
        # Neither format has more bits. Older versions of Pillow open 16-bit PNG files so.
        return 16
    if opened.mode == "L" and opened.format == "TIFF":
        return int(_read_tiff_tag(opened, 258, 8))
    if opened.mode == "L" and opened.format == "PNG":
        layout = str(opened.tile[0].args)
        return {"L;2": 2, "L;4": 4}.get(layout, 8)
    return 8


def _read_tiff_tag(opened: ImageFile.ImageFile, tag: int, default: int) -> int:
    """Return the (first) number of a tag of a TIFF file, or `default` for other files."""
    if opened.format != "TIFF":
        return default
    value = opened.tag_v2.get(tag, default)  # type: ignore[attr-defined]
    return int(value[0] if isinstance(value, tuple) else value)


def _turn_upright(image: Image.Image) -> Image.Image:
    """Return the picture as its EXIF orientation says that it is seen."""
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:
        # The pixels of a file with damaged EXIF data can still be used.
        orientation = 1
    if orientation not in UPRIGHT:
        return image
    return image.transpose(UPRIGHT[orientation])


def _keep_highest_bits(decoded: Decoded, name: str) -> Image.Image:
    """Return a picture of more than 8 bits as 8-bit grey."""
    if "transparency" in decoded.image.info:
        raise ConfigError(
            f"{name} has {decoded.grey_bits}-bit grey values and a transparent one; "
            "save it without transparency or with 8 bits"
        )
    if decoded.is_white_zero:
        raise ConfigError(
            f"{name} is a TIFF of {decoded.grey_bits} bits with white stored as 0; "
            "save it with black as 0"
        )
    values = np.asarray(decoded.image)
    return Image.fromarray((values >> (decoded.grey_bits - 8)).astype(np.uint8))


def _spread_unit_range(decoded: Decoded, name: str) -> Image.Image:
    """Return a picture with floats from 0 to 1 as 8-bit grey."""
    values = np.asarray(decoded.image)
    low, high = values.min(), values.max()
    # A comparison with NaN is False.
    if decoded.is_white_zero or not (low >= 0 and high <= 1):
        raise ConfigError(
            f"{name} has floats from {low:.4g} to {high:.4g}, and only floats from 0 (black) to 1 "
            "(white) have a known range; save it with 8 or 16 bits"
        )
    return Image.fromarray(np.rint(values * 255).astype(np.uint8))


def _lay_over_white(image: Image.Image) -> Image.Image:
    """Return an RGB picture without transparency; opaque pixels keep their colours."""
    straight = image.convert("LA") if image.mode == "La" else image
    pixels = np.asarray(straight.convert("RGBA")).astype(np.uint16)
    colour, alpha = pixels[..., :3], pixels[..., 3:]
    mixed = (colour * alpha + WHITE * (255 - alpha) + 127) // 255
    return Image.fromarray(mixed.astype(np.uint8))


def _read_colours(image: Image.Image, name: str) -> Pixels:
    """Return the colours (h, w, 3) of a label mask; raise ConfigError."""
    if image.mode not in COLOUR_MODES:
        raise ConfigError(
            f"{name} has pixels of mode {image.mode}; save labels with colours as PNG of 8 bits, "
            "RGB or palette"
        )
    if image.has_transparency_data:
        alpha = np.asarray(image.convert("RGBA"))[..., 3]
        if alpha.min() < 255:
            raise ConfigError(
                f"{name} has transparent pixels, whose classes are not known; fill them with the "
                "colour of a class or with data.void"
            )
    return np.asarray(image.convert("RGB"))
