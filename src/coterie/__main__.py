"""`python -m coterie`, the same as the command."""

from coterie.cli.main import main

if __name__ == "__main__":
    main()
