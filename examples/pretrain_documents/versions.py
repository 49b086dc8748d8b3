"""megatron-core 0.10 and later differ in which arguments they take; asking them is surer than reading version numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def known(call: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
    """Keep the arguments that `call` takes here; an older Megatron does without the rest."""
    taken = inspect.signature(call).parameters
    return {name: value for name, value in arguments.items() if name in taken}
