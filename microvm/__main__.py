"""`python -m microvm`: the same as the console script `microvm`."""

from microvm.cli import main

if __name__ == "__main__":
    main()
