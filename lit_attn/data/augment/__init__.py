"""Augmentation of image batches on the device.

Every step has two methods. `draw` makes the random parameters on the CPU from a generator, one row
for each image. `apply` changes the images on their device. A batch is therefore the same on every
device, however many batches are augmented together, and the tests compare `apply` with Pillow,
torchvision and timm on the same draws.
"""
