"""Reading: the plan of each study, and the state, results and measurements of its cells."""
