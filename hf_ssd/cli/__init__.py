"""The command line `hf-ssd`."""
