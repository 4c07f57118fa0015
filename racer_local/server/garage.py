"""The models that a server has: loaded when they are first asked for, within a limit of memory.

All but the names is for the thread that owns the models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from racer_local.config import ContextConfig, DraftConfig, ModelConfig
from racer_local.errors import ConfigError, RacerError
from racer_local.llama import Model
from racer_local.llama.embedder import Embedder
from racer_local.llama.vocabulary import Vocabulary
from racer_local.models import readable_size
from racer_local.session import Session
from racer_local.wire.errors import ApiError


@dataclass
class Parked:
    """A model, loaded or not."""

    path: Path
    created: int
    """When the file was written, in seconds."""
    session: Session | None = None
    embedder: Embedder | None = None

    @property
    def loaded(self) -> bool:
        return self.session is not None or self.embedder is not None

    @property
    def n_ctx(self) -> int | None:
        session, embedder = self.session, self.embedder  # the thread that owns them may close them meanwhile
        if session:
            return session.target.n_ctx
        return embedder.n_ctx if embedder else None

    @property
    def memory_bytes(self) -> int:
        holder = self.session or self.embedder
        return holder.memory_bytes if holder else 0

    def close(self) -> None:
        session, embedder, self.session, self.embedder = self.session, self.embedder, None, None
        if session:
            session.model.close()  # and its context first
        if embedder:
            embedder.close()


class Garage:
    """Models by name; the first one is the default."""

    def __init__(
        self,
        paths: Mapping[str, Path],
        model: ModelConfig,
        context: Callable[[Path], ContextConfig],
        draft: DraftConfig,
        most_bytes: int | None,
        notify: Callable[[str], object],
    ) -> None:
        self._parked = {name: Parked(path, int(path.stat().st_mtime)) for name, path in paths.items()}
        self._model, self._context, self._draft = model, context, draft
        self._most, self._notify = most_bytes, notify
        self._used: list[str] = []
        """Names of loaded models, the one used last at the end."""

    @property
    def models(self) -> Mapping[str, Parked]:
        return self._parked

    def name_of(self, asked: str | None) -> str:
        """The model that is meant. Raises ApiError."""
        if asked is None:
            return next(iter(self._parked))
        if asked not in self._parked:
            known = ", ".join(self._parked)
            raise ApiError(404, f"there is no model {asked!r}; known: {known}", code="model_not_found", param="model")
        return asked

    def session(self, name: str) -> Session:
        """The model, loaded for answers. Raises ApiError where it is one for embeddings or can't be loaded."""
        parked = self.load(name)
        if parked.session is None:
            raise ApiError(400, f"{name} is a model for embeddings and answers nothing; name another", param="model")
        return parked.session

    def embedder(self, name: str) -> Embedder:
        """The model, loaded for embeddings. Raises ApiError where it is one for answers or can't be loaded."""
        parked = self.load(name)
        if parked.embedder is None:
            raise ApiError(400, f"{name} does not embed; serve an embedding model beside it (--model)", param="model")
        return parked.embedder

    def close(self) -> None:
        for parked in self._parked.values():
            parked.close()

    def load(self, name: str) -> Parked:
        """The model, in memory. Raises ApiError where it can't be."""
        parked = self._parked[name]
        if parked.loaded:
            self._used.remove(name)
            self._used.append(name)
            return parked
        try:
            self._make_room(parked.path.stat().st_size, name)
            self._open(parked)
            self._used.append(name)
            self._make_room(0, name)
        except (RacerError, OSError) as error:
            raise ApiError(503, f"{name} can't be loaded: {error}", code="model_unavailable") from error
        return parked

    def _open(self, parked: Parked) -> None:
        with Vocabulary(parked.path) as facts:
            embeds = facts.pooling > 0
        if embeds:
            parked.embedder = Embedder(parked.path, self._model, self._context(parked.path))
            return
        model = Model(parked.path, self._model)
        try:
            parked.session = Session(model, self._context(parked.path), self._draft, notify=self._notify)
        except BaseException:
            model.close()
            raise
        for note in parked.session.notes:
            self._notify(f"{parked.path.name}: {note}")

    def _make_room(self, more: int, name: str) -> None:
        """Close what was used longest ago until so many bytes fit; `name` stays, and is refused if it is too large."""
        if self._most is None:
            return
        while (total := more + sum(parked.memory_bytes for parked in self._parked.values())) > self._most:
            oldest = next((used for used in self._used if used != name), None)
            if oldest is None:
                self._parked[name].close()
                self._used = [used for used in self._used if used != name]
                raise ConfigError(
                    f"it takes about {readable_size(total)} and --max-ram allows {readable_size(self._most)}; "
                    f"allow more, or take a smaller --ctx or quant"
                )
            self._notify(f"closing {oldest} to make room for {name}")
            self._parked[oldest].close()
            self._used.remove(oldest)
