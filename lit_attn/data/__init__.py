"""Data sets, augmentation on the device, and data modules."""

MEMBERS = (
    "augment.policies",
    "augment.steps",
    "columns",
    "image_folders",
    "image_sets",
    "table_sets",
    "text.listops",
    "text.parallel",
    "text.plain_text",
    "text.shards",
    "text.text_folders",
)
"""Modules that register members of the families when they are imported."""
