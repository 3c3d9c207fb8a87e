"""Tables and figures of the five papers, with published values beside ours."""
