"""The image: what every guest is made of, built from Debian packages by one small recipe.

`build_image` turns `recipe.toml` into a root file system, a kernel, an initrd and the VMM's closure, and says
what they are in a manifest. This package must not start guests, must not need Docker or mounts, and knows
nothing of the service: the daemon reads what lies here through the manifest alone.
"""

from image.build import build_image
from image.debian import HOST_PACKAGES
from image.errors import ImageError
from image.manifest import Manifest, Part, load_manifest

__all__ = ["HOST_PACKAGES", "ImageError", "Manifest", "Part", "build_image", "load_manifest"]
