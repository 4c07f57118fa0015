"""How likely is a drafted token to be accepted? A fitted prior, and what was learned since.

The evidence (`kernels.evidence`) says how a candidate continues what was seen: matches of each suffix length, cues
of each key, how reliable they were lately. The prior maps it to a probability. It was fitted to recorded answers
(`racer-local bench fit`) of several models, with an empty memory as well as a full one, so that it is sober when
little is known. Its last layer goes on learning from every emitted token, and is drawn back to the prior, so that
one bad stretch does not last.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from racer_local.errors import ConfigError
from racer_local.kernels.acceptance import Net, new_net

PRIOR = Path(__file__).with_name("prior.npz")
LEARNING_RATE = np.float32(1e-3)
"""Of the last layer, for each emitted token. Ten times as much did harm in replays."""
PULL = np.float32(1e-4)
"""Share of the way back to the prior with each token: half of what was learned is gone after 7,000."""


def load_prior(path: Path = PRIOR) -> Net:
    """The fitted network. Raises ConfigError where the file is none."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return new_net(*(file[name] for name in ("node_weights", "token_weights", "bias", "prior")))
    except Exception as error:  # np.load lets through whatever its many parsers raise
        raise ConfigError(f"{path} holds no fitted prior ({error}); fit one with: racer-local bench fit") from error
