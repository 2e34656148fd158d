"""What a description leaves open: the recipes that it allows, their maps, and how far these are apart."""

from vlcam.ambiguity.description import Description
from vlcam.ambiguity.enumeration import fitting_recipes
from vlcam.ambiguity.presets import Preset, descriptions
from vlcam.ambiguity.result import Ambiguity

__all__ = ["Ambiguity", "Description", "Preset", "descriptions", "fitting_recipes"]
