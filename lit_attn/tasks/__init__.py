"""Tasks: the LightningModules that compute losses and metrics."""
