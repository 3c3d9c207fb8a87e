"""The attention layer and the parts that a study can choose.

`spec` and `parts` describe the choices and import no torch. `layer` computes a layer fast;
`reference` computes the same by formulas, and the tests compare the two.
"""
