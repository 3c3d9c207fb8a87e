"""The attention layer and the choices an ablation can make about it.

`spec` is light (no torch) and says what can be chosen; `layer` computes it fast; `reference`
computes the same in plain formulas, and the tests hold one to the other.
"""
