"""Where the attention layer stands, and how many parameters and FLOPs that costs."""
