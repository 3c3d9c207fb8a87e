"""Drawing of the pictures of a segmentation, without mmsegmentation."""

import numpy as np

from lit_attn.cells.legend import Legend
from lit_attn.tasks.pictures import (
    HEIGHT,
    LEGEND_LINE,
    choose_colours,
    choose_empty_colour,
    draw_legend,
    draw_picture,
)


def test_labels_and_predictions_have_the_colours_of_their_classes() -> None:
    image = np.full((2, 4, 3), 9, np.uint8)
    labels = np.array([[0, 0, 1, 1], [0, 0, 255, 255]], np.uint8)
    prediction = np.ones((2, 4), np.uint8)
    colours = np.zeros((256, 3), np.uint8)
    colours[:2] = [[10, 20, 30], [40, 50, 60]]
    picture = draw_picture(image, labels, prediction, colours)
    assert picture.shape == (2, 12, 3)
    assert (picture[:, :4] == 9).all()
    assert picture[:, 4:8].tolist() == [
        [[10, 20, 30]] * 2 + [[40, 50, 60]] * 2,
        [[10, 20, 30]] * 2 + [[0, 0, 0]] * 2,
    ]
    assert (picture[:, 8:] == [40, 50, 60]).all()


def test_a_large_picture_is_made_smaller_without_new_colours() -> None:
    labels = np.random.default_rng(0).integers(0, 3, (3 * HEIGHT, HEIGHT)).astype(np.uint8)
    image = np.zeros((*labels.shape, 3), np.uint8)
    colours = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, axis=1)
    picture = draw_picture(image, labels, labels, colours)
    assert picture.shape == (HEIGHT, 3 * round(HEIGHT / 3), 3)
    assert set(np.unique(picture[:, picture.shape[1] // 3 :])) == {0, 1, 2}


def test_classes_have_different_colours() -> None:
    colours = choose_colours(150)
    assert len(set(colours)) == 150
    assert choose_empty_colour(colours) == (0, 0, 0)
    assert choose_empty_colour([(0, 0, 0), (1, 1, 1)]) == (2, 2, 2)


def test_the_legend_has_a_line_for_every_shown_class() -> None:
    classes = {"wall": (255, 0, 0), "tree": (0, 255, 0), "sky": (0, 0, 255)}
    legend = Legend(weights="trained", classes=classes, shown=["wall", "sky"])
    drawn = draw_legend(legend)
    assert drawn.shape[0] == 2 * LEGEND_LINE
    assert drawn[10, 10].tolist() == [255, 0, 0]
    assert drawn[LEGEND_LINE + 10, 10].tolist() == [0, 0, 255]
