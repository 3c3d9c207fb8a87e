"""Answers with --json; the folder `report/schemas` has the JSON schema of each answer."""
