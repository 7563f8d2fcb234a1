"""Finding a model or its weights inside the object that a scheme was given as its context.

A context is whatever owns the model: a collector, a server, a trainer. It may offer
``get_model(model_id)``; otherwise the model id is a path such as ``"policy"``,
``"env.transform[0].module"`` or ``"models['critic']"``. Must not import transports.
"""

from __future__ import annotations

import re
from typing import Any

from aiosync.errors import ConfigError
from aiosync.wire import DEFAULT_LIMITS

__all__ = [
    "NoWeakReference",
    "as_model_id",
    "resolve_model",
    "resolve_path",
]

_STEP = re.compile(r"""\.?([A-Za-z_]\w*)|\[(?:(-?\d+)|'([^']*)'|"([^"]*)")\]""")


class NoWeakReference(ConfigError, TypeError):
    """A context of which no weak reference can be made; for TorchRL a ``TypeError``."""


def resolve_path(root: object, path: str) -> Any:
    """Follow a path of attributes, indices and keys.

    Args:
        root: Where the path starts.
        path: For example ``"env.transform[0].module"``.

    Raises:
        ConfigError: The path is malformed.
        AttributeError: An attribute, index or key of the path does not exist.
    """
    here: Any = root
    position = 0
    while position < len(path):
        step = _STEP.match(path, position)
        if step is None or (position == 0 and step.group(0).startswith(".")):
            raise ConfigError(
                f"{path!r} is not a path: write attributes, indices and keys, for example "
                "'env.transform[0].module'"
            )
        name, index, single, double = step.groups()
        try:
            if name is not None:
                here = getattr(here, name)
            elif index is not None:
                here = here[int(index)]
            else:
                here = here[single if single is not None else double]
        except (AttributeError, IndexError, KeyError) as exc:
            raise AttributeError(
                f"Attribute {step.group(0).lstrip('.')} from {path!r} not found in "
                f"{type(root).__name__}"
            ) from exc
        position = step.end()
    return here


def resolve_model(context: object, model_id: str) -> Any:
    """The model of that id in ``context``: its ``get_model(model_id)``, else the path.

    Raises:
        AttributeError: There is no such model, or it is ``None``.
    """
    get_model = getattr(context, "get_model", None)
    model = None
    if callable(get_model):
        try:
            model = get_model(model_id)
        except (KeyError, ValueError, AttributeError):
            model = None  # the context does not know the id; it may still be a path
    if model is None:
        model = resolve_path(context, model_id)
    if model is None:
        raise AttributeError(f"Model {model_id} was `None` in context")
    return model


def as_model_id(value: Any) -> str:
    """The name of a model, as it is told to the other side.

    Raises:
        ConfigError: It is not a str, or too long for a Hello.
    """
    try:
        if isinstance(value, str) and (nbytes := len(value.encode())):
            # Before the Hello has been read, the other side's own Limits do not count.
            if nbytes > (most := DEFAULT_LIMITS.max_name_nbytes):
                raise ConfigError(f"model_id has {nbytes} bytes; at most {most} are allowed")
            return value
    except UnicodeEncodeError:  # half of a surrogate pair
        pass
    raise ConfigError(f"model_id must be a str of valid Unicode, got {value!r}")
