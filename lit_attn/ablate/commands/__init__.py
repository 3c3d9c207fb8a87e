"""Commands of the runner: `run`, `rerun`, `seal`, `status`, `judge` and `logs`."""
