"""Models: functions of (params, buffers, tokens), and weights in and out."""

from pathlib import Path

PACKAGED = {"tiny": Path(__file__).parent.parent / "assets" / "tiny"}


def locate(model: str) -> str:
    """The folder of a packaged model for its name; anything else is a folder, file or hub id and stays as it is."""
    return str(PACKAGED.get(model, model))
