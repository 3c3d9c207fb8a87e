"""Data sets, augmentation on the device, and LightningDataModules."""
