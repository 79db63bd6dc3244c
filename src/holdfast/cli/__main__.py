"""`python -m holdfast.cli`, for where scripts are not on the path."""

from holdfast.cli import main

if __name__ == "__main__":
    main()
