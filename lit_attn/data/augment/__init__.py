"""Augmentation of image batches on the device."""
