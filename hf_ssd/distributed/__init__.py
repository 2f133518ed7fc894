from .roles import Roles, init_roles

__all__ = ["Roles", "init_roles"]
