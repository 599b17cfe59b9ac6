"""`baton version`."""

import platform
from importlib import metadata

_LIBRARIES = ("torch", "transformers", "msgspec", "pyzmq", "uvloop", "ucxx-cu12")


def main() -> None:
    """Show the versions of Baton and of what it stands on."""
    print(f"baton {_version('baton')}")
    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}")
    for library in _LIBRARIES:
        print(f"{library} {_version(library)}")


def _version(package: str) -> str:
    """Read from the installed metadata, so nothing heavy is imported."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
