"""Data sets, augmentation on the device, and data modules."""
