"""From ablations.yaml to cells to runs: `python -m lit_attn.ablate`."""
