"""Overview of the commands: `python -m lit_attn`."""

OVERVIEW = """\
lit_attn trains the variants of an ablation study and writes their tables.

  python -m lit_attn.ablate ablations.yaml    run the missing cells of the default studies
  python -m lit_attn.ablate ablations.yaml --dry-run --params
                                              list the cells, parameters and FLOPs
  python -m lit_attn.ablate status            show what is done and what failed
  python -m lit_attn.ablate logs CELL         show the log of a cell (STUDY/VARIANT/SEED)
  python -m lit_attn.ablate rerun stale ablations.yaml
                                              run cells again whose code or data have changed
  python -m lit_attn.train FOLDER             train one cell alone
  python -m lit_attn.report runs              write the tables and figures again
  python -m lit_attn.generate FOLDER          continue a prompt with a trained language model
  python -m lit_attn.bench attention          measure the time and memory of mechanisms
  python -m lit_attn.data.prepare             download and tokenise the text data sets

Every command explains its options with --help. The README contains an example.
"""

if __name__ == "__main__":
    print(OVERVIEW, end="")
