"""The models that can be fetched by name: where each comes from, where it lies, and how it gets there.

Everything lies in `cache_home()/models`. A file gets its final name only after its sha256 was checked, so a
file of that name is never hashed again. Only the standard library is used.

Each module imports only those before it: registry, download, fetching.
"""

from racer_local.models.fetching import Progress, fetch
from racer_local.models.registry import Entry, entry_of, find, load_registry, models_home, readable_size

__all__ = ["Entry", "Progress", "entry_of", "fetch", "find", "load_registry", "models_home", "readable_size"]
