"""Optimisers, learning-rate schedules, and the average of the weights."""

MEMBERS = (
    "standard",
    "set_adam",
    "jax_adamw",
    "muon",
)
"""Modules that register members of the families when they are imported."""
