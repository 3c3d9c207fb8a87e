"""Configurations of data sets."""
