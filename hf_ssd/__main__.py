"""`python -m hf_ssd` is `hf-ssd`."""

from .cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
