"""Semantic segmentation with mmsegmentation: data of label images, models, metrics and floors.

The kinds that this product adds to the families of the core are its door: data such as `ade20k`,
the models `segmenter` and `mmseg`, and the task `segmentation`. The core knows them by name alone.
"""

MEMBERS = ("mask_sets", "scenes", "scene_steps", "segmenter_config", "mmseg_models", "task_config")
"""Modules that register members of the families when they are imported."""
