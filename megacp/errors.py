"""The errors a user can meet.

Every message says what was asked, what was found, why that cannot be, and what to do.
A refusal is raised on every rank, from values that every rank has, before the first collective.
"""

from __future__ import annotations

__all__ = ["CommTimeout", "ConfigError", "MegacpError", "SeamError", "ShapeError", "UnsupportedError"]


class MegacpError(Exception):
    """Base of all errors raised by megacp on purpose."""


class ConfigError(MegacpError, ValueError):
    """A setting has a value that cannot be right, whatever the machine."""


class ShapeError(ConfigError):
    """A tensor has another shape, dtype or device than the layout or the plan asks for."""


class UnsupportedError(MegacpError, ValueError):
    """The request makes sense, but nothing here can carry it out exactly."""


class SeamError(MegacpError, RuntimeError):
    """A place in the host that megacp relies on is missing or has another shape."""


class CommTimeout(MegacpError, RuntimeError):
    """A peer did not answer within the deadline."""
