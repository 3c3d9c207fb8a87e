"""Configurations that a user writes in YAML: experiments and studies."""
