"""Augmentation on the device, in the order a set-up gives.

Every step is two: `draw` makes parameters from a generator, one row per image, on the CPU; `apply`
carries them out on whatever device the images are. So a batch is the same on every device, however
many batches are carried out together, and the tests hold `apply` to Pillow, torchvision and timm on
the same draws.
"""
