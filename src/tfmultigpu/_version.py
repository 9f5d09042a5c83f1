"""The version of the package, and the version of Keras, which packages of two names install."""

import importlib.metadata

__version__ = "0.1.0"


def version_of_keras() -> str:
    """Returns the version of the installed Keras; to import it fails where its backend is missing.

    Tomorrow's Keras is the package ``keras-nightly``.
    """
    packages = importlib.metadata.packages_distributions().get("keras", [])
    return ", ".join(map(importlib.metadata.version, packages)) or "not installed"
