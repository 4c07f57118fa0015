"""The models that can be fetched by name: where each comes from, where it lies, and how it gets there.

Everything lies in `cache_home()/models`. A file gets its final name only after its sha256 was checked, so a
file of that name is never hashed again. Only the standard library is used.

Each module imports only those before it: entry, web, download, sources, registry, fetching.
"""

from racer_local.models.entry import Entry, Progress, Source, models_home, readable_size
from racer_local.models.fetching import fetch
from racer_local.models.registry import entry_of, find, load_registry, registry_path
from racer_local.models.sources import HubSource, PypiSource, WheelPart

__all__ = [
    "Entry",
    "HubSource",
    "Progress",
    "PypiSource",
    "Source",
    "WheelPart",
    "entry_of",
    "fetch",
    "find",
    "load_registry",
    "models_home",
    "readable_size",
    "registry_path",
]
