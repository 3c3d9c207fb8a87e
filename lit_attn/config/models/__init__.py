"""Configurations of models."""
