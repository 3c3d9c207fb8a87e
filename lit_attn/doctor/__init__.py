"""`lit-attn doctor`: the program proves itself on the machine of its user."""
