"""Keys that an Axolotl YAML file may have for spillway.integrations.axolotl, beside Axolotl's own."""
from typing import Literal

from pydantic import BaseModel


class SpillwayArgs(BaseModel):
    """Axolotl adds it to its own."""

    spillway_on_existing: Literal["refuse", "replace"] | None = None  # a store that is there
