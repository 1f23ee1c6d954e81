"""Request classes: names for the priorities that most people need."""

from __future__ import annotations

from llmsched.engine.errors import RequestError

CLASS_HEADER = "x-llmsched-class"

#: A lower number is more urgent.
CLASSES = {"interactive": 0, "batch": 1}


def priority_of(priority: int | None, class_name: str | None) -> int:
    """The priority that the body's `priority`, else the class header asks for; interactive is the default.

    Raises RequestError for a class that does not exist.
    """
    if class_name is not None and class_name not in CLASSES:
        raise RequestError(CLASS_HEADER, f"{CLASS_HEADER} is {class_name[:100]!r}; allowed is {' or '.join(CLASSES)}")
    if priority is not None:
        return priority
    return CLASSES[class_name or "interactive"]
