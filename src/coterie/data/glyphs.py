"""Characters drawn from the fonts that matplotlib ships: 28x28 images, any number, no download."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from coterie.data.counting import blank_records
from coterie.data.preprocessing import Label, Preprocessing
from coterie.data.records import Array, Dataset, Records, Task, stream
from coterie.errors import check_memory

_CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
# Interleaved by family, so that a few fonts already differ much.
_FONTS = (
    "DejaVuSans",
    "STIXGeneral",
    "DejaVuSerif-Bold",
    "DejaVuSansMono-Oblique",
    "cmr10",
    "STIXGeneralBolIta",
    "DejaVuSans-Bold",
    "cmtt10",
    "DejaVuSerif-Italic",
    "cmss10",
    "DejaVuSansMono",
    "STIXGeneralItalic",
    "DejaVuSans-Oblique",
    "cmb10",
    "DejaVuSerif",
    "STIXGeneralBol",
    "DejaVuSansMono-Bold",
    "DejaVuSerif-BoldItalic",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono-BoldOblique",
)
_SIDE = 28
_TEMPLATE = 48  # a template has a margin, so that a distorted glyph is sampled from inside it
_CHUNK = 256  # images warped at a time: what fits a cache is faster, and memory stays bounded


def draw_glyphs(
    seed: int, size: int = 12_000, classes: int = 10, fonts: int = 20, *, blank: bool = False
) -> Dataset:
    """`size` training and a sixth as many test images, each a random character, font and distortion.

    Distortions are rotation by up to 20 degrees, shear, stretch, shift, stroke intensity and pixel noise.

    Args:
        blank: the same characters, and nothing drawn: for whoever only counts them.
    """
    check_memory(f"data.size: {size}", 7 / 6 * size * 4 * (_SIDE * _SIDE + 16))
    task = Task("classification", (1, _SIDE, _SIDE), classes)
    counts = size, max(classes, size // 6)
    if blank:
        train, test = (_blank(task, count, stream(seed, at)) for at, count in enumerate(counts))
    else:
        templates = _templates(_CHARACTERS[:classes], _FONTS[:fonts])
        train, test = (_draw(templates, count, stream(seed, at)) for at, count in enumerate(counts))
    return Dataset(
        "glyphs",
        train,
        test,
        task,
        f"{classes} characters in {fonts} fonts of matplotlib, distorted; intensities in [0, 1]",
        preprocessing=Preprocessing.of_array(task, label=Label(classes=tuple(_CHARACTERS[:classes]))),
    )


def _templates(characters: str, fonts: tuple[str, ...]) -> Array:
    """One undistorted image of every character in every font, (classes, fonts, side, side)."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    drawn = np.zeros((len(characters), len(fonts), _TEMPLATE, _TEMPLATE), dtype=np.float32)
    for column, font_name in enumerate(fonts):
        font = ImageFont.truetype(folder / f"{font_name}.ttf", size=4 * 28)
        for row, character in enumerate(characters):
            # Drawn four times as large and averaged, for smooth edges.
            canvas = Image.new("L", (4 * _TEMPLATE, 4 * _TEMPLATE))
            ImageDraw.Draw(canvas).text(
                (2 * _TEMPLATE, 2 * _TEMPLATE), character, fill=255, font=font, anchor="mm"
            )
            fine = np.asarray(canvas, dtype=np.float32) / 255.0
            drawn[row, column] = fine.reshape(_TEMPLATE, 4, _TEMPLATE, 4).mean(axis=(1, 3))
    return drawn


def _characters(classes: int, count: int, rng: np.random.Generator) -> Array:
    return rng.integers(classes, size=count)


def _blank(task: Task, count: int, rng: np.random.Generator) -> Records:
    return replace(blank_records(task, count), targets=_characters(task.classes, count, rng))


def _draw(templates: Array, count: int, rng: np.random.Generator) -> Records:
    classes, fonts = templates.shape[:2]
    targets = _characters(classes, count, rng)
    flat = templates.reshape(classes * fonts, -1)
    which = targets * fonts + rng.integers(fonts, size=count)
    maps, shifts = _distortions(count, rng)
    strength = rng.uniform(0.6, 1.0, size=(count, 1)).astype(np.float32)
    images = np.empty((count, _SIDE * _SIDE), dtype=np.float32)
    for start in range(0, count, _CHUNK):
        part = slice(start, start + _CHUNK)
        images[part] = strength[part] * _warped(flat, which[part], maps[part], shifts[part])
        images[part] += np.float32(0.1) * rng.standard_normal(images[part].shape, dtype=np.float32)
    np.clip(images, 0.0, 1.0, out=images)
    return Records(images.reshape(count, 1, _SIDE, _SIDE), targets)


def _distortions(count: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Maps from the image's coordinates back to the template's: rotation x shear x stretch, and a shift."""
    angle = np.deg2rad(rng.uniform(-20.0, 20.0, size=count))
    shear = rng.uniform(-0.25, 0.25, size=count)
    stretch = rng.uniform(0.85, 1.3, size=(count, 2))
    cosine, sine = np.cos(angle), np.sin(angle)
    rotation = np.stack([np.stack([cosine, -sine], -1), np.stack([sine, cosine], -1)], -2)
    skew = stretch[:, :, None] * np.eye(2)
    skew[:, 1, 0] = shear
    return (rotation @ skew).astype(np.float32), rng.uniform(-2.0, 2.0, size=(count, 2)).astype(np.float32)


def _warped(flat: Array, which: Array, maps: Array, shifts: Array) -> Array:
    """Bilinear samples of each image's template at its distorted pixel grid."""
    axis = np.arange(_SIDE, dtype=np.float32) - np.float32((_SIDE - 1) / 2)
    row, column = (grid.reshape(-1) for grid in np.meshgrid(axis, axis, indexing="ij"))
    shifts = shifts + np.float32((_TEMPLATE - 1) / 2)
    places = maps[:, :, 0, None] * row + maps[:, :, 1, None] * column + shifts[:, :, None]
    np.clip(places, 0.0, _TEMPLATE - 1.001, out=places)
    corner = places.astype(np.int32)
    places -= corner
    down, right = places[:, 0], places[:, 1]
    index = (
        which.astype(np.int32)[:, None] * (_TEMPLATE * _TEMPLATE) + corner[:, 0] * _TEMPLATE + corner[:, 1]
    )
    values = flat.reshape(-1)
    top, bottom = values[index], values[index + _TEMPLATE]
    top += right * (values[index + 1] - top)
    bottom += right * (values[index + (_TEMPLATE + 1)] - bottom)
    return np.asarray(top + down * (bottom - top))
