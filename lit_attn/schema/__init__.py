"""Base classes of everything in YAML: strict configurations, families, and plug-ins."""
