"""What is optimised: LightningModules, optimisers, schedules."""
