"""The command `mlx_paged.generate`."""

from .cli.generate import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
