"""Makes this repository loadable as `model.generate(custom_generate=..., trust_remote_code=True, ...)`."""

from hf_ssd import generate

__all__ = ["generate"]
