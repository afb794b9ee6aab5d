"""One scenario a file: `SUMMARY`, a line for `--list`, and `run(bench)`. A new file is a new scenario."""
