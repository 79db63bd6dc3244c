"""Entry point of `python -m holdfast.cli`, for use where scripts are not on the path."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
