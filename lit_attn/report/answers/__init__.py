"""Answers with --json, and the JSON schema of each answer."""
