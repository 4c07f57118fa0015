"""Answer one prompt and show what drafting did: python examples/generate.py MODEL.gguf "your prompt"."""

import sys

from racer_local import DraftConfig, Model, Session

if len(sys.argv) != 3:
    sys.exit(__doc__)
path, text = sys.argv[1:]
with Model(path) as model, Session(model, draft=DraftConfig(draft="racer")) as session:
    answer = session.answer(text, max_tokens=200, on_text=lambda piece: print(piece, end="", flush=True))
print("\n", answer.stats.as_dict())
