"""Strict configuration models, plug-in families, and error messages of one line."""
