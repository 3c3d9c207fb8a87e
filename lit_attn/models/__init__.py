"""Networks around the attention layer, and their numbers of parameters and FLOPs."""
