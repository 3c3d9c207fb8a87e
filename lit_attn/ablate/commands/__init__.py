"""Commands of the runner: `run`, `rerun`, `seal`, `status` and `logs`."""
