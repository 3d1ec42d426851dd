"""`python -m workbench.cli`: the same as the `workbench` command, for a checkout that is not installed."""

from workbench.cli import main

if __name__ == "__main__":
    main()
