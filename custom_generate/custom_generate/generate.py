"""What `model.generate(custom_generate=..., trust_remote_code=True, ...)` calls."""

from hf_ssd import generate

__all__ = ["generate"]
