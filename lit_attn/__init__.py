"""lit_attn: ablations of attention mechanisms that a reviewer believes."""

__version__ = "0.1.0"
