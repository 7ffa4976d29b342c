"""`python -m pipeline` is the `trtpipe` command."""

from pipeline.cli.main import main

if __name__ == "__main__":
    main()
