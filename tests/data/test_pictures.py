"""Every picture is decoded as an independent reading of known pixels says, or refused in a line."""

import io
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.paths import ROOT
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from lit_attn.data.pictures import ENDINGS, MASK_ENDINGS, read_mask, read_picture
from lit_attn.schema.errors import ConfigError

ORIENTATION = 274
Array = np.ndarray[Any, Any]

LOSSLESS = {
    "1": ("PNG", "TIFF", "BMP", "PPM"),
    "L": ("PNG", "TIFF", "BMP", "PPM"),
    "LA": ("PNG", "TIFF"),
    "P": ("PNG", "TIFF", "BMP", "GIF"),
    "RGB": ("PNG", "TIFF", "BMP", "PPM", "WEBP"),
    "RGBA": ("PNG", "TIFF", "WEBP"),
    "CMYK": ("TIFF",),
    "I;16": ("PNG", "TIFF", "PPM"),
    "I;16B": ("TIFF",),
    "F": ("TIFF", "PPM"),
}
WITH_EXIF = ("PNG", "TIFF", "WEBP")


def encode(image: Image.Image, kind: str, **options: Any) -> bytes:
    content = io.BytesIO()
    if kind == "WEBP":
        options |= {"lossless": True, "exact": True}
    image.save(content, kind, **options)
    return content.getvalue()


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[ORIENTATION] = orientation
    return tags


def turn(pixels: Array, orientation: int) -> Array:
    """Return pixels (h, w, ...) as a viewer shows them, by the definition of the EXIF tag."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    # After the exchange of rows and columns: which sides are mirrored.
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def grey_of(colour: Array) -> Array:
    """Return ITU-R 601 luma as Pillow computes it, with 16 bits after the point."""
    weights = np.array([19595, 38470, 7471])
    return (colour.astype(np.int64) @ weights + 0x8000) >> 16


def over_white(colour: Array, alpha: Array) -> Array:
    share = alpha[..., None] / 255
    return np.rint(colour * share + 255 * (1 - share))


def draw_picture(mode: str, shape: tuple[int, int], seed: int) -> tuple[Image.Image, Array]:
    """Return a picture with random pixels, and the colours (h, w, 3) that are expected of it."""
    generator = np.random.default_rng(seed)

    def numbers(channels: int, most: int = 256) -> Array:
        return generator.integers(most, size=(*shape, channels))

    if mode == "1":
        bits = numbers(1)[..., 0] > 127
        return Image.fromarray(bits), np.repeat(bits[..., None] * 255, 3, 2)
    if mode == "P":
        table = generator.integers(256, size=(256, 3))
        indices = numbers(1)[..., 0]
        image = Image.fromarray(indices.astype(np.uint8), "P")
        image.putpalette(table.astype(np.uint8).tobytes())
        return image, table[indices]
    if mode.startswith("I;16"):
        values = numbers(1, 2**16)[..., 0]
        order = ">u2" if mode == "I;16B" else "<u2"
        raw = values.astype(order).tobytes()
        image = Image.frombytes(mode, shape[::-1], raw)
        return image, np.repeat(values[..., None] // 256, 3, 2)
    if mode == "F":
        floats = generator.random(shape, np.float32)
        return Image.fromarray(floats), np.repeat(np.rint(floats * 255)[..., None], 3, 2)
    channels = len(mode)
    pixels = numbers(channels)
    squeezed = pixels[..., 0] if channels == 1 else pixels
    image = Image.fromarray(squeezed.astype(np.uint8), mode)
    if mode == "CMYK":
        ink = pixels[..., :3]
        black = pixels[..., 3:]
        # Multiplied and rounded: white minus black, minus the share of ink of the rest.
        rest = 255 - black
        return image, np.clip(rest - np.rint(ink * rest / 255), 0, 255)
    colour = pixels[..., :3] if channels >= 3 else np.repeat(pixels[..., :1], 3, 2)
    if mode in ("LA", "RGBA"):
        colour = over_white(colour, pixels[..., -1])
    return image, colour


@st.composite
def pictures(draw: st.DrawFn) -> tuple[bytes, Array]:
    """Draw the content of a file and the upright colours that are expected of it."""
    mode = draw(st.sampled_from(sorted(LOSSLESS)))
    kind = draw(st.sampled_from(LOSSLESS[mode]))
    shape = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    image, colour = draw_picture(mode, shape, draw(st.integers(0, 999)))
    options: dict[str, Any] = {}
    if kind == "TIFF":
        options["compression"] = draw(st.sampled_from([None, "tiff_lzw", "tiff_adobe_deflate"]))
    if kind in WITH_EXIF:
        # No file of libtiff has other numbers than 1 to 8; all of them mean "upright" elsewhere.
        orientation = draw(st.integers(1, 8) if kind == "TIFF" else st.integers(0, 9))
        options["exif"] = exif(orientation)
        colour = turn(colour, orientation)
    return encode(image, kind, **options), colour


@given(pictures())
@settings(max_examples=250, deadline=None)
def test_pictures_equal_an_independent_reading(picture: tuple[bytes, Array]) -> None:
    content, colour = picture
    image = read_picture(content, "x", "RGB")
    assert image.mode == "RGB"
    assert np.array_equal(np.asarray(image), colour)
    grey = read_picture(content, "x", "L")
    assert grey.mode == "L"
    assert np.abs(np.asarray(grey) - grey_of(colour.astype(np.int64))).max() <= 1


def test_a_file_and_its_content_are_the_same_picture(tmp_path: Path) -> None:
    image, colour = draw_picture("RGB", (3, 5), 0)
    path = tmp_path / "a.png"
    path.write_bytes(encode(image, "PNG"))
    assert np.array_equal(np.asarray(read_picture(path, "x", "RGB")), colour)


@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP"])
def test_pictures_of_8_bits_have_the_bits_of_a_plain_conversion(mode: str, kind: str) -> None:
    image = draw_picture(mode, (17, 13), 1)[0]
    content = encode(image.convert("RGB") if (mode, kind) == ("P", "JPEG") else image, kind)
    for wanted in ("RGB", "L"):
        expected = Image.open(io.BytesIO(content)).convert(wanted)
        assert read_picture(content, "x", wanted).tobytes() == expected.tobytes()


def test_jpeg_files_have_the_bits_that_opencv_decodes() -> None:
    """Segmentation was published with OpenCV's decoder, and earlier results here used it."""
    cv2 = pytest.importorskip("cv2")
    for seed, quality in enumerate((60, 75, 95)):
        for subsampling in (0, 1, 2):
            for mode in ("RGB", "L"):
                image = draw_picture(mode, (33, 18), seed)[0].resize((40, 31))
                content = encode(image, "JPEG", quality=quality, subsampling=subsampling)
                decoded = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
                pixels = np.asarray(read_picture(content, "x", "RGB"))
                assert np.array_equal(pixels, decoded[..., ::-1])


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_as_their_orientation_says(orientation: int) -> None:
    colour = np.zeros((16, 32, 3), np.uint8)
    colour[:8, :8, 0] = colour[:8, 24:, 1] = colour[8:, :16, 2] = 255
    content = encode(Image.fromarray(colour), "JPEG", exif=exif(orientation), subsampling=0)
    image = np.asarray(read_picture(content, "x", "RGB")).astype(int)
    assert np.abs(image - turn(colour, orientation)).max() < 60


def test_damaged_exif_data_do_not_hide_a_picture() -> None:
    image, colour = draw_picture("RGB", (4, 6), 0)
    content = encode(image, "PNG", exif=b"Exif\0\0nonsense")
    assert np.array_equal(np.asarray(read_picture(content, "x", "RGB")), colour)


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def write_png(rows: list[bytes], width: int, bits: int, colours: int, extra: bytes = b"") -> bytes:
    """Write a PNG without Pillow: rows of packed pixels, and further chunks before them."""
    header = struct.pack(">IIBBBBB", width, len(rows), bits, colours, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + extra + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@pytest.mark.parametrize(("bits", "row"), [(1, b"\x60"), (2, b"\x1b"), (4, b"\x01\x2f")])
def test_few_bits_of_grey_are_spread_in_pictures_and_kept_in_masks(bits: int, row: bytes) -> None:
    width = 8 * len(row) // bits
    packed = int.from_bytes(row, "big")
    numbers = [packed >> (bits * place) & (2**bits - 1) for place in reversed(range(width))]
    content = write_png([row], width, bits, 0)
    grey = np.asarray(read_picture(content, "x", "L"))[0]
    assert grey.tolist() == [number * 255 // (2**bits - 1) for number in numbers]
    assert read_mask(content, "x", has_colours=False)[0].tolist() == numbers


def test_16_bit_colours_keep_their_highest_bits() -> None:
    values = np.arange(0, 65536, 65535 // 11)[:12].reshape(2, 2, 3)
    rows = [row.astype(">u2").tobytes() for row in values]
    image = read_picture(write_png(rows, 2, 16, 2), "x", "RGB")
    assert np.array_equal(np.asarray(image), values // 256)


@pytest.mark.parametrize("bits", [8, 16])
def test_a_transparent_colour_of_a_png_is_white(bits: int) -> None:
    size = bits // 8
    row = b"".join(value.to_bytes(size, "big") for value in (5, 6, 7, 200, 100, 0))
    key = b"".join(value.to_bytes(2, "big") for value in (5, 6, 7))
    image = read_picture(write_png([row], 2, bits, 2, chunk(b"tRNS", key)), "x", "RGB")
    second = [200, 100, 0] if bits == 8 else [0, 0, 0]
    assert np.asarray(image)[0].tolist()[1] == second
    if bits == 8:
        assert np.asarray(image)[0].tolist()[0] == [255, 255, 255]


def test_transparent_entries_of_a_palette_are_laid_over_white() -> None:
    image = Image.fromarray(np.array([[0, 1, 2]], np.uint8), "P")
    image.putpalette([0, 0, 0, 10, 20, 30, 100, 0, 200])
    content = encode(image, "PNG", transparency=bytes([0, 255, 51]))
    assert np.asarray(read_picture(content, "x", "RGB"))[0].tolist() == [
        [255, 255, 255],
        [10, 20, 30],
        [224, 204, 244],
    ]


def test_opaque_alpha_changes_nothing() -> None:
    image, colour = draw_picture("RGB", (5, 4), 3)
    image.putalpha(255)
    assert np.array_equal(np.asarray(read_picture(encode(image, "PNG"), "x", "RGB")), colour)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_an_animation_is_read(kind: str) -> None:
    frames = [Image.new("RGB", (4, 3), colour) for colour in ("red", "lime", "blue")]
    content = encode(frames[0], kind, save_all=True, append_images=frames[1:])
    with Image.open(io.BytesIO(content)) as written:
        assert written.n_frames == 3
    pixels = np.asarray(read_picture(content, "x", "RGB"))
    assert np.array_equal(pixels, np.asarray(frames[0]))


def test_a_photograph_with_a_second_picture_is_read() -> None:
    """Telephones write such files (MPO) with the ending .jpg."""
    frames = [Image.new("RGB", (16, 8), colour) for colour in ("red", "blue")]
    content = encode(frames[0], "MPO", save_all=True, append_images=frames[1:])
    assert np.asarray(read_picture(content, "x", "RGB"))[4, 8, 0] > 240


SIGNED = {339: 2}
WHITE_IS_ZERO = {262: 0}


def write_tiff(values: Array, bits: int, tags: dict[int, int]) -> bytes:
    """Write one grey row as an uncompressed TIFF, without Pillow."""
    data = values.tobytes()
    fields = {256: values.shape[1], 257: values.shape[0], 258: bits, 259: 1, 262: 1, 273: 8}
    fields |= {277: 1, 278: values.shape[0], 279: len(data), **tags}
    padded = data + b"\0" * (len(data) % 2)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, fields[tag]) for tag in sorted(fields))
    place = 8 + len(padded)
    return (
        b"II*\0"
        + struct.pack("<I", place)
        + padded
        + struct.pack("<H", len(fields))
        + entries
        + bytes(4)
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (write_tiff(np.array([[-1, 5]], np.int8), 8, SIGNED), "x has signed integers"),
        (write_tiff(np.array([[-1, 5]], np.int16), 16, SIGNED), "x has signed integers"),
        (write_tiff(np.array([[1, 5]], np.uint32), 32, {}), "x has pixels of mode I, whose range"),
        (write_tiff(np.array([[1, 5]], np.uint16), 16, WHITE_IS_ZERO), "16 bits with white stored"),
        (encode(Image.new("F", (2, 2), 7.5), "TIFF"), "x has floats from 7.5 to 7.5"),
        (encode(Image.new("F", (2, 2), -0.1), "TIFF"), "x has floats from -0.1 to -0.1"),
        (encode(Image.new("F", (2, 2), float("nan")), "TIFF"), "x has floats from nan to nan"),
        (encode(Image.new("LAB", (2, 2)), "TIFF"), "x has pixels of mode LAB"),
        (b"", r"x is not a readable image: it is empty \(0 bytes\)"),
        (b"text", "x is not a readable image: it is damaged or has none of the formats BMP, GIF"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is damaged or has none of"),
        (
            write_png([b"\0\0\0\1"], 2, 16, 0, chunk(b"tRNS", b"\0\1")),
            "x has 16-bit grey values and a transparent one",
        ),
        (b"P5 18200 10000 255\n", "x is not a readable image: it has more than 178,956,970 pixels"),
    ],
)
def test_pictures_without_a_known_range_are_refused(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_picture(content, "x", "RGB")
    assert str(caught.value).startswith("x ")
    assert "; " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_picture_of_several_pages_is_refused() -> None:
    pages = [Image.new("L", (3, 3), level) for level in (1, 2, 3)]
    content = encode(pages[0], "TIFF", save_all=True, append_images=pages[1:])
    for read in (read_as_rgb, read_as_mask):
        with pytest.raises(ConfigError, match=r"x has 3 pages.*; save each page as a file"):
            read(content)


def read_as_rgb(content: bytes) -> None:
    read_picture(content, "x", "RGB")


def read_as_mask(content: bytes) -> None:
    read_mask(content, "x", has_colours=False)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_files_are_pictures_or_one_line(data: st.DataObject) -> None:
    """Bytes are cut off, or changed anywhere: in headers, tags, tables and pixels."""
    kinds = ["PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP", "JPEG2000", "PPM"]
    kind = data.draw(st.sampled_from(kinds))
    content = bytearray(encode(draw_picture("RGB", (12, 9), 0)[0], kind))
    del content[data.draw(st.integers(0, len(content))) :]
    for _ in range(data.draw(st.integers(0, 4))):
        assume(content)
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    for read in (read_as_rgb, read_as_mask):
        message = "x "
        try:
            read(bytes(content))
        except ConfigError as error:
            message = str(error)
        assert message.startswith("x ")
        assert "\n" not in message


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_a_file_that_lacks_its_end_is_refused(kind: str) -> None:
    content = encode(draw_picture("RGB", (40, 30), 0)[0], kind)
    with pytest.raises(ConfigError, match=r"x is not a readable image: .*; replace the file"):
        read_picture(content[: len(content) // 2], "x", "RGB")
    assert not ImageFile.LOAD_TRUNCATED_IMAGES


def test_files_that_cannot_be_opened_are_named(tmp_path: Path) -> None:
    link = tmp_path / "link.png"
    link.symlink_to(tmp_path / "none.png")
    for path, reason in ((link, "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"^x cannot be read: {reason}; replace the file"):
            read_picture(path, "x", "RGB")


def test_large_pictures_below_the_limit_are_read_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    assert read_picture(encode(Image.new("L", (4, 5)), "PNG"), "x", "L").size == (4, 5)
    with pytest.raises(ConfigError, match="it has more than 20 pixels; make it smaller"):
        read_picture(encode(Image.new("L", (3, 7)), "PNG"), "x", "L")


@given(
    mode=st.sampled_from(["1", "L", "P", "I;16", "I"]),
    kind=st.sampled_from(["PNG", "TIFF", "BMP", "GIF"]),
    orientation=st.integers(1, 8),
    seed=st.integers(0, 99),
)
@settings(max_examples=120, deadline=None)
def test_masks_keep_the_numbers_of_the_file(
    mode: str, kind: str, orientation: int, seed: int
) -> None:
    assume(mode in ("L", "P") or kind == "TIFF" or (mode in ("1", "I;16") and kind == "PNG"))
    most = {"1": 2, "L": 256, "P": 256, "I;16": 2**16, "I": 2**31}[mode]
    numbers = np.random.default_rng(seed).integers(most, size=(3, 5))
    raw_type = {"1": bool, "L": np.uint8, "P": np.uint8, "I;16": "<u2", "I": np.int32}[mode]
    image = Image.fromarray(numbers.astype(raw_type))
    if mode == "P":
        image = Image.fromarray(numbers.astype(np.uint8), "P")
        image.putpalette(np.random.default_rng(seed).bytes(768))
    options: dict[str, Any] = {}
    if kind in WITH_EXIF:
        options["exif"] = exif(orientation)
        numbers = turn(numbers, orientation)
    if kind == "GIF":
        # Pillow would leave out unused colours, and number the others anew.
        assume(mode == "P")
        options["optimize"] = False
    content = encode(image, kind, **options)
    assert np.array_equal(read_mask(content, "x", has_colours=False), numbers)


@pytest.mark.parametrize(
    ("content", "has_colours", "message"),
    [
        (encode(Image.new("RGB", (2, 2)), "PNG"), False, "x has pixels of mode RGB; save labels"),
        (encode(Image.new("LA", (2, 2)), "PNG"), False, "x has pixels of mode LA"),
        (encode(Image.new("F", (2, 2)), "TIFF"), False, "x has pixels of mode F"),
        (encode(Image.new("L", (2, 2)), "JPEG"), False, "x is a JPEG file"),
        (encode(Image.new("L", (2, 2)), "PPM"), False, "x is a PPM file"),
        (encode(Image.new("RGB", (2, 2)), "WEBP"), True, "x is a WEBP file"),
        (encode(Image.new("I;16", (2, 2)), "PNG"), True, "x has pixels of mode I;16"),
        (encode(Image.new("RGBA", (2, 2), (1, 2, 3, 9)), "PNG"), True, "x has transparent pixels"),
        (write_tiff(np.array([[-1, 5]], np.int8), 8, SIGNED), False, "x is a TIFF with signed"),
        (write_tiff(np.array([[1, 5]], np.uint8), 8, WHITE_IS_ZERO), False, "white stored as 0"),
    ],
)
def test_masks_that_do_not_store_numbers_are_refused(
    content: bytes, has_colours: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_mask(content, "x", has_colours=has_colours)
    assert "; " in str(caught.value)


def test_the_page_lists_the_endings() -> None:
    page = (ROOT / "docs" / "own-data.md").read_text(encoding="utf-8")
    section = page[page.index("## Pictures") :]
    paragraph = section[: section.index("small letters or capitals")]
    assert set(re.findall(r"`(\.\w+)`", paragraph)) == ENDINGS
    assert MASK_ENDINGS < ENDINGS
